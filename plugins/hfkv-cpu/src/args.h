// What crosses the border between the module and the kernels: plain records of pointers and strides.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hfkv {

enum class Type : int { float32, bfloat16, float16, boolean };

// A tensor [batch, heads, tokens, channels]; strides are in elements and the last one is 1.
struct Tensor {
    void* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
    Type type = Type::float32;
};

// How keys or values are packed: `hfkv.cache.PackedFormat`.
struct Format {
    int nbits;
    bool channel_axis;
    int64_t block_length, head_dim, runs, group, group_bytes, groups;
    // 256 levels: the codebook, or 0, 1, 2, ..., repeated
    const float* levels;
    // whether they are any: not of upper halves, which are evenly spaced
    bool codebook;
    // hierarchical codes of 8 bits are two planes of 4: bytes from a group's upper halves to its lower ones, else 0.
    // `group_bytes` is of one plane
    int64_t plane;
    // codes of 4 bits that are such upper halves
    bool upper;
};

// What kernels are compiled for: 2, 3, 4 or 8 bits, or one of these.
constexpr int HALVES = 16, UPPER = 17;
inline int layout(const Format& f) { return f.plane ? HALVES : f.upper ? UPPER : f.nbits; }

// Packed blocks [batch, heads, blocks, groups, group_bytes]: `hfkv.cache.PackedBlocks`. The last two dimensions are
// contiguous, those of scale and offset too; their strides are equal.
struct Blocks {
    Format format;
    uint8_t* codes;
    uint16_t *scale, *offset;
    int64_t codes_batch, codes_head, codes_block;
    int64_t scale_batch, scale_head, scale_block;
    int64_t count;
};

struct Attend {
    int64_t batch, heads, kv_heads, queries;
    int64_t exact_length, sink;
    Tensor query, exact_keys, exact_values, output;
    // data null: every query attends to all tokens; strides of 0 broadcast
    Tensor mask;
    float* lse;
    Blocks keys, values;
    float scale;
    bool causal;
    // the plan: rows of a unit, and into how many parts the context is split
    int64_t unit_rows, row_blocks, splits;
    // partial results of the splits: `partial_size` floats a unit
    float* partial;
    int64_t partial_size;
};

struct Convert {
    int64_t batch, heads;
    Tensor states;
    Blocks blocks;
};

// What a weight's code is: an index of so many bits (8 bits: a number by itself), or an int8 or float8 (e4m3). The last
// is bits3 whose third bits begin within a byte.
enum class Code : int { bits1 = 1, bits2 = 2, bits3 = 3, bits4 = 4, bits8 = 8, int8, float8, bits3_within };

// y = x W^T, or y = W, for a weight [outputs, inputs] on a grid: `hfkv.weights.PackedWeight`.
struct Matmul {
    int64_t rows, inputs, outputs;
    Code code;
    // inputs that share a scale, and the scales of an output; or one scale for all
    int64_t group, groups;
    bool one_scale;
    // 16 levels of codes below 8 bits; what codes of 8 bits count from
    const float* levels;
    float middle;
    int64_t row_bytes;
    const uint8_t* codes;
    // offset null: none
    const uint16_t *scale, *offset;
    Tensor x, y;
    // the plan: outputs of a unit, a multiple of 4; x in the order of the codes, made once for all units
    int64_t unit_outputs;
    float* shared;
};

// One instruction set's kernels. `scratch` is 64-byte aligned and as large as the matching function says, in floats.
struct Kernels {
    const char* name;
    // the most rows that a unit should have; asked before there is a plan
    int64_t (*unit_rows)(const Attend&);
    int64_t (*attend_scratch)(const Attend&);
    int64_t (*partial_size)(const Attend&);
    // `rows` is one of (batch, kv_head, block of rows)
    void (*attend)(const Attend&, int64_t rows, int64_t split, float* scratch);
    // joins the splits of these rows
    void (*merge)(const Attend&, int64_t rows);
    int64_t (*convert_scratch)(const Convert&);
    // the `index`-th block of (batch, head, block)
    void (*pack)(const Convert&, int64_t index, float* scratch);
    void (*unpack)(const Convert&, int64_t index, float* scratch);
    int64_t (*matmul_shared)(const Matmul&);
    int64_t (*matmul_scratch)(const Matmul&);
    // fills `Matmul::shared`; before `matmul`
    void (*matmul_prepare)(const Matmul&);
    // the `index`-th unit of outputs: their products, or their weights
    void (*matmul)(const Matmul&, int64_t index, float* scratch);
    void (*expand)(const Matmul&, int64_t index, float* scratch);
};

}  // namespace hfkv
