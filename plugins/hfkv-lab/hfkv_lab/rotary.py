"""A cache that quantizes keys before the rotary embedding, which no cache of ours stores: for measurements only.

Before the embedding a key channel is steadier over the tokens; after it, pairs of channels turn with the position.
Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization", 2024, quantize
keys before it and turn them at every read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hfkv import kernels
from hfkv.cache import KVQuantizer, PackedFormat
from hfkv.cli.quality import read

from .recording import recording


@dataclass(frozen=True)
class Rotation:
    """One layer's rotary embedding of the first tokens.

    Attributes
    ----------
    apply
        The model's own ``apply_rotary_pos_emb``.
    cos, sin
        ``[1, tokens, head_dim]``.
    """

    apply: Callable[..., Any]
    cos: torch.Tensor
    sin: torch.Tensor

    def turn(self, keys: torch.Tensor, begin: int, back: bool = False) -> torch.Tensor:
        """Keys ``[batch, kv_heads, tokens, head_dim]`` whose first token has the position ``begin``, turned or back."""
        end = begin + keys.shape[2]
        cos, sin = self.cos[:, begin:end].float(), self.sin[:, begin:end].float()
        if back:
            # some embeddings scale what they turn
            size = cos.square() + sin.square()
            cos, sin = cos / size, -sin / size
        turned: torch.Tensor = self.apply(keys.float(), keys.float(), cos, sin)[1]
        return turned.to(keys.dtype)


def rotations(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[int, Rotation]:
    """The rotary embedding of each full-attention layer, for the positions of ``[1, tokens]``.

    Raises
    ------
    NotImplementedError
        The model embeds positions in another way.
    """
    result = {}
    with recording(model) as recorder:
        read(model, input_ids.to(model.device), DynamicCache(config=model.config.get_text_config(decoder=True)))
    for call in recorder.calls:
        apply = getattr(sys.modules[type(call.module).__module__], "apply_rotary_pos_emb", None)
        if call.rotary is None or apply is None or call.rotary[0].shape[-1] != call.key.shape[-1]:
            raise NotImplementedError(
                f"{type(model).__name__} does not turn whole heads by a rotary embedding: keys cannot be turned back"
            )
        if not call.is_sliding:
            result[call.layer] = Rotation(apply, *call.rotary)
    return result


class KeysOnly(DynamicLayer):
    """Keys quantized in blocks as they leave the residual, in float; values exact.

    What is stored is the dequantized key, turned: the error is that of a packed cache, the bytes are not.
    """

    def __init__(self, format: PackedFormat, quantizer: KVQuantizer, residual_length: int, rotation: Rotation | None):
        super().__init__()
        self.format, self.quantizer, self.residual_length, self.rotation = format, quantizer, residual_length, rotation
        self.packed = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, then quantize the keys of every whole block that has left the residual."""
        handed = super().update(key_states, value_states, *args, **kwargs)
        block = self.format.block_length
        count = (self.get_seq_length() - self.packed - self.residual_length) // block
        if count > 0:
            begin, end = self.packed, self.packed + count * block
            leaving = self._quantized(handed[0][:, :, begin:end], begin)
            self.keys = torch.cat([handed[0][:, :, :begin], leaving, handed[0][:, :, end:]], dim=2)
            self.packed = end
        return handed

    def _quantized(self, keys: torch.Tensor, begin: int) -> torch.Tensor:
        plain = keys if self.rotation is None else self.rotation.turn(keys, begin, back=True)
        restored = kernels.unpack(kernels.pack(plain, self.format, self.quantizer), keys.dtype)
        return restored if self.rotation is None else self.rotation.turn(restored, begin)


def make_cache(
    model: PreTrainedModel,
    quantizer: KVQuantizer,
    format: PackedFormat,
    residual_length: int,
    rotations: dict[int, Rotation] | None = None,
) -> Cache:
    """An empty cache of `KeysOnly` layers; with ``rotations``, keys are quantized before the rotary embedding."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            rotation = None if rotations is None else rotations[index]
            cache.layers[index] = KeysOnly(format, quantizer, residual_length, rotation)
    return cache
