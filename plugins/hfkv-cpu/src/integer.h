// Products of floats with packed codes, in integers. The floats of a row become 23-bit or 16-bit integers, and those
// signed bytes, which the processor multiplies with four codes at a time (VNNI) and sums exactly; the sums of the bytes
// make one float again. What is lost is 2^-23, or 2^-16, of the largest float of the row. The codes go from memory to the
// products in registers.
#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__)

namespace hfkv {
namespace HFKV_ISA {

// a chunk: 64 floats of each row, and the groups that they multiply
constexpr int64_t CHUNK = 64;
// elements of a group, in two vectors
constexpr int64_t GROUP = 32;
// rows that are multiplied at once: their sums are 24 registers
constexpr int64_t SUMMED = 4;

// near the largest integer of so many digits that a float's 23 bits hold beside the half digits that are added
INLINE float largest_of(int digits) { return digits == 3 ? 63 * 65536 : 127 * 256; }

// A row's 64 floats times its factor, as rows of 64 signed bytes, lowest first. Of each row the q-th four bytes are at
// q % 4 * 4 + q / 4.
template <int DIGITS> INLINE void write_digits(const float* floats, vf factor, int8_t* out) {
    // added to a float, it leaves the rounded integer in its low bits, and half of each digit's range added to that, so
    // that no digit borrows from the next
    const vf whole = set(12582912.f + 0x8080);
    // taken off again, of the third byte what the float is larger than 2^23 by
    const __m512i half = _mm512_set1_epi32(0x408080);
    const __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i n = bits<__m512i>(load(floats + j * W) * factor + whole);
        v[j] = _mm512_shuffle_epi8(_mm512_sub_epi8(n, half), by_digit);
    }
    const __m512i low = _mm512_unpacklo_epi32(v[0], v[1]), low2 = _mm512_unpacklo_epi32(v[2], v[3]);
    _mm512_store_si512(out, _mm512_unpacklo_epi64(low, low2));
    _mm512_store_si512(out + 64, _mm512_unpackhi_epi64(low, low2));
    if (DIGITS == 2) return;
    const __m512i high = _mm512_unpackhi_epi32(v[0], v[1]), high2 = _mm512_unpackhi_epi32(v[2], v[3]);
    _mm512_store_si512(out + 128, _mm512_unpacklo_epi64(high, high2));
}

// Of ROWS rows: `folded` = x * scale, the dots of x and the offset, and the largest absolute values of what is folded.
template <int ROWS, bool PEAKS>
static void fold_rows(const float* x, int64_t stride, const float* scale, const float* offset, int64_t length, float* folded,
                      float* dots, float* peaks) {
    vf peak[ROWS] = {}, dot[ROWS] = {};
    for (int64_t d = 0; d < length; d += W) {
        const vf s = load(scale + d), o = load(offset + d);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const vf v = load(x + r * stride + d), product = v * s;
            dot[r] += v * o;
            // the larger of two absolute values
            if (PEAKS) peak[r] = _mm512_range_ps(peak[r], product, 0b1011);
            store(folded + r * length + d, product);
        }
    }
    store_sums(dots, dot[0], dot[ROWS > 1 ? 1 : 0], dot[ROWS > 2 ? 2 : 0], dot[ROWS > 3 ? 3 : 0]);
    if (!PEAKS) return;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) peaks[r] = largest(peak[r]);
}

// How the bytes of four groups of 32 become two vectors whose 32-bit lanes hold an element of each of the four.
template <int BITS> struct Spread {
    alignas(64) uint8_t first[64] = {}, second[64] = {}, third[64] = {};
    alignas(64) int32_t shift[16] = {}, turn[16] = {}, turn2[16] = {};

    constexpr Spread() {
        for (int i = 0; i < 16; i++) {
            for (int g = 0; g < 4; g++) {
                const int at = 4 * i + g;
                if (BITS == 8) first[at] = g * 32 + i, second[at] = g * 32 + 16 + i;
                if (BITS == 4 || BITS == HALVES || BITS == UPPER) first[at] = g * 16 + i;
                if (BITS == 2) first[at] = g * 8 + i % 8;
                if (BITS == 3) first[at] = g * 12 + i % 8, second[at] = g * 12 + 8 + i / 8, third[at] = second[at] + 2;
            }
            shift[i] = i < 8 ? 0 : 2;
            // the high bit of element i, at i % 8 of its byte, is turned to its place at 2
            turn[i] = (i % 8 + 30) % 32;
            turn2[i] = (i % 8 + 26) % 32;
        }
    }

    INLINE __m512i table(const void* p) { return _mm512_load_si512(p); }

    // what the second half is multiplied by: its codes stay where they are in their bytes
    static constexpr int FURTHER = BITS >= 8 ? 1 : 16;

    // the first and the second half of the elements of four groups, whose lower halves are `plane` bytes further
    INLINE void groups(const Spread& spread, const uint8_t* p, int64_t plane, __m512i& elements, __m512i& further) {
        const __m512i mask = _mm512_set1_epi8(BITS == 4 ? 15 : 3), mask2 = _mm512_slli_epi32(mask, 4);
        const __m512i first = table(spread.first), second = table(spread.second), third = table(spread.third);
        const __m512i shift = table(spread.shift), turn = table(spread.turn);
        if (BITS == 8) {
            const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(p + 64);
            elements = _mm512_permutex2var_epi8(x, first, y);
            further = _mm512_permutex2var_epi8(x, second, y);
        } else if (BITS == HALVES || BITS == UPPER) {
            const __m512i upper = _mm512_set1_epi8((char)0xf0);
            const __m512i x = _mm512_permutexvar_epi8(first, _mm512_loadu_si512(p));
            // of the upper halves alone, the lower ones are the middle of what they can be
            __m512i low = _mm512_set1_epi8(8), low2 = low;
            if (BITS == HALVES) {
                low = _mm512_permutexvar_epi8(first, _mm512_loadu_si512(p + plane));
                low2 = _mm512_srli_epi16(low, 4);
            }
            // each bit from the one where the mask is set, else from the other
            elements = _mm512_ternarylogic_epi32(upper, _mm512_slli_epi16(x, 4), low, 0xca);
            further = _mm512_ternarylogic_epi32(upper, x, low2, 0xca);
        } else if (BITS == 4) {
            const __m512i x = _mm512_permutexvar_epi8(first, _mm512_loadu_si512(p));
            elements = _mm512_and_si512(x, mask);
            further = _mm512_and_si512(x, mask2);
        } else if (BITS == 2) {
            const __m512i bytes = _mm512_castsi256_si512(load_as<__m256i>(p));
            const __m512i x = _mm512_srlv_epi32(_mm512_permutexvar_epi8(first, bytes), shift);
            elements = _mm512_and_si512(x, mask);
            further = _mm512_and_si512(x, mask2);
        } else {
            const __m512i bytes = _mm512_maskz_loadu_epi8(0xffffffffffffull, p);
            const __m512i bit = _mm512_set1_epi8(4), bit2 = _mm512_set1_epi8(64), turn2 = table(spread.turn2);
            const __m512i x = _mm512_srlv_epi32(_mm512_permutexvar_epi8(first, bytes), shift);
            const __m512i high = _mm512_rorv_epi32(_mm512_permutexvar_epi8(second, bytes), turn);
            const __m512i high2 = _mm512_rorv_epi32(_mm512_permutexvar_epi8(third, bytes), turn2);
            elements = _mm512_or_si512(_mm512_and_si512(x, mask), _mm512_and_si512(high, bit));
            further = _mm512_or_si512(_mm512_and_si512(x, mask2), _mm512_and_si512(high2, bit2));
        }
    }
};

// What is multiplied: in each of `blocks`, `fours` times four groups, one after the other. The codes that lie `ahead` bytes
// further are asked for meanwhile. Of hierarchical codes these are the upper halves; the lower ones are `plane` bytes further.
struct Operand {
    const uint8_t* codes;
    int64_t block_stride, blocks, fours, ahead, plane;
};

// _mm512_dpbusd_epi32, spelt so that GCC 12 keeps 24 sums in registers: with the intrinsic it stores each of them every time
INLINE void add_products(__m512i& sums, __m512i codes, __m512i bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(bytes));
}

// Sums over all groups of the rows' bytes times the groups' codes, as floats: ROWS rows of a group's 32 elements.
// `digits` has DIGITS rows of 64 bytes for each row and each chunk; a chunk is `chunk_bytes`.
template <int BITS, int DIGITS, int ROWS>
static void multiply(const Operand& operand, const int8_t* digits, int64_t chunk_bytes, float* sums) {
    alignas(64) static constexpr Spread<BITS> spread;
    constexpr int64_t FOUR = 4 * GROUP * (BITS == HALVES || BITS == UPPER ? 4 : BITS) / 8;
    __m512i acc[ROWS * DIGITS][2] = {};
    int64_t q = 0;
    for (int64_t b = 0; b < operand.blocks; b++) {
        const uint8_t* p = operand.codes + b * operand.block_stride;
        for (int64_t i = 0; i < operand.fours; i++, q++, p += FOUR) {
            const int8_t* four = digits + q / 16 * chunk_bytes + (q % 4 * 4 + q % 16 / 4) * 4;
            __builtin_prefetch(p + operand.ahead);
            if (BITS == HALVES) __builtin_prefetch(p + operand.plane + operand.ahead);
            __m512i elements, further;
            Spread<BITS>::groups(spread, p, operand.plane, elements, further);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS * DIGITS; r++) {
                const __m512i bytes = _mm512_set1_epi32(load_as<int32_t>(four + r * 64));
                add_products(acc[r][0], elements, bytes);
                add_products(acc[r][1], further, bytes);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512 x = _mm512_cvtepi32_ps(acc[r * DIGITS + DIGITS - 1][half]);
#pragma GCC unroll 2
            for (int d = DIGITS - 2; d >= 0; d--) {
                x = _mm512_fmadd_ps(x, _mm512_set1_ps(256), _mm512_cvtepi32_ps(acc[r * DIGITS + d][half]));
            }
            if (half == 1) x = _mm512_mul_ps(x, _mm512_set1_ps(1.f / Spread<BITS>::FURTHER));
            _mm512_store_ps(sums + r * GROUP + half * 16, x);
        }
    }
}

template <int BITS, int DIGITS>
static void multiply_rows(const Operand& operand, const int8_t* digits, int64_t chunk_bytes, float* sums, int64_t rows) {
    int64_t r = 0;
#define ROWS(N) multiply<BITS, DIGITS, N>(operand, digits + r * DIGITS * 64, chunk_bytes, sums + r * GROUP)
    for (; r + SUMMED <= rows; r += SUMMED) ROWS(4);
    switch (rows - r) {
        case 3: ROWS(3); break;
        case 2: ROWS(2); break;
        case 1: ROWS(1); break;
    }
#undef ROWS
}

typedef void (*Multiply)(const Operand&, const int8_t*, int64_t, float*, int64_t);
template <int DIGITS> static Multiply multiply_for(const Format& f) {
    switch (layout(f)) {
        case 2: return multiply_rows<2, DIGITS>;
        case 3: return multiply_rows<3, DIGITS>;
        case 4: return multiply_rows<4, DIGITS>;
        case HALVES: return multiply_rows<HALVES, DIGITS>;
        case UPPER: return multiply_rows<UPPER, DIGITS>;
        default: return multiply_rows<8, DIGITS>;
    }
}

}  // namespace HFKV_ISA
}  // namespace hfkv

#endif
