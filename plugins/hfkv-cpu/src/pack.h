// Quantizing blocks (round to nearest between a group's minimum and maximum) and dequantizing them.
#pragma once

#include "codes.h"

namespace hfkv {
namespace HFKV_ISA {

struct Tile {
    int64_t stride;
    float *states, *group, *scale, *offset;
    int64_t size;

    Tile(const Convert& c, float* base) {
        const Format& f = c.blocks.format;
        // dequantized, a row of the tile is a token with its padding; to be quantized, a group
        stride = f.channel_axis ? round_up(f.head_dim, 16) : f.runs * f.group;
        const int64_t padded = round_up(f.groups, 16);
        states = base;
        group = states + round_up(f.groups * f.group + f.block_length * stride, 16);
        scale = group + round_up(larger(f.group, f.head_dim), 16) + 16;
        offset = scale + padded;
        size = offset + padded - base;
    }
};

static int64_t convert_scratch(const Convert& c) { return Tile(c, nullptr).size; }

struct Place {
    int64_t batch, head, block;
    char* states;

    Place(const Convert& c, int64_t index) {
        block = index % c.blocks.count;
        head = index / c.blocks.count % c.heads;
        batch = index / c.blocks.count / c.heads;
        const Tensor& s = c.states;
        states = (char*)s.data + (batch * s.batch_stride + head * s.head_stride +
                                  block * c.blocks.format.block_length * s.row_stride) * type_size(s.type);
    }
};

// The arithmetic of `round_to_grid`, operation for operation: codes, scale and offset are equal to the reference's.
static void quantize_group(float* x, int64_t group, float levels, uint16_t* scale, uint16_t* offset) {
    vf low = load(x), high = low;
    vi strange = low != low;
    int64_t i = W;
    for (; i + W <= group; i += W) {
        vf v = load(x + i);
        low = minimum(low, v), high = maximum(high, v);
        strange |= v != v;
    }
    float least = -largest(-low), most = largest(high);
    bool nan = false;
    for (int j = 0; j < W; j++) nan |= strange[j] != 0;
    for (; i < group; i++) {
        least = x[i] < least ? x[i] : least, most = x[i] > most ? x[i] : most;
        nan |= x[i] != x[i];
    }
    float s = (most - least) / levels, o = least;
    if (s < 5.9604644775390625e-8f) s = 5.9604644775390625e-8f;
    s = s > 65504.f ? 65504.f : s;
    o = o < -65504.f ? -65504.f : o > 65504.f ? 65504.f : o;
    if (nan) s = o = NAN;
    *scale = float_to_half(s), *offset = float_to_half(o);
    s = half_to_float(*scale), o = half_to_float(*offset);
    for (i = 0; i < group; i += W) {
        vf code = (load(x + i) - o) / s;
        code = minimum(maximum(code, set(0.f)), set(levels));
        // the addition rounds halves to even; within 0 to 255 clamping before or after is the same
        store(x + i, (code + 12582912.f) - 12582912.f);
    }
}

// Hierarchical codes to bytes: the upper halves, and `plane` further the lower ones.
static void write_halves(const float* x, const Format& f, uint8_t* out) {
    const int64_t half = f.group / 2;
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 8 <= half; i += 8) {
        const __m256i one = _mm256_cvttps_epi32(load_as<__m256>(x + i));
        const __m256i other = _mm256_cvttps_epi32(load_as<__m256>(x + half + i));
        // each bit from the second where the mask is set, else from the first
        const __m256i mask = _mm256_set1_epi32(0xf0);
        const __m256i upper = _mm256_ternarylogic_epi32(mask, other, _mm256_srli_epi32(one, 4), 0xca);
        const __m256i lower = _mm256_ternarylogic_epi32(mask, _mm256_slli_epi32(other, 4), one, 0xca);
        _mm_storel_epi64((__m128i*)(out + i), _mm256_cvtepi32_epi8(upper));
        _mm_storel_epi64((__m128i*)(out + f.plane + i), _mm256_cvtepi32_epi8(lower));
    }
#endif
    for (; i < half; i++) {
        const int one = (int)x[i], other = (int)x[half + i];
        out[i] = (uint8_t)(one >> 4 | (other & 0xf0));
        out[f.plane + i] = (uint8_t)((one & 15) | other << 4);
    }
}

// Codes to bytes; what is in `x` is lost.
static void write_codes(float* x, const Format& f, uint8_t* out) {
    if (f.plane) return write_halves(x, f, out);
    const int bits = f.nbits == 3 ? 2 : f.nbits, per_byte = 8 / bits;
    const int64_t bytes = f.group / per_byte;
    if (f.nbits == 3) {
        for (int64_t i = 0; i < f.group / 8; i++) {
            int byte = 0;
            for (int k = 0; k < 8; k++) {
                const int high = (int)x[i * 8 + k] >> 2;
                byte |= high << k;
                x[i * 8 + k] -= (float)(high * 4);
            }
            out[bytes + i] = byte;
        }
    }
    // a byte's codes are put together as floats, which hold them exactly
    typedef Lanes<8>::f eight;
    for (int k = 1; k < per_byte; k++) {
        const float place = 1 << (k * bits);
        int64_t i = 0;
        for (; i + 8 <= bytes; i += 8) {
            const eight joined = load_as<eight>(x + i) + load_as<eight>(x + k * bytes + i) * place;
            memcpy(x + i, &joined, sizeof joined);
        }
        for (; i < bytes; i++) x[i] += x[k * bytes + i] * place;
    }
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 8 <= bytes; i += 8) {
        _mm_storel_epi64((__m128i*)(out + i), _mm256_cvtepi32_epi8(_mm256_cvtps_epi32(load_as<__m256>(x + i))));
    }
#endif
    for (; i < bytes; i++) out[i] = (uint8_t)(int)x[i];
}

static void pack(const Convert& c, int64_t index, float* scratch) {
    const Format& f = c.blocks.format;
    const Place place(c, index);
    const Tile tile(c, scratch);
    const int64_t row_bytes = c.states.row_stride * type_size(c.states.type);
    for (int64_t t = 0; t < f.block_length; t++) {
        float* row = tile.group;
        to_floats(place.states + t * row_bytes, c.states.type, f.head_dim, 1, row, 0);
        if (f.channel_axis) {
            for (int64_t d = 0; d < f.head_dim; d++) tile.states[d * f.group + t] = row[d];
            continue;
        }
        for (int64_t run = 0; run < f.runs; run++) {
            float* group = tile.states + (run * f.block_length + t) * f.group;
            // beyond the last channel it repeats: padding must not widen the last group's range
            for (int64_t i = 0; i < f.group; i++) group[i] = row[smaller(run * f.group + i, f.head_dim - 1)];
        }
    }
    uint8_t* codes = (uint8_t*)codes_of(c.blocks, place.batch, place.head, place.block);
    const int64_t at = scale_of(c.blocks, place.batch, place.head, place.block);
    const float levels = (1 << f.nbits) - 1;
    for (int64_t g = 0; g < f.groups; g++) {
        // a group of 8 or 24 ends within a vector: what follows it must survive, so it is quantized in a copy
        float* group = tile.group;
        memcpy(group, tile.states + g * f.group, f.group * sizeof(float));
        for (int64_t i = f.group; i < W; i++) group[i] = group[0];
        quantize_group(group, larger(f.group, W), levels, c.blocks.scale + at + g, c.blocks.offset + at + g);
        write_codes(group, f, codes + g * f.group_bytes);
    }
}

static void unpack(const Convert& c, int64_t index, float* scratch) {
    const Format& f = c.blocks.format;
    const Place place(c, index);
    const Tile tile(c, scratch);
    const int64_t at = scale_of(c.blocks, place.batch, place.head, place.block);
    to_floats(c.blocks.scale + at, Type::float16, f.groups, 1, tile.scale, 0);
    to_floats(c.blocks.offset + at, Type::float16, f.groups, 1, tile.offset, 0);
    dequantize_block(f, expand_for<true>(f), codes_of(c.blocks, place.batch, place.head, place.block), tile.scale,
                     tile.offset, true, tile.states, tile.stride, tile.group);
    const int64_t row_bytes = c.states.row_stride * type_size(c.states.type);
    for (int64_t t = 0; t < f.block_length; t++) {
        from_floats(tile.states + t * tile.stride, f.head_dim, 1, place.states + t * row_bytes, c.states.type);
    }
}

}  // namespace HFKV_ISA
}  // namespace hfkv
