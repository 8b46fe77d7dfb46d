"""Views as attention is handed them, made of random numbers."""

from __future__ import annotations

import torch

from hfkv.cache import KVView, PackedBlocks, PackedFormat
from hfkv.cache.packed import Axis
from hfkv.testing.packing import make_blocks

from . import _kernels

WIDTHS = (2, 3, 4, 8)
ISAS = tuple(_kernels.isa_names())
FINITE = torch.finfo(torch.float32).min


def make_view(
    *,
    batch: int = 1,
    kv_heads: int = 2,
    head_dim: int = 128,
    value_head_dim: int | None = None,
    key_nbits: int = 4,
    value_nbits: int = 4,
    group_size: int = 32,
    blocks: int = 11,
    exact: int = 37,
    sink: int = 4,
    key_axis: Axis = "channel",
    value_axis: Axis = "token",
    codebook: tuple[float, ...] | None = None,
    hierarchical: bool = False,
    dtype: torch.dtype = torch.float32,
    grown: bool = False,
    strided: bool = False,
    outliers: float = 0.0,
    constant: bool = False,
) -> KVView:
    """A view of random keys and values; ``exact`` counts the residual, the sink comes on top."""
    generator = torch.Generator().manual_seed(0)
    value_head_dim = value_head_dim or head_dim

    def states(tokens: int, channels: int) -> torch.Tensor:
        shape = (batch, tokens, kv_heads, channels) if strided else (batch, kv_heads, tokens, channels)
        result = torch.randn(shape, generator=generator)
        return result.transpose(1, 2) if strided else result

    formats = (
        PackedFormat(key_nbits, key_axis, group_size, head_dim, codebook, hierarchical),
        PackedFormat(value_nbits, value_axis, group_size, value_head_dim, codebook, hierarchical),
    )
    packed: list[PackedBlocks] = []
    for format in formats:
        tokens = states(blocks * format.block_length, format.head_dim)
        # a level of its own for each channel, as keys have it
        tokens = tokens + torch.randn(format.head_dim, generator=generator)
        if outliers and format is formats[0]:
            tokens[..., ::40] *= outliers
        if constant:
            tokens = tokens[:, :, :1].expand_as(tokens).mean(-1, keepdim=True).expand_as(tokens)
        packed.append(make_blocks(tokens.to(dtype), format, grown))
    return KVView.of(
        states(sink + exact, head_dim).to(dtype),
        states(sink + exact, value_head_dim).to(dtype),
        sink,
        packed[0],
        packed[1],
    )
