"""How the arrangement of a block is found out, and blocks that can only be sent whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")

BLOCK, HEAD = 32, 16


@pytest.fixture
def pair(fake: Any) -> Any:
    from rig import pair

    return pair


def _rows(key: Any, value: Any, keys: Any, values: Any, slots: Any) -> None:
    keys[0, 0], values[0, 0] = key[:, 0], value[:, 0]


def _columns(key: Any, value: Any, keys: Any, values: Any, slots: Any) -> None:
    keys.view(HEAD, BLOCK)[:] = key[:, 0].T
    values[0, 0] = value[:, 0]


def _pairs(key: Any, value: Any, keys: Any, values: Any, slots: Any) -> None:
    """Two contents of one token beside each other, then the next token's: as AMX wants it."""
    keys.view(HEAD // 2, BLOCK, 2)[:] = key[:, 0].view(BLOCK, HEAD // 2, 2).permute(1, 0, 2)
    values[0, 0] = value[:, 0]


def _other_pairs(key: Any, value: Any, keys: Any, values: Any, slots: Any) -> None:
    keys.view(HEAD // 4, BLOCK, 4)[:] = key[:, 0].view(BLOCK, HEAD // 4, 4).permute(1, 0, 2)
    values[0, 0] = value[:, 0]


def _lossy(key: Any, value: Any, keys: Any, values: Any, slots: Any) -> None:
    keys[0, 0] = key[:, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_strides_are_found(fake: Any, dtype: str) -> None:
    import torch

    from kvxfer.integrations.vllm_connector.packing import Plane, probe

    kind = getattr(torch, dtype)
    rows = probe(_rows, BLOCK, HEAD, torch.float32, kind)
    assert rows.planes == (Plane(0, HEAD, 1), Plane(BLOCK * HEAD, HEAD, 1))
    columns = probe(_columns, BLOCK, HEAD, torch.float32, kind)
    assert columns.planes == (Plane(0, 1, BLOCK), Plane(BLOCK * HEAD, HEAD, 1))
    assert columns.fingerprint != rows.fingerprint


def test_what_strides_cannot_say(fake: Any) -> None:
    import torch

    from kvxfer.integrations.vllm_connector.packing import probe

    found = [
        probe(write, BLOCK, HEAD, torch.bfloat16, torch.bfloat16)
        for write in (_pairs, _other_pairs, _pairs)
    ]
    assert [each.planes for each in found] == [None] * 3
    assert found[0] == found[2]
    assert found[0].fingerprint != found[1].fingerprint
    with pytest.raises(ValueError, match="its own place"):
        probe(_lossy, BLOCK, HEAD, torch.bfloat16, torch.bfloat16)


@pytest.fixture
def opaque(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    """The backend's arrangement as if strides could not describe it."""
    import dataclasses

    from kvxfer.integrations.vllm_connector import caches

    found = caches._packing
    monkeypatch.setattr(
        caches, "_packing", lambda *given: dataclasses.replace(found(*given), planes=None)
    )


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("windows", [(None,), (None, 64)])
@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_whole_blocks(
    engine: Callable[..., Any], pair: Any, windows: tuple[int | None], codec: str
) -> None:
    p = engine("kv_producer", windows=windows)
    d = engine("kv_consumer", windows=windows, extra={"codec": codec})  # and yet all goes raw
    for length in (1, 2, 31, 32, 33, 64, 65, 127, 128, 129, 500):
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    tokens = pair.prompt(500) + pair.prompt(50)  # with a prefix on both sides
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    pair.settle(p, d)
    assert d.stats["loads"] == 11
    assert "failures" not in d.stats


@pytest.mark.usefixtures("opaque")
def test_whole_blocks_of_other_sizes_are_refused(
    engine: Callable[..., Any], pair: Any, log: list[str]
) -> None:
    p = engine("kv_producer", extra={"lease": 0.5})
    d = engine("kv_consumer", block_size=64)
    tokens = pair.prompt(200)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] == {"mismatch": 1}
    assert any("g0 block size is '64' here and '32' there" in line for line in log)
    pair.settle(p, d)
