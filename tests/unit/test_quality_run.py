"""The measurement with a model of one attention layer each in NumPy, and with texts of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from kvxfer._quality_run import (
    Array,
    AttentionSample,
    Coded,
    LayerKv,
    Passage,
    Planes,
    Prefilled,
    measure,
)
from kvxfer._quality_texts import cut, files_of
from kvxfer.errors import InvalidError

SIZE = 4
HEADS = 2
VOCABULARY = 9


class ToyModel:
    """Two layers of attention that add to the residual; K is of the layer's input, V as well."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.embedding = rng.normal(size=(VOCABULARY, HEADS, SIZE))
        self.runs: list[list[int]] = []

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        state = self.embedding[list(tokens)]
        layers = []
        for index in (0, 1):
            k = (state * (index + 1)).transpose(1, 0, 2).astype(np.float32)
            layers.append(LayerKv(index, 0, {"k": k, "v": k * 0.5}))
            state = state + 0.1
        return Prefilled(None, len(tokens), layers)

    def attend(self, state: Array, planes: Planes) -> Array:
        scores = np.einsum("thc,hnc->htn", state, planes["k"])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("htn,hnc->thc", weights, planes["v"])

    def continue_(
        self,
        prefilled: Prefilled,
        tokens: Sequence[int],
        replaced: Mapping[int, Planes] | None = None,
        probed: Sequence[Mapping[int, Planes]] = (),
    ) -> tuple[Array, list[AttentionSample]]:
        self.runs.append(list(tokens))
        state = self.embedding[list(tokens)]
        samples = []
        for layer in prefilled.layers:
            out = self.attend(state, (replaced or {}).get(layer.index, layer.planes))
            others = [self.attend(state, planes[layer.index]) for planes in probed]
            if probed:
                samples.append(AttentionSample(layer.index, out, others))
            state = state + out
        logits = np.einsum("thc,vhc->tv", state, self.embedding)
        return logits.astype(np.float32), samples

    def values(self, stored: Array) -> Array:
        return stored


def round_trip(codec: str, layer: LayerKv, prompt_tokens: int) -> Coded:
    """`second` spoils V of layer 1, `both` K of both layers, `nothing` nothing."""
    planes = {name: stored.copy() for name, stored in layer.planes.items()}
    if codec == "second" and layer.index == 1:
        planes["v"][:, 1] *= 1.5
    if codec == "both":
        planes["k"] *= np.float32(1.25)
    return Coded(planes, 100, 50 + layer.index, 1)


@pytest.fixture
def passages() -> list[Passage]:
    return [Passage("a", 0, [1, 2, 3, 4], [5, 6]), Passage("b", 7, [8, 0, 8, 2], [1, 1])]


def test_what_is_unchanged_costs_nothing(passages):
    (result,) = measure(ToyModel(), passages, ["nothing"], round_trip)
    record = result.record()
    assert record["kl_nats"] == 0
    assert record["top1_agreement"] == 1
    assert record["rel_l2"] == {"k": 0, "v": 0}
    assert record["attention_rel_l2"] == 0
    assert record["tokens"] == 4
    assert record["wire_ratio"] == pytest.approx(400 / (2 * 50 + 2 * 51))
    assert record["raw_rows"] == 4


def test_errors_are_told_apart_by_codec_and_layer(passages):
    results = measure(ToyModel(), passages, ["both", "nothing", "second"], round_trip)
    both, nothing, second = (result.record() for result in results)
    assert nothing["kl_nats"] == 0
    assert both["kl_nats"] > 0
    assert second["kl_nats"] > 0
    assert both["rel_l2"]["k"] > 0
    assert both["rel_l2"]["v"] == 0
    first, other = results[2].layers
    assert (first.index, other.index) == (0, 1)
    assert first.attention.value == 0
    assert other.attention.value > 0
    assert first.planes["v"].value == 0
    squares = errors = 0.0
    for passage in passages:
        v = ToyModel().prefill(passage.prompt).layers[1].planes["v"]
        squares += float((v**2).sum())
        errors += float((0.25 * v[:, 1] ** 2).sum())
    assert other.planes["v"].value == pytest.approx((errors / squares) ** 0.5, rel=1e-6)


def test_attention_error_is_for_the_original_queries(passages):
    """Layer 1's own error alone, not that of layer 0 which its queries would carry."""
    (result,) = measure(ToyModel(), passages[:1], ["both"], round_trip)
    model, passage = ToyModel(), passages[0]
    prefilled = model.prefill(passage.prompt)
    state = model.embedding[passage.following]
    state = state + model.attend(state, prefilled.layers[0].planes)
    right = model.attend(state, prefilled.layers[1].planes)
    wrong = model.attend(state, round_trip("both", prefilled.layers[1], 4).planes)
    expected = np.linalg.norm(wrong - right) / np.linalg.norm(right)
    assert result.layers[1].attention.value == pytest.approx(expected, rel=1e-6)


def test_runs_each_passage_once_as_it_is_and_once_a_codec(passages):
    model = ToyModel()
    said: list[str] = []
    measure(model, passages, ["nothing", "both"], round_trip, said.append)
    assert model.runs == [[5, 6]] * 3 + [[1, 1]] * 3
    assert "passage 2 of 2, b: both" in said


def words(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.mark.parametrize(
    ("length", "passages", "begins"),
    [(9, 3, []), (10, 3, [0]), (19, 3, [0]), (20, 3, [0, 10]), (45, 3, [0, 17, 35]), (45, 1, [0])],
)
def test_passages_are_spread_and_apart(tmp_path, length, passages, begins):
    path = tmp_path / "text"
    path.write_text(" ".join(map(str, range(100, 100 + length))))
    found = cut(path, words, [], 7, 3, passages)
    assert [passage.first_token for passage in found] == begins
    for passage in found:
        begin = 100 + passage.first_token
        assert passage.prompt == list(range(begin, begin + 7))
        assert passage.following == list(range(begin + 7, begin + 10))
        assert passage.text == "text"


def test_prefix_is_part_of_the_prompt(tmp_path):
    path = tmp_path / "text"
    path.write_text("5 6 7 8 9")
    (passage,) = cut(path, words, [1, 2], 5, 2, 1)
    assert passage.prompt == [1, 2, 5, 6, 7]
    assert passage.following == [8, 9]
    assert cut(path, words, [1, 2], 6, 2, 1) == []


def test_text_that_is_none(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"\xff\xfe\x80")
    with pytest.raises(InvalidError, match="weights is not text in UTF-8"):
        cut(path, words, [], 1, 1, 1)


def test_files_of_a_folder(tmp_path):
    with pytest.raises(InvalidError, match="put text files there"):
        files_of(tmp_path)
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    assert [path.name for path in files_of(tmp_path)] == ["a", "b"]
    assert files_of(tmp_path / "b") == [tmp_path / "b"]
    with pytest.raises(InvalidError, match="no such file or folder"):
        files_of(tmp_path / "c")
