"""The concurrent flow: the decode side asks before, and while, the prefill side computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvxfer

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def pair(fake: Any) -> Any:
    from rig import pair

    return pair


@pytest.fixture
def known(engine: Callable[..., Any], pair: Any) -> Callable[[Any], dict[str, Any]]:
    """What a proxy keeps of a prefill engine's first answer."""

    def standing(p: Any) -> dict[str, Any]:
        from kvxfer.integrations.vllm_connector.proxy import _standing

        name, params = pair.prefill(p, pair.prompt(3))
        p.step()
        p.worker.worker._withdraw(name, [params["kvxfer"]["agents"]["g0"]], "")
        for offer in p.worker.worker._sends[name].offers:
            offer.release()  # nobody fetches this one
        pair.settle(p)
        return _standing(params)

    return standing


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_asked_at_once(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any, first: str
) -> None:
    p = engine("kv_producer", max_batched_tokens=128)  # several chunks
    d = engine("kv_consumer", block_size=64)
    standing = known(p)
    for number, length in enumerate((1, 2, 33, 128, 129, 700)):
        tokens = pair.prompt(length, number)
        transfer = f"transfer-{number}"
        asks = {
            "prefill": lambda t=tokens, x=transfer: p.add(
                t, params=fake.prefill_params(transfer_id=x), max_tokens=1
            ),
            "decode": lambda t=tokens, x=transfer: d.add(t, params={**standing, "transfer_id": x}),
        }
        names = {first: asks.pop(first)()}
        for _ in range(3):
            (p if first == "prefill" and length < 128 else d).step()
        (other,) = asks
        names[other] = asks[other]()
        pair.step_until(lambda: d.answers[names["decode"]]["finish"] is not None, d, p)  # noqa: B023
        pair.check(d, names["decode"], tokens)
    pair.settle(p, d)
    assert d.stats["loads"] == 5
    assert "failures" not in d.stats


def test_asked_at_once_and_sent_afterwards(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any
) -> None:
    """By an engine that was told not to send while it computes."""
    p = engine("kv_producer", extra={"concurrent": False, "lease": 1000})
    d = engine("kv_consumer", extra={"load_timeout": 1000})
    standing = known(p)
    for number in range(2):
        tokens = pair.prompt(200, number)
        params = fake.prefill_params(transfer_id=f"x{number}")
        name = d.add(tokens, params={**standing, "transfer_id": f"x{number}"})
        d.step()
        prefill = p.add(tokens, params=params, max_tokens=1)
        if number:
            p.abort(prefill)
        pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)  # noqa: B023
        pair.check(d, name, tokens)
    assert d.stats["loads"] == 1
    assert d.stats["failures"] == {"withdrawn": 1}
    pair.settle(p, d)


def test_prompts_that_share_a_transfer_id(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any
) -> None:
    """As those of one API request with a list of prompts do."""
    p, d = engine("kv_producer"), engine("kv_consumer", prefix_caching=False)
    standing = known(p)
    prompts = [pair.prompt(100, number) for number in range(3)]
    names = [d.add(tokens, params={**standing, "transfer_id": "x"}) for tokens in prompts]
    d.step()
    for tokens in reversed(prompts):
        p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for tokens, name in zip(prompts, names, strict=True):
        pair.check(d, name, tokens)
    assert d.stats["loads"] == 3
    assert "failures" not in d.stats
    pair.settle(p, d)


@pytest.mark.parametrize("aborts", [False, True])
def test_equal_prompts_that_share_a_transfer_id(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any, log: list[str], aborts: bool
) -> None:
    """Samples of one prompt at the prefill side: what befalls the second is not the first's end."""
    p, d = engine("kv_producer"), engine("kv_consumer", policy="fail")
    standing, tokens = known(p), pair.prompt(100)
    first, second = (
        p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1) for _ in range(2)
    )
    if aborts:
        p.abort(second)
    pair.step_until(lambda: p.answers[first]["finish"] is not None, p)
    names = [d.add(tokens, params={**standing, "transfer_id": "x"}) for _ in range(2)]
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for name in names:
        pair.check(d, name, tokens)
    assert p.answers[first]["params"] is not None
    assert d.stats["loads"] == 1
    assert "failures" not in d.stats
    assert not [line for line in log if "cannot be offered" in line]
    pair.settle(p, d)
    # The name is free again, as the first has ended; its offer was used, so it serves no other.
    p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    pair.settle(p)


@pytest.mark.parametrize(("block", "other"), [(32, 32), (64, 32)])
def test_windows(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any, block: int, other: int
) -> None:
    """The prefill side leaves out the last token there, and still names the transfer equally."""
    windows = (None, 64)
    p = engine("kv_producer", block_size=block, windows=windows, max_batched_tokens=128)
    d = engine("kv_consumer", block_size=other, windows=windows)
    standing = known(p)
    for number, length in enumerate((1, 2, 33, 129, 500)):
        tokens = pair.prompt(length, number)
        name = d.add(tokens, params={**standing, "transfer_id": "x"})
        d.step()
        p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
        pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)  # noqa: B023
        pair.check(d, name, tokens)
    pair.settle(p, d)
    assert d.stats["loads"] == 4
    assert "failures" not in d.stats


def test_transfer_id_of_another_prompt(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any
) -> None:
    p = engine("kv_producer", extra={"lease": 0.5})
    d = engine("kv_consumer", extra={"load_timeout": 0.5})
    standing = known(p)
    p.add(pair.prompt(100, 1), params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    pair.decode(d, pair.prompt(100), {**standing, "transfer_id": "x"}, p)
    assert d.stats["failures"] == {"timeout": 1}
    pair.settle(p, d)


def test_any_text_is_a_transfer_id(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any
) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    standing = known(p)
    for number, transfer in enumerate(("\ud800", "x" * 100000, {"a": [1]})):
        tokens = pair.prompt(50, number)
        p.add(tokens, params=fake.prefill_params(transfer_id=transfer), max_tokens=1)
        pair.decode(d, tokens, {**standing, "transfer_id": transfer}, p)
    assert d.stats["loads"] == 3
    pair.settle(p, d)


@pytest.mark.parametrize("length", [1, 100])
@pytest.mark.parametrize("damage", ["signature", "agents", "kind"])
def test_damaged_template(
    engine: Callable[..., Any], pair: Any, known: Any, damage: str, length: int
) -> None:
    """It is noticed whether there is something to load, something to decline, or an abort."""
    p, d = engine("kv_producer"), engine("kv_consumer")
    standing = known(p)
    if damage == "kind":
        standing["kvxfer"]["agents"]["g0"] = 5
    else:
        standing["kvxfer"]["agents"]["g0"][damage] = []
    tokens = pair.prompt(length)
    pair.decode(d, tokens, {**standing, "transfer_id": "x"})
    assert d.stats.get("failures") == ({"ticket": 1} if length > 1 else None)
    d.abort(d.add(pair.prompt(length, 1), params={**standing, "transfer_id": "y"}))
    pair.settle(p, d)


def test_what_waits_is_renewed(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any
) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer", num_blocks=8)
    standing = known(p)
    d.add(pair.prompt(200), max_tokens=20)  # all blocks
    d.step()
    tokens = pair.prompt(100, 1)
    name = d.add(tokens, params={**standing, "transfer_id": "x"})
    d.connector.scheduler._renewed -= 1000
    d.step()
    (renewed,) = d.worker._done.renew
    p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    p.step()
    (sent,) = p.worker._done.send
    for field in ("offer", "generation"):
        assert renewed[field] == sent.parts[0].ticket[field]
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    pair.check(d, name, tokens)
    assert d.stats["loads"] == 1
    pair.settle(p, d)


def test_layers_are_sent_while_others_are_computed(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any
) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    standing = known(p)
    tokens = pair.prompt(200)
    name = d.add(tokens, params={**standing, "transfer_id": "x"})
    d.step()
    (load,) = d.worker.worker._loads.values()
    p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    written = p.worker.save_kv_layer
    seen = []

    def save(layer: str, *rest: Any) -> None:
        written(layer, *rest)
        want = len(seen) + 1
        pair.step_until(lambda: load.fetches["g0"].report.chunks >= want)
        seen.append(layer)

    p.worker.save_kv_layer = save
    p.step()
    assert seen == p.layers[0]  # each layer has arrived before the next was written
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    pair.check(d, name, tokens)
    pair.settle(p, d)


@pytest.mark.parametrize("fails", ["mark_ready", "mark_all_ready"])
def test_an_offer_that_cannot_be_marked(
    engine: Callable[..., Any],
    pair: Any,
    fake: Any,
    known: Any,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    """It costs the one request its transfer, and the engine goes on."""
    p = engine("kv_producer", extra={"lease": 1000})
    d = engine("kv_consumer", extra={"load_timeout": 1000})
    standing, tokens = known(p), pair.prompt(200)

    def refuse(*_: Any) -> None:
        raise kvxfer.ResourceError("no event")

    name = d.add(tokens, params={**standing, "transfer_id": "x"})
    d.step()
    p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(kvxfer.Offer, fails, refuse)
        if fails == "mark_all_ready":  # else all layers have gone over before
            patch.setattr(kvxfer.Offer, "mark_ready", lambda *_: None)
        p.step()
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    pair.check(d, name, tokens)
    assert sum(d.stats["failures"].values()) == 1
    assert len([line for line in log if "cannot be sent" in line]) == 1
    pair.settle(p, d)
    other = pair.prompt(90, 5)
    pair.decode(d, other, pair.prefill(p, other)[1], p)
    assert d.stats["loads"] == 1


def test_a_rank_that_does_not_hear_of_a_steps_end(
    engine: Callable[..., Any],
    pair: Any,
    fake: Any,
    known: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one of vLLM's V1 runner with drafts and pipeline stages behind it."""
    p = engine("kv_producer", extra={"lease": 1000})
    d = engine("kv_consumer", extra={"load_timeout": 1000})
    standing, tokens = known(p), pair.prompt(200)
    monkeypatch.setattr(p.worker, "wait_for_save", lambda: None)
    monkeypatch.setattr(p.worker, "save_kv_layer", lambda *_: None)
    name = d.add(tokens, params={**standing, "transfer_id": "x"})
    d.step()
    p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    p.step()
    assert p.worker.worker._filling
    p.step()
    assert not p.worker.worker._filling
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    pair.check(d, name, tokens)
    assert "failures" not in d.stats
    pair.settle(p, d)


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_prefill_aborted(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any, steps: int, first: str
) -> None:
    """Before it was scheduled, in the middle, and when its last layers are on offer."""
    p = engine("kv_producer", max_batched_tokens=64)
    d = engine("kv_consumer", extra={"load_timeout": 1000})
    standing = known(p)
    tokens = pair.prompt(400)
    if first == "decode":
        name = d.add(tokens, params={**standing, "transfer_id": "x"})
        d.step()
    prefill = p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=50)
    for _ in range(steps):
        p.step()
    p.abort(prefill)
    p.step()
    if first == "prefill":
        name = d.add(tokens, params={**standing, "transfer_id": "x"})
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    pair.check(d, name, tokens)
    if steps < 7 or first == "prefill":  # else its last chunk was computed, and may be here
        assert d.stats["failures"] == {"withdrawn": 1}
    pair.settle(p, d)  # long before anything times out


def test_decode_aborted_before_the_prefill(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any
) -> None:
    p, d = engine("kv_producer", extra={"lease": 1000}), engine("kv_consumer")
    standing = known(p)
    tokens = pair.prompt(400)
    name = d.add(tokens, params={**standing, "transfer_id": "x"})
    d.step()
    d.abort(name)
    pair.settle(d)
    prefill = p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    pair.step_until(lambda: p.answers[prefill]["finish"] is not None, p)
    pair.settle(p, d)  # declined: long before the lease ends


def test_preempted_after_it_was_offered(
    engine: Callable[..., Any], pair: Any, fake: Any, known: Any
) -> None:
    """A proxy that lets the prefill side go on generating, and a cache that is too small."""
    p = engine("kv_producer", num_blocks=14)
    d = engine("kv_consumer", extra={"load_timeout": 1000})
    standing = known(p)
    prompts = [pair.prompt(100, number) for number in range(3)]
    sent = [
        p.add(tokens, params=fake.prefill_params(transfer_id=f"x{at}"), max_tokens=60)
        for at, tokens in enumerate(prompts)
    ]
    names = [
        d.add(tokens, params={**standing, "transfer_id": f"x{at}"})
        for at, tokens in enumerate(prompts)
    ]
    pair.step_until(lambda: all(p.answers[name]["finish"] for name in sent), p, d)
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for tokens, name in zip(prompts, names, strict=True):
        pair.check(d, name, tokens)
    for tokens, name in zip(prompts, sent, strict=True):
        pair.check(p, name, tokens, 60)
    pair.settle(p, d)
