"""A model that sees its own quantized cache while it is trained.

Each query of a training sequence sees what it would see while decoding: the sinks and the newest tokens as they are,
and between them whole blocks, quantized and back. Gradients pass the rounding as if it were not there (*Estimating or
Propagating Gradients Through Stochastic Neurons for Conditional Computation*, Bengio et al., 2013).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfkv
from hfkv import kernels
from hfkv.cache import KVQuantizer, PackedFormat, SegmentedLayer

from .latent import LatentProjection

NAME = "hfkv_cache_aware"

# the cache that models with this attention see; backward may compute a layer again, in another thread
_seen: list[CacheView] = []


class CacheView:
    """What the attention of a model would see of a cache.

    Parameters
    ----------
    model
        The model.
    cache_implementation, cache_config
        A cache of sinks, packed blocks and a residual, such as ``"kivi"``.

    Raises
    ------
    ValueError
        No such cache, or options that it does not have.
    NotImplementedError
        A cache that packs nothing, or one with a window; a model whose caches hold latents.
    """

    def __init__(self, model: Any, cache_implementation: str, cache_config: Mapping[str, Any] | None = None) -> None:
        if any(isinstance(module, LatentProjection) for module in model.modules()):
            raise NotImplementedError(
                f"a cache of {type(model).__name__} holds latents, and training sees one of keys and values. "
                "Fix: train without the cache"
            )
        cache = hfkv.make_cache(cache_implementation, model, **(cache_config or {}))
        self.layers: dict[int, SegmentedLayer] = {
            index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, SegmentedLayer)
        }
        for index, layer in self.layers.items():
            if layer.quantizer is None or layer.window is not None:
                raise NotImplementedError(
                    f"cache_implementation={cache_implementation!r} with {dict(cache_config or {})} has no packed "
                    f"blocks, or has a window, in layer {index}: training sees the cache of kivi, without window_length"
                )
        # layers that read another's keys and values have no cache of their own
        self.reading = {index for index, layer in enumerate(cache.layers) if type(layer).__name__ == "DummyLayer"}
        options = {repr(layer.options) for layer in self.layers.values()}
        if self.reading and len(options) > 1:
            raise NotImplementedError("layers that share keys and values see one cache: give all layers one setting")

    def layer(self, module: Any) -> SegmentedLayer | None:
        """The cache of an attention module; None for one that keeps transformers' own."""
        index = module.layer_idx
        if index in self.reading:
            index = min(self.layers)
        return self.layers.get(index)


@contextmanager
def seeing(model: Any, view: CacheView) -> Iterator[None]:
    """Let a model see a cache, in forwards and in what backward computes again."""
    before = model.config._attn_implementation
    if before not in (None, "sdpa", NAME):
        raise NotImplementedError(f"attn_implementation={before!r}: training sees a cache with 'sdpa' only")
    model.set_attn_implementation(NAME)
    _seen.append(view)
    try:
        yield
    finally:
        _seen.pop()
        model.set_attn_implementation(before)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Transformers' sdpa attention over exact and quantized tokens, each query with its own boundary."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    layer = _seen[-1].layer(module) if _seen else None
    if (
        layer is None
        or layer.quantizer is None
        or kwargs.get("sliding_window") is not None
        or query.shape[2] != key.shape[2]
    ):
        return original(module, query, key, value, attention_mask, *args, **kwargs)
    tokens = key.shape[2]
    packed = packed_tokens(torch.arange(tokens, device=key.device), layer)
    count = int(packed[-1])
    if count == 0:
        return original(module, query, key, value, attention_mask, *args, **kwargs)
    begin, quantizer = layer.sink_length, layer.quantizer
    old = slice(begin, begin + count)
    keys = straight_through(key[:, :, old], layer.key_format(key.shape[-1]), quantizer)
    values = straight_through(value[:, :, old], layer.value_format(value.shape[-1]), quantizer)
    places = torch.arange(tokens, device=key.device)
    visible = places[:, None] >= places if attention_mask is None else attention_mask
    if visible.dtype != torch.bool:
        raise NotImplementedError(f"a mask of {visible.dtype}: training sees a cache with the masks of 'sdpa' only")
    quantized = (places >= begin) & (places < begin + packed[:, None])
    mask = torch.cat([visible & ~quantized, (visible & quantized)[..., old]], dim=-1)
    mask = mask.expand(*(query.shape[:1] if mask.dim() == 4 else ()), *mask.shape[-3:])
    joined = torch.cat([key, keys], dim=2), torch.cat([value, values], dim=2)
    return original(module, query, *joined, mask, *args, **kwargs)


def packed_tokens(seen: torch.Tensor, layer: SegmentedLayer) -> torch.Tensor:
    """How many tokens a layer has packed when it has seen so many, one by one."""
    blocks = (seen - layer.sink_length - layer.residual_length) // layer.block_length
    return blocks.clamp(min=0) * layer.block_length


def straight_through(states: torch.Tensor, format: PackedFormat, quantizer: KVQuantizer) -> torch.Tensor:
    """Whole blocks ``[batch, kv_heads, tokens, head_dim]``, packed and unpacked; the gradient is that of the states."""
    exact = states.detach()
    unpacked = kernels.unpack(kernels.pack(exact, format, quantizer), exact.dtype)
    return states + (unpacked - exact)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
