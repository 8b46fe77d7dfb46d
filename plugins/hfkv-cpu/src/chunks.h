// Attention of many bfloat16 rows, as chunks of queries have them, on AMX tiles of bfloat16. A step's keys and values are
// dequantized once for all rows of a unit. Queries are bfloat16 as they come; packed keys and values become two bfloat16
// numbers each, which have 16 bits together; weights are rounded to one.
#pragma once

#include "unit.h"

#if defined(__AMX_BF16__)

namespace hfkv {
namespace HFKV_ISA {

// numbers along a tile's row, in pairs, and numbers of a tile
constexpr int64_t DEEP = 32, PAIRS = DEEP / 2, NUMBERS = DEEP * TILE_ROWS;

// Two bfloat16 numbers in each lane: those of `first`, and above them those of `second`. What is below them is cut off.
INLINE __m512i cut_pairs(vf first, vf second) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    return _mm512_ternarylogic_epi32(upper, bits<__m512i>(second), _mm512_srli_epi32(bits<__m512i>(first), 16), 0xca);
}

// A float near x that is the nearest bfloat16 number when it is cut off, and that number.
INLINE vf half_more(vf x) { return bits<vf>(_mm512_add_epi32(bits<__m512i>(x), _mm512_set1_epi32(0x8000))); }
INLINE vf cut(vf x) { return bits<vf>(_mm512_and_si512(bits<__m512i>(x), _mm512_set1_epi32((int)0xffff0000))); }

struct ChunkSteps {
    const Attend& a;
    Unit& unit;
    const Room& room;
    const int64_t depth, width;

    explicit ChunkSteps(Unit& owner)
        : a(owner.a), unit(owner), room(owner.room), depth(round_up(a.keys.format.head_dim, DEEP)), width(room.width) {}

    // A and B of C = A B. Rows of A are `stride` numbers apart. B is tiles: of 32 numbers of the depth those of all columns,
    // then those of the next 32; and once more all of them, where each number is the sum of two.
    struct Factors {
        const uint16_t* a;
        int64_t stride;
        const uint16_t* b;
        int64_t columns, chunks;
        bool two;
    };

    // 32 columns of 32 rows, or of 16. ADD: on top of what is there.
    template <bool BOTH, bool ADD>
    INLINE void product_tiles(const Factors& f, int64_t row, int64_t column, float* c, int64_t stride) {
        const int64_t next = f.columns / W * NUMBERS, bytes = stride * sizeof(float), row_bytes = f.stride * sizeof(uint16_t);
        const uint16_t *a = f.a + row * f.stride, *b = f.b + column / W * NUMBERS;
        float* further = c + TILE_ROWS * stride;
        if (ADD) {
            LOAD_TILE(0, c, bytes);
            LOAD_TILE(1, c + W, bytes);
            if (BOTH) LOAD_TILE(2, further, bytes);
            if (BOTH) LOAD_TILE(3, further + W, bytes);
        } else {
            CLEAR_TILE(0);
            CLEAR_TILE(1);
            CLEAR_TILE(2);
            CLEAR_TILE(3);
        }
        for (int64_t part = 0; part < (f.two ? 2 : 1); part++) {
            for (int64_t i = 0; i < f.chunks; i++, b += next) {
                LOAD_TILE(4, a + i * DEEP, row_bytes);
                LOAD_TILE(6, b, CHUNK);
                ADD_PAIRS(0, 4, 6);
                LOAD_TILE(7, b + NUMBERS, CHUNK);
                ADD_PAIRS(1, 4, 7);
                if (!BOTH) continue;
                LOAD_TILE(5, a + TILE_ROWS * f.stride + i * DEEP, row_bytes);
                ADD_PAIRS(2, 5, 6);
                ADD_PAIRS(3, 5, 7);
            }
        }
        STORE_TILE(0, c, bytes);
        STORE_TILE(1, c + W, bytes);
        if (BOTH) STORE_TILE(2, further, bytes);
        if (BOTH) STORE_TILE(3, further + W, bytes);
    }

    template <bool ADD> void product(const Factors& f, float* c, int64_t stride) const {
        const int64_t rows = round_up(unit.rows, TILE_ROWS);
        for (int64_t j = 0; j < f.columns; j += 2 * W) {
            int64_t r = 0;
            for (; r + 2 * TILE_ROWS <= rows; r += 2 * TILE_ROWS) product_tiles<true, ADD>(f, r, j, c + r * stride + j, stride);
            if (r < rows) product_tiles<false, ADD>(f, r, j, c + r * stride + j, stride);
        }
    }

    // The queries as they are, zeros after their channels.
    void load_query() const {
        const Tensor& q = a.query;
        const int64_t channels = a.keys.format.head_dim;
        for (int64_t r = 0; r < unit.rows; r++) {
            const uint16_t* p = (const uint16_t*)q.data + unit.batch * q.batch_stride + unit.head_of(r) * q.head_stride +
                                unit.query_of(r) * q.row_stride;
            uint16_t* to = room.chunk.query + r * depth;
            memcpy(to, p, channels * sizeof(uint16_t));
            memset(to + channels, 0, (depth - channels) * sizeof(uint16_t));
        }
    }

    // Two vectors as pairs; what their rounding left out goes `rest` numbers further, where there is anything.
    template <bool TWO> static void write_pairs(vf x, vf y, uint16_t* to, int64_t rest) {
        const vf u = half_more(x), v = half_more(y);
        _mm512_store_si512(to, cut_pairs(u, v));
        if (TWO) _mm512_store_si512(to + rest, cut_pairs(x - cut(u), y - cut(v)));
    }

    // Rows of channels, so many tokens long, to tiles.
    void write_keys(const float* rows, int64_t stride, int64_t columns) const {
        const int64_t channels = a.keys.format.head_dim, rest = columns * depth;
        uint16_t* to = room.chunk.keys;
        for (int64_t first = 0; first < depth; first += DEEP) {
            for (int64_t t = 0; t < columns; t += W) {
                for (int64_t d = first; d < first + DEEP; d += 2, to += DEEP) {
                    const vf x = d < channels ? load(rows + d * stride + t) : vf{};
                    const vf y = d + 1 < channels ? load(rows + (d + 1) * stride + t) : vf{};
                    write_pairs<true>(x, y, to, rest);
                }
            }
        }
    }

    // Rows of tokens to tiles of values, whose pairs are tokens i and i + 16 of each 32; `row` gives 16 channels of a token.
    template <bool TWO, typename Row> void write_values(int64_t count, Row row) const {
        const int64_t rest = round_up(count, DEEP) * width;
        uint16_t* to = room.chunk.values;
        for (int64_t first = 0; first < count; first += DEEP) {
            for (int64_t c = 0; c < width; c += W) {
                for (int64_t t = first; t < first + PAIRS; t++, to += DEEP) {
                    const vf x = t < count ? row(t, c) : vf{}, y = t + PAIRS < count ? row(t + PAIRS, c) : vf{};
                    write_pairs<TWO>(x, y, to, rest);
                }
            }
        }
    }

    // Exact keys to tiles, as they are: two channels of 16 tokens at a time.
    void write_exact_keys(int64_t first, int64_t count) const {
        const Tensor& k = a.exact_keys;
        const uint16_t* p = (const uint16_t*)k.data + unit.batch * k.batch_stride + unit.kv_head * k.head_stride;
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i from = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)k.row_stride));
        uint16_t* to = room.chunk.keys;
        for (int64_t d = 0; d < depth; d += DEEP) {
            for (int64_t t = 0; t < round_up(count, DEEP); t += W) {
                const __mmask16 some = _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32((int)(count - t)));
                for (int64_t i = d; i < d + DEEP; i += 2, to += DEEP) {
                    const uint16_t* pairs = p + (first + t) * k.row_stride + i;
                    const __mmask16 known = i < a.keys.format.head_dim ? some : 0;
                    _mm512_store_si512(to, _mm512_mask_i32gather_epi32(__m512i{}, known, from, pairs, sizeof(uint16_t)));
                }
            }
        }
    }

    void write_exact_values(int64_t first, int64_t count) const {
        const Tensor& v = a.exact_values;
        const uint16_t* p = (const uint16_t*)v.data + unit.batch * v.batch_stride + unit.kv_head * v.head_stride;
        write_values<false>(count, [&](int64_t t, int64_t c) {
            const int64_t left = larger(0, smaller(W, a.values.format.head_dim - c));
            const __m256i x = _mm256_maskz_loadu_epi16((1u << left) - 1, p + (first + t) * v.row_stride + c);
            return bits<vf>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
        });
    }

    // Scores to weights, in pairs as the values are, zeros after them. What they sum to is that of the rounded ones.
    void soften(int64_t count) const {
        unit.raise_maximum(count);
        const int64_t columns = round_up(count, DEEP);
        for (int64_t r = 0; r < unit.rows; r++) {
            float* s = room.scores + r * room.tokens;
            if (columns - count >= W) store(s + columns - W, set(-INFINITY));
            const float now = room.maximum[r];
            vf total = {};
            for (int64_t t = 0; t < columns; t += DEEP) {
                const vf x = half_more(exp_nonpositive(load(s + t) - now));
                const vf y = half_more(exp_nonpositive(load(s + t + W) - now));
                total += cut(x) + cut(y);
                _mm512_store_si512(room.chunk.weights + r * room.tokens + t, cut_pairs(x, y));
            }
            room.total[r] += sum(total);
        }
    }

    void score(int64_t count, bool two) const {
        product<false>({room.chunk.query, depth, room.chunk.keys, round_up(count, DEEP), depth / DEEP, two}, room.scores,
                       room.tokens);
    }

    void add_values(int64_t count, bool two) const {
        product<true>({room.chunk.weights, room.tokens, room.chunk.values, width, round_up(count, DEEP) / DEEP, two},
                      room.output, width);
    }

    void packed_step(int64_t first, int64_t count) const {
        const Format &k = a.keys.format, &v = a.values.format;
        const int64_t length = k.block_length, tokens = count * length, columns = round_up(tokens, DEEP);
        for (int64_t b = 0; b < count; b++) {
            // scores come out scaled
            const uint8_t* codes = unit.load_block(a.keys, first + b, a.scale);
            dequantize_block(k, unit.dequantize_keys, codes, room.scale, room.offset, false, room.tile + b * length, columns,
                             room.group);
        }
        write_keys(room.tile, columns, columns);
        score(tokens, true);
        unit.apply_mask(room.scores, a.sink + first * length, tokens);
        soften(tokens);
        for (int64_t b = 0; b < count; b++) {
            const uint8_t* codes = unit.load_block(a.values, first + b, 1);
            dequantize_block(v, unit.dequantize_values, codes, room.scale, room.offset, true, room.tile + b * length * width,
                             width, room.group);
        }
        write_values<true>(tokens, [&](int64_t t, int64_t c) { return load(room.tile + t * width + c); });
        add_values(tokens, true);
    }

    void exact_step(int64_t first, int64_t count) const {
        write_exact_keys(first, count);
        score(count, false);
        for (int64_t r = 0; r < unit.rows; r++) {
            float* s = room.scores + r * room.tokens;
            for (int64_t t = 0; t < count; t += W) store(s + t, load(s + t) * a.scale);
        }
        unit.mask_exact(first, count);
        soften(count);
        write_exact_values(first, count);
        add_values(count, false);
    }
};

static void chunk_steps(Unit& unit, const Unit::Part& part) {
    const TileConfig config{TileRows(TILE_ROWS)};
    const ChunkSteps steps(unit);
    steps.load_query();
    unit.take_steps(part, steps);
}

}  // namespace HFKV_ISA
}  // namespace hfkv

#endif
