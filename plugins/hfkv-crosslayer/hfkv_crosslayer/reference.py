"""What sharing stands for, as simply as it can be said: the conformance kit judges the cache by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .groups import donors
from .layer import CrossLayer, kinds_of


class LendingCache(DynamicCache):
    """Transformers' cache for one forward of a whole sequence, in which some layers get what others have stored.

    Attributes
    ----------
    donors
        The layer that each borrowing layer reads.
    """

    def __init__(self, model: PreTrainedModel, donors: Mapping[int, int]) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self.donors = donors
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the layer, or of the one that it borrows from."""
        if layer_idx in self.donors:
            return self._seen[self.donors[layer_idx]]
        self._seen[layer_idx] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self._seen[layer_idx]


def reference(model: PreTrainedModel, options: Mapping[str, Any]) -> LendingCache:
    """A cache that is right for one forward, with the groups that these options mean for the model."""
    parsed = CrossLayer.Options.parse(options, "crosslayer")
    return LendingCache(model, donors(parsed.resolve(kinds_of(model.config), model)))
