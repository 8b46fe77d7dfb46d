"""torch's own CPU products with packed weights: ``_weight_int8pack_mm`` and ``_weight_int4pack_mm_for_cpu``.

The 4-bit product wants the codes in tiles of 64 outputs. `tiles` makes them; a layer keeps the tiles in place of its
codes, in as many bytes. The order is undocumented, so `has_int4` compares it with torch's own once.
"""

from __future__ import annotations

import functools

import torch

TILE = 64
ALIGNMENT = 64
# what the 4-bit product takes as group
GROUPS = (256, 128, 64, 32)
# in float32 the products are slower than decoding the weight
DTYPE = torch.bfloat16
# up to so many rows a product is faster than decoding the weight for them
INT8_ROWS, INT4_ROWS = 32, 64


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that begins at a multiple of 64 bytes: torch's 8-bit product crashes on any other address.

    A file that is mapped into memory, or a slice of a tensor, may begin anywhere.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def tiles(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes ``[outputs, inputs]`` uint8 to ``[outputs / 64, inputs, 32]``; the low half byte is the first 32."""
    first, second = codes.unflatten(0, (-1, TILE)).transpose(1, 2).split(TILE // 2, dim=-1)
    return (first | (second << 4)).contiguous()


def from_tiles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `tiles`."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).transpose(1, 2).flatten(0, 1)


@functools.cache
def has_int4() -> bool:
    """Whether this torch has the 4-bit product for this CPU, with the tiles as we lay them out."""
    try:
        codes = torch.arange(2 * TILE * 64, dtype=torch.int32).mul_(2654435761).bitwise_right_shift_(13)
        codes = codes.bitwise_and_(15).view(2 * TILE, 64)
        expected = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    # another release has no such function, or wants other arguments
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(expected.flatten(), tiles(codes.to(torch.uint8)).flatten())


def int4_group(group: int, inputs: int) -> int | None:
    """The inputs that share a scale in the 4-bit product, for a layer with groups of so many; None where it cannot."""
    return next((size for size in GROUPS if group % size == 0 and inputs % size == 0), None)


def int4_scales(scale: torch.Tensor, middle: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    """``[inputs / size, outputs, 2]``: what the product takes for numbers ``(code - 8) * scale + middle``.

    Both are ``[outputs, groups]`` float32.
    """
    size = int4_group(group, inputs)
    assert size is not None
    pairs = torch.stack([scale, middle], dim=-1)
    return pairs.repeat_interleave(group // size, dim=1)[:, : inputs // size].transpose(0, 1).to(DTYPE).contiguous()


def int4(states: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[rows, outputs]`` for ``[rows, inputs]``, tiles and `int4_scales`."""
    inputs = states.shape[1]
    weight = packed.view(-1, inputs // 2)
    return torch._weight_int4pack_mm_for_cpu(aligned(states), weight, inputs // scales.shape[0], scales)


def int8(states: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``[rows, outputs]`` for ``[rows, inputs]``, codes ``[outputs, inputs]`` int8 and a scale for each output."""
    return torch._weight_int8pack_mm(aligned(states), codes, scale)
