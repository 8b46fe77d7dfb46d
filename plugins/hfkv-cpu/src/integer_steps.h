// Attention to packed blocks in integers: the query is folded with a block's scales, or the weights with those of a step's
// values, written as digits and multiplied with the codes (integer.h).
#pragma once

#include "attend.h"

namespace hfkv {
namespace HFKV_ISA {

// A unit's steps. Of one product, of the query with a block of keys or of the weights with a run of channels, the rows are
// folded, written as digits and multiplied with the codes.
template <int DIGITS> struct IntegerSteps {
    const Attend& a;
    Unit& unit;
    const Room& room;
    const int64_t rows;
    const Multiply multiply_keys, multiply_values;

    explicit IntegerSteps(Unit& owner)
        : a(owner.a), unit(owner), room(owner.room), rows(owner.rows),
          multiply_keys(multiply_for<DIGITS>(a.keys.format)), multiply_values(multiply_for<DIGITS>(a.values.format)) {}

    // What the digits of each row are multiplied by, and their unit, by the largest floats of the rows. A row without
    // anything in it gets zeros.
    void choose_units() const {
        const vf peak = load(room.peaks), most = set(largest_of(DIGITS));
        const __mmask16 some = _mm512_cmp_ps_mask(peak, set(1e-30f), _CMP_GT_OQ);
        store(room.factor, _mm512_maskz_div_ps(some, most, peak));
        store(room.unit, _mm512_maskz_mul_ps(some, peak, set(1 / largest_of(DIGITS))));
    }

    // The rows of x times the scales in `folded`, and times the offsets in `bias`.
    template <bool PEAKS>
    void fold(const float* x, int64_t stride, const float* scale, const float* offset, int64_t length) const {
#define ROWS(N) \
    fold_rows<N, PEAKS>(x + r * stride, stride, scale, offset, length, room.folded + r * length, room.bias + r, \
                        room.peaks + r)
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) ROWS(4);
        switch (rows - r) {
            case 3: ROWS(3); break;
            case 2: ROWS(2); break;
            case 1: ROWS(1); break;
        }
#undef ROWS
    }

    // The digits of what has been folded. `factor` has been chosen.
    void write_folded(int64_t length) const {
        int8_t* out = room.digits;
        const float *folded = room.folded, *factor = room.factor;
        for (int64_t c = 0; c < length; c += CHUNK) {
            for (int64_t r = 0; r < rows; r++, out += DIGITS * CHUNK) {
                write_digits<DIGITS>(folded + r * length + c, set(factor[r]), out);
            }
        }
    }

    // The products of what is written, for each row to `out`: in place of what is there, or on top of it.
    template <bool ADD> void multiply_codes(Multiply multiply, const Operand& operand, float* out, int64_t stride) const {
        multiply(operand, room.digits, rows * DIGITS * CHUNK, room.sums, rows);
        for (int64_t r = 0; r < rows; r++) {
            const vf unit = set(room.unit[r]), bias = set(room.bias[r]);
#pragma GCC unroll 2
            for (int64_t i = 0; i < GROUP; i += W) {
                const vf x = load(room.sums + r * GROUP + i) * unit + bias;
                float* o = out + r * stride + i;
                store(o, ADD ? load(o) + x : x);
            }
        }
    }

    void score_block(int64_t block, float* scores) const {
        const Format& f = a.keys.format;
        const int64_t at = scale_of(a.keys, unit.batch, unit.kv_head, block);
        to_floats(a.keys.scale + at, Type::float16, f.groups, 1, room.scale, room.depth);
        to_floats(a.keys.offset + at, Type::float16, f.groups, 1, room.offset, room.depth);
        fold<true>(room.query, room.depth, room.scale, room.offset, room.depth);
        choose_units();
        write_folded(room.depth);
        const Operand operand{codes_of(a.keys, unit.batch, unit.kv_head, block), 0, 1, f.head_dim / 4, 2 * a.keys.codes_block,
                              f.plane};
        multiply_codes<false>(multiply_keys, operand, scores, room.tokens);
    }

    // The scales and offsets of a step's values, a row for each run; returns the largest scale.
    float load_scales(int64_t first, int64_t count, int64_t length) const {
        const Format& f = a.values.format;
        vf highest = {};
        for (int64_t run = 0; run < f.runs; run++) {
            float *scale = room.scale + run * length, *offset = room.offset + run * length;
            for (int64_t b = 0; b < count; b++) {
                const int64_t at = scale_of(a.values, unit.batch, unit.kv_head, first + b) + run * GROUP;
                for (int64_t t = 0; t < GROUP; t += W) {
                    const vf x = load_halves(a.values.scale + at + t);
                    highest = maximum(highest, x);
                    store(scale + b * GROUP + t, x);
                    store(offset + b * GROUP + t, load_halves(a.values.offset + at + t));
                }
            }
            for (int64_t t = count * GROUP; t < length; t += W) store(scale + t, vf{}), store(offset + t, vf{});
        }
        return largest(highest);
    }

    void step(int64_t first, int64_t count) const {
        const Format& v = a.values.format;
        const int64_t tokens = count * GROUP, length = round_up(tokens, CHUNK);
        for (int64_t b = 0; b < count; b++) score_block(first + b, room.scores + b * GROUP);
        unit.apply_mask(room.scores, a.sink + first * GROUP, tokens);
        unit.soften(tokens);
        const float scale = load_scales(first, count, length);
        for (int64_t r = 0; r < rows; r++) {
            room.peaks[r] = room.peak[r] * scale;
            for (int64_t t = tokens; t < length; t += W) store(room.scores + r * room.tokens + t, vf{});
        }
        choose_units();
        for (int64_t run = 0; run < v.runs; run++) {
            fold<false>(room.scores, room.tokens, room.scale + run * length, room.offset + run * length, length);
            write_folded(length);
            const Operand operand{codes_of(a.values, unit.batch, unit.kv_head, first) + run * GROUP * v.group_bytes,
                                  a.values.codes_block, count, GROUP / 4, room.step * a.values.codes_block, v.plane};
            multiply_codes<true>(multiply_values, operand, room.output + run * GROUP, room.width);
        }
    }
};

template <int DIGITS> static void integer_steps(Unit& unit, int64_t begin, int64_t end) {
    const IntegerSteps<DIGITS> steps(unit);
    for (int64_t b = begin; b < end; b += unit.room.step) steps.step(b, smaller(unit.room.step, end - b));
}

}  // namespace HFKV_ISA
}  // namespace hfkv
