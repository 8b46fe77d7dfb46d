"""Drafting from the target's own cache: what a draft adds is taken back before the target verifies it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hfkv import decoding
from hfkv.speculation import Block, Draft, RolloutDrafter


class SharedCacheDrafter(RolloutDrafter):
    """Reads the keys and values of the target, so it needs no prompt of its own and no memory for them."""

    @classmethod
    def check_model(cls, model: Any) -> None:
        """Raise NotImplementedError for a model whose cache cannot be shared."""
        if model.config.is_encoder_decoder:
            raise NotImplementedError(f"{type(model).__name__} has an encoder; this assistant is for a decoder alone")
        config = model.config.get_text_config(decoder=True)
        if any(getattr(layer, "is_sliding", False) for layer in DynamicCache(config=config).layers):
            raise NotImplementedError(
                f"{type(model).__name__} has sliding layers, which forget while tokens are drafted from the cache that "
                'they share with the target. Use the assistant "lookup" or "model"'
            )

    def draft_cache(self) -> Any:
        """The target's."""
        return self.call.cache

    @property
    def layers(self) -> list[Any]:
        """The layers of the cache that drafting writes to."""
        return decoding.decoder_layers(self.cache)

    def rewind(self, block: Block) -> None:
        """The loop has cropped the cache to what all rows agree with."""
        self.fed = block.cached

    def logits(self, block: Block, column: int) -> torch.Tensor:
        """Those of the draft model, after the columns up to this one."""
        decoding.forget_as_ever(self.layers)
        return super().logits(block, column)

    def propose(self, block: Block) -> Draft:
        """Draft, then take back what was written."""
        with decoding.taken_back(self.layers):
            return super().propose(block)
