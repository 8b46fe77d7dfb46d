// Vectors of W floats by the compiler's vector types, and the few operations that need the processor's own
// instructions to be fast. Everything lives in a namespace of its own for each instruction set: no function compiled
// for one may be linked into another.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "args.h"

#define INLINE static inline __attribute__((always_inline))

namespace hfkv {
namespace HFKV_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

// registers of accumulators along one row of a matrix product: 16 in all, with 4 rows, where there are 32 registers
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int COLUMNS = 4;
#else
constexpr int COLUMNS = 2;
#endif

template <int L> struct Lanes {
    typedef float f __attribute__((vector_size(L * 4)));
    typedef int32_t i __attribute__((vector_size(L * 4)));
    typedef uint8_t u8 __attribute__((vector_size(L)));
    typedef uint16_t u16 __attribute__((vector_size(L * 2)));
};
typedef Lanes<W>::f vf;
typedef Lanes<W>::i vi;

template <typename V> INLINE V load_as(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE vf load(const float* p) { return load_as<vf>(p); }
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
// x - 0 is x for every x, -0 too; x + 0 is not
INLINE vf set(float x) { return x - vf{}; }
template <typename To, typename From> INLINE To bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To r;
    memcpy(&r, &v, sizeof r);
    return r;
}
INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE vf maximum(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
INLINE vf minimum(vf a, vf b) { return -maximum(-a, -b); }

INLINE float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    float s = 0;
    for (int i = 0; i < W; i++) s += v[i];
    return s;
#endif
}
INLINE float largest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

// four sums at once, to four places in a row
INLINE void store_sums(float* p, vf a, vf b, vf c, vf d) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
#define HALVES(v) _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))
#else
#define HALVES(v) v
#endif
    __m256 ab = _mm256_hadd_ps(HALVES(a), HALVES(b)), cd = _mm256_hadd_ps(HALVES(c), HALVES(d));
#undef HALVES
    __m256 abcd = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
    p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d);
#endif
}

// e^x for x <= 0, within 2 ulp while it matters; 0 far below
INLINE vf exp_nonpositive(vf x) {
#if defined(__AVX512F__)
    // 2^t: the nearest integer goes to the exponent, the rest is at most half
    const vf magic = set(12582912.f), log2_e = set(1.44269504088896341f);
    const vf clamped = maximum(x, set(-150.f)), n = (clamped * log2_e + magic) - magic, t = clamped * log2_e - n;
    vf p = set(1.5403530393381610e-4f);
    p = p * t + 1.3333558146428443e-3f;
    p = p * t + 9.6181291076284772e-3f;
    p = p * t + 5.5504108664821580e-2f;
    p = p * t + 2.4022650695910072e-1f;
    p = p * t + 6.9314718055994531e-1f;
    p = p * t + 1.f;
    return _mm512_scalef_ps(p, n);
#else
    const float magic = 12582912.f;
    vf clamped = maximum(x, set(-88.f));
    vf shifted = clamped * 1.44269504088896341f + magic;
    vf n = shifted - magic;
    vf r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = set(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    vi exponent = (bits<vi>(shifted) - bits<vi>(set(magic))) << 23;
    vf result = bits<vf>(bits<vi>(p) + exponent);
    return bits<vf>(bits<vi>(result) & (x > -87.f));
#endif
}

INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t rest = (uint32_t)(h & 0x7fff) << 13;
    // 2^112: from float16's exponent bias to float32's; right for subnormal numbers too
    uint32_t u = bits<uint32_t>(bits<float>(rest) * 5.192296858534828e33f);
    if ((h & 0x7c00) == 0x7c00) u |= 0x7f800000u;
    return bits<float>(u | (uint32_t)(h & 0x8000) << 16);
#endif
}
INLINE uint16_t float_to_half(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t u = bits<uint32_t>(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return sign | 0x7e00;
    if (rest >= 0x47800000u) return sign | 0x7c00;
    if (rest < 0x38800000u) {
        // subnormal: the addition rounds to a multiple of 2^-24
        float rounded = bits<float>(rest) + 0.5f;
        return sign | (uint16_t)(bits<uint32_t>(rounded) - 0x3f000000u);
    }
    rest += 0xfffu + ((rest >> 13) & 1);
    return sign | (uint16_t)((rest - 0x38000000u) >> 13);
#endif
}
INLINE float bfloat_to_float(uint16_t h) { return bits<float>((uint32_t)h << 16); }
INLINE uint16_t float_to_bfloat(float x) {
    uint32_t u = bits<uint32_t>(x);
    if (x != x) return (uint16_t)(u >> 16) | 0x40;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

INLINE vf load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(load_as<__m128i>(p));
#else
    vf r;
    for (int i = 0; i < W; i++) r[i] = half_to_float(p[i]);
    return r;
#endif
}
INLINE vf load_bfloats(const uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(p)), 16));
#elif defined(__AVX2__)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(p)), 16));
#else
    return bits<vf>(__builtin_convertvector(load_as<Lanes<W>::u16>(p), vi) << 16);
#endif
}

// float16 and bfloat16 numbers, which are loaded as floats
struct Half {
    uint16_t bits;
};
struct Bfloat {
    uint16_t bits;
};
INLINE vf load(const Half* p) { return load_halves(&p->bits); }
INLINE vf load(const Bfloat* p) { return load_bfloats(&p->bits); }

INLINE int64_t type_size(Type type) { return type == Type::float32 ? 4 : type == Type::boolean ? 1 : 2; }

// n numbers as floats, times a factor; zeros up to `padded`
static inline void to_floats(const void* from, Type type, int64_t n, float factor, float* to, int64_t padded) {
    int64_t i = 0;
    if (type == Type::float32) {
        const float* p = (const float*)from;
        for (; i + W <= n; i += W) store(to + i, load(p + i) * factor);
        for (; i < n; i++) to[i] = p[i] * factor;
    } else if (type == Type::bfloat16) {
        const uint16_t* p = (const uint16_t*)from;
        for (; i + W <= n; i += W) store(to + i, load_bfloats(p + i) * factor);
        for (; i < n; i++) to[i] = bfloat_to_float(p[i]) * factor;
    } else {
        const uint16_t* p = (const uint16_t*)from;
        for (; i + W <= n; i += W) store(to + i, load_halves(p + i) * factor);
        for (; i < n; i++) to[i] = half_to_float(p[i]) * factor;
    }
    for (; i < padded; i++) to[i] = 0;
}

// n floats times a factor, in another type
static inline void from_floats(const float* from, int64_t n, float factor, void* to, Type type) {
    if (type == Type::float32) {
        for (int64_t i = 0; i < n; i++) ((float*)to)[i] = from[i] * factor;
    } else if (type == Type::bfloat16) {
        for (int64_t i = 0; i < n; i++) ((uint16_t*)to)[i] = float_to_bfloat(from[i] * factor);
    } else {
        for (int64_t i = 0; i < n; i++) ((uint16_t*)to)[i] = float_to_half(from[i] * factor);
    }
}

}  // namespace HFKV_ISA
}  // namespace hfkv
