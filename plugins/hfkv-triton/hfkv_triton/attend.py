"""Attention over packed and exact segments, split over the context (flash decoding).

Dao et al., "Flash-Decoding for long-context inference", 2023; the folding of scales is that of Liu et al., "KIVI: A
Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024.

The context is a run of units: the tiles of the packed blocks, then those of the exact tokens. A program takes a share of the
units and some rows, a row being one query of one of the query heads that share a KV head; `merge` joins the shares by
their log-sum-exp. There are two ways to use a tile of codes:

* folded, for few rows and KIVI's axes: scores are (query times key scales) times codes, and the output is (weights
  times value scales) times codes, so that no code is multiplied by its scale. A weight has as many value scales as its
  token has runs of channels: each row is there once for each run, in the rows that a matrix product is padded to anyway,
  and keeps the channels of its run;
* unfolded, for many rows or other axes: a tile is dequantized once and used by all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import groups_and_elements, levels, load_codes, load_scales

# lengths change with every step: to compile for some of their values, as Triton does, would be to compile all the time
LENGTHS = [
    "mask_batch", "mask_head", "mask_query", "queries", "blocks", "exact", "sink", "units", "units_per_split",
]  # fmt: skip


@triton.jit
def softmax_step(scores, top, total):
    """One step of the online softmax: weights, new maximum and total, and what is left of earlier sums."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # a row that has seen nothing yet: exp(-inf - -inf) would not be a number
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(top - base)
    return weights, new_top, total * kept + tl.sum(weights, 1), kept


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
    softmax_scale, kv_heads, queries, blocks, exact, sink, units, units_per_split,
    SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_CHANNEL: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_BOOK: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_CHANNEL: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_BOOK: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, FOLD: tl.constexpr, RUNS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One share of the units for one tile of rows; every length is at run time, every shape at compile time.

    ``RUNS`` is how often a row is repeated (folded: once for each run of value channels), ``MASK`` 0 for none, 1 for a
    boolean and 2 for an additive one; ``DTYPE`` is that of the operands of matrix products.
    """
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    split = tl.program_id(2)

    rows = SHARE * queries
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_real = row < rows * RUNS
    run = row // rows
    head = kv_head * SHARE + row % rows // queries
    position = row % rows % queries

    key_channels = tl.arange(0, KEY_PAD)
    value_channels = tl.arange(0, VALUE_PAD)
    query_rows = query + batch * query_batch + head * query_head + position * query_query
    q = tl.load(
        query_rows[:, None] + key_channels[None, :] * query_channel,
        mask=row_real[:, None] & (key_channels < KEY_DIM)[None, :],
        other=0.0,
    )
    operand = q.to(DTYPE)
    q = q.to(tl.float32)

    mask_rows = mask + batch * mask_batch + head * mask_head + position.to(tl.int64) * mask_query
    # columns are in stored order: sink, packed, residual
    packed = blocks * BLOCK
    last_visible = packed + exact - queries + position

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # of the output: what the codes give, and what the offsets of the row's run give to all its channels
    sums = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    constant = tl.zeros([ROWS], tl.float32)

    TILES: tl.constexpr = (BLOCK + TOKENS - 1) // TOKENS
    begin = split * units_per_split
    end = tl.minimum(begin + units_per_split, units)
    packed_units = blocks * TILES

    key_codes += batch * key_codes_batch + kv_head * key_codes_head
    key_scale += batch * key_scale_batch + kv_head * key_scale_head
    key_offset += batch * key_scale_batch + kv_head * key_scale_head
    value_codes += batch * value_codes_batch + kv_head * value_codes_head
    value_scale += batch * value_scale_batch + kv_head * value_scale_head
    value_offset += batch * value_scale_batch + kv_head * value_scale_head

    for unit in range(begin, tl.minimum(end, packed_units)):
        block = tl.cast(unit // TILES, tl.int64)
        tokens = unit % TILES * TOKENS + tl.arange(0, TOKENS)
        token_real = tokens < BLOCK

        # keys: [channels, tokens]
        groups, elements = groups_and_elements(
            tokens[None, :], key_channels[:, None], KEY_CHANNEL, KEY_GROUP, BLOCK
        )
        real = (key_channels < KEY_DIM)[:, None] & token_real[None, :]
        codes = load_codes(key_codes + block * key_codes_block, groups, elements, real, KEY_BITS, KEY_GROUP)
        numbers = levels(codes, key_book, KEY_BITS, KEY_BOOK, DTYPE if FOLD else tl.float32)
        scales = key_scale + block * key_scale_block
        offsets = key_offset + block * key_scale_block
        if FOLD:
            factor, shift = load_scales(scales, offsets, key_channels, key_channels < KEY_DIM, KEY_BITS, KEY_BOOK)
            scores = tl.dot((q * factor[None, :]).to(DTYPE), numbers, input_precision=PRECISION)
            scores += tl.sum(q * shift[None, :], 1)[:, None]
        else:
            factor, shift = load_scales(scales, offsets, groups, real, KEY_BITS, KEY_BOOK)
            scores = tl.dot(operand, (numbers * factor + shift).to(DTYPE), input_precision=PRECISION)
        columns = sink + block.to(tl.int32) * BLOCK + tokens
        scores = masked(
            scores * softmax_scale, mask_rows, mask_column, columns, token_real, last_visible, MASK, CAUSAL
        )
        weights, top, total, kept = softmax_step(scores, top, total)

        # values: [tokens, channels]
        groups, elements = groups_and_elements(
            tokens[:, None], value_channels[None, :], VALUE_CHANNEL, VALUE_GROUP, BLOCK
        )
        real = token_real[:, None] & (value_channels < VALUE_DIM)[None, :]
        codes = load_codes(value_codes + block * value_codes_block, groups, elements, real, VALUE_BITS, VALUE_GROUP)
        numbers = levels(codes, value_book, VALUE_BITS, VALUE_BOOK, DTYPE if FOLD else tl.float32)
        scales = value_scale + block * value_scale_block
        offsets = value_offset + block * value_scale_block
        if FOLD:
            factor, shift = load_scales(
                scales, offsets, run[:, None] * BLOCK + tokens[None, :], row_real[:, None] & token_real[None, :],
                VALUE_BITS, VALUE_BOOK,
            )  # fmt: skip
            constant = constant * kept + tl.sum(weights * shift, 1)
            weights = weights * factor
        else:
            factor, shift = load_scales(scales, offsets, groups, real, VALUE_BITS, VALUE_BOOK)
            numbers = (numbers * factor + shift).to(DTYPE)
        sums = tl.dot(weights.to(DTYPE), numbers, acc=sums * kept[:, None], input_precision=PRECISION)

    exact_keys += batch * exact_key_batch + kv_head * exact_key_head
    exact_values += batch * exact_value_batch + kv_head * exact_value_head
    for unit in range(tl.maximum(begin, packed_units), end):
        tokens = (unit - packed_units) * TOKENS + tl.arange(0, TOKENS)
        token_real = tokens < exact
        keys = tl.load(
            exact_keys + key_channels[:, None] * exact_key_channel + tokens[None, :] * exact_key_token,
            mask=(key_channels < KEY_DIM)[:, None] & token_real[None, :],
            other=0.0,
        )
        scores = tl.dot(operand, keys.to(DTYPE), input_precision=PRECISION)
        columns = tl.where(tokens < sink, tokens, tokens + packed)
        scores = masked(
            scores * softmax_scale, mask_rows, mask_column, columns, token_real, last_visible, MASK, CAUSAL
        )
        weights, top, total, kept = softmax_step(scores, top, total)
        values = tl.load(
            exact_values + tokens[:, None] * exact_value_token + value_channels[None, :] * exact_value_channel,
            mask=token_real[:, None] & (value_channels < VALUE_DIM)[None, :],
            other=0.0,
        )
        constant *= kept
        sums = tl.dot(weights.to(DTYPE), values.to(DTYPE), acc=sums * kept[:, None], input_precision=PRECISION)

    # a row that attends to nothing: zeros and -inf
    result = (sums + constant[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
    own = row_real[:, None] & (value_channels < VALUE_DIM)[None, :]
    if FOLD:
        own = own & (value_channels[None, :] // VALUE_GROUP == run[:, None])
    output_rows = output + split.to(tl.int64) * output_split + batch * output_batch + head * output_head
    output_rows += position * output_query
    tl.store(output_rows[:, None] + value_channels[None, :] * output_channel, result, mask=own)
    heads = kv_heads * SHARE
    lse_rows = lse + split.to(tl.int64) * lse_split + (batch * heads + head) * queries + position
    tl.store(lse_rows, top + tl.log(total), mask=row_real & (run == 0))


@triton.jit(do_not_specialize=["queries", "splits", "part_split", "part_lse_split"])
def merge(
    output, lse, parts, part_lse, output_batch, output_head, output_query, output_channel,
    part_split, part_lse_split, heads, queries, splits,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the shares of one row: ``parts`` ``[splits, batch, heads, queries, channels]``, ``SPLITS`` at a time."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, VALUE_PAD)
    top = float("-inf")
    total = 0.0
    sums = tl.zeros([VALUE_PAD], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        logs = tl.load(part_lse + split * part_lse_split + row, mask=split < splits, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logs, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(logs - base)
        values = tl.load(
            parts + split.to(tl.int64)[:, None] * part_split + row * VALUE_DIM + channels[None, :],
            mask=(split < splits)[:, None] & (channels < VALUE_DIM)[None, :],
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
    tl.store(target + channels * output_channel, result, mask=channels < VALUE_DIM)
    tl.store(lse + row, top + tl.log(total))
