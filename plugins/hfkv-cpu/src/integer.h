// Products of floats with packed codes, in integers. The floats of a row become 24-bit integers, and those three signed
// bytes each; bytes times codes are summed exactly by the processor's byte products (VNNI, AMX), and the three sums
// make one float again. What is lost is 2^-24 of the largest float of the row.
#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__)

namespace hfkv {
namespace HFKV_ISA {

// a chunk: 64 floats of each row, and the groups that they multiply; three bytes per float
constexpr int64_t CHUNK = 64, DIGITS = 3;
// elements of a group, in two vectors
constexpr int64_t GROUP = 32;
// near the largest integer of three signed bytes, and far enough from it that rounding cannot pass that
constexpr float LARGEST = 127 * 65536;
// rows whose bytes fit one tile register of 16 rows
constexpr int64_t TILE_ROWS = 5;

// Rows in equal parts of at most TILE_ROWS.
struct Parts {
    int64_t count, rows;
    explicit Parts(int64_t all) : count((all + TILE_ROWS - 1) / TILE_ROWS), rows((all + count - 1) / count) {}
    // bytes of one chunk of one part, of its bytes' sums over one group, and of all parts
    int64_t chunk_bytes() const { return DIGITS * rows * CHUNK; }
    int64_t sum_count() const { return DIGITS * rows * GROUP; }
};

// The place of the q-th four floats of a chunk: `write_digits` leaves them in this order.
INLINE int64_t place_of(int64_t q) { return q % 4 * 4 + q / 4; }

// 64 floats, times a factor, as three rows of 64 signed bytes, lowest first, `stride` apart.
INLINE void write_digits(const float* x, float factor, int8_t* out, int64_t stride) {
    const __m512i middle = _mm512_set1_epi32(0x808080);
    const __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * j), _mm512_set1_ps(factor)));
        // half of each byte's range is added, so that no byte borrows from the next, and taken off again
        n = _mm512_xor_epi32(_mm512_add_epi32(n, middle), middle);
        v[j] = _mm512_shuffle_epi8(n, by_digit);
    }
    __m512i low = _mm512_unpacklo_epi32(v[0], v[1]), high = _mm512_unpackhi_epi32(v[0], v[1]);
    __m512i low2 = _mm512_unpacklo_epi32(v[2], v[3]), high2 = _mm512_unpackhi_epi32(v[2], v[3]);
    _mm512_store_si512(out, _mm512_unpacklo_epi64(low, low2));
    _mm512_store_si512(out + stride, _mm512_unpackhi_epi64(low, low2));
    _mm512_store_si512(out + 2 * stride, _mm512_unpacklo_epi64(high, high2));
}

// How the bytes of four groups of 32 become two vectors whose 32-bit lanes hold an element of each of the four.
template <int BITS> struct Spread {
    alignas(64) uint8_t first[64] = {}, second[64] = {}, third[64] = {};
    alignas(64) int32_t shift[16] = {}, turn[16] = {};

    constexpr Spread() {
        for (int i = 0; i < 16; i++) {
            for (int g = 0; g < 4; g++) {
                const int at = 4 * i + g;
                if (BITS == 8) first[at] = g * 32 + i, second[at] = g * 32 + 16 + i;
                if (BITS == 4) first[at] = g * 16 + i;
                if (BITS == 2) first[at] = g * 8 + i % 8;
                if (BITS == 3) first[at] = g * 12 + i % 8, second[at] = g * 12 + 8 + i / 8, third[at] = second[at] + 2;
            }
            shift[i] = i < 8 ? 0 : 2;
            // the high bit of element i, at i % 8 of its byte, is turned to its place at 2
            turn[i] = (i % 8 + 30) % 32;
        }
    }

    INLINE __m512i table(const void* p) { return _mm512_load_si512(p); }

    INLINE void groups(const Spread& spread, const uint8_t* p, uint8_t* elements, uint8_t* further) {
        const __m512i mask = _mm512_set1_epi8(BITS == 4 ? 15 : 3);
        const __m512i first = table(spread.first), second = table(spread.second), third = table(spread.third);
        const __m512i shift = table(spread.shift), turn = table(spread.turn);
        if (BITS == 8) {
            const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(p + 64);
            _mm512_store_si512(elements, _mm512_permutex2var_epi8(x, first, y));
            _mm512_store_si512(further, _mm512_permutex2var_epi8(x, second, y));
        } else if (BITS == 4) {
            const __m512i x = _mm512_permutexvar_epi8(first, _mm512_loadu_si512(p));
            _mm512_store_si512(elements, _mm512_and_si512(x, mask));
            _mm512_store_si512(further, _mm512_and_si512(_mm512_srli_epi16(x, 4), mask));
        } else if (BITS == 2) {
            const __m512i bytes = _mm512_castsi256_si512(load_as<__m256i>(p));
            const __m512i x = _mm512_srlv_epi32(_mm512_permutexvar_epi8(first, bytes), shift);
            _mm512_store_si512(elements, _mm512_and_si512(x, mask));
            _mm512_store_si512(further, _mm512_and_si512(_mm512_srli_epi32(x, 4), mask));
        } else {
            const __m512i bytes = _mm512_maskz_loadu_epi8(0xffffffffffffull, p), bit = _mm512_set1_epi8(4);
            const __m512i x = _mm512_srlv_epi32(_mm512_permutexvar_epi8(first, bytes), shift);
            const __m512i high = _mm512_rorv_epi32(_mm512_permutexvar_epi8(second, bytes), turn);
            const __m512i high2 = _mm512_rorv_epi32(_mm512_permutexvar_epi8(third, bytes), turn);
            _mm512_store_si512(elements, _mm512_or_si512(_mm512_and_si512(x, mask), _mm512_and_si512(high, bit)));
            const __m512i rest = _mm512_and_si512(_mm512_srli_epi32(x, 4), mask);
            _mm512_store_si512(further, _mm512_or_si512(rest, _mm512_and_si512(high2, bit)));
        }
    }
};

// Groups `first` to `first + count` of a product, four a row, into chunks: `bytes` holds two tiles of 16 rows of 64 bytes
// for each chunk, one for each half of the groups' elements. `first` and `count` are multiples of 4.
template <int BITS> static void spread_groups(const uint8_t* codes, int64_t first, int64_t count, uint8_t* bytes) {
    alignas(64) static constexpr Spread<BITS> spread;
    for (int64_t q = first / 4; q < (first + count) / 4; q++, codes += 4 * GROUP * BITS / 8) {
        uint8_t* row = bytes + q / 16 * 2048 + place_of(q % 16) * 64;
        Spread<BITS>::groups(spread, codes, row, row + 1024);
    }
}

typedef void (*SpreadGroups)(const uint8_t*, int64_t, int64_t, uint8_t*);
static SpreadGroups spread_for(int nbits) {
    return nbits == 2 ? spread_groups<2> : nbits == 3 ? spread_groups<3> : nbits == 4 ? spread_groups<4> : spread_groups<8>;
}

#if defined(__AMX_INT8__)

// Shapes the tile registers: 0 to 3 sums, 4 and 5 bytes of rows, 6 and 7 codes.
INLINE void begin_tiles(int64_t rows) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = i < 6 ? DIGITS * rows : 16;
    _tile_loadconfig(&config);
}
INLINE void end_tiles() { _tile_release(); }

// Sums of `chunks` chunks: `digits` is one part's, a chunk every `digit_stride` bytes.
INLINE void multiply(const Parts& parts, const int8_t* digits, int64_t digit_stride, const uint8_t* codes, int64_t chunks,
                     int32_t* sums) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t c = 0; c < chunks; c++) {
        _tile_loadd(4, digits + c * digit_stride, 64);
        _tile_loadd(6, codes + c * 2048, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, codes + c * 2048 + 1024, 64);
        _tile_dpbsud(1, 4, 7);
    }
    _tile_stored(0, sums, GROUP * 4);
    _tile_stored(1, sums + 16, GROUP * 4);
    (void)parts;
}

#else

INLINE void begin_tiles(int64_t) {}
INLINE void end_tiles() {}

template <int ROWS>
INLINE void multiply_rows(const int8_t* digits, int64_t digit_stride, const uint8_t* codes, int64_t chunks, int32_t* sums) {
    __m512i acc[ROWS][2] = {};
    for (int64_t c = 0; c < chunks; c++) {
        for (int64_t k = 0; k < 16; k++) {
            const __m512i x = _mm512_load_si512(codes + c * 2048 + k * 64);
            const __m512i y = _mm512_load_si512(codes + c * 2048 + 1024 + k * 64);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const __m512i four = _mm512_set1_epi32(load_as<int32_t>(digits + c * digit_stride + r * 64 + k * 4));
                acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], x, four);
                acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], y, four);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        _mm512_store_si512(sums + r * GROUP, acc[r][0]);
        _mm512_store_si512(sums + r * GROUP + 16, acc[r][1]);
    }
}

INLINE void multiply(const Parts& parts, const int8_t* digits, int64_t digit_stride, const uint8_t* codes, int64_t chunks,
                     int32_t* sums) {
    int64_t r = 0;
    for (; r + 4 <= parts.rows; r += 4) {
        multiply_rows<4 * DIGITS>(digits + r * DIGITS * 64, digit_stride, codes, chunks, sums + r * DIGITS * GROUP);
    }
    for (; r < parts.rows; r++) {
        multiply_rows<DIGITS>(digits + r * DIGITS * 64, digit_stride, codes, chunks, sums + r * DIGITS * GROUP);
    }
}

#endif

// The three sums of one row and half of a group, lowest digit first, as floats.
INLINE __m512 join_sums(const int32_t* sums, int64_t stride) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums));
    const __m512 middle = _mm512_cvtepi32_ps(_mm512_load_si512(sums + stride));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 2 * stride));
    return _mm512_fmadd_ps(_mm512_fmadd_ps(high, _mm512_set1_ps(256), middle), _mm512_set1_ps(256), low);
}

}  // namespace HFKV_ISA
}  // namespace hfkv

#endif
