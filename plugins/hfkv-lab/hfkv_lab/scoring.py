"""What many caches cost in quality on one text, at the price of one prefill and one reference.

Every cache is filled with the keys and values of a single prefill, and the reference's predictions are kept. What is
measured is `hfkv.cli.quality.compare`'s: decoding from the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hfkv.cache.build import build_cache
from hfkv.cli.quality import log_probabilities, read

from . import intervals
from .filling import filled
from .intervals import Estimate


@dataclass(frozen=True)
class Score:
    """How far a cache moves the predictions.

    Attributes
    ----------
    same, sums, counts
        Of each block of neighbouring tokens: those whose most likely next token is the reference's, the sum of the
        divergences from the reference's next-token distribution, in nats, and the tokens.
    """

    same: tuple[int, ...]
    sums: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def kl(self) -> float:
        """The mean divergence."""
        return sum(self.sums) / sum(self.counts)

    def interval(self, level: float = intervals.LEVEL) -> Estimate:
        """The mean divergence with its interval."""
        return intervals.mean_of_sums(self.sums, self.counts, level)

    def minus(self, other: Score, level: float = intervals.LEVEL) -> Estimate:
        """The difference of two mean divergences on the same tokens, block by block: surer than either alone."""
        if self.counts != other.counts:
            raise ValueError(f"scores of {len(self.counts)} and {len(other.counts)} blocks are of different texts")
        differences = [mine - its for mine, its in zip(self.sums, other.sums, strict=True)]
        return intervals.mean_of_sums(differences, self.counts, level)

    @property
    def top1(self) -> Estimate:
        """The share of tokens whose most likely next token is the reference's."""
        return intervals.share_of_sums(self.same, self.counts)


class Scorer:
    """Scores caches of a model on one text.

    Parameters
    ----------
    input_ids
        ``[rows, tokens]``.
    prefill
        Tokens of the first forward, which is exact and not scored.
    chunk
        Tokens of each later one.
    """

    def __init__(self, model: PreTrainedModel, input_ids: torch.Tensor, prefill: int, chunk: int = 16) -> None:
        if not 0 < prefill < input_ids.shape[1]:
            raise ValueError(f"prefill={prefill} must leave tokens to decode: there are {input_ids.shape[1]}")
        self._model, self._decoded, self._chunk = model, input_ids[:, prefill:], chunk
        self._prompt = DynamicCache(config=model.config.get_text_config(decoder=True))
        read(model, input_ids[:, :prefill], self._prompt)
        self._expected = list(self._predict(copy.deepcopy(self._prompt)))

    def score(self, name: str, options: Mapping[str, Any]) -> Score:
        """The cache of that name and those options against the plain one."""
        cache = filled(build_cache(name, self._model, options), self._prompt)
        divergences, agreements = [], []
        for expected, actual in zip(self._expected, self._predict(cache), strict=True):
            # a sum of terms of both signs may round to a little below 0
            divergences.append((expected.exp() * (expected - actual)).sum(-1).clamp(min=0).double())
            agreements.append(expected.argmax(-1) == actual.argmax(-1))
        same, kl = (intervals.blocks(list(torch.cat(found, dim=1))) for found in (agreements, divergences))
        return Score(
            tuple(int(block.sum()) for block in same),
            tuple(float(block.sum()) for block in kl),
            tuple(len(block) for block in kl),
        )

    def _predict(self, cache: Cache) -> Iterator[torch.Tensor]:
        """``[rows, chunk, vocabulary]`` log-probabilities of each chunk."""
        return log_probabilities(self._model, self._decoded, 0, cache, self._chunk)
