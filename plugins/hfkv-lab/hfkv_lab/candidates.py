"""What is compared: a model with the cache that it decodes from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import Cache, PreTrainedModel

from hfkv import integration
from hfkv.cli.quality import read
from hfkv.cli.settings import PLAIN, Setting, parse_cache


@dataclass(frozen=True)
class Candidate:
    """A model and the cache to decode from.

    Attributes
    ----------
    label
        What a table calls it.
    model
        The model; several candidates may share it.
    make_cache
        Called for each run: an empty cache.
    """

    label: str
    model: PreTrainedModel
    make_cache: Callable[[], Cache]

    def read(self, input_ids: torch.Tensor) -> Cache:
        """A cache that has read ``[1, tokens]`` in one forward."""
        cache = self.make_cache()
        read(self.model, input_ids.to(self.model.device), cache)
        return cache

    def go_on(self, cache: Cache, input_ids: torch.Tensor, new_tokens: int, past_the_end: bool = False) -> list[int]:
        """Decode greedily from a copy of a cache: the new tokens.

        Parameters
        ----------
        cache
            Has read the first of the tokens ``[1, tokens]``, and not the last one.
        past_the_end
            Whether to go on where the model would end the text.
        """
        input_ids = input_ids.to(self.model.device)
        arguments = {integration.cache_argument(self.model): copied(cache)}
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            num_beams=1,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens if past_the_end else 0,
            **arguments,
        )
        tokens: list[int] = output[0, input_ids.shape[1] :].tolist()
        return tokens


def candidates(model: PreTrainedModel, caches: Iterable[str | Setting]) -> list[Candidate]:
    """The plain cache, then the caches of these texts, each ``NAME`` or ``NAME:key=value,key=value``.

    Raises
    ------
    ValueError
        A text that is no cache, or a cache that does not grow.
    """
    settings = [parse_cache(cache) if isinstance(cache, str) else cache for cache in caches]
    for setting in settings:
        if setting.make(model) is None:
            raise ValueError(
                f"the cache {setting.name!r} needs a length in advance and cannot be decoded from in steps. "
                "Choose one that grows: dynamic, quantized, or one of hfkv list"
            )
    return [
        Candidate(setting.label, model, partial(_make, setting, model))
        for setting in [PLAIN, *(setting for setting in settings if setting != PLAIN)]
    ]


def _make(setting: Setting, model: PreTrainedModel) -> Cache:
    cache = setting.make(model)
    assert cache is not None
    return cache


def copied(cache: Cache) -> Cache:
    """A copy to decode from, while the cache stays as it is."""
    # optimum-quanto's tensors cannot be copied; transformers replaces them, and never writes to one
    shared = {}
    for layer in cache.layers:
        for name in ("_quantized_keys", "_quantized_values"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, torch.Tensor):
                shared[id(tensor)] = tensor
    return copy.deepcopy(cache, shared)


def common_prefix(sequences: list[list[int]]) -> int:
    """How many tokens all sequences begin with; at least one token of each is left out."""
    shortest = min(len(sequence) for sequence in sequences) - 1
    for index in range(shortest):
        if len({sequence[index] for sequence in sequences}) > 1:
            return index
    return shortest
