"""Views as attention is handed them, made of random numbers; every fresh allocation can be poisoned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfkv.cache import KVQuantizer, KVView, PackedBlocks, PackedFormat, PackedStore, round_to_grid
from hfkv.cache.packed import Axis
from hfkv.kernels import REFERENCE

from . import _kernels

WIDTHS = (2, 3, 4, 8)
ISAS = tuple(_kernels.isa_names())
FINITE = torch.finfo(torch.float32).min


class RoundToNearest(KVQuantizer):
    """Round to nearest between the minimum and the maximum, as the op ``pack`` does it for this name."""

    name = "rtn"

    def quantize(self, groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and offset of each group."""
        low, high = groups.aminmax(dim=-1)
        return round_to_grid(groups, (high - low) / (2**nbits - 1), low, nbits)


class Nearest(KVQuantizer):
    """The nearest level of a codebook."""

    name = "book"

    def __init__(self, levels: tuple[float, ...]) -> None:
        self.levels = torch.tensor(levels)

    def quantize(self, groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes of the nearest levels, times the largest absolute value."""
        scale = groups.abs().amax(-1).half()
        codes = (groups.unsqueeze(-1) / scale.float()[..., None, None] - self.levels).abs().argmin(-1)
        return codes.to(torch.uint8), scale, torch.zeros_like(scale)


def make_blocks(states: torch.Tensor, format: PackedFormat, grown: bool = False) -> PackedBlocks:
    """Packed by the reference; ``grown`` gives a view of a store with room for more."""
    quantizer = RoundToNearest() if format.codebook is None else Nearest(format.codebook)
    blocks = REFERENCE.pack(states, format, quantizer)
    if not grown:
        return blocks
    store = PackedStore(format, states.shape[0], states.shape[1], states.device)
    store.extend(blocks.narrow(0, 1))
    for block in range(1, blocks.count):
        store.extend(blocks.narrow(block, 1))
    return store.view()


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
        PackedFormat(key_nbits, key_axis, group_size, head_dim, codebook),
        PackedFormat(value_nbits, value_axis, group_size, value_head_dim, codebook),
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
    return KVView(
        states(sink + exact, head_dim).to(dtype),
        states(sink + exact, value_head_dim).to(dtype),
        sink,
        packed[0],
        packed[1],
    )


class _Poison(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            result.view(torch.uint8).fill_(255) if result.dtype == torch.uint8 else result.fill_(torch.nan)
        return result


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what ``torch.empty`` and its relatives return with NaN (255 for bytes)."""
    with _Poison():
        yield
