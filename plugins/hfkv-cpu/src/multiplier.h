// Who multiplies digits with codes: AMX tiles where the kernels are compiled for them, else VNNI.
#pragma once

#include "tiles.h"

#if defined(__AVX512VNNI__)

namespace hfkv {
namespace HFKV_ISA {

// What a product is written to, and its sums.
struct Slot {
    int8_t* digits = nullptr;
    uint8_t* codes = nullptr;
    int32_t* sums = nullptr;
};

// 1 / FURTHER of `Spread`
INLINE float further_of(const Format& f) { return layout(f) >= 8 ? 1 : 1.f / 16; }

#if defined(__AMX_INT8__)

// rows that are multiplied so at most, and bytes of a chunk's codes
constexpr int64_t INTEGER_ROWS = 64, TILE_BYTES = 2 * TILE;

INLINE int64_t digit_rows(int64_t rows) { return larger(TileRows(rows * 3).total(), TileRows(rows * 2).total()); }

template <int DIGITS> class Multiplier {
    const float further_by;
    const TileRows shared;
    const SpreadTiles spread;

  public:
    Multiplier(const Format& f, int64_t rows) : further_by(further_of(f)), shared(rows * DIGITS), spread(spread_for(f)) {}
    int64_t chunk_bytes() const { return shared.total() * CHUNK; }
    float further() const { return further_by; }
    void prepare(const Operand& operand, const Slot& slot) const { spread(operand, slot.codes); }
    // The last sums stay in tiles: until they are asked for, the processor multiplies beside what comes next.
    void multiply(const Operand&, int64_t length, const Slot& slot) const {
        const int64_t chunks = length / CHUNK, bytes = shared.rows * CHUNK, sums = shared.rows * GROUP;
        int64_t t = 0;
        for (; t + 2 < shared.tiles; t += 2) {
            multiply_tiles<true>(slot.codes, slot.digits + t * bytes, chunks, shared);
            store_tiles<true>(shared, slot.sums + t * sums);
        }
        (shared.tiles - t == 2 ? multiply_tiles<true> : multiply_tiles<false>)(slot.codes, slot.digits + t * bytes, chunks, shared);
    }
    void collect(const Slot& slot) const {
        const int64_t t = (shared.tiles - 1) / 2 * 2;
        (shared.tiles - t == 2 ? store_tiles<true> : store_tiles<false>)(shared, slot.sums + t * shared.rows * GROUP);
    }
};

#else

constexpr int64_t INTEGER_ROWS = 16, TILE_BYTES = 0;

INLINE int64_t digit_rows(int64_t rows) { return rows * 3; }

template <int DIGITS> class Multiplier {
    const float further_by;
    const int64_t rows;
    const Multiply multiply_codes;

  public:
    Multiplier(const Format& f, int64_t count)
        : further_by(further_of(f)), rows(count), multiply_codes(multiply_for<DIGITS>(f)) {}
    int64_t chunk_bytes() const { return rows * DIGITS * CHUNK; }
    float further() const { return further_by; }
    void prepare(const Operand&, const Slot&) const {}
    void multiply(const Operand& operand, int64_t, const Slot& slot) const {
        multiply_codes(operand, slot.digits, chunk_bytes(), slot.sums, rows);
    }
    void collect(const Slot&) const {}
};

#endif

}  // namespace HFKV_ISA
}  // namespace hfkv

#endif
