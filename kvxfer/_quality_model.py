"""A Hugging Face model whose KV cache can be taken out, changed and put back.

Everything here needs torch and transformers; nothing else of ``kvxfer quality`` does.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from kvxfer._quality_run import Array, AttentionSample, LayerKv, Planes, Prefilled

_PROBE = "kvxfer_probe"


class Model:
    """A causal language model on the CPU.

    Parameters
    ----------
    folder
        With its configuration, weights and tokenizer.
    cache_dtype
        What the cache holds: ``bfloat16``, ``float16`` or ``float32``.
    compute_dtype
        What the model computes in. In float32, nothing but the cache is degraded.
    """

    def __init__(self, folder: Path, cache_dtype: str, compute_dtype: str) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._cache_dtype = getattr(torch, cache_dtype)
        self._compute_dtype = getattr(torch, compute_dtype)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=self._compute_dtype
        ).eval()
        self._samples: list[AttentionSample] = []
        self._probed: Sequence[Mapping[int, Planes]] = ()
        arguments = inspect.signature(self._model.forward).parameters
        # What versions of transformers call it, and what spares the logits that nobody looks at.
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._prompt_options = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self._install_probe()

    def describe(self) -> dict[str, Any]:
        """Return what a reader of figures wants to know of the model."""
        config = self._model.config.get_text_config()
        return {
            "architecture": type(self._model).__name__,
            "layers": config.num_hidden_layers,
            "attention_heads": config.num_attention_heads,
            "kv_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
            "vocabulary": config.vocab_size,
            "max_tokens": getattr(config, "max_position_embeddings", None),
        }

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens, without the special ones."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return tokens

    def prefix(self) -> list[int]:
        """Return the special tokens that every prompt of this model begins with."""
        whole: list[int] = self._tokenizer("a").input_ids
        text = self.tokenize("a")
        begin = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
        return whole[:begin]

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """Run a prompt; leave its K and V in the cache as the cache's type holds them."""
        with torch.no_grad():
            output = self._model(
                torch.tensor([list(tokens)]), use_cache=True, **self._prompt_options
            )
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        layers = []
        for index, layer in enumerate(cache.layers):
            if getattr(layer, "keys", None) is None:
                continue  # no attention, or another layer's K and V
            stored = {
                "k": layer.keys.to(self._cache_dtype),
                "v": layer.values.to(self._cache_dtype),
            }
            layer.keys = stored["k"].to(self._compute_dtype)
            layer.values = stored["v"].to(self._compute_dtype)
            planes = {name: _to_numpy(tensor[0]) for name, tensor in stored.items()}
            held = layer.keys.shape[-2]
            layers.append(LayerKv(index, len(tokens) - held, planes))
        return Prefilled(cache, len(tokens), layers)

    def continue_(
        self,
        prefilled: Prefilled,
        tokens: Sequence[int],
        replaced: Mapping[int, Planes] | None = None,
        probed: Sequence[Mapping[int, Planes]] = (),
    ) -> tuple[NDArray[np.float32], list[AttentionSample]]:
        """Run the tokens that follow a prompt, all at once.

        Parameters
        ----------
        replaced
            K and V that stand in for the cache's, by layer.
        probed
            Others to compute each layer's attention with too, for the queries of this run.

        Returns
        -------
        logits
            After each of the tokens, ``[tokens, vocabulary]``.
        samples
            For each layer, if there is something to probe.
        """
        cache = copy.deepcopy(prefilled.cache)
        for index, planes in (replaced or {}).items():
            cache.layers[index].keys = self._to_torch(planes["k"])
            cache.layers[index].values = self._to_torch(planes["v"])
        arguments = {self._cache_argument: cache}
        with torch.no_grad(), self._probing(probed) as samples:
            output = self._model(torch.tensor([list(tokens)]), use_cache=True, **arguments)
        return output.logits[0].float().numpy(), samples

    def values(self, stored: Array) -> NDArray[np.float32]:
        """Return stored elements as numbers."""
        values: NDArray[np.float32] = _from_numpy(stored, self._cache_dtype).float().numpy()
        return values

    def _to_torch(self, stored: Array) -> torch.Tensor:
        return _from_numpy(stored, self._cache_dtype).to(self._compute_dtype)[None]

    def _install_probe(self) -> None:
        """Put a function of ours before the model's attention, which is called as it was."""
        base = self._model.config._attn_implementation
        functions = transformers.AttentionInterface()
        shared = functions[base] if base != "eager" else None

        def probe(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            **options: object,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            attend = shared or sys.modules[type(module).__module__].eager_attention_forward
            result: tuple[torch.Tensor, torch.Tensor | None]
            result = attend(module, query, key, value, mask, **options)
            index: int = getattr(module, "layer_idx", -1)
            if self._probed and index in self._probed[0]:
                held = key.shape[-2] - query.shape[-2]
                degraded = []
                for planes in self._probed:
                    k, v = (self._to_torch(planes[index][name]) for name in ("k", "v"))
                    k = torch.cat([k[:, :, -held:], key[:, :, held:]], dim=-2)
                    v = torch.cat([v[:, :, -held:], value[:, :, held:]], dim=-2)
                    degraded.append(_sample(attend(module, query, k, v, mask, **options)))
                self._samples.append(AttentionSample(index, _sample(result), degraded))
            return result

        transformers.AttentionInterface.register(_PROBE, probe)
        masks = transformers.AttentionMaskInterface()
        transformers.AttentionMaskInterface.register(_PROBE, masks[base])
        self._model.set_attn_implementation(_PROBE)

    @contextmanager
    def _probing(self, probed: Sequence[Mapping[int, Planes]]) -> Iterator[list[AttentionSample]]:
        samples: list[AttentionSample] = []
        self._samples, self._probed = samples, probed
        try:
            yield samples
        finally:
            self._samples, self._probed = [], ()


def _sample(result: tuple[torch.Tensor, torch.Tensor | None]) -> Array:
    """Batch 1 of an attention function's result."""
    sample: Array = result[0][0].float().numpy()
    return sample


def _to_numpy(tensor: torch.Tensor) -> Array:
    """NumPy knows no bfloat16: its elements come as uint16."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy().copy()
    return array


def _from_numpy(array: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).view(dtype)
