// The memory that attention works in: what a unit needs, and where each of its parts begins.
#pragma once

#include "multiplier.h"

namespace hfkv {
namespace HFKV_ISA {

// tokens between two updates of the softmax
constexpr int64_t STEP = 128;
// up to here it is cheaper to fold the scales into every row than to scale a tile's codes once
constexpr int64_t FOLD_ROWS = 16;
// rows that share one pass over the packed blocks: their sums and scores stay in the second-level cache
constexpr int64_t UNIT_ROWS = 64;
// the same of rows on tiles of bfloat16 (chunks.h), and from how many on there are any
constexpr int64_t CHUNK_ROWS = 256, FEWEST_CHUNK_ROWS = 33;
#if defined(__AMX_BF16__)
constexpr bool HAS_CHUNKS = true;
#else
constexpr bool HAS_CHUNKS = false;
#endif

// Room for a unit, and the sizes of its parts.
struct Room {
    int64_t rows, depth, width, step, tokens;
    float *query, *folded, *scores, *output, *tile, *group, *scale, *offset, *weights, *maximum, *total, *start, *shift,
        *peak, *factor;
    int64_t size;
    // of a chunk: rows, weights, and tiles of keys and values
    struct {
        uint16_t *query, *weights, *keys, *values;
    } chunk;

    Room(const Attend& a, float* base) {
        const Format &k = a.keys.format, &v = a.values.format;
        rows = a.unit_rows;
        depth = round_up(k.head_dim, 64);
        width = round_up(larger(v.runs * v.group, v.head_dim), 32);
        const int64_t block = k.block_length;
#if defined(__AVX512VNNI__)
        integers = in_integers(a, rows);
#endif
        step = larger(1, STEP / block);
        tokens = round_up(larger(step * block, STEP), 32) + 32;
        size = 0;
        auto take = [&](int64_t count) {
            float* p = base + size;
            size += round_up(count, 16);
            return p;
        };
        query = take(rows * depth);
        folded = take(rows * larger(depth, tokens));
        scores = take(round_up(rows, 16) * tokens);
        output = take(round_up(rows, 16) * width);
        const int64_t packed = larger(depth * round_up(block, 16), block * width);
        tile = take(larger(packed, round_up(larger(step * block, STEP), 32) * larger(depth, width)));
        group = take(larger(k.group, v.group) + 16);
        const int64_t groups = larger(larger(depth, round_up(k.groups, 16)), round_up(v.groups, 16));
        scale = take(groups);
        offset = take(groups);
        weights = take(rows * round_up(block, 16));
        maximum = take(rows);
        total = take(rows);
        start = take(rows);
        shift = take(rows * v.runs);
        peak = take(rows);
        factor = take(rows);
        if (in_chunks(a)) {
            auto numbers = [&](int64_t count) { return (uint16_t*)take(count / 2); };
            chunk = {numbers(round_up(rows, 16) * depth), numbers(round_up(rows, 16) * tokens), numbers(2 * tokens * depth),
                     numbers(2 * tokens * width)};
        }
#if defined(__AVX512VNNI__)
        if (!integers) return;
        const int64_t length = round_up(step * block, CHUNK), chunks = larger(depth, length) / CHUNK;
        for (Slot& slot : slots) {
            slot.digits = (int8_t*)take(chunks * digit_rows(rows) * CHUNK / 4);
            slot.sums = (int32_t*)take(digit_rows(rows) * GROUP);
            if (TILE_BYTES) slot.codes = (uint8_t*)take(chunks * TILE_BYTES / 4);
        }
        for (float*& each : bias) each = take(rows);
        halves = (uint16_t*)take(larger(larger(depth, v.groups), length) + 32);
        peaks = take(rows);
        unit = take(rows);
#endif
    }

#if defined(__AVX512VNNI__)
    Slot slots[2];
    float* bias[3] = {};
    // the largest floats of each row, and their units as integers
    float *peaks = nullptr, *unit = nullptr;
    // room for float16 numbers, twice as many as a product's scales
    uint16_t* halves = nullptr;
    bool integers;

    // whether the folded products can be summed in integers: KIVI's geometry, and few rows
    static bool in_integers(const Attend& a, int64_t rows) {
        const Format &k = a.keys.format, &v = a.values.format;
        return !in_chunks(a) && rows <= INTEGER_ROWS && k.channel_axis && !v.channel_axis && k.group == GROUP &&
               v.group == GROUP && !k.codebook && !v.codebook && k.head_dim % 4 == 0;
    }
#endif

    // whether the rows are enough to be multiplied in tiles of bfloat16, and are that
    static bool in_chunks(const Attend& a) {
        const auto is_bfloat = [](const Tensor& x) { return x.type == Type::bfloat16; };
        return HAS_CHUNKS && a.heads / a.kv_heads * a.queries >= FEWEST_CHUNK_ROWS && a.keys.format.head_dim % 2 == 0 &&
               is_bfloat(a.query) && is_bfloat(a.exact_keys) && is_bfloat(a.exact_values);
    }
};

static int64_t unit_rows(const Attend& a) { return Room::in_chunks(a) ? CHUNK_ROWS : UNIT_ROWS; }

static int64_t attend_scratch(const Attend& a) { return Room(a, nullptr).size; }

// of one unit's partial result: the sums, then the maximum and the total of each row
static int64_t partial_size(const Attend& a) { return a.unit_rows * (a.values.format.head_dim + 2); }

}  // namespace HFKV_ISA
}  // namespace hfkv
