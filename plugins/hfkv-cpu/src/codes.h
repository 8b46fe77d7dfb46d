// Codes to floats: groups whose bytes lie one after the other become rows of a tile.
#pragma once

#include "simd.h"

namespace hfkv {
namespace HFKV_ISA {

// the code of one element, for groups that no vector fits
template <int BITS> INLINE int code_at(const uint8_t* p, int64_t group, int64_t plane, int64_t element) {
    if (BITS == 8) return p[element];
    if (BITS == HALVES) return code_at<4>(p, group, 0, element) << 4 | code_at<4>(p + plane, group, 0, element);
    if (BITS == 3) {
        const uint8_t* high = p + group / 4;
        return code_at<2>(p, group, 0, element) | ((high[element / 8] >> (element % 8)) & 1) << 2;
    }
    int64_t bytes = group * BITS / 8;
    return (p[element % bytes] >> (element / bytes * BITS)) & ((1 << BITS) - 1);
}

// Levels of codes in the low bits of each lane. Above them a lane may hold anything; 3-bit codes come clean.
template <int BITS, bool BOOK, int L> INLINE typename Lanes<L>::f levels_of(typename Lanes<L>::i codes, const float* levels) {
    typedef typename Lanes<L>::f f;
#if defined(__AVX512F__)
    if constexpr (L == 16 && BITS < 8) {
        // one instruction looks 16 levels up and ignores the upper bits; the table repeats for fewer bits
        return _mm512_permutexvar_ps((__m512i)codes, load(levels));
    }
#endif
    codes &= (1 << BITS) - 1;
    if constexpr (!BOOK) return __builtin_convertvector(codes, f);
#if defined(__AVX512F__)
    if constexpr (L == 16) return _mm512_i32gather_ps((__m512i)codes, levels, 4);
#endif
#if defined(__AVX2__)
    if constexpr (L == 8) return _mm256_i32gather_ps(levels, (__m256i)codes, 4);
#endif
    f r;
    for (int i = 0; i < L; i++) r[i] = levels[codes[i]];
    return r;
}

template <int L> INLINE typename Lanes<L>::i bytes_to_lanes(const uint8_t* p) {
#if defined(__AVX512F__)
    if constexpr (L == 16) return (typename Lanes<L>::i)_mm512_cvtepu8_epi32(load_as<__m128i>(p));
#endif
#if defined(__AVX2__)
    if constexpr (L == 8) return (typename Lanes<L>::i)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#endif
    return __builtin_convertvector(load_as<typename Lanes<L>::u8>(p), typename Lanes<L>::i);
}

// bits of a code that lie together in a byte
template <int BITS> constexpr int LOW_BITS = BITS == 3 ? 2 : BITS == HALVES ? 4 : BITS;

// Elements i, i + 1, ... of every run of bytes of one group, L at a time.
template <int BITS, bool BOOK, bool SCALED, int L>
INLINE int64_t expand_lanes(const uint8_t* p, int64_t group, int64_t plane, int64_t i, const float* levels, float* out,
                            float s, float o) {
    typedef typename Lanes<L>::f f;
    typedef typename Lanes<L>::i v;
    constexpr int LOW = LOW_BITS<BITS>;
    const int64_t bytes = group * LOW / 8;
    v lane;
    for (int j = 0; j < L; j++) lane[j] = j % 8;
    for (; i + L <= bytes; i += L) {
        v x = bytes_to_lanes<L>(p + i), y = x;
        if (BITS == HALVES) y = bytes_to_lanes<L>(p + plane + i);
#pragma GCC unroll 4
        for (int k = 0; k < 8 / LOW; k++) {
            v codes = x >> (k * LOW);
            if (BITS == HALVES) codes = (codes & 15) << 4 | ((y >> (k * LOW)) & 15);
            if (BITS == 3) {
                int64_t first = k * bytes + i;
                const uint8_t* high = p + bytes + first / 8;
                v third;
                if (L == 16) {
                    for (int j = 0; j < L; j++) third[j] = high[j / 8];
                } else {
                    third = v{} + (high[0] >> (first % 8));
                }
                codes = (codes & 3) | (((third >> lane) & 1) << 2);
            }
            f value = levels_of<BITS == HALVES ? 8 : BITS, BOOK, L>(codes, levels);
            if (SCALED) value = value * s + o;
            memcpy(out + k * bytes + i, &value, sizeof value);
        }
    }
    return i;
}

#if defined(__AVX512F__)
// 2 and 3 bits in groups of 32: eight bytes give all four vectors' worth, so each byte is loaded into two lanes
template <int BITS, bool SCALED>
INLINE void expand_32(const uint8_t* p, __m512 table, float* out, float s, float o) {
    const __m512i shift = _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512i x = _mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_set1_epi64x(load_as<int64_t>(p))), shift);
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        __m512i codes = k == 0 ? x : _mm512_srli_epi32(x, 4);
        if (BITS == 3) {
            __mmask16 high = load_as<uint16_t>(p + 8 + 2 * k);
            codes = _mm512_and_epi32(codes, _mm512_set1_epi32(3));
            codes = _mm512_mask_or_epi32(codes, high, codes, _mm512_set1_epi32(4));
        }
        __m512 value = _mm512_permutexvar_ps(codes, table);
        if (SCALED) value = _mm512_fmadd_ps(value, _mm512_set1_ps(s), _mm512_set1_ps(o));
        _mm512_storeu_ps(out + 16 * k, value);
    }
}
#endif

// `count` groups to rows of `out` that are `stride` apart. SCALED: times the scale, plus the offset of each group.
template <int BITS, bool BOOK, bool SCALED>
static void expand_groups(const Format& f, const uint8_t* codes, int64_t count, const float* scale, const float* offset,
                          float* out, int64_t stride) {
    const int64_t group = f.group, group_bytes = f.group_bytes, plane = f.plane;
    const float* levels = f.levels;
#if defined(__AVX512F__)
    if constexpr (BITS == 2 || BITS == 3) {
        if (group == 32) {
            __m512 table = load(levels);
            for (int64_t g = 0; g < count; g++) {
                expand_32<BITS, SCALED>(codes + g * group_bytes, table, out + g * stride, SCALED ? scale[g] : 0,
                                        SCALED ? offset[g] : 0);
            }
            return;
        }
    }
#endif
    for (int64_t g = 0; g < count; g++) {
        const uint8_t* p = codes + g * group_bytes;
        float *row = out + g * stride, s = SCALED ? scale[g] : 0, o = SCALED ? offset[g] : 0;
        const int64_t bytes = group * LOW_BITS<BITS> / 8;
        int64_t i = 0;
        // a vector of high bits has to begin with a whole byte of them, or lie within one
        const bool whole = BITS != 3 || bytes % 16 == 0;
        if (W == 16 && whole) i = expand_lanes<BITS, BOOK, SCALED, 16>(p, group, plane, i, levels, row, s, o);
        if (W >= 8 && (BITS != 3 || bytes % 8 == 0))
            i = expand_lanes<BITS, BOOK, SCALED, 8>(p, group, plane, i, levels, row, s, o);
        if (BITS != 3 || bytes % 4 == 0) i = expand_lanes<BITS, BOOK, SCALED, 4>(p, group, plane, i, levels, row, s, o);
        for (; i < bytes; i++) {
            for (int64_t e = i; e < group; e += bytes) {
                float value = levels[code_at<BITS>(p, group, plane, e)];
                row[e] = SCALED ? value * s + o : value;
            }
        }
    }
}

typedef void (*Expand)(const Format&, const uint8_t*, int64_t, const float*, const float*, float*, int64_t);

template <bool SCALED> static Expand expand_for(const Format& f) {
#define CHOOSE(BITS) \
    case BITS: return f.codebook ? expand_groups<BITS, true, SCALED> : expand_groups<BITS, false, SCALED>
    switch (layout(f)) {
        case HALVES: return expand_groups<HALVES, false, SCALED>;
        // as floats they are the levels of a codebook
        case UPPER: return expand_groups<4, true, SCALED>;
        CHOOSE(2);
        CHOOSE(3);
        CHOOSE(4);
        default: CHOOSE(8);
    }
#undef CHOOSE
}

// The offsets of the codes, and of the scales, of one block.
INLINE const uint8_t* codes_of(const Blocks& b, int64_t batch, int64_t head, int64_t block) {
    return b.codes + batch * b.codes_batch + head * b.codes_head + block * b.codes_block;
}
INLINE int64_t scale_of(const Blocks& b, int64_t batch, int64_t head, int64_t block) {
    return batch * b.scale_batch + head * b.scale_head + block * b.scale_block;
}

// a group runs along what the rows of the tile run along: tokens for keys' scores, channels for values
INLINE bool along_rows(const Format& f, bool token_rows) { return f.channel_axis != token_rows; }

// One block, dequantized: rows are tokens, or channels. `scale` and `offset` are those of its groups, `group` room for
// one group. A row of the tile is `stride` long and holds the padding of the last group too.
static void dequantize_block(const Format& f, Expand expand, const uint8_t* codes, const float* scale, const float* offset,
                             bool token_rows, float* tile, int64_t stride, float* group) {
    const int64_t length = f.block_length;
    if (along_rows(f, token_rows)) {
        if (f.channel_axis) return expand(f, codes, f.groups, scale, offset, tile, stride);
        for (int64_t run = 0; run < f.runs; run++) {
            int64_t first = run * length;
            expand(f, codes + first * f.group_bytes, length, scale + first, offset + first, tile + run * f.group, stride);
        }
        return;
    }
    for (int64_t g = 0; g < f.groups; g++) {
        expand(f, codes + g * f.group_bytes, 1, scale + g, offset + g, group, f.group);
        if (f.channel_axis) {
            for (int64_t t = 0; t < length; t++) tile[t * stride + g] = group[t];
        } else {
            int64_t token = g % length, channel = g / length * f.group;
            int64_t width = smaller(f.group, f.head_dim - channel);
            for (int64_t c = 0; c < width; c++) tile[(channel + c) * stride + token] = group[c];
        }
    }
}

}  // namespace HFKV_ISA
}  // namespace hfkv
