"""Reads request traces: Mooncake's, Azure's, vLLM's, and those with a longest common prefix."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kvxfer.errors import InvalidError
from kvxfer.serving.fit import Served
from kvxfer.serving.workload import Job, Workload


def read_trace(path: str | Path, limit: int | None = None) -> Workload:
    """Return the workload in `path`, at most its first `limit` requests.

    Known are JSON lines of Mooncake (`timestamp` in ms, `input_length`, `output_length`,
    `hash_ids` of 512 tokens) and of a vLLM request log (`arrival_time`, `input_toks`,
    `output_toks`); CSV of Azure (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`), of Vidur
    (`arrived_at`, `num_prefill_tokens`, `num_decode_tokens`), and with prefixes by conversation
    (`trace`, `t_s`, `in_tokens`, `out_tokens`, `cached_tokens_lcp`); and the JSON that `vllm bench
    serve --save-result --save-detailed` writes. Any of them may be gzipped.

    Raises
    ------
    InvalidError
        Another format, or a line that lacks something; the message names it.
    """
    path = Path(path)
    text = _text(path)
    rows = _rows(path, text)
    try:
        first = next(rows)
    except StopIteration:
        raise InvalidError(f"{path} has no requests") from None
    fields = first[1]
    known = [(make, tokens) for wanted, make, tokens in _FORMATS if wanted <= fields.keys()]
    if not known:
        raise InvalidError(
            f"{path} is in no format known here; its first request has {', '.join(fields)}"
        )
    make_parser, block_tokens = known[0]
    parser = make_parser()
    jobs = []
    for line, row in itertools.islice(itertools.chain([first], rows), limit):
        try:
            job = parser(row)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidError(
                f"{path}:{line}: {type(error).__name__} {error}: {row!r:.200}"
            ) from (error)
        if job is not None:
            jobs.append(job)
    if not jobs:
        raise InvalidError(f"{path} has no request with both a prompt and an answer")
    jobs.sort(key=lambda job: job.time)
    start = jobs[0].time
    return Workload(
        tuple(
            Job(job.time - start, job.prompt_tokens, job.output_tokens, job.blocks) for job in jobs
        ),
        block_tokens,
    )


def read_served(path: str | Path) -> list[Served]:
    """Return what a vLLM request log tells of when requests were scheduled and answered.

    Also reads `vllm bench` results; they don't say when a request was scheduled, so its arrival is
    taken, which is right only where nothing queued.
    """
    path = Path(path)
    served = []
    for line, row in _rows(path, _text(path)):
        try:
            if "scheduled_ts" in row:
                times = (row["scheduled_ts"], row["first_token_ts"], row["last_token_ts"])
            else:
                start, ttft = float(row["start_time"]), float(row["ttft"])
                times = (start, start + ttft, start + ttft + float(row["decode_seconds"]))
            tokens = int(row["input_toks"]), int(row["output_toks"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidError(f"{path}:{line}: {type(error).__name__} {error}") from error
        scheduled, first, last = map(float, times)
        served.append(Served(scheduled, first, last, *tokens))
    return served


def _text(path: Path) -> str:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidError(f"can't read the trace: {error}") from error
    except (UnicodeDecodeError, EOFError) as error:
        raise InvalidError(f"{path} is no text: {error}") from error


def _rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Return each request with the line it stands on."""
    start = text.lstrip()[:1]
    if start != "{":
        for line, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
            yield line, row
        return
    head = text.lstrip().split("\n", 1)[0]
    if '"input_lens"' in text and not _is_json(head, "timestamp"):
        yield from enumerate(_bench_rows(path, text))
        return
    for line, content in enumerate(text.splitlines(), 1):
        if content.strip():
            try:
                row = json.loads(content)
            except json.JSONDecodeError as error:
                raise InvalidError(f"{path}:{line}: {error}") from error
            if not isinstance(row, dict):
                raise InvalidError(f"{path}:{line}: {content[:80]!r} is no request")
            yield line, row


def _is_json(line: str, key: str) -> bool:
    try:
        return key in json.loads(line)
    except (json.JSONDecodeError, TypeError):
        return False


def _bench_rows(path: Path, text: str) -> Iterator[Mapping[str, Any]]:
    try:
        result = json.loads(text)
        inputs, outputs = result["input_lens"], result["output_lens"]
        starts = result.get("start_times")
        if starts is None:
            rate = float(result["request_rate"])
            starts = [index / rate for index in range(len(inputs))]
        ttfts = result.get("ttfts") or [None] * len(inputs)
        gaps = result.get("itls") or [[]] * len(inputs)
        rows = list(zip(inputs, outputs, starts, ttfts, gaps, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidError(
            f"{path} lacks the details of a vllm bench result ({type(error).__name__} {error}); "
            "run it with --save-detailed and a finite --request-rate"
        ) from error
    for prompt, output, start, ttft, itls in rows:
        yield {
            "arrival_time": start,
            "start_time": start,
            "input_toks": prompt,
            "output_toks": output,
            "ttft": ttft,
            "decode_seconds": sum(itls),
        }


Parser = Callable[[Mapping[str, Any]], "Job | None"]


def _job(
    time: float, prompt: int | str, output: int | str, blocks: tuple[int, ...] = ()
) -> Job | None:
    """Requests without a prompt or an answer (errors, embeddings) are left out."""
    tokens_in, tokens_out = int(prompt), int(output)
    if tokens_in < 0 or tokens_out < 0:
        raise ValueError(f"{tokens_in} tokens in, {tokens_out} out")
    return Job(time, tokens_in, tokens_out, blocks) if tokens_in and tokens_out else None


def _mooncake() -> Parser:
    def parse(row: Mapping[str, Any]) -> Job | None:
        full = int(row["input_length"]) // 512
        ids = tuple(map(int, row["hash_ids"][:full]))
        return _job(float(row["timestamp"]) / 1e3, row["input_length"], row["output_length"], ids)

    return parse


def _request_log() -> Parser:
    return lambda row: _job(float(row["arrival_time"]), row["input_toks"], row["output_toks"])


def _azure() -> Parser:
    epoch = datetime(2000, 1, 1)

    def parse(row: Mapping[str, Any]) -> Job | None:
        stamp = row["TIMESTAMP"]
        whole, _, fraction = stamp.partition(".")
        when = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S")
        seconds = (when - epoch).total_seconds() + float("0." + (fraction or "0"))
        return _job(seconds, row["ContextTokens"], row["GeneratedTokens"])

    return parse


def _vidur() -> Parser:
    return lambda row: _job(
        float(row["arrived_at"]), row["num_prefill_tokens"], row["num_decode_tokens"]
    )


def _conversations() -> Parser:
    """Ids that give each request the common prefix with its conversation that the trace states."""
    fresh = itertools.count()
    latest: dict[str, list[tuple[int, ...]]] = {}

    def parse(row: Mapping[str, Any]) -> Job | None:
        shared = int(row["cached_tokens_lcp"]) // 64
        full = int(row["in_tokens"]) // 64
        before = latest.setdefault(row["trace"], [])
        base = next((ids for ids in reversed(before) if len(ids) >= shared), ())
        ids = base[:shared] + tuple(next(fresh) for _ in range(full - len(base[:shared])))
        before.append(ids)
        del before[:-8]
        return _job(float(row["t_s"]), row["in_tokens"], row["out_tokens"], ids)

    return parse


_FORMATS: tuple[tuple[set[str], Callable[[], Parser], int], ...] = (
    ({"timestamp", "input_length", "output_length", "hash_ids"}, _mooncake, 512),
    ({"arrival_time", "input_toks", "output_toks"}, _request_log, 512),
    ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure, 512),
    ({"arrived_at", "num_prefill_tokens", "num_decode_tokens"}, _vidur, 512),
    ({"trace", "t_s", "in_tokens", "out_tokens", "cached_tokens_lcp"}, _conversations, 64),
)
