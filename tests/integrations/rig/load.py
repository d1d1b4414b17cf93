"""Streaming requests and what they tell: when each token came, and whether it is the right one."""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ANSWER_SECONDS = 300


@dataclass
class Answer:
    """What a stream has brought: tokens, and the seconds from the request to each of them."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]


Ask = Callable[[list[int], int], Answer]
"""Sends a prompt and a number of tokens to generate."""


def stream(port: int, prompt: list[int], count: int) -> Answer:
    body = {
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    found = Answer()
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.monotonic() - began
                new = json.loads(line[6:])["choices"][0]["token_ids"] or []
                found.tokens += new
                found.times += [now] * len(new)
    if len(found.tokens) != count:
        raise RuntimeError(f"port {port}: {len(found.tokens)} tokens came of {count}")
    return found


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return how far the logprobs of two answers are apart, while their tokens are the same."""
    pairs = [
        list(
            zip(
                each["choices"][0]["token_ids"],
                each["choices"][0]["logprobs"]["token_logprobs"],
                strict=True,
            )
        )
        for each in (a, b)
    ]
    farthest = 0.0
    for (token, logprob), (other, theirs) in zip(*pairs, strict=True):
        if token != other:
            break
        farthest = max(farthest, abs(logprob - theirs))
    return farthest


def disagreement(wanted: dict[str, Any], got: dict[str, Any], tolerance: float) -> str:
    """Say where two answers with logprobs differ by more than rounding does; "" if nowhere.

    They agree when their tokens and logprobs do, up to where one of them chose another token that
    the other thought as likely: after that they continue different texts.
    """
    a, b = wanted["choices"][0], got["choices"][0]
    pairs = zip(a["token_ids"], b["token_ids"], strict=True)
    for at, (first, second) in enumerate(pairs):
        ours, theirs = (each["logprobs"]["token_logprobs"][at] for each in (a, b))
        if abs(ours - theirs) > tolerance:
            return f"token {at}: logprob {theirs:.4f}, wanted {ours:.4f}"
        if first != second:
            others = sorted(a["logprobs"]["top_logprobs"][at].values(), reverse=True)
            if len(others) < 2 or others[0] - others[1] > tolerance:
                return f"token {at} is {second}, wanted {first}, which is by far the likeliest"
            return ""
    return ""


def under_load(
    ask: Ask,
    short: Callable[[object], list[int]],
    long: Callable[[object], list[int]],
    *,
    seconds: float,
    streams: int,
    count: int,
    every: float,
) -> dict[str, Any]:
    """Time running decodes while long prompts arrive, one `every` so many seconds.

    `streams` clients let `short` prompts generate `count` tokens, one after the other.
    """
    gaps: list[float] = []
    firsts: list[float] = []
    failures: list[BaseException] = []
    lock = threading.Lock()
    stop = time.monotonic() + seconds

    def run(work: Callable[..., None], *given: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def decode(number: int) -> None:
        for round_ in itertools.count():
            if time.monotonic() > stop:
                return
            answer = ask(short((number, round_)), count)
            with lock:
                gaps.extend(answer.gaps)

    def arrive(number: int) -> None:
        answer = ask(long(number), 2)
        with lock:
            firsts.append(answer.ttft)

    threads = [run(decode, number) for number in range(streams)]
    for number in itertools.count():
        if time.monotonic() > stop:
            break
        threads.append(run(arrive, number))
        time.sleep(every)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    gaps.sort()
    firsts.sort()
    return {
        "itl_p50_ms": gaps[len(gaps) // 2] * 1e3,
        "itl_p99_ms": gaps[len(gaps) * 99 // 100] * 1e3,
        "itl_max_ms": gaps[-1] * 1e3,
        "tokens": len(gaps),
        "long_prompts": len(firsts),
        "long_ttft_p50_ms": firsts[len(firsts) // 2] * 1e3,
    }


def requests_per_second(ask: Ask, prompts: list[list[int]], count: int, clients: int) -> float:
    """Have `clients` work off the prompts, `count` tokens each."""
    todo = iter(prompts)
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        try:
            while True:
                with lock:
                    prompt = next(todo, None)
                if prompt is None:
                    return
                ask(prompt, count)
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return len(prompts) / (time.monotonic() - began)
