"""Packing by round to nearest, and unpacking."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import levels, load_codes, load_scales


@triton.jit
def load_elements(
    states, groups, elements, block, states_token, states_channel, real,
    CHANNEL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Elements of groups in float32."""
    if CHANNEL:
        tokens = elements
        channels = groups
    else:
        tokens = groups % BLOCK
        # repeat the last channel: padding must not widen the last group's range
        channels = tl.minimum(groups // BLOCK * GROUP + elements, DIM - 1)
    tokens = block * BLOCK + tokens
    return tl.load(states + tokens * states_token + channels * states_channel, mask=real, other=0.0).to(tl.float32)


@triton.jit
def quantize(numbers, scale, offset, NBITS: tl.constexpr):
    """The nearest codes, halves to even."""
    # division as IEEE has it: the quick one would put some halves on the other side
    exact = tl.div_rn(numbers - offset, scale)
    exact = tl.minimum(tl.maximum(exact, 0.0), 2.0**NBITS - 1)
    # 1.5 * 2**23: the sum has no bits left for a fraction
    return ((exact + 12582912.0) - 12582912.0).to(tl.uint8)


@triton.jit
def pack(
    states, codes, scale, offset, states_batch, states_head, states_token, states_channel, heads, blocks,
    NBITS: tl.constexpr, CHANNEL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """``TILE`` groups of one block; the packed tensors are contiguous.

    ``WIDTH`` is the group's length and ``BYTES`` that of a plane, both as powers of two; a byte of the (low) plane
    holds ``PARTS`` elements.
    """
    TILES: tl.constexpr = (GROUPS + TILE - 1) // TILE
    program = tl.program_id(0).to(tl.int64)
    block = program // TILES % blocks
    plane = program // TILES // blocks
    states += plane // heads * states_batch + plane % heads * states_head
    groups = program % TILES * TILE + tl.arange(0, TILE)
    group_real = groups < GROUPS

    elements = tl.arange(0, WIDTH)[None, :]
    real = group_real[:, None] & (elements < GROUP)
    numbers = load_elements(
        states, groups[:, None], elements, block, states_token, states_channel, real, CHANNEL, GROUP, BLOCK, DIM
    )
    low = tl.min(tl.where(real, numbers, float("inf")), 1)
    high = tl.max(tl.where(real, numbers, float("-inf")), 1)
    # what is not a number is left out of a minimum here, and must not be lost
    broken = tl.max((numbers != numbers).to(tl.int32), 1) > 0
    low = tl.where(broken, float("nan"), low)
    factor = tl.div_rn(high - low, tl.full([TILE], 2.0**NBITS - 1, tl.float32))
    # float16's range, and its smallest number above zero: `hfkv.cache.round_to_grid`
    factor = tl.where(broken, factor, tl.minimum(tl.maximum(factor, 5.9604644775390625e-08), 65504.0))
    low = tl.where(broken, low, tl.minimum(tl.maximum(low, -65504.0), 65504.0))
    factor = factor.to(tl.float16)
    low = low.to(tl.float16)
    row = (plane * blocks + block) * GROUPS + groups
    tl.store(scale + row, factor, mask=group_real)
    tl.store(offset + row, low, mask=group_real)
    factor = factor.to(tl.float32)[:, None, None]
    low = low.to(tl.float32)[:, None, None]

    # element part * bytes + byte is in the byte's bits from part * width on
    PLANE_BITS: tl.constexpr = 2 if NBITS == 3 else NBITS
    PLANE: tl.constexpr = GROUP * PLANE_BITS // 8
    part = tl.arange(0, PARTS)[None, :, None]
    byte = tl.arange(0, BYTES)[None, None, :]
    real = group_real[:, None, None] & (byte < PLANE) & (part >= 0)
    numbers = load_elements(
        states, groups[:, None, None], part * PLANE + byte, block, states_token, states_channel, real,
        CHANNEL, GROUP, BLOCK, DIM,
    )  # fmt: skip
    quantized = quantize(numbers, factor, low, NBITS).to(tl.int32) & (2**PLANE_BITS - 1)
    packed = tl.sum(quantized << (part * PLANE_BITS), 1)
    target = codes + row[:, None] * (GROUP * NBITS // 8)
    byte = tl.arange(0, BYTES)[None, :]
    tl.store(target + byte, packed.to(tl.uint8), mask=group_real[:, None] & (byte < PLANE))
    if NBITS == 3:
        # the high plane: element e at bit e % 8 of byte e // 8
        byte = tl.arange(0, WIDTH // 8)[None, :, None]
        bit = tl.arange(0, 8)[None, None, :]
        real = group_real[:, None, None] & (byte < GROUP // 8) & (bit >= 0)
        numbers = load_elements(
            states, groups[:, None, None], byte * 8 + bit, block, states_token, states_channel, real,
            CHANNEL, GROUP, BLOCK, DIM,
        )  # fmt: skip
        quantized = quantize(numbers, factor, low, NBITS).to(tl.int32) >> 2
        packed = tl.sum(quantized << bit, 2)
        byte = tl.arange(0, WIDTH // 8)[None, :]
        tl.store(target + PLANE + byte, packed.to(tl.uint8), mask=group_real[:, None] & (byte < GROUP // 8))


@triton.jit(do_not_specialize=["blocks"])
def unpack(
    states, codes, scale, offset, book, codes_batch, codes_head, codes_block, scale_batch, scale_head, scale_block,
    heads, blocks,
    NBITS: tl.constexpr, CHANNEL: tl.constexpr, GROUP: tl.constexpr, BOOK: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, TOKENS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """``TOKENS`` tokens of one block; ``states`` is contiguous."""
    TILES: tl.constexpr = (BLOCK + TOKENS - 1) // TOKENS
    program = tl.program_id(0).to(tl.int64)
    block = program // TILES % blocks
    plane = program // TILES // blocks
    batch = plane // heads
    head = plane % heads
    tokens = (program % TILES).to(tl.int32) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.arange(0, PAD)
    real = (tokens < BLOCK)[:, None] & (channels < DIM)[None, :]
    if CHANNEL:
        groups = channels[None, :]
        elements = tokens[:, None]
    else:
        groups = channels[None, :] // GROUP * BLOCK + tokens[:, None]
        elements = channels[None, :] % GROUP
    row = codes + batch * codes_batch + head * codes_head + block * codes_block + groups * (GROUP * NBITS // 8)
    places = batch * scale_batch + head * scale_head + block * scale_block + groups
    numbers = levels(load_codes(row, elements, real, NBITS, GROUP), book, NBITS, BOOK)
    factor, shift = load_scales(scale, offset, places, real, NBITS, BOOK)
    target = states + (plane * blocks + block) * BLOCK * DIM
    tl.store(target + tokens[:, None] * DIM + channels[None, :], numbers * factor + shift, mask=real)
