"""What a conversion saves and what it costs: parameters, bytes of keys and values, divergence, perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hfkv.integration import cache_argument

from .decoder import evaluating


@dataclass(frozen=True)
class Quality:
    """How far the converted model is from the original, before any training.

    Attributes
    ----------
    kl
        Kullback-Leibler divergence from the original's next-token distribution, in nats per token.
    top1
        Share of tokens for which the most likely next token is the original's.
    perplexity, original_perplexity
        Of the text, by each of them.
    """

    kl: float
    top1: float
    perplexity: float
    original_perplexity: float


def log_probabilities(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """``[rows, tokens, vocabulary]`` in float32, without a cache."""
    with evaluating(model):
        logits: torch.Tensor = model(input_ids.to(model.device), use_cache=False).logits
    return logits.float().log_softmax(-1)


def compare(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    pieces: Sequence[torch.Tensor],
    step: Callable[[], None] = lambda: None,
) -> Quality:
    """Both models on pieces of text ``[1, tokens]``, one forward each."""
    kl = same = tokens = 0.0
    losses = [0.0, 0.0]
    for piece in pieces:
        expected, actual = (log_probabilities(model, piece)[:, :-1].cpu() for model in (original, converted))
        kl += float((expected.exp() * (expected - actual)).sum())
        same += float((expected.argmax(-1) == actual.argmax(-1)).sum())
        for index, predicted in enumerate((expected, actual)):
            losses[index] -= float(predicted.gather(-1, piece[:, 1:, None].cpu()).sum())
        tokens += piece.shape[1] - 1
        step()
    before, after = (math.exp(loss / tokens) for loss in losses)
    return Quality(kl / tokens, same / tokens, after, before)


def kv_bytes(model: PreTrainedModel, context: int) -> int:
    """Bytes that transformers' own cache holds of one row of ``context`` tokens.

    What one token takes is counted on a cache; of how many of them each layer keeps, its kind decides.
    """
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with evaluating(model):
        model(token, **{cache_argument(model): cache, "use_cache": True})
    total = 0
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        tokens = context if window is None else min(context, window)
        states = (getattr(layer, "keys", None), getattr(layer, "values", None))
        total += tokens * sum(state.numel() * state.element_size() for state in states if state is not None)
    return total
