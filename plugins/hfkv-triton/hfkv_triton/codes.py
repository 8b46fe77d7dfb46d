"""How kernels read packed blocks: bytes to codes, codes to numbers that a matrix product takes.

What is a number here is centred: a uniform grid's code minus half the number of codes, so that the part of a score
that is rounded with the operands is the variation of the keys and not their mean; `load_scales` gives the offset that
belongs to it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def groups_and_elements(tokens, channels, CHANNEL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Which group of its block holds a number, and where in the group it is; tokens count from the block's first."""
    if CHANNEL:
        groups = channels
        elements = tokens
    else:
        groups = (channels // GROUP) * BLOCK + tokens
        elements = channels % GROUP
    return groups, elements


@triton.jit
def load_codes(codes, groups, elements, real, NBITS: tl.constexpr, GROUP: tl.constexpr):
    """Codes of the elements of groups, uint8; ``codes`` points to the block, and what is not real is 0."""
    row = codes + groups * (GROUP * NBITS // 8)
    if NBITS == 3:
        # the plane of the low two bits, then that of the high ones
        LOW: tl.constexpr = GROUP // 4
        low = tl.load(row + elements % LOW, mask=real, other=0)
        high = tl.load(row + LOW + elements // 8, mask=real, other=0)
        low = (low >> (elements // LOW * 2).to(tl.uint8)) & 3
        high = (high >> (elements % 8).to(tl.uint8)) & 1
        result = low | (high << 2)
    elif NBITS == 8:
        result = tl.load(row + elements, mask=real, other=0)
    else:
        BYTES: tl.constexpr = GROUP * NBITS // 8
        packed = tl.load(row + elements % BYTES, mask=real, other=0)
        result = (packed >> (elements // BYTES * NBITS).to(tl.uint8)) & (2**NBITS - 1)
    return result


@triton.jit
def levels(codes, book, NBITS: tl.constexpr, BOOK: tl.constexpr, DTYPE: tl.constexpr):
    """Codes as centred numbers, exact in ``DTYPE`` (float32 or bfloat16; a codebook's levels are rounded to it)."""
    if BOOK:
        result = tl.load(book + codes).to(DTYPE)
    elif DTYPE == tl.bfloat16 and NBITS < 8:
        # the last seven bits of a bfloat16 between 128 and 256 count in ones: no conversion, which is slow on GPUs
        result = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128 + 2 ** (NBITS - 1))
    else:
        # so do the last 23 bits of a float32 between 2**23 and 2**24
        result = (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (2**23 + 2 ** (NBITS - 1))
        result = result.to(DTYPE)
    return result


@triton.jit
def load_scales(scale, offset, groups, real, NBITS: tl.constexpr, BOOK: tl.constexpr):
    """Scale and offset of groups in float32, the offset such that ``levels * scale + offset`` is the number."""
    factor = tl.load(scale + groups, mask=real, other=0.0).to(tl.float32)
    shift = tl.load(offset + groups, mask=real, other=0.0).to(tl.float32)
    if not BOOK:
        shift += factor * 2 ** (NBITS - 1)
    return factor, shift
