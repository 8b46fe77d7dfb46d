"""What a cache costs in quality, measured while decoding from it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from .. import integration


@dataclass(frozen=True)
class Quality:
    """How far a cache moves the model's predictions, averaged over the decoded tokens.

    Attributes
    ----------
    kl
        Kullback-Leibler divergence from the reference's next-token distribution, in nats.
    top1
        Share of tokens for which the most likely next token is the reference's.
    """

    kl: float
    top1: float


def decode_quality(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    prefill: int,
    cache_a: Cache,
    cache_b: Cache,
    chunk: int = 16,
) -> tuple[float, float]:
    """Compare decoding from ``cache_b`` with decoding from ``cache_a``, the reference.

    Parameters
    ----------
    input_ids
        ``[batch, tokens]``, given to both (teacher-forced).
    prefill
        Tokens of the first forward; what it predicts is not compared, the cache plays no part in it.
    cache_a, cache_b
        Empty caches.
    chunk
        Tokens of each later forward; all their predictions are compared.

    Returns
    -------
    tuple
        KL divergence in nats and top-1 agreement, as in `Quality`.
    """
    (quality,) = compare(model, input_ids, prefill, cache_a, [cache_b], chunk)
    return quality.kl, quality.top1


def compare(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    prefill: int,
    reference: Cache,
    caches: Sequence[Cache],
    chunk: int = 16,
) -> list[Quality]:
    """`decode_quality` for several caches; all decode in step, so only one chunk's predictions are held."""
    return compare_models(input_ids, prefill, [(model, cache) for cache in (reference, *caches)], chunk)


def compare_models(
    input_ids: torch.Tensor, prefill: int, pairs: Sequence[tuple[PreTrainedModel, Cache]], chunk: int = 16
) -> list[Quality]:
    """`compare` for models, each with its cache; the first pair is the reference."""
    tokens = input_ids.shape[1]
    if not 0 < prefill < tokens:
        raise ValueError(f"prefill={prefill} must leave tokens to decode: there are {tokens}")
    count = len(pairs) - 1
    kl = [0.0] * count
    same = [0] * count
    runs = [log_probabilities(model, input_ids, prefill, cache, chunk) for model, cache in pairs]
    for expected, *others in zip(*runs, strict=True):
        for index, actual in enumerate(others):
            kl[index] += float((expected.exp() * (expected - actual)).sum())
            same[index] += int((expected.argmax(-1) == actual.argmax(-1)).sum())
    decoded = input_ids.shape[0] * (tokens - prefill)
    return [Quality(kl[index] / decoded, same[index] / decoded) for index in range(count)]


def log_probabilities(
    model: PreTrainedModel, input_ids: torch.Tensor, prefill: int, cache: Cache, chunk: int
) -> Iterator[torch.Tensor]:
    """``[batch, chunk, vocabulary]`` float32 for each chunk after the prefill.

    Parameters
    ----------
    prefill
        Tokens of the first forward, of which nothing is yielded; 0 for a cache that has read its prompt.
    """
    if prefill:
        read(model, input_ids[:, :prefill], cache)
    for piece in input_ids[:, prefill:].split(chunk, dim=1):
        # not across a yield: the mode would leak into whoever consumes this
        with torch.no_grad():
            logits = model(piece, **{integration.cache_argument(model): cache}).logits
            predicted = logits.float().log_softmax(-1)
        yield predicted


@torch.no_grad()
def read(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache) -> None:
    """One forward that only fills the cache."""
    # the prompt's own logits are not needed, and would be the largest tensor of the run
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids, **{integration.cache_argument(model): cache}, **last)
