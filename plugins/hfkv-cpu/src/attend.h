// Attention: which way a unit's steps are taken, and how the parts of a context are joined.
#pragma once

#include "unit.h"

#if defined(__AVX512VNNI__)
#include "integer_steps.h"
#endif
#if defined(__AMX_BF16__)
#include "chunks.h"
#endif

namespace hfkv {
namespace HFKV_ISA {

// A part of the tokens for a block of rows.
static void attend(const Attend& a, int64_t rows, int64_t split, float* scratch) {
    Unit unit(a, scratch);
    unit.place(rows);
    unit.clear();
    const Unit::Part part = unit.part_of(split);
#if defined(__AMX_BF16__)
    if (Room::in_chunks(a)) {
        chunk_steps(unit, part);
        return unit.write(rows * a.splits + split);
    }
#endif
    unit.load_query();
#if defined(__AVX512VNNI__)
    if (unit.room.integers) {
        // what is rounded to 8 bits in the end needs little more than 16; of many rows some meet a rounding's edge
        const bool narrow = a.query.type == Type::bfloat16 && a.unit_rows <= FOLD_ROWS;
        narrow ? integer_steps<2>(unit, part) : integer_steps<3>(unit, part);
        return unit.write(rows * a.splits + split);
    }
#endif
    unit.take_steps(part, unit);
    unit.write(rows * a.splits + split);
}

static void merge(const Attend& a, int64_t index) {
    Unit unit(a, nullptr);
    unit.place(index);
    const int64_t channels = a.values.format.head_dim;
    for (int64_t r = 0; r < unit.rows; r++) {
        float* first = a.partial + index * a.splits * a.partial_size + r * (channels + 2);
        float top = -FLT_MAX, total = 0;
        for (int64_t s = 0; s < a.splits; s++) {
            const float m = first[s * a.partial_size + channels];
            top = m > top ? m : top;
        }
        for (int64_t s = 0; s < a.splits; s++) {
            float* p = first + s * a.partial_size;
            const float factor = exp_nonpositive(set(p[channels] - top))[0];
            total += p[channels + 1] * factor;
            for (int64_t c = 0; c < channels; c++) first[c] = (s == 0 ? 0 : first[c]) + p[c] * factor;
        }
        unit.write_row(r, first, top, total);
    }
}

}  // namespace HFKV_ISA
}  // namespace hfkv
