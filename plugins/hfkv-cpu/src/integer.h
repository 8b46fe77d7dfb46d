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

// where the q-th four bytes of a chunk's row are
INLINE int64_t place_of(int64_t q) { return q % 4 * 4 + q / 4; }

// Scales and offsets, in runs of 32 that are `stride` apart.
struct Scales {
    const uint16_t *scale, *offset;
    int64_t stride;
};

// Of ROWS rows: x times the scales as DIGITS rows of signed bytes for each, lowest first, a chunk every `chunk_bytes`; and
// the dots of x and the offsets. What is rounded to integers is x * scale.
template <int DIGITS, int ROWS>
static void write_digits(const float* x, int64_t stride, const Scales& scales, int64_t length, int8_t* out,
                         int64_t chunk_bytes, float* dots) {
    // added to a float, it leaves the rounded integer in its low bits, and half of each digit's range added to that, so
    // that no digit borrows from the next
    const vf whole = set(12582912.f + 0x8080);
    // taken off again, of the third byte what the float is larger than 2^23 by
    const __m512i half = _mm512_set1_epi8((char)0x80), half_third = _mm512_set1_epi8(0x40);
    const __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const uint16_t *scale = scales.scale, *offset = scales.offset;
    vf dot[ROWS] = {};
    for (int64_t c = 0; c < length; c += CHUNK, out += chunk_bytes) {
        vf s[4], o[4];
#pragma GCC unroll 2
        for (int j = 0; j < 4; j += 2, scale += scales.stride, offset += scales.stride) {
            s[j] = load_halves(scale), s[j + 1] = load_halves(scale + W);
            o[j] = load_halves(offset), o[j + 1] = load_halves(offset + W);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            int8_t* digits = out + r * DIGITS * CHUNK;
            __m512i v[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const vf y = load(x + r * stride + c + j * W);
                dot[r] += y * o[j];
                v[j] = _mm512_shuffle_epi8(bits<__m512i>(y * s[j] + whole), by_digit);
            }
            const __m512i low = _mm512_unpacklo_epi32(v[0], v[1]), low2 = _mm512_unpacklo_epi32(v[2], v[3]);
            _mm512_store_si512(digits, _mm512_sub_epi8(_mm512_unpacklo_epi64(low, low2), half));
            _mm512_store_si512(digits + CHUNK, _mm512_sub_epi8(_mm512_unpackhi_epi64(low, low2), half));
            if (DIGITS == 2) continue;
            const __m512i high = _mm512_unpackhi_epi32(v[0], v[1]), high2 = _mm512_unpackhi_epi32(v[2], v[3]);
            _mm512_store_si512(digits + 2 * CHUNK, _mm512_sub_epi8(_mm512_unpacklo_epi64(high, high2), half_third));
        }
    }
    store_sums(dots, dot[0], dot[ROWS > 1 ? 1 : 0], dot[ROWS > 2 ? 2 : 0], dot[ROWS > 3 ? 3 : 0]);
}

// The larger ones of float16 scales, which are positive, and what is there.
static void raise_halves(const uint16_t* scale, int64_t count, uint16_t* most) {
    for (int64_t i = 0; i < count; i += 32) {
        const __mmask32 some = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
        const __m512i x = _mm512_maskz_loadu_epi16(some, scale + i);
        _mm512_store_si512(most + i, _mm512_max_epu16(x, _mm512_load_si512(most + i)));
    }
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

// _mm512_dpbusd_epi32, spelt so that GCC 12 keeps 24 sums in registers: with the intrinsic it stores each of them every time
INLINE void add_products(__m512i& sums, __m512i codes, __m512i bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(bytes));
}

// bytes of four groups, of one plane where there are two
constexpr int64_t four_bytes(int bits) { return 4 * GROUP * (bits == HALVES || bits == UPPER ? 4 : bits) / 8; }

// What is multiplied: in each of `blocks`, `fours` times four groups, one after the other. The codes that lie `ahead` bytes
// further are asked for meanwhile. Of hierarchical codes these are the upper halves; the lower ones are `plane` bytes further.
struct Operand {
    const uint8_t* codes;
    int64_t block_stride, blocks, fours, ahead, plane;
};

// Sums over all groups of the rows' bytes times the groups' codes: of each row and digit a group's 32 elements.
// `digits` has DIGITS rows of 64 bytes for each row and each chunk; a chunk is `chunk_bytes`.
template <int BITS, int DIGITS, int ROWS>
static void multiply(const Operand& operand, const int8_t* digits, int64_t chunk_bytes, int32_t* sums) {
    alignas(64) static constexpr Spread<BITS> spread;
    constexpr int64_t FOUR = four_bytes(BITS);
    __m512i acc[ROWS * DIGITS][2] = {};
    int64_t q = 0;
    for (int64_t b = 0; b < operand.blocks; b++) {
        const uint8_t* p = operand.codes + b * operand.block_stride;
        for (int64_t i = 0; i < operand.fours; i++, q++, p += FOUR) {
            const int8_t* four = digits + q / 16 * chunk_bytes + place_of(q % 16) * 4;
            __builtin_prefetch(p + operand.ahead, 0, 2);
            if (BITS == HALVES) __builtin_prefetch(p + operand.plane + operand.ahead, 0, 2);
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
#pragma GCC unroll 12
    for (int r = 0; r < ROWS * DIGITS; r++) {
        _mm512_store_si512(sums + r * GROUP, acc[r][0]);
        _mm512_store_si512(sums + r * GROUP + 16, acc[r][1]);
    }
}

template <int BITS, int DIGITS>
static void multiply_rows(const Operand& operand, const int8_t* digits, int64_t chunk_bytes, int32_t* sums, int64_t rows) {
    int64_t r = 0;
#define ROWS(N) multiply<BITS, DIGITS, N>(operand, digits + r * DIGITS * CHUNK, chunk_bytes, sums + r * DIGITS * GROUP)
    for (; r + SUMMED <= rows; r += SUMMED) ROWS(4);
    switch (rows - r) {
        case 3: ROWS(3); break;
        case 2: ROWS(2); break;
        case 1: ROWS(1); break;
    }
#undef ROWS
}

typedef void (*Multiply)(const Operand&, const int8_t*, int64_t, int32_t*, int64_t);
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
