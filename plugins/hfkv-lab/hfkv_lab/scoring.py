"""What many caches cost in quality on one text, at the price of one prefill and one reference.

A prefill is exact whatever the cache, so every cache can be filled with the keys and values of a single one; and
the reference's predictions are kept. What is measured is `hfkv.cli.quality.compare`'s: decoding from the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hfkv.cache import KVLayer
from hfkv.cache.build import build_cache
from hfkv.cli.quality import log_probabilities, read


@dataclass(frozen=True)
class Score:
    """How far a cache moves the predictions.

    Attributes
    ----------
    kl
        Mean divergence from the reference's next-token distribution, in nats.
    error
        Standard error of that mean, over the tokens.
    top1
        Share of tokens whose most likely next token is the reference's.
    """

    kl: float
    error: float
    top1: float


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
        divergences, same = [], []
        for expected, actual in zip(self._expected, self._predict(self._filled(name, options)), strict=True):
            divergences.append((expected.exp() * (expected - actual)).sum(-1).flatten())
            same.append((expected.argmax(-1) == actual.argmax(-1)).flatten())
        each = torch.cat(divergences).double()
        error = float(each.std() / len(each) ** 0.5) if len(each) > 1 else 0.0
        return Score(float(each.mean()), error, float(torch.cat(same).double().mean()))

    def _filled(self, name: str, options: Mapping[str, Any]) -> Cache:
        """A cache that has seen the prompt."""
        cache = build_cache(name, self._model, options)
        for index, plain in enumerate(self._prompt.layers):
            if not isinstance(cache.layers[index], KVLayer):
                cache.layers[index] = copy.deepcopy(plain)
            elif type(plain) is DynamicLayer and plain.keys is not None:
                cache.update(plain.keys, plain.values, index)
            else:
                raise NotImplementedError(
                    f"tune fills full-attention layers, and {name!r} takes a {type(plain).__name__} here"
                )
        return cache

    def _predict(self, cache: Cache) -> Iterator[torch.Tensor]:
        """``[rows, chunk, vocabulary]`` log-probabilities of each chunk."""
        return log_probabilities(self._model, self._decoded, 0, cache, self._chunk)
