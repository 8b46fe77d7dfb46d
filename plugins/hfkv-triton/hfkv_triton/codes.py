"""How kernels read packed blocks: bytes to codes, codes to numbers.

A code becomes a float without a conversion, which is slow on GPUs: it is put into the mantissa of a float whose last
bits count in ones. What that float has in `excess` is taken away with the group's offset.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def excess(NBITS: tl.constexpr, BOOK: tl.constexpr):
    """What `levels` adds to each code."""
    return 128.0 if NBITS < 8 and not BOOK else 0.0


@triton.jit
def levels(codes, book, NBITS: tl.constexpr, BOOK: tl.constexpr):
    """Codes (int32) as float32 numbers, `excess` too large."""
    if BOOK:
        result = tl.load(book + codes)
    elif NBITS < 8:
        # 128 + code, exactly; small enough that `excess` times the scale is a precise number too
        result = ((codes << 16) | 0x43000000).to(tl.float32, bitcast=True)
    else:
        result = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return result


@triton.jit
def load_scales(scale, offset, places, real, NBITS: tl.constexpr, BOOK: tl.constexpr):
    """Scale and offset in float32, such that ``levels * scale + offset`` is the number."""
    factor = tl.load(scale + places, mask=real, other=0.0).to(tl.float32)
    shift = tl.load(offset + places, mask=real, other=0.0).to(tl.float32)
    return factor, shift - factor * excess(NBITS, BOOK)


@triton.jit
def load_codes(row, elements, real, NBITS: tl.constexpr, GROUP: tl.constexpr):
    """Codes of single elements, int32: for every format, a byte for each; ``row`` points to bytes of the groups."""
    if NBITS == 3:
        # the plane of the low two bits, then that of the high ones
        LOW: tl.constexpr = GROUP // 4
        low = tl.load(row + elements % LOW, mask=real, other=0).to(tl.int32)
        high = tl.load(row + LOW + elements // 8, mask=real, other=0).to(tl.int32)
        result = ((low >> (elements // LOW * 2)) & 3) | (((high >> (elements % 8)) & 1) << 2)
    elif NBITS == 8:
        result = tl.load(row + elements, mask=real, other=0).to(tl.int32)
    else:
        BYTES: tl.constexpr = GROUP * NBITS // 8
        packed = tl.load(row + elements % BYTES, mask=real, other=0).to(tl.int32)
        result = (packed >> (elements // BYTES * NBITS)) & (2**NBITS - 1)
    return result


@triton.jit
def word_element(position, word, NBITS: tl.constexpr, GROUP: tl.constexpr):
    """Which element of its group is the one at a position, from the lowest bits up, in the group's 32-bit word."""
    # of three bits the low plane
    WIDTH: tl.constexpr = 2 if NBITS == 3 else NBITS
    BYTES: tl.constexpr = GROUP * WIDTH // 8
    PER_BYTE: tl.constexpr = 8 // WIDTH
    return position % PER_BYTE * BYTES + word * 4 + position // PER_BYTE


@triton.jit
def _number(packed, high, first, factor, shift, book, POSITION: tl.constexpr, FORMAT: tl.constexpr):
    NBITS: tl.constexpr = FORMAT[0]
    BOOK: tl.constexpr = FORMAT[2]
    WIDTH: tl.constexpr = 2 if NBITS == 3 else NBITS
    codes = (packed >> (POSITION * WIDTH)) & (2**WIDTH - 1)
    if NBITS == 3:
        codes |= ((high >> (first + word_element(POSITION, 0, NBITS, FORMAT[1]))) & 1) << 2
    return levels(codes, book, NBITS, BOOK) * factor + shift


@triton.jit
def _two(packed, high, first, factor, shift, book, POSITION: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr):
    low = _number(packed, high, first, factor, shift, book, POSITION, FORMAT)
    return tl.join(low, _number(packed, high, first, factor, shift, book, POSITION + STEP, FORMAT))


@triton.jit
def _four(packed, high, first, factor, shift, book, POSITION: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr):
    low = _two(packed, high, first, factor, shift, book, POSITION, 2 * STEP, FORMAT)
    return tl.join(low, _two(packed, high, first, factor, shift, book, POSITION + STEP, 2 * STEP, FORMAT))


@triton.jit
def _eight(packed, high, first, factor, shift, book, POSITION: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr):
    low = _four(packed, high, first, factor, shift, book, POSITION, 2 * STEP, FORMAT)
    return tl.join(low, _four(packed, high, first, factor, shift, book, POSITION + STEP, 2 * STEP, FORMAT))


@triton.jit
def load_words(
    codes, scale, offset, book, groups, places, words, real,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NBITS: tl.constexpr, GROUP: tl.constexpr, BOOK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Dequantized tile ``[ROWS, COLUMNS]`` of whole 32-bit words: every byte is loaded once.

    ``groups`` and ``words`` are the word's group in its block and its place in the group, both ``[rows, words]``;
    ``codes`` points to 32-bit words of the block, ``places`` to the group's scale. Columns are the words' codes, word
    by word. Of three bits only groups of 32: their high plane is one word.
    """
    # what one thread loads it also spreads: `join` keeps both parts in a thread's registers
    FORMAT: tl.constexpr = (NBITS, GROUP, BOOK)
    row = codes + groups * (GROUP * NBITS // 32)
    packed = tl.load(row + words, mask=real, other=0)
    factor, shift = load_scales(scale, offset, places, real, NBITS, BOOK)
    high = packed
    if NBITS == 3:
        high = tl.load(row + 2, mask=real, other=0)
    first = words * 4
    if NBITS == 8:
        result = _four(packed, high, first, factor, shift, book, 0, 1, FORMAT)
    elif NBITS == 4:
        result = _eight(packed, high, first, factor, shift, book, 0, 1, FORMAT)
    else:
        low = _eight(packed, high, first, factor, shift, book, 0, 2, FORMAT)
        result = tl.join(low, _eight(packed, high, first, factor, shift, book, 1, 2, FORMAT))
    # rounded last: on Hopper, Triton 3.9 fails to compile some shapes whose reshaped tensor is itself an operand
    return tl.reshape(result, [ROWS, COLUMNS]).to(DTYPE)
