// Numbers times packed weights, y = x W^T: codes become numbers in registers, and sums are in float32.
//
// Codes are packed row by row: byte i of a row of 4-bit codes has those of inputs i and i + half, and so on for fewer
// bits. A vector of bytes therefore gives one vector of weights for each `part` of the row. A row is cut into segments
// in which no part changes its scale; x is brought into the order in which segments read it once for all outputs, with
// zeros where a vector reaches past the end of its segment.
#pragma once

#include "simd.h"

namespace hfkv {
namespace HFKV_ISA {

constexpr int MOST_PARTS = 8;
// vectors of a segment: sums of segments are independent, and the processor works on several at a time
constexpr int64_t MOST_VECTORS = 8;
// rows of x that share one reading of the codes
constexpr int ROW_BLOCK = 4;
// bytes of codes that are asked for before they are read: a model's weights come from far away, each once a token
constexpr int64_t AHEAD = 2048;

struct Segment {
    int32_t first, length, groups[MOST_PARTS];
};

// What `Matmul::shared` begins with: where the rest of it lies.
struct Layout {
    int64_t parts, part, segments, vectors;
    int64_t x_stride, sums_stride;
    Segment* table;
    // x in the order of the segments, the sums of each group's x (where offsets need them), and one row of x
    float *x, *sums, *row, *end;
};

constexpr int parts_of(Code code) {
    return code == Code::bits1 ? 8 : code == Code::bits4 ? 2 : code == Code::bits2 || code == Code::bits3 || code == Code::bits3_within ? 4 : 1;
}
template <Code CODE> constexpr int PARTS = parts_of(CODE);

// Calls `next(first, length)` for each segment.
template <typename Next> static void each_segment(const Matmul& m, int64_t parts, int64_t part, Next next) {
    for (int64_t first = 0; first < part;) {
        int64_t end = smaller(part, first + MOST_VECTORS * W);
        for (int64_t k = 0; k < parts; k++) {
            const int64_t at = first + k * part;
            end = smaller(end, first + m.group - at % m.group);
        }
        next(first, end - first);
        first = end;
    }
}

static Layout layout_of(const Matmul& m) {
    Layout l{};
    l.parts = parts_of(m.code);
    l.part = (l.parts == 1 ? m.inputs : round_up(m.inputs, 8)) / l.parts;
    each_segment(m, l.parts, l.part, [&](int64_t, int64_t length) {
        l.segments++;
        l.vectors += (length + W - 1) / W;
    });
    l.x_stride = l.vectors * l.parts * W;
    l.sums_stride = m.offset || m.middle != 0 ? round_up(m.groups, W) : 0;
    char* table = (char*)m.shared + round_up(sizeof(Layout), 64);
    l.table = (Segment*)table;
    l.x = (float*)(table + round_up(l.segments * sizeof(Segment), 64));
    l.sums = l.x + m.rows * l.x_stride;
    l.row = l.sums + m.rows * l.sums_stride;
    l.end = l.row + round_up(m.inputs, 8);
    return l;
}

static int64_t matmul_shared(const Matmul& m) {
    const Layout l = layout_of(m);
    return l.end - m.shared;
}

static void matmul_prepare(const Matmul& m) {
    const Layout l = layout_of(m);
    memcpy(m.shared, &l, sizeof l);
    Segment* segment = l.table;
    each_segment(m, l.parts, l.part, [&](int64_t first, int64_t length) {
        segment->first = (int32_t)first, segment->length = (int32_t)length;
        for (int64_t k = 0; k < l.parts; k++) {
            // what pads a row is in no group: its x is 0
            segment->groups[k] = (int32_t)smaller((first + k * l.part) / m.group, m.groups - 1);
        }
        segment++;
    });
    for (int64_t r = 0; r < m.rows; r++) {
        const char* from = (const char*)m.x.data + r * m.x.row_stride * type_size(m.x.type);
        to_floats(from, m.x.type, m.inputs, 1.f, l.row, round_up(m.inputs, 8));
        float* to = l.x + r * l.x_stride;
        for (int64_t s = 0; s < l.segments; s++) {
            const Segment& segment = l.table[s];
            for (int64_t i = 0; i < segment.length; i += W) {
                const int64_t width = smaller(W, segment.length - i);
                for (int64_t k = 0; k < l.parts; k++, to += W) {
                    memcpy(to, l.row + k * l.part + segment.first + i, width * sizeof(float));
                    for (int64_t j = width; j < W; j++) to[j] = 0;
                }
            }
        }
        float* sums = l.sums + r * l.sums_stride;
        for (int64_t g = 0; g < l.sums_stride; g++) {
            float total = 0;
            const int64_t end = smaller(m.inputs, (g + 1) * m.group);
            int64_t i = g * m.group;
            vf lanes{};
            for (; i + W <= end; i += W) lanes += load(l.row + i);
            for (; i < end; i++) total += l.row[i];
            sums[g] = total + sum(lanes);
        }
    }
}

// Up to 16 levels, in registers; bits of a code above those that count may be anything.
struct Levels {
#if defined(__AVX512F__)
    __m512 all;
#elif defined(__AVX2__)
    __m256 low, high;
#else
    float all[16];
#endif
};
INLINE Levels levels_from(const float* p) {
    Levels r;
    memcpy(&r, p, sizeof r);
    return r;
}
template <Code CODE> INLINE vf look_up(vi codes, const Levels& levels) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)codes, levels.all);
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(levels.low, (__m256i)codes);
    if (CODE != Code::bits4) return low;
    const __m256 high = _mm256_permutevar8x32_ps(levels.high, (__m256i)codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)codes, 28)));
#else
    vf r;
    for (int i = 0; i < W; i++) r[i] = levels.all[codes[i] & 15];
    return r;
#endif
}

template <bool SIGNED> INLINE vi widen(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m128i bytes = load_as<__m128i>(p);
    return SIGNED ? (vi)_mm512_cvtepi8_epi32(bytes) : (vi)_mm512_cvtepu8_epi32(bytes);
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
    return SIGNED ? (vi)_mm256_cvtepi8_epi32(bytes) : (vi)_mm256_cvtepu8_epi32(bytes);
#else
    vi r;
    for (int i = 0; i < W; i++) r[i] = SIGNED ? (int8_t)p[i] : p[i];
    return r;
#endif
}

// float8 (e4m3) has the exponent of float16 less eight: what this gives is a 256th, which its scale makes up for
INLINE vf from_float8(const uint8_t* p) {
    uint16_t halves[W];
    for (int i = 0; i < W; i++) halves[i] = (uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
    return load_halves(halves);
}

// Two bits of each lane of `codes`, and a third above them: one of W bits that begin at bit `at` of `p`. Bits above are
// anything. ALIGNED: `at` is a multiple of 8.
template <bool ALIGNED> INLINE vi with_third_bits(vi codes, const uint8_t* p, uint64_t at) {
    const int shift = ALIGNED ? 0 : (int)(at % 8);
    vi lane;
    for (int j = 0; j < W; j++) lane[j] = j;
#if defined(__AVX512F__)
    const __m512i word = _mm512_broadcastd_epi32(_mm_cvtsi32_si128(load_as<int>(p + at / 8)));
    const __m512i turned = _mm512_rolv_epi32(word, (__m512i)((2 - shift) - lane));
    // where 3 has a bit, the first, else the second
    return (vi)_mm512_ternarylogic_epi32((__m512i)codes, turned, _mm512_set1_epi32(3), 0xe4);
#else
    const vi third = (vi{} + (int)(load_as<uint32_t>(p + at / 8) >> shift)) >> lane;
    return (codes & 3) | (third & 1) << 2;
#endif
}

// The weights of `part` in a vector of bytes, in units of the scale: `codes` is the row, `i` the place of the bytes.
template <Code CODE> struct Reader {
    Levels levels;
    int64_t part;

    INLINE Reader from(const Matmul& m, const Layout& l) { return {levels_from(m.levels), l.part}; }
    inline __attribute__((always_inline)) vi bytes(const uint8_t* codes, int64_t i) const {
        if constexpr (CODE == Code::float8) return vi{};
        return widen<CODE == Code::int8>(codes + i);
    }
    inline __attribute__((always_inline)) vf weights(vi bytes, int64_t k, const uint8_t* codes, int64_t i) const {
        if constexpr (CODE == Code::float8) return from_float8(codes + i);
        if constexpr (CODE == Code::int8 || CODE == Code::bits8) return __builtin_convertvector(bytes, vf);
        constexpr bool third = CODE == Code::bits3 || CODE == Code::bits3_within;
        constexpr int low = third ? 2 : (int)CODE;
        vi x = k ? bytes >> (int)(k * low) : bytes;
        if constexpr (third) x = with_third_bits<CODE == Code::bits3>(x, codes + part, i + k * part);
        return look_up<CODE>(x, levels);
    }
};

// One output for R rows of x: vectors whose lanes add up to it.
template <Code CODE, int R>
INLINE void product_of_row(const Layout& l, const Reader<CODE>& reader, const uint8_t* codes, const float* scale,
                           const float* x, vf* result) {
    constexpr int P = PARTS<CODE>;
    // sums of their own for the parts, as far as there are registers
    constexpr int SUMS = R * P <= 8 ? P : 1;
    vf sums[R][SUMS] = {};
    for (int64_t s = 0; s < l.segments; s++) {
        const Segment& segment = l.table[s];
        vf part[R][P] = {};
        for (int64_t i = segment.first; i < segment.first + segment.length; i += W) {
            const vi bytes = reader.bytes(codes, i);
#pragma GCC unroll 8
            for (int k = 0; k < P; k++) {
                const vf w = reader.weights(bytes, k, codes, i);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) part[r][k] += w * load(x + r * l.x_stride + k * W);
            }
            x += P * W;
        }
#pragma GCC unroll 8
        for (int k = 0; k < P; k++) {
            const vf factor = set(scale[segment.groups[k]]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][k % SUMS] += part[r][k] * factor;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        result[r] = sums[r][0];
        for (int k = 1; k < SUMS; k++) result[r] += sums[r][k];
    }
}

// A unit's scales, what is added to its weights (null: nothing) and room for one row of codes and for its outputs.
struct OutputUnit {
    int64_t first, count, stride;
    float *scale, *offset, *output;
    uint8_t* row;
};

INLINE int64_t scales_room(const Matmul& m) { return round_up(m.unit_outputs * m.groups + W, 16); }

static int64_t matmul_scratch(const Matmul& m) {
    return 2 * scales_room(m) + round_up(larger(ROW_BLOCK * m.unit_outputs, m.inputs + 8 + W), 16) +
           round_up(m.row_bytes / 4 + 32, 16);
}

static OutputUnit output_unit(const Matmul& m, int64_t index, float* scratch) {
    OutputUnit u;
    u.first = index * m.unit_outputs;
    u.count = smaller(m.unit_outputs, m.outputs - u.first);
    u.stride = m.one_scale ? 0 : m.groups;
    u.scale = scratch;
    u.offset = scratch + scales_room(m);
    u.output = u.offset + scales_room(m);
    u.row = (uint8_t*)(u.output + round_up(larger(ROW_BLOCK * m.unit_outputs, m.inputs + 8 + W), 16));
    const int64_t first = u.first * u.stride, count = m.one_scale ? 1 : u.count * m.groups;
    const float factor = m.code == Code::float8 ? 256.f : 1.f;
    to_floats(m.scale + first, Type::float16, count, factor, u.scale, count);
    if (m.offset) {
        to_floats(m.offset + first, Type::float16, count, 1.f, u.offset, count + W);
    } else if (m.middle != 0) {
        for (int64_t i = 0; i < count; i++) u.offset[i] = -m.middle * u.scale[i];
        for (int64_t i = count; i < count + W; i++) u.offset[i] = 0;
    } else {
        u.offset = nullptr;
    }
    return u;
}

// The codes of an output. Vectors reach past the end of a row: at the end of all codes, a copy of it.
INLINE const uint8_t* codes_of_output(const Matmul& m, const OutputUnit& u, int64_t output) {
    const uint8_t* codes = m.codes + output * m.row_bytes;
    if ((m.outputs - output) * m.row_bytes >= m.row_bytes + 16) return codes;
    memcpy(u.row, codes, m.row_bytes);
    memset(u.row + m.row_bytes, 0, 32);
    return u.row;
}

template <Code CODE, int R> static void matmul_rows(const Matmul& m, const Layout& l, const OutputUnit& u, int64_t row) {
    const Reader<CODE> reader = Reader<CODE>::from(m, l);
    const float *x = l.x + row * l.x_stride, *x_sums = l.sums + row * l.sums_stride;
    for (int64_t n = 0; n < u.count; n += 4) {
        vf lanes[4][R] = {};
        for (int64_t j = 0; j < smaller(4, u.count - n); j++) {
            const uint8_t* codes = codes_of_output(m, u, u.first + n + j);
            for (int64_t i = 0; i < m.row_bytes; i += 64) __builtin_prefetch(codes + AHEAD + i);
            product_of_row<CODE, R>(l, reader, codes, u.scale + (n + j) * u.stride, x, lanes[j]);
            if (!u.offset) continue;
            const float* offset = u.offset + (n + j) * u.stride;
            for (int64_t g = 0; g < l.sums_stride; g += W) {
#pragma GCC unroll 4
                // past its groups a row has those of the next: their sums are 0
                for (int r = 0; r < R; r++) lanes[j][r] += load(offset + g) * load(x_sums + r * l.sums_stride + g);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            store_sums(u.output + r * m.unit_outputs + n, lanes[0][r], lanes[1][r], lanes[2][r], lanes[3][r]);
        }
    }
    for (int r = 0; r < R; r++) {
        char* to = (char*)m.y.data + ((row + r) * m.y.row_stride + u.first) * type_size(m.y.type);
        from_floats(u.output + r * m.unit_outputs, u.count, 1.f, to, m.y.type);
    }
}

template <Code CODE> static void matmul_unit(const Matmul& m, const OutputUnit& u) {
    const Layout& l = *(const Layout*)m.shared;
    int64_t row = 0;
    for (; row + ROW_BLOCK <= m.rows; row += ROW_BLOCK) matmul_rows<CODE, ROW_BLOCK>(m, l, u, row);
    switch (m.rows - row) {
        case 3: return matmul_rows<CODE, 3>(m, l, u, row);
        case 2: return matmul_rows<CODE, 2>(m, l, u, row);
        case 1: return matmul_rows<CODE, 1>(m, l, u, row);
    }
}

// Rounded here: with what follows it would be one operation, and not what the reference computes.
INLINE vf rounded(vf x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__AVX2__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

// The weights of a unit's outputs to rows of y.
template <Code CODE> static void expand_unit(const Matmul& m, const OutputUnit& u) {
    const Layout& l = *(const Layout*)m.shared;
    const Reader<CODE> reader = Reader<CODE>::from(m, l);
    for (int64_t n = 0; n < u.count; n++) {
        const uint8_t* codes = codes_of_output(m, u, u.first + n);
        const float *scale = u.scale + n * u.stride, *offset = u.offset ? u.offset + n * u.stride : nullptr;
        for (int64_t s = 0; s < l.segments; s++) {
            const Segment& segment = l.table[s];
            const int64_t end = segment.first + segment.length;
            for (int64_t i = segment.first; i < end; i += W) {
                const vi bytes = reader.bytes(codes, i);
                const int64_t width = smaller(W, end - i);
#pragma GCC unroll 8
                for (int64_t k = 0; k < PARTS<CODE>; k++) {
                    const int32_t group = segment.groups[k];
                    vf w = rounded(reader.weights(bytes, k, codes, i) * scale[group]);
                    if (offset) w = w + offset[group];
                    float* to = u.output + k * l.part + i;
                    if (width == W) {
                        store(to, w);
                    } else {
                        for (int64_t j = 0; j < width; j++) to[j] = w[j];
                    }
                }
            }
        }
        char* to = (char*)m.y.data + (u.first + n) * m.y.row_stride * type_size(m.y.type);
        from_floats(u.output, m.inputs, 1.f, to, m.y.type);
    }
}

template <bool PRODUCT> static void run_outputs(const Matmul& m, int64_t index, float* scratch) {
    const OutputUnit u = output_unit(m, index, scratch);
    const Layout& l = *(const Layout*)m.shared;
    const bool aligned = W % 8 == 0 && l.part % 8 == 0 && (m.groups == 1 || m.group % 8 == 0);
#define CHOOSE(CODE) \
    case CODE: return PRODUCT ? matmul_unit<CODE>(m, u) : expand_unit<CODE>(m, u)
    switch (m.code == Code::bits3 && !aligned ? Code::bits3_within : m.code) {
        CHOOSE(Code::bits1);
        CHOOSE(Code::bits2);
        CHOOSE(Code::bits3);
        CHOOSE(Code::bits4);
        CHOOSE(Code::bits8);
        CHOOSE(Code::int8);
        CHOOSE(Code::float8);
        CHOOSE(Code::bits3_within);
    }
#undef CHOOSE
}

static void matmul(const Matmul& m, int64_t unit, float* scratch) { run_outputs<true>(m, unit, scratch); }
static void expand(const Matmul& m, int64_t unit, float* scratch) { run_outputs<false>(m, unit, scratch); }

}  // namespace HFKV_ISA
}  // namespace hfkv
