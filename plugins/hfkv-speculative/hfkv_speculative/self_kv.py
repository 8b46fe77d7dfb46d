"""The model itself drafts, from its keys and values in fewer bits; it verifies with the full ones.

After Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache", 2025. Fewer bits pay
where reading the cache takes long: at long contexts, with a kernel that reads packed blocks. Where the target's cache
is hierarchical they are in it, and nothing is stored twice. Beside any other cache stands a copy in one that packs,
filled with what the target computes. Neither needs a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hfkv import decoding
from hfkv.cache import coarsely, option
from hfkv.cache.build import build_cache
from hfkv.speculation import Block, Call, Draft, Drafter, RolloutDrafter, RolloutOptions

from .shared import SharedCacheDrafter

# what a copy is made in
KIND = "kivi"


@dataclass(frozen=True, kw_only=True)
class SelfKVOptions(RolloutOptions):
    """Options of the assistant "self-kv"."""

    cache_implementation: str | None = option(
        None, "the cache that holds a copy to draft from; None: none where the target's is hierarchical, else kivi"
    )
    cache_config: Mapping[str, Any] | None = option(
        None, "the options of the copy; None is its default, 4 bits for kivi"
    )

    def copy(self, model: Any) -> Any:
        """An empty cache for a copy."""
        return build_cache(self.cache_implementation or KIND, model, self.cache_config or {})


class SelfKVDrafter(Drafter):
    """The assistant "self-kv"."""

    Options = SelfKVOptions

    def __init__(self, call: Call, options: SelfKVOptions, resources: Any) -> None:
        super().__init__(call, options, resources)
        asked = options.cache_implementation is not None or options.cache_config is not None
        layers = decoding.decoder_layers(call.cache)
        hierarchical = any(getattr(layer, "is_hierarchical", False) for layer in layers)
        kind = ViewDrafter if hierarchical and not asked else CopyDrafter
        self._drafter: Drafter = kind(call, options, resources)

    @classmethod
    def prepare(cls, model: Any, options: SelfKVOptions) -> None:
        """Check that a copy can be built."""
        if model.config.is_encoder_decoder:
            raise NotImplementedError(f"{type(model).__name__} has an encoder; this assistant is for a decoder alone")
        if not all(layer.is_croppable for layer in options.copy(model).layers):
            raise NotImplementedError(
                f"cache_implementation={options.cache_implementation!r} cannot crop, and drafts are taken back: choose "
                "another cache to draft from"
            )

    def propose(self, block: Block) -> Draft:
        """Continue each row."""
        return self._drafter.propose(block)

    def close(self) -> None:
        """The call is over."""
        self._drafter.close()


class ViewDrafter(SharedCacheDrafter):
    """Reads the upper halves of the target's own codes; what it adds stands beside them in full precision."""

    def draft_model(self) -> Any:
        """The target."""
        return self.call.model

    def propose(self, block: Block) -> Draft:
        """Draft with attention to the coarser view."""
        with coarsely(self.layers):
            return super().propose(block)


class CopyDrafter(RolloutDrafter):
    """Reads a copy of the target's keys and values, which it keeps in step."""

    options: SelfKVOptions

    def __init__(self, call: Call, options: SelfKVOptions, resources: Any) -> None:
        super().__init__(call, options, resources)
        # of each layer: tokens of the copy that are the target's, and the target's newest, not yet in the copy
        self._held: dict[int, int] = {}
        self._newest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copy_what_is_there()
        self._watched = call.cache.update
        call.cache.update = self._update

    def draft_model(self) -> Any:
        """The target."""
        return self.call.model

    def draft_cache(self) -> Any:
        """The copy. Sliding layers keep all tokens: drafting takes several forwards before anything is cropped."""
        copy = self.options.copy(self.call.model)
        copy.layers = [DynamicLayer() if getattr(layer, "is_sliding", False) else layer for layer in copy.layers]
        copy.note_mask(self.call.model_kwargs.get("attention_mask"))
        return copy

    def close(self) -> None:
        """Stop watching."""
        del self.call.cache.update

    def _copy_what_is_there(self) -> None:
        """A cache that was handed to `generate` holds tokens already."""
        for index, layer in enumerate(decoding.decoder_layers(self.call.cache)):
            length = layer.get_seq_length() if getattr(layer, "is_initialized", False) else 0
            if length == 0:
                continue
            # what a window has left behind is masked: its place is what counts
            missing = length - layer.keys.shape[2]
            states = (torch.nn.functional.pad(state, (0, 0, missing, 0)) for state in (layer.keys, layer.values))
            self.cache.update(*states, index)
            self._held[index] = length

    def _update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Give the copy what the target's cache is given: a prompt at once, later tokens when they are accepted."""
        length = decoding.decoder_layers(self.call.cache)[layer_idx].get_seq_length()
        if self.fed == 0:
            # nothing was drafted yet that could be rejected
            self.cache.layers[layer_idx].update(key_states, value_states)
            self._held[layer_idx] = length + key_states.shape[2]
        else:
            self._settle(layer_idx, length)
            self._newest[layer_idx] = key_states, value_states
        return self._watched(key_states, value_states, layer_idx, *args, **kwargs)

    def _settle(self, layer_idx: int, length: int) -> None:
        """Let a layer of the copy hold the target's tokens up to a length, and nothing else."""
        held, layer = self._held[layer_idx], self.cache.layers[layer_idx]
        layer.crop(held - layer.get_seq_length())
        newest = self._newest.pop(layer_idx, None)
        if newest is not None and length > held:
            layer.update(*(states[:, :, : length - held] for states in newest))
        self._held[layer_idx] = length

    def rewind(self, block: Block) -> None:
        """Bring the copy up to date with what the target has accepted."""
        for index, layer in enumerate(decoding.decoder_layers(self.call.cache)):
            if index in self._held:
                self._settle(index, layer.get_seq_length())
        self.fed = block.cached
