"""A tiny Llama with random weights of the right size, so that attention decides the tokens.

vLLM's own dummy weights are so small that an empty cache changes no token.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCABULARY = 512
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER = 4, 256, 8, 4, 64, 512


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    window: int | None = None,
    positions: int = 4096,
    layers: int = LAYERS,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    inner: int = INNER,
) -> Path:
    """Write config and weights; with `window`, as a Mistral whose layers all have that window."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "Llama" if window is None else "Mistral"
    config = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if window is not None:
        config["sliding_window"] = window
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)

    random = torch.Generator().manual_seed(seed)

    def linear(rows: int, columns: int) -> torch.Tensor:
        weights = torch.randn(rows, columns, generator=random) / columns**0.5
        return weights.to(getattr(torch, dtype)).contiguous()

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=getattr(torch, dtype))

    weights = {
        "model.embed_tokens.weight": linear(VOCABULARY, HIDDEN) * HIDDEN**0.5,
        "model.norm.weight": ones(),
        "lm_head.weight": linear(VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": ones(),
            f"{at}.post_attention_layernorm.weight": ones(),
            # Attention sharper than at random, so that single tokens far back matter.
            f"{at}.self_attn.q_proj.weight": 3 * linear(heads * HEAD_SIZE, HIDDEN),
            f"{at}.self_attn.k_proj.weight": linear(kv_heads * HEAD_SIZE, HIDDEN),
            f"{at}.self_attn.v_proj.weight": linear(kv_heads * HEAD_SIZE, HIDDEN),
            f"{at}.self_attn.o_proj.weight": 2 * linear(HIDDEN, heads * HEAD_SIZE),
            f"{at}.mlp.gate_proj.weight": linear(inner, HIDDEN),
            f"{at}.mlp.up_proj.weight": linear(inner, HIDDEN),
            f"{at}.mlp.down_proj.weight": linear(HIDDEN, inner),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Words "t0" to "t511", one a token."""
    words = WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
