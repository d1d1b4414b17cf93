"""The figures of ``kvxfer quality``, against plain loops."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kvxfer import _quality_report as report
from kvxfer._quality_metrics import (
    CodecResult,
    LayerResult,
    RelativeError,
    compare_logits,
)


def divergence(original: list[float], degraded: list[float]) -> float:
    """KL(original || degraded) of two rows of logits, as the textbook has it."""
    p = [math.exp(x) / sum(map(math.exp, original)) for x in original]
    q = [math.exp(x) / sum(map(math.exp, degraded)) for x in degraded]
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_relative_error_pools_what_is_added():
    rng = np.random.default_rng(1)
    pairs = [(rng.normal(size=(3, 4)), rng.normal(size=(3, 4))) for _ in range(3)]
    error = RelativeError()
    for degraded, original in pairs:
        error.add(degraded.astype(np.float32), original.astype(np.float32))
    wrong = sum((d - o) ** 2 for a, b in pairs for d, o in zip(a.flat, b.flat, strict=True))
    right = sum(o**2 for _, b in pairs for o in b.flat)
    assert error.value == pytest.approx(math.sqrt(wrong / right), rel=1e-5)


def test_relative_error_of_nothing():
    error = RelativeError()
    error.add(np.zeros(3), np.zeros(3))
    assert math.isnan(error.value)
    error.add(np.ones(3), np.zeros(3))
    assert error.value == math.inf


def test_relative_error_needs_equal_shapes():
    with pytest.raises(ValueError, match="shapes differ"):
        RelativeError().add(np.zeros((1, 3)), np.zeros(3))


def test_divergence_of_two_tokens():
    found = compare_logits(np.array([[math.log(3), 0.0]]), np.array([[0.0, 0.0]]))
    assert found.kl[0] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    # The other direction is another number: the arguments must not be exchanged.
    assert found.kl[0] != pytest.approx(divergence([math.log(3), 0.0], [0.0, 0.0]), rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
def test_logits_against_loops(tokens):
    rng = np.random.default_rng(tokens)
    original = rng.normal(scale=4, size=(tokens, 11)).astype(np.float32)
    degraded = (original + rng.normal(scale=3, size=original.shape)).astype(np.float32)
    found = compare_logits(degraded, original)
    for token in range(tokens):
        ours, theirs = original[token].tolist(), degraded[token].tolist()
        assert found.kl[token] == pytest.approx(divergence(ours, theirs), rel=1e-6)
        assert found.agrees[token] == (ours.index(max(ours)) == theirs.index(max(theirs)))
        delta = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        assert found.max_delta[token] == pytest.approx(delta, rel=1e-6)
    assert tokens < 15 or not found.agrees.all()


def test_equal_and_shifted_logits_do_not_differ():
    logits = np.random.default_rng(2).normal(size=(5, 7)).astype(np.float32)
    same = compare_logits(logits, logits)
    assert same.kl.tolist() == [0] * 5
    assert same.agrees.all()
    assert same.max_delta.tolist() == [0] * 5
    shifted = compare_logits(logits + np.float32(2), logits)
    assert shifted.kl == pytest.approx(0, abs=1e-6)
    assert shifted.max_delta == pytest.approx(2)


def test_large_logits_do_not_overflow():
    found = compare_logits(np.array([[900.0, 0.0]]), np.array([[1000.0, 0.0]]))
    assert found.kl[0] == pytest.approx(0)


def test_logits_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="no logits to compare"):
        compare_logits(np.zeros((2, 3)), np.zeros((3, 3)))


@pytest.fixture
def result() -> CodecResult:
    first = LayerResult(0, memory_bytes=200, wire_bytes=100, raw_rows=1)
    second = LayerResult(3, memory_bytes=100, wire_bytes=100, raw_rows=2)
    for layer, error in ((first, 1.0), (second, 3.0)):
        layer.add_plane("k", np.array([10 + error]), np.array([10.0]))
        layer.add_plane("v", np.array([20 + error]), np.array([20.0]))
    first.attention.add(np.array([1.1]), np.array([1.0]))
    second.attention.add(np.array([1.3]), np.array([1.0]))
    passages = [
        compare_logits(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.0, 0.5], [0.0, 1.0]])),
        compare_logits(np.array([[0.0, 1.0]]), np.array([[0.0, 1.0]])),
    ]
    return CodecResult("int8", [first, second], passages)


def test_record_of_a_codec(result):
    record = result.record()
    one = divergence([0.0, 0.5], [1.0, 0.0])
    assert record["wire_ratio"] == pytest.approx(300 / 200)
    assert record["rel_l2"]["k"] == pytest.approx(math.sqrt((1 + 9) / 200))
    assert record["rel_l2"]["v"] == pytest.approx(math.sqrt((1 + 9) / 800))
    assert record["attention_rel_l2"] == pytest.approx(0.2)
    assert record["attention_rel_l2_worst_layer"] == pytest.approx(0.3)
    assert record["kl_nats"] == pytest.approx(one / 3)
    assert record["kl_nats_max"] == pytest.approx(one)
    # Of the means over the two passages, one / 2 and 0.
    assert record["kl_nats_standard_error"] == pytest.approx(one / 4)
    assert record["top1_agreement"] == pytest.approx(2 / 3)
    assert record["max_delta_logit"] == pytest.approx(1)
    assert record["tokens"] == 3
    assert record["raw_rows"] == 3


def test_one_passage_has_no_standard_error(result):
    result.logits.pop()
    assert result.record()["kl_nats_standard_error"] is None
    assert "+-" not in report.table([result])


def test_layer_without_attention_is_null_and_not_counted(result):
    result.layers[1].attention = RelativeError()
    assert result.layers[1].record()["attention_rel_l2"] is None
    assert result.record()["attention_rel_l2"] == pytest.approx(0.1)
    row = report.layer_table([result]).splitlines()[2]
    assert row.split()[-2] == "-"


def test_json_is_json(result):
    record = report.record({"name": "m"}, {"prompt_tokens": 3}, [result])
    assert record["schema"] == "kvxfer.quality/1"
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    (codec,) = record["codecs"]
    assert [layer["layer"] for layer in codec["layers"]] == [0, 3]
    assert codec["layers"][0]["wire_ratio"] == 2


def test_table_has_a_row_for_each_codec(result):
    header, row, *_ = report.table([result]).splitlines()
    assert header.split()[0] == "codec"
    assert row.split()[:2] == ["int8", "1.500"]
    assert "66.67%" in row
    layers = report.layer_table([result]).splitlines()
    assert [line.split()[1] for line in layers[1:]] == ["0", "3"]
