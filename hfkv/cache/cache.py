"""The `Cache` that hfkv's layers live in."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from ..attention import outside_graphs
from .layer import KVLayer
from .padding import Padding


class HFKVCache(DynamicCache):
    """Layers of a technique, and transformers' own layers where the technique does not apply.

    It is a `DynamicCache` because transformers asks for one by type (encoder-decoder caches, several models).

    Attributes
    ----------
    name
        The technique, as given to ``cache_implementation``.
    padding
        What is known of the padding in the batch; `generate` fills it from the attention mask.
    """

    def __init__(self, name: str, layers: list[Any], padding: Padding) -> None:
        Cache.__init__(self, layers=layers)
        self.name = name
        self.padding = padding

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in self.layers))
        return f"{type(self).__name__}({self.name!r}, {len(self.layers)} layers: {kinds})"

    def note_mask(self, attention_mask: torch.Tensor | None) -> None:
        """Tell the cache which tokens are padding, where you call the model yourself (`generate` does it).

        Parameters
        ----------
        attention_mask
            ``[batch, tokens]``, 1 for real tokens; before the first forward.
        """
        self.padding.note(attention_mask)

    # packing depends on how many tokens there are, and the choice of a kernel is made once: no graph holds that
    @outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's tokens of the current forward; return all of its keys and values (or their handles)."""
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _counting(self, layer_idx: int) -> int:
        """The layer to ask for lengths: a model whose layers were removed leaves some of ours empty."""
        layers = self.layers
        if layer_idx < len(layers) and not _empty(layers[layer_idx]):
            return layer_idx
        sliding = layer_idx < len(layers) and getattr(layers[layer_idx], "is_sliding", False)
        for index, layer in enumerate(layers):
            if _filled(layer) and getattr(layer, "is_sliding", False) == sliding:
                return index
        return layer_idx

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, of the layer, or of the first one in use where the model skips it."""
        return super().get_seq_length(self._counting(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that attention of this layer will see.

        One mask serves all layers of a kind: it covers what the one that looks back farthest needs, and each takes the
        newest columns of it.
        """
        counting = self._counting(layer_idx)
        length, offset = super().get_mask_sizes(query_length, counting)
        if offset == 0:
            return length, offset
        asked = self.layers[counting]
        sizes = [layer.get_mask_sizes(query_length) for layer in self.layers if _shares_mask(layer, asked)]
        length, offset = min([(length, offset), *sizes], key=lambda size: size[1])
        return length, offset

    def activate_past_recording(self) -> None:
        """Get ready for crops: assisted decoding calls it before anything is computed.

        Raises
        ------
        NotImplementedError
            A layer cannot crop.
        """
        for layer in self.layers:
            if isinstance(layer, KVLayer) and not layer.is_croppable:
                raise NotImplementedError(
                    f"the cache {layer.technique!r} cannot crop, and assisted decoding and prompt lookup take rejected "
                    "tokens back. Generate without them, or choose another cache"
                )
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens (zero or negative)."""
        super().crop(tokens_to_remove)
        self.padding.crop(self.get_seq_length())

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.padding.clear()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows for beam search."""
        # beams often stay where they are; on other devices the comparison would cost a synchronization
        count = len(beam_idx)
        if beam_idx.device.type == "cpu" and count == self.batch_size and torch.equal(beam_idx, torch.arange(count)):
            return
        super().reorder_cache(beam_idx)
        self.padding.map_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        if self.padding.mask is not None:
            self.padding.map_rows(torch.arange(len(self.padding.mask)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of these indices."""
        super().batch_select_indices(indices)
        self.padding.map_rows(indices)


def _shares_mask(layer: Any, asked: Any) -> TypeGuard[CacheLayerMixin]:
    """Whether a layer that holds tokens is given the same mask as another."""
    holds = isinstance(layer, KVLayer | DynamicLayer) and layer.get_seq_length() == asked.get_seq_length()
    return holds and layer.is_sliding == asked.is_sliding


def _empty(layer: Any) -> bool:
    return isinstance(layer, CacheLayerMixin) and layer.get_seq_length() == 0


def _filled(layer: Any) -> bool:
    # layers without keys and values (linear attention, or reusing another layer's) count no tokens
    return isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > 0
