"""One option varied, everything else equal: the measurement behind the studies.

Every variant decodes the same windows as the plain cache and is compared with it. Each starts from the plain cache's
keys and values of the prompt (`filling.filled`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import hfkv

from . import intervals, text
from .attention_error import QUERIES, LayerError, attention_errors
from .candidates import Candidate
from .decoding import Losses, decode
from .filling import filled
from .intervals import Estimate
from .progress import Silent, Watcher
from .recording import record

# the length at which the stored size is shown, and the model's dtype there
SIZE_TOKENS = 4096
SIZE_DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class AblationOptions:
    """How much is measured: windows of the text, tokens that are read at once, tokens that are decoded and compared."""

    windows: int = 2
    prefill: int = 1024
    tokens: int = 512
    chunk: int = 16


@dataclass(frozen=True)
class Outcome:
    """What one variant did.

    Attributes
    ----------
    kl, top1
        Divergence from the plain cache, and agreement with it.
    layers
        The errors of each layer.
    """

    kl: Estimate
    top1: Estimate
    layers: list[LayerError]

    def mean(self, name: str) -> float:
        """An error of `LayerError`, averaged over the layers."""
        return statistics.mean(getattr(layer, name) for layer in self.layers)

    def columns(self, *errors: str) -> dict[str, float]:
        """The numbers for a table, with the errors that were named."""
        return {
            "kl": self.kl.value,
            "kl_low": self.kl.low,
            "kl_high": self.kl.high,
            "top1": 100 * self.top1.value,
        } | {name: self.mean(name) for name in errors}


def ablate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    content: str,
    variants: Mapping[str, Callable[[], Cache]],
    options: AblationOptions,
    steps: Watcher | None = None,
) -> dict[str, Outcome]:
    """Measure every variant."""
    steps = steps or Silent()
    steps.expect(len(variants) * options.windows)
    config = model.config.get_text_config(decoder=True)
    plain = Candidate("plain", model, lambda: DynamicCache(config=config))
    candidates = [plain, *(Candidate(label, model, make) for label, make in variants.items())]
    losses = [Losses() for _ in candidates]
    ids, first = text.encode(tokenizer, content), text.start(tokenizer)
    with torch.no_grad():
        for number, window in enumerate(
            text.windows(ids, options.windows, options.prefill + options.tokens + 1, first), start=1
        ):
            steps.step(f"window {number} of {options.windows}")
            reference = plain.read(window[:, : options.prefill])
            caches = [filled(make(), reference) for make in variants.values()]
            found = decode(candidates, [reference, *caches], window, options.prefill, options.chunk)
            for total, added in zip(losses, found, strict=True):
                total.extend(added)
            steps.done(len(variants))
        steps.step("layers")
        (window,) = text.windows(ids, 1, options.prefill + QUERIES, first)
        calls = record(model, window, QUERIES)
        outcomes = {}
        for (label, make), loss in zip(variants.items(), losses[1:], strict=True):
            divergence = intervals.mean(intervals.blocks(loss.kl))
            outcomes[label] = Outcome(divergence, loss.agreement(), attention_errors(calls, make()))
    return outcomes


def stored_bits(config: PretrainedConfig, options: Mapping[str, Any]) -> float:
    """Bits per element that kivi stores of `SIZE_TOKENS` tokens of a bfloat16 model, everything counted."""
    cache = hfkv.make_cache("kivi", config, **options)
    layer = next(index for index, layer in enumerate(cache.layers) if isinstance(layer, hfkv.cache.KVLayer))
    heads, head_dim = attention_shape(config)
    states = torch.zeros(1, heads, SIZE_TOKENS, head_dim, dtype=SIZE_DTYPE)
    cache.update(states, states.clone(), layer)
    return hfkv.memory(cache).bits_per_element


def attention_shape(config: PretrainedConfig) -> tuple[int, int]:
    """KV heads and head_dim."""
    config = config.get_text_config(decoder=True)
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, head_dim
