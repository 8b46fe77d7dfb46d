"""What is compared: a model with the cache that it decodes from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from hfkv import integration
from hfkv.cli.quality import read


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
