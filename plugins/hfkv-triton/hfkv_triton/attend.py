"""Attention over packed and exact segments, split over the context (flash decoding).

Dao et al., "Flash-Decoding for long-context inference", 2023. A program takes some rows (a row is one query of one of
the query heads that share a KV head) and a share of either the packed or the exact tokens, tile by tile; `merge` joins
the shares by their log-sum-exp.

Scales are applied to the codes, one multiply-add each, and not folded into query and weights as on a CPU: a matrix
product takes no fewer than 16 rows, and to scale 16 padded rows for each block, with a reduction for the offsets, costs
more instructions than a multiply-add for each of its 32 tokens.

KIVI's axes are read as 32-bit words (`load_words`), so a tile has its tokens, or channels, in the order in which they
lie in the words: attention does not care about the order of tokens, and channels are put right when they are stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import levels, load_codes, load_scales, load_words, word_element

# lengths change with every step: to compile for some of their values, as Triton does, would be to compile all the time
LENGTHS = [
    "mask_batch", "mask_head", "mask_query", "queries", "blocks", "exact", "sink", "packed_splits", "share",
]  # fmt: skip


@triton.jit
def masked(
    scores, mask_rows, mask_column, columns, column_real, last_visible, MASK: tl.constexpr, CAUSAL: tl.constexpr
):
    """Scores, -inf where a row does not attend to a column."""
    if MASK == 1:
        seen = tl.load(mask_rows[:, None] + columns[None, :] * mask_column, mask=column_real[None, :], other=0)
        scores = tl.where(seen != 0, scores, float("-inf"))
    elif MASK == 2:
        bias = tl.load(mask_rows[:, None] + columns[None, :] * mask_column, mask=column_real[None, :], other=0.0)
        scores += bias.to(tl.float32)
    if CAUSAL:
        scores = tl.where(columns[None, :] <= last_visible[:, None], scores, float("-inf"))
    return tl.where(column_real[None, :], scores, float("-inf"))


@triton.jit
def softmax_step(scores, top):
    """One step of the online softmax: weights, the new maximum, and what is left of earlier sums."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # a row that has seen nothing yet: exp(-inf - -inf) would not be a number
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return tl.exp(scores - base[:, None]), new_top, tl.exp(top - base)


@triton.jit
def token_order(tile, TOKENS: tl.constexpr, BLOCK: tl.constexpr, NBITS: tl.constexpr, WORDS: tl.constexpr):
    """The packed tokens of a tile of keys: as they lie in the words of a channel, or one after the other."""
    if WORDS:
        POSITIONS: tl.constexpr = 16 if NBITS == 3 else 32 // NBITS
        COUNT: tl.constexpr = TOKENS // POSITIONS
        PER_GROUP: tl.constexpr = BLOCK // POSITIONS
        word = tile * COUNT + tl.arange(0, COUNT)
        element = word_element(tl.arange(0, POSITIONS)[None, :], (word % PER_GROUP)[:, None], NBITS, BLOCK)
        tokens = tl.reshape((word // PER_GROUP * BLOCK)[:, None] + element, [TOKENS])
    else:
        tokens = tile * TOKENS + tl.arange(0, TOKENS)
    return tokens


@triton.jit
def channel_order(PAD: tl.constexpr, NBITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """The channels of a tile of values, likewise."""
    if WORDS:
        POSITIONS: tl.constexpr = 16 if NBITS == 3 else 32 // NBITS
        PER_GROUP: tl.constexpr = GROUP // POSITIONS
        word = tl.arange(0, PAD // POSITIONS)
        element = word_element(tl.arange(0, POSITIONS)[None, :], (word % PER_GROUP)[:, None], NBITS, GROUP)
        channels = tl.reshape((word // PER_GROUP * GROUP)[:, None] + element, [PAD])
    else:
        channels = tl.arange(0, PAD)
    return channels


@triton.jit
def key_tile(
    codes, scale, offset, book, codes_block, scale_block, tile, tokens, blocks,
    DIM: tl.constexpr, PAD: tl.constexpr, NBITS: tl.constexpr, CHANNEL: tl.constexpr, GROUP: tl.constexpr,
    BOOK: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Dequantized keys ``[channels, tokens]``, the tokens as `token_order` says; 0 where there are none."""
    channels = tl.arange(0, PAD)[:, None]
    if WORDS:
        POSITIONS: tl.constexpr = 16 if NBITS == 3 else 32 // NBITS
        COUNT: tl.constexpr = TOKENS // POSITIONS
        PER_GROUP: tl.constexpr = BLOCK // POSITIONS
        word = (tile * COUNT + tl.arange(0, COUNT))[None, :]
        block = (word // PER_GROUP).to(tl.int64)
        real = (channels < DIM) & (block < blocks)
        result = load_words(
            codes + block * codes_block, scale, offset, book, channels, block * scale_block + channels,
            word % PER_GROUP, real, PAD, TOKENS, NBITS, GROUP, BOOK, DTYPE,
        )  # fmt: skip
    else:
        block = (tokens // BLOCK).to(tl.int64)[None, :]
        token = (tokens % BLOCK)[None, :]
        real = (channels < DIM) & (block < blocks)
        if CHANNEL:
            groups = channels
            elements = token
        else:
            groups = channels // GROUP * BLOCK + token
            elements = channels % GROUP
        row = codes + block * codes_block + groups * (GROUP * NBITS // 8)
        numbers = levels(load_codes(row, elements, real, NBITS, GROUP), book, NBITS, BOOK)
        factor, shift = load_scales(scale, offset, block * scale_block + groups, real, NBITS, BOOK)
        result = (numbers * factor + shift).to(DTYPE)
    return result


@triton.jit
def value_tile(
    codes, scale, offset, book, codes_block, scale_block, tokens, blocks,
    DIM: tl.constexpr, PAD: tl.constexpr, NBITS: tl.constexpr, CHANNEL: tl.constexpr, GROUP: tl.constexpr,
    BOOK: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Dequantized values ``[tokens, channels]``, the channels as `channel_order` says."""
    block = (tokens // BLOCK).to(tl.int64)[:, None]
    token = (tokens % BLOCK)[:, None]
    if WORDS:
        POSITIONS: tl.constexpr = 16 if NBITS == 3 else 32 // NBITS
        PER_GROUP: tl.constexpr = GROUP // POSITIONS
        word = tl.arange(0, PAD // POSITIONS)[None, :]
        run = word // PER_GROUP
        real = (block < blocks) & (run * GROUP < DIM)
        groups = run * BLOCK + token
        result = load_words(
            codes + block * codes_block, scale, offset, book, groups, block * scale_block + groups,
            word % PER_GROUP, real, TOKENS, PAD, NBITS, GROUP, BOOK, DTYPE,
        )  # fmt: skip
    else:
        channels = tl.arange(0, PAD)[None, :]
        real = (block < blocks) & (channels < DIM)
        if CHANNEL:
            groups = channels
            elements = token
        else:
            groups = channels // GROUP * BLOCK + token
            elements = channels % GROUP
        row = codes + block * codes_block + groups * (GROUP * NBITS // 8)
        numbers = levels(load_codes(row, elements, real, NBITS, GROUP), book, NBITS, BOOK)
        factor, shift = load_scales(scale, offset, block * scale_block + groups, real, NBITS, BOOK)
        result = (numbers * factor + shift).to(DTYPE)
    return result


@triton.jit
def store_share(output_rows, output_channel, lse_rows, channels, top, total, sums, row_real, DIM: tl.constexpr):
    """The output and the log-sum-exp of a share: zeros and -inf for a row that attends to nothing in it."""
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    real = row_real[:, None] & (channels < DIM)[None, :]
    tl.store(output_rows[:, None] + channels[None, :] * output_channel, result, mask=real)
    tl.store(lse_rows, top + tl.log(total), mask=row_real)


@triton.jit(do_not_specialize=LENGTHS)
def attend(
    output, lse, query, exact_keys, exact_values, mask,
    key_codes, key_scale, key_offset, value_codes, value_scale, value_offset, key_book, value_book,
    output_split, output_batch, output_head, output_query, output_channel, lse_split,
    query_batch, query_head, query_query, query_channel,
    exact_key_batch, exact_key_head, exact_key_token, exact_key_channel,
    exact_value_batch, exact_value_head, exact_value_token, exact_value_channel,
    key_codes_batch, key_codes_head, key_codes_block, key_scale_batch, key_scale_head, key_scale_block,
    value_codes_batch, value_codes_head, value_codes_block, value_scale_batch, value_scale_head, value_scale_block,
    mask_batch, mask_head, mask_query, mask_column,
    softmax_scale, kv_heads, queries, blocks, exact, sink, packed_splits, share,
    SHARED: tl.constexpr, BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, KEY_BITS: tl.constexpr, KEY_CHANNEL: tl.constexpr,
    KEY_GROUP: tl.constexpr, KEY_BOOK: tl.constexpr, KEY_WORDS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_CHANNEL: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUE_BOOK: tl.constexpr, VALUE_WORDS: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``share`` tiles for one tile of rows; every length is known at run time, every shape at compile time.

    ``SHARED`` query heads share a KV head. ``MASK`` is 0 for none, 1 for a boolean and 2 for an additive one; ``DTYPE``
    is that of the operands of matrix products. Where ``WORDS`` is true, codes are 32-bit words, strides too.
    """
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    split = tl.program_id(2)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_real = row < SHARED * queries
    # rows beyond the last are those of head 0 again, and are not stored
    head = kv_head * SHARED + row // queries % SHARED
    position = row % queries
    key_channels = tl.arange(0, KEY_PAD)
    query_rows = query + batch * query_batch + head * query_head + position * query_query
    q = tl.load(
        query_rows[:, None] + key_channels[None, :] * query_channel,
        mask=row_real[:, None] & (key_channels < KEY_DIM)[None, :],
        other=0.0,
    ).to(DTYPE)

    mask_rows = mask + batch * mask_batch + head * mask_head + position.to(tl.int64) * mask_query
    # columns are in stored order: sink, packed, residual
    packed = blocks * BLOCK
    last_visible = packed + exact - queries + position
    output_rows = output + split.to(tl.int64) * output_split + batch * output_batch + head * output_head
    output_rows += position * output_query
    lse_rows = lse + split.to(tl.int64) * lse_split
    lse_rows += (batch * kv_heads * SHARED + head) * queries + position

    top = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    # summed over its columns at the end: a sum in every step would exchange numbers between warps
    totals = tl.zeros([ROWS, TOKENS], tl.float32)

    if split < packed_splits:
        key_codes += batch * key_codes_batch + kv_head * key_codes_head
        key_scale += batch * key_scale_batch + kv_head * key_scale_head
        key_offset += batch * key_scale_batch + kv_head * key_scale_head
        value_codes += batch * value_codes_batch + kv_head * value_codes_head
        value_scale += batch * value_scale_batch + kv_head * value_scale_head
        value_offset += batch * value_scale_batch + kv_head * value_scale_head
        for tile in range(split * share, tl.minimum((split + 1) * share, tl.cdiv(packed, TOKENS))):
            tokens = token_order(tile, TOKENS, BLOCK, KEY_BITS, KEY_WORDS)
            keys = key_tile(
                key_codes, key_scale, key_offset, key_book, key_codes_block, key_scale_block, tile, tokens, blocks,
                KEY_DIM, KEY_PAD, KEY_BITS, KEY_CHANNEL, KEY_GROUP, KEY_BOOK, KEY_WORDS, BLOCK, TOKENS, DTYPE,
            )  # fmt: skip
            scores = tl.dot(q, keys, input_precision=PRECISION) * softmax_scale
            scores = masked(scores, mask_rows, mask_column, sink + tokens, tokens < packed, last_visible, MASK, CAUSAL)
            weights, top, kept = softmax_step(scores, top)
            totals = totals * kept[:, None] + weights
            values = value_tile(
                value_codes, value_scale, value_offset, value_book, value_codes_block, value_scale_block, tokens,
                blocks,
                VALUE_DIM, VALUE_PAD, VALUE_BITS, VALUE_CHANNEL, VALUE_GROUP, VALUE_BOOK, VALUE_WORDS, BLOCK, TOKENS,
                DTYPE,
            )  # fmt: skip
            sums = tl.dot(weights.to(DTYPE), values, acc=sums * kept[:, None], input_precision=PRECISION)
        channels = channel_order(VALUE_PAD, VALUE_BITS, VALUE_GROUP, VALUE_WORDS)
        store_share(output_rows, output_channel, lse_rows, channels, top, tl.sum(totals, 1), sums, row_real, VALUE_DIM)
    else:
        exact_keys += batch * exact_key_batch + kv_head * exact_key_head
        exact_values += batch * exact_value_batch + kv_head * exact_value_head
        first = (split - packed_splits) * share
        channels = tl.arange(0, VALUE_PAD)
        for tile in range(first, tl.minimum(first + share, tl.cdiv(exact, TOKENS))):
            tokens = tile * TOKENS + tl.arange(0, TOKENS)
            token_real = tokens < exact
            keys = tl.load(
                exact_keys + key_channels[:, None] * exact_key_channel + tokens[None, :] * exact_key_token,
                mask=(key_channels < KEY_DIM)[:, None] & token_real[None, :],
                other=0.0,
            )
            scores = tl.dot(q, keys.to(DTYPE), input_precision=PRECISION) * softmax_scale
            columns = tl.where(tokens < sink, tokens, tokens + packed)
            scores = masked(scores, mask_rows, mask_column, columns, token_real, last_visible, MASK, CAUSAL)
            weights, top, kept = softmax_step(scores, top)
            totals = totals * kept[:, None] + weights
            values = tl.load(
                exact_values + tokens[:, None] * exact_value_token + channels[None, :] * exact_value_channel,
                mask=token_real[:, None] & (channels < VALUE_DIM)[None, :],
                other=0.0,
            )
            sums = tl.dot(weights.to(DTYPE), values.to(DTYPE), acc=sums * kept[:, None], input_precision=PRECISION)
        store_share(output_rows, output_channel, lse_rows, channels, top, tl.sum(totals, 1), sums, row_real, VALUE_DIM)


@triton.jit(do_not_specialize=["queries", "splits", "part_split", "part_lse_split"])
def merge(
    output, lse, parts, part_lse, output_batch, output_head, output_query, output_channel,
    part_split, part_lse_split, heads, queries, splits,
    DIM: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the shares of one row: ``parts`` ``[splits, batch, heads, queries, channels]``, ``SPLITS`` at a time."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, PAD)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([PAD], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        logs = tl.load(part_lse + split.to(tl.int64) * part_lse_split + row, mask=split < splits, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logs, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(logs - base)
        values = tl.load(
            parts + split.to(tl.int64)[:, None] * part_split + row * DIM + channels[None, :],
            mask=(split < splits)[:, None] & (channels < DIM)[None, :],
            other=0.0,
        )
        kept = tl.exp(top - base)
        sums = sums * kept + tl.sum(values * weights[:, None], 0)
        total = total * kept + tl.sum(weights, 0)
        top = new_top
    query = row % queries
    head = row // queries % heads
    batch = row // queries // heads
    target = output + batch * output_batch + head * output_head + query * output_query
    result = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(target + channels * output_channel, result, mask=channels < DIM)
    tl.store(lse + row + tl.arange(0, 1), top + tl.log(total))
