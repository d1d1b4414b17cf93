"""A model's cache, taken out and put back: with a tiny random model of transformers'."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer import quality
from kvxfer._quality_run import Planes

REASON = "needs torch and transformers: pip install 'kvxfer[quality]'"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

WORDS = [f"w{number}" for number in range(60)]
WINDOW = 16


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate(["<s>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", unk_token="<unk>"
    )


def save(kind: str, folder: Path) -> None:
    common = {
        "vocab_size": len(WORDS) + 2, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 256,
    }  # fmt: skip
    if kind == "llama":
        config = transformers.LlamaConfig(**common)
    elif kind == "gemma3":
        config = transformers.Gemma3TextConfig(
            **common, sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )  # fmt: skip
    else:  # soft capping, which only the models' own attention function has
        config = transformers.Gemma2Config(
            **common, sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if kind == "gemma2" else "sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma2"])
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(request.param, path)
    return path


@pytest.fixture
def model(folder):
    from kvxfer._quality_model import Model

    return Model(folder, "float32", "float32")


def tokens_of(model) -> list[int]:
    words = random.Random(1).choices(WORDS, k=50)
    return [*model.prefix(), *model.tokenize(" ".join(words))]


def planes_of(prefilled) -> dict[int, Planes]:
    return {layer.index: layer.planes for layer in prefilled.layers}


def test_tokens_have_their_prefix_once(model):
    assert model.prefix() == [0]
    assert model.tokenize("w0 w3") == [2, 5]


def test_continuing_is_what_one_run_gives(model, folder):
    tokens = tokens_of(model)
    prefilled = model.prefill(tokens[:40])
    logits, samples = model.continue_(prefilled, tokens[40:])
    assert samples == []
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0, 40:].numpy()
    assert logits.shape == (11, len(WORDS) + 2)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
    again, _ = model.continue_(prefilled, tokens[40:])
    assert np.array_equal(again, logits)


def test_layers_hold_what_their_windows_hold(model, folder):
    prefilled = model.prefill(tokens_of(model)[:40])
    assert [layer.index for layer in prefilled.layers] == [0, 1, 2]
    config = json.loads((folder / "config.json").read_text())
    kinds = config.get("layer_types") or ["full_attention"] * 3
    for layer, kind in zip(prefilled.layers, kinds, strict=True):
        held = WINDOW - 1 if kind == "sliding_attention" else 40
        assert layer.first_token == 40 - held
        assert layer.planes["k"].shape == layer.planes["v"].shape == (2, held, 16)
        assert layer.planes["k"].dtype == np.float32


def test_its_own_planes_change_nothing(model):
    tokens = tokens_of(model)
    prefilled = model.prefill(tokens[:40])
    own = planes_of(prefilled)
    original, samples = model.continue_(prefilled, tokens[40:], probed=[own, own])
    replaced, _ = model.continue_(prefilled, tokens[40:], replaced=own)
    assert np.array_equal(original, replaced)
    assert [sample.layer for sample in samples] == [0, 1, 2]
    for sample in samples:
        assert sample.original.shape == (11, 4, 16)
        assert np.array_equal(sample.degraded[0], sample.original)
        assert np.array_equal(sample.degraded[1], sample.original)


def test_other_planes_are_used(model):
    tokens = tokens_of(model)
    prefilled = model.prefill(tokens[:40])
    own = planes_of(prefilled)
    spoilt = {**own, 1: {"k": own[1]["k"], "v": own[1]["v"] * np.float32(1.25)}}
    original, samples = model.continue_(prefilled, tokens[40:], probed=[own, spoilt])
    for sample in samples:
        same = np.array_equal(sample.degraded[1], sample.original)
        assert same == (sample.layer != 1)
        assert np.array_equal(sample.degraded[0], sample.original)
    changed, _ = model.continue_(prefilled, tokens[40:], replaced=spoilt)
    assert not np.allclose(changed, original)
    # The prompt's cache itself is as it was.
    again, _ = model.continue_(prefilled, tokens[40:])
    assert np.array_equal(again, original)


def test_attention_sample_is_attention(model, folder):
    """The first layer's, computed in NumPy from K and V that differ from the cache's."""
    if "gemma" in folder.name:
        pytest.skip("the queries of a Llama are the easy ones")
    tokens = tokens_of(model)
    prefilled = model.prefill(tokens[:40])
    own = planes_of(prefilled)
    spoilt = {**own, 0: {"k": own[0]["k"] * np.float32(0.5), "v": own[0]["v"][:, ::-1].copy()}}
    _, (sample, *_) = model.continue_(prefilled, tokens[40:], probed=[spoilt])

    inner = model._model.model
    attention = inner.layers[0].self_attn
    with torch.no_grad():
        states = inner.layers[0].input_layernorm(inner.embed_tokens(torch.tensor([tokens])))
        q, k, v = (
            projection(states).view(1, len(tokens), -1, 16).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        rotary = inner.rotary_emb(states, torch.arange(len(tokens))[None])
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        q, k = rotate(q, k, *rotary)
    q, k, v = (tensor[0].numpy().astype(np.float64) for tensor in (q, k, v))
    np.testing.assert_allclose(own[0]["k"], k[:, :40], rtol=1e-4, atol=1e-4)
    k[:, :40], v[:, :40] = k[:, :40] * 0.5, v[:, :40][:, ::-1].copy()
    for head in range(4):
        for row, token in enumerate(range(40, 51)):
            scores = k[head // 2, : token + 1] @ q[head, token] / 4
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ v[head // 2, : token + 1]
            np.testing.assert_allclose(
                sample.degraded[0][row, head], expected, rtol=1e-3, atol=1e-4
            )


def test_cache_holds_what_its_type_can(folder):
    from kvxfer._quality_model import Model

    tokens = tokens_of(full := Model(folder, "float32", "float32"))
    exact = full.prefill(tokens[:40]).layers[0].planes["k"]
    model = Model(folder, "bfloat16", "float32")
    stored = model.prefill(tokens[:40]).layers[0].planes["k"]
    assert stored.dtype == np.uint16
    bits = exact.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(stored, rounded)
    assert np.array_equal(model.values(stored).view(np.uint32) >> 16, stored)


def command(folder: Path, text: Path, *options: str) -> list[str]:
    return [
        str(folder), "--prompts", str(text), "--tokens", "40", "--continue", "8", "--codec", "raw",
        "--codec", "int8", "--codec", "fp8_e4m3", *options,
    ]  # fmt: skip


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(random.Random(2).choices(WORDS, k=130)))
    return path


def test_command_prints_json(folder, text):
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "quality"]
        + command(folder, text, "--json", "--passages", "2"),
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["schema"] == "kvxfer.quality/1"
    assert record["model"]["layers"] == 3
    assert len(record["settings"]["passages"]) == 2
    raw, int8, fp8 = record["codecs"]
    assert raw["kl_nats"] == 0
    assert raw["top1_agreement"] == 1
    assert 0.9 < raw["wire_ratio"] <= 1
    assert raw["rel_l2"] == {"k": 0, "v": 0}
    for codec in (int8, fp8):
        assert codec["tokens"] == 16
        assert codec["wire_ratio"] > 1.3
        assert 0 < codec["rel_l2"]["k"] < 0.05
        assert 0 < codec["attention_rel_l2"] < 0.1
        assert codec["kl_nats"] > 0
        assert len(codec["layers"]) == 3
    assert int8["rel_l2"]["k"] < fp8["rel_l2"]["k"]


def test_command_prints_tables_and_draws(folder, text, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason=REASON)
    drawn = tmp_path / "out.png"
    assert quality.main(command(folder, text, "--layers", "--plot", str(drawn))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 layers, 4 attention heads, 2 kv heads. 1 passages" in lines[0]
    assert [line.split()[0] for line in lines[2:6]] == ["codec", "raw", "int8", "fp8_e4m3"]
    assert sum(line.startswith("int8 ") for line in lines) == 1 + 3
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_texts_that_are_too_short(folder, text, tmp_path, capsys):
    short = text.with_name("short.txt")
    short.write_text("w1 w2")
    assert quality.main(command(folder, short)) == 2
    assert "too short for 40 + 8 tokens: short.txt" in capsys.readouterr().err
    assert quality.main(command(folder, tmp_path, "--json")) == 0
    assert "left out, for they are shorter than 40 + 8 tokens: short.txt" in capsys.readouterr().err


def test_more_tokens_than_the_model_takes(folder, text, capsys):
    assert quality.main(command(folder, text, "--tokens", "250")) == 2
    assert "more than the 256 tokens" in capsys.readouterr().err


def test_folder_without_weights(folder, text, tmp_path, capsys):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert quality.main(command(tmp_path, text)) == 2
    assert "can't load the model in" in capsys.readouterr().err
