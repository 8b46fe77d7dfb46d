// Attention to packed blocks in integers: the query times a block's scales, or the weights times those of a step's values,
// are written as digits and multiplied with the codes (integer.h, tiles.h).
#pragma once

#include "unit.h"

namespace hfkv {
namespace HFKV_ISA {

// A unit's steps. A step's products, of the query with its blocks of keys, then of its weights with the runs of channels,
// follow one another in three slots: while one is multiplied, the next is written, and the sums of the one before are read.
template <int DIGITS> struct IntegerSteps {
    const Attend& a;
    Unit& unit;
    const Room& room;
    const int64_t rows;
    const Multiplier<DIGITS> multiply_keys, multiply_values;

    explicit IntegerSteps(Unit& owner)
        : a(owner.a), unit(owner), room(owner.room), rows(owner.rows), multiply_keys(a.keys.format, rows),
          multiply_values(a.values.format, rows) {}

    // The rows of x, their scales, and the codes that they are multiplied with; where the results go.
    struct Product {
        const float* x;
        int64_t stride, length;
        Scales scales;
        Operand codes;
        float* out;
        int64_t out_stride;
    };

    // The factor that turns a row, whose floats are at most `peaks`, into integers, and their unit. A row without anything
    // in it gets zeros.
    void choose_units() const {
        const vf most = set(largest_of(DIGITS));
        for (int64_t r = 0; r < rows; r += W) {
            const vf peak = load(room.peaks + r);
            const __mmask16 some = _mm512_cmp_ps_mask(peak, set(1e-30f), _CMP_GT_OQ);
            store(room.factor + r, _mm512_maskz_div_ps(some, most, peak));
            store(room.unit + r, _mm512_maskz_mul_ps(some, peak, set(1 / largest_of(DIGITS))));
        }
    }

    void write(const Product& p, const Slot& slot, float* bias, const Multiplier<DIGITS>& multiplier) const {
        const int64_t chunk_bytes = multiplier.chunk_bytes();
#define ROWS(N) \
    write_digits<DIGITS, N>(p.x + r * p.stride, p.stride, p.scales, p.length, slot.digits + r * DIGITS * CHUNK, \
                            chunk_bytes, bias + r)
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) ROWS(4);
        switch (rows - r) {
            case 3: ROWS(3); break;
            case 2: ROWS(2); break;
            case 1: ROWS(1); break;
        }
#undef ROWS
        multiplier.prepare(p.codes, slot);
    }

    // The results from the sums: in place of what is there, or on top of it.
    template <bool ADD> void finish(const Product& p, const Slot& slot, const float* biases, float further) const {
        for (int64_t r = 0; r < rows; r++) {
            const vf bias = set(biases[r]), unit = set(room.unit[r]);
#pragma GCC unroll 2
            for (int64_t half = 0; half < 2; half++) {
                const int32_t* sums = slot.sums + r * DIGITS * GROUP + half * W;
                vf x = _mm512_cvtepi32_ps(_mm512_load_si512(sums + (DIGITS - 1) * GROUP));
#pragma GCC unroll 2
                for (int d = DIGITS - 2; d >= 0; d--) x = x * 256.f + _mm512_cvtepi32_ps(_mm512_load_si512(sums + d * GROUP));
                x = (half ? x * further + bias : x + bias) * unit;
                float* o = p.out + r * p.out_stride + half * W;
                store(o, ADD ? load(o) + x : x);
            }
        }
    }

    template <bool ADD, typename Of> void products(int64_t count, const Multiplier<DIGITS>& multiplier, Of product) const {
        Product p[3];
        const float further = multiplier.further();
        for (int64_t i = 0; i < count + 2; i++) {
            const Slot &slot = room.slots[i % 2], &before = room.slots[(i + 1) % 2];
            const bool multiplies = i >= 1 && i <= count;
            if (multiplies) multiplier.multiply(p[(i + 2) % 3].codes, p[(i + 2) % 3].length, before);
            if (i < count) {
                p[i % 3] = product(i);
                write(p[i % 3], slot, room.bias[i % 3], multiplier);
            }
            if (i >= 2) finish<ADD>(p[(i + 1) % 3], slot, room.bias[(i + 1) % 3], further);
            if (multiplies) multiplier.collect(before);
        }
    }

    // The scales of `count` runs of 32: where they are, if they are whole chunks, else with zeros after them.
    Scales whole_chunks(const Blocks& b, int64_t at, int64_t stride, int64_t count, int64_t last) const {
        if (count % 2 == 0 && last == GROUP) return {b.scale + at, b.offset + at, stride};
        uint16_t *scale = room.halves, *offset = scale + round_up(count * GROUP, CHUNK);
        memset(scale, 0, 2 * sizeof(uint16_t) * round_up(count * GROUP, CHUNK));
        for (int64_t i = 0; i < count; i++) {
            const int64_t bytes = (i + 1 < count ? GROUP : last) * sizeof(uint16_t);
            memcpy(scale + i * GROUP, b.scale + at + i * stride, bytes);
            memcpy(offset + i * GROUP, b.offset + at + i * stride, bytes);
        }
        return {scale, offset, GROUP};
    }

    // The scores of `count` blocks. The query becomes integers by what is largest in any of them.
    void score(int64_t first, int64_t count) const {
        const Format& f = a.keys.format;
        const int64_t depth = room.depth, at = scale_of(a.keys, unit.batch, unit.kv_head, first);
        memset(room.halves, 0, depth * sizeof(uint16_t));
        for (int64_t b = 0; b < count; b++) raise_halves(a.keys.scale + at + b * a.keys.scale_block, f.groups, room.halves);
        for (int64_t r = 0; r < rows; r++) {
            vf peak = {};
            stay_awake();
            // the larger of two absolute values
            for (int64_t d = 0; d < depth; d += W) {
                peak = _mm512_range_ps(peak, load(room.query + r * depth + d) * load_halves(room.halves + d), 0b1011);
            }
            room.peaks[r] = largest(peak);
        }
        choose_units();
        for (int64_t r = 0; r < rows; r++) {
            const vf factor = set(room.factor[r]);
            for (int64_t d = 0; d < depth; d += W) {
                store(room.folded + r * depth + d, load(room.query + r * depth + d) * factor);
            }
        }
        const int64_t runs = (f.groups + GROUP - 1) / GROUP, last = f.groups - (runs - 1) * GROUP;
        const Operand codes{codes_of(a.keys, unit.batch, unit.kv_head, first), 0, 1, f.head_dim / 4,
                            room.step * a.keys.codes_block, f.plane};
        products<false>(count, multiply_keys, [&](int64_t b) {
            Product p{room.folded, depth, depth, whole_chunks(a.keys, at + b * a.keys.scale_block, GROUP, runs, last), codes,
                      room.scores + b * GROUP, room.tokens};
            p.codes.codes += b * a.keys.codes_block;
            return p;
        });
    }

    // The largest scale of a step's values.
    float largest_scale(int64_t at, int64_t count) const {
        const int64_t groups = a.values.format.groups;
        memset(room.halves, 0, groups * sizeof(uint16_t));
        for (int64_t b = 0; b < count; b++) raise_halves(a.values.scale + at + b * a.values.scale_block, groups, room.halves);
        __m512i most = {};
        for (int64_t i = 0; i < groups; i += 32) most = _mm512_max_epu16(most, _mm512_load_si512(room.halves + i));
        alignas(64) uint16_t halves[32];
        _mm512_store_si512(halves, most);
        return largest(maximum(load_halves(halves), load_halves(halves + W)));
    }

    void packed_step(int64_t first, int64_t count) const {
        const Format& v = a.values.format;
        const int64_t tokens = count * GROUP, length = round_up(tokens, CHUNK);
        const int64_t at = scale_of(a.values, unit.batch, unit.kv_head, first);
        score(first, count);
        unit.apply_mask(room.scores, a.sink + first * GROUP, tokens);
        stay_awake();
        const float scale = largest_scale(at, count);
        unit.raise_maximum(tokens);
        stay_awake();
        for (int64_t r = 0; r < rows; r += W) store(room.peaks + r, load(room.peak + r) * scale);
        choose_units();
        unit.weigh(tokens, length, room.factor);
        const Operand codes{codes_of(a.values, unit.batch, unit.kv_head, first), a.values.codes_block, count, GROUP / 4,
                            room.step * a.values.codes_block, v.plane};
        products<true>(v.runs, multiply_values, [&](int64_t run) {
            Product p{room.scores, room.tokens, length, whole_chunks(a.values, at + run * GROUP, a.values.scale_block, count, GROUP),
                      codes, room.output + run * GROUP, room.width};
            p.codes.codes += run * GROUP * v.group_bytes;
            return p;
        });
    }

    void exact_step(int64_t first, int64_t count) const { unit.exact_step(first, count); }
};

template <int DIGITS> static void integer_steps(Unit& unit, const Unit::Part& part) {
#if defined(__AMX_INT8__)
    const TileConfig config(TileRows(unit.rows * DIGITS));
#endif
    const IntegerSteps<DIGITS> steps(unit);
    unit.take_steps(part, steps);
}

}  // namespace HFKV_ISA
}  // namespace hfkv
