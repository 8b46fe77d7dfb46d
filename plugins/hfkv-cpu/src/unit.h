// Attention of a few query rows over a part of one KV head's tokens: packed blocks, then exact tokens, by online
// softmax. A unit's rows are the queries of the query heads that share the KV head.
#pragma once

#include "codes.h"
#include "gemm.h"
#include "room.h"

namespace hfkv {
namespace HFKV_ISA {

struct Unit {
    const Attend& a;
    const Room room;
    int64_t batch, kv_head, first_row, rows, share;
    Expand expand_keys, expand_values, dequantize_keys, dequantize_values;
    bool fold_keys, fold_values;

    Unit(const Attend& args, float* scratch) : a(args), room(args, scratch) {
        const Format &k = a.keys.format, &v = a.values.format;
        share = a.heads / a.kv_heads;
        expand_keys = expand_for<false>(k);
        expand_values = expand_for<false>(v);
        dequantize_keys = expand_for<true>(k);
        dequantize_values = expand_for<true>(v);
    }

    void place(int64_t index) {
        first_row = index % a.row_blocks * a.unit_rows;
        kv_head = index / a.row_blocks % a.kv_heads;
        batch = index / a.row_blocks / a.kv_heads;
        rows = smaller(a.unit_rows, share * a.queries - first_row);
        const Format &k = a.keys.format, &v = a.values.format;
        fold_keys = rows <= FOLD_ROWS && k.channel_axis;
        fold_values = rows <= FOLD_ROWS && !v.channel_axis && v.group % W == 0;
    }

    int64_t head_of(int64_t row) const { return kv_head * share + (first_row + row) / a.queries; }
    int64_t query_of(int64_t row) const { return (first_row + row) % a.queries; }

    void clear() const {
        // whole vectors of rows: what is done to them all meets no numbers that slow the processor down
        for (int64_t r = 0; r < round_up(rows, 16); r++) room.maximum[r] = -FLT_MAX, room.total[r] = 0, room.peak[r] = 0;
        memset(room.output, 0, rows * room.width * sizeof(float));
    }

    void load_query() const {
        const Tensor& q = a.query;
        const int64_t size = type_size(q.type);
        for (int64_t r = 0; r < rows; r++) {
            const char* p = (const char*)q.data +
                            (batch * q.batch_stride + head_of(r) * q.head_stride + query_of(r) * q.row_stride) * size;
            to_floats(p, q.type, a.keys.format.head_dim, a.scale, room.query + r * room.depth, room.depth);
        }
    }

    // The scales and offsets of a block's groups, times a factor; its codes.
    const uint8_t* load_block(const Blocks& b, int64_t block, float factor) const {
        const int64_t at = scale_of(b, batch, kv_head, block), groups = b.format.groups;
        to_floats(b.scale + at, Type::float16, groups, factor, room.scale, round_up(groups, W));
        to_floats(b.offset + at, Type::float16, groups, factor, room.offset, round_up(groups, W));
        return codes_of(b, batch, kv_head, block);
    }

    // The scores of columns `column` to `column + count`: add the mask, or leave out what is later than the query.
    void apply_mask(float* scores, int64_t column, int64_t count) const {
        const Tensor& m = a.mask;
        if (m.data) {
            const int64_t size = type_size(m.type);
            for (int64_t r = 0; r < rows; r++) {
                const char* p = (const char*)m.data + (batch * m.batch_stride + head_of(r) * m.head_stride +
                                                       query_of(r) * m.row_stride + column) * size;
                float* s = scores + r * room.tokens;
                if (m.type == Type::boolean) {
                    for (int64_t i = 0; i < count; i++) s[i] = p[i] ? s[i] : -INFINITY;
                } else if (m.type == Type::float32) {
                    for (int64_t i = 0; i < count; i++) s[i] += ((const float*)p)[i];
                } else if (m.type == Type::bfloat16) {
                    for (int64_t i = 0; i < count; i++) s[i] += bfloat_to_float(((const uint16_t*)p)[i]);
                } else {
                    for (int64_t i = 0; i < count; i++) s[i] += half_to_float(((const uint16_t*)p)[i]);
                }
            }
        } else if (a.causal) {
            const int64_t length = a.exact_length + a.keys.count * a.keys.format.block_length;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t limit = length - (a.queries - 1 - query_of(r));
                for (int64_t i = larger(0, limit - column); i < count; i++) scores[r * room.tokens + i] = -INFINITY;
            }
        }
    }

    // The maxima of these scores, and what was summed before to the new ones.
    void raise_maximum(int64_t count) {
        const int64_t padded = round_up(count, W);
        for (int64_t r = 0; r < rows; r++) {
            float* s = room.scores + r * room.tokens;
            for (int64_t i = count; i < padded; i++) s[i] = -INFINITY;
            vf highest = load(s);
            for (int64_t i = W; i < padded; i += W) highest = maximum(highest, load(s + i));
            room.peak[r] = largest(highest);
        }
        for (int64_t r = 0; r < rows; r += W) {
            const vf before = load(room.maximum + r), top = load(room.peak + r), now = maximum(before, top);
            const vf kept = exp_nonpositive(before - now);
            store(room.maximum + r, now);
            store(room.peak + r, exp_nonpositive(top - now));
            store(room.total + r, load(room.total + r) * kept);
            for (int64_t i = 0; i < smaller(W, rows - r); i++) {
                if (kept[i] == 1) continue;
                float* o = room.output + (r + i) * room.width;
                for (int64_t c = 0; c < room.width; c += W) store(o + c, load(o + c) * kept[i]);
            }
        }
    }

    // Scores to weights times each row's factor, zeros up to `length`.
    void weigh(int64_t count, int64_t length, const float* factor) {
        const int64_t padded = round_up(count, W);
        for (int64_t r = 0; r < rows; r++) {
            float* s = room.scores + r * room.tokens;
            const float now = room.maximum[r], by = factor[r];
            vf total = {};
            for (int64_t i = 0; i < padded; i += W) {
                const vf weight = exp_nonpositive(load(s + i) - now);
                total += weight;
                store(s + i, weight * by);
            }
            for (int64_t i = padded; i < length; i += W) store(s + i, vf{});
            room.total[r] += sum(total);
        }
    }

    void soften(int64_t count) {
        raise_maximum(count);
        for (int64_t r = 0; r < rows; r++) room.factor[r] = 1;
        weigh(count, 0, room.factor);
    }

    void score_block(int64_t block, float* scores) {
        const Format& f = a.keys.format;
        const uint8_t* codes = load_block(a.keys, block, 1);
        const int64_t stride = round_up(f.block_length, W);
        const float* query = room.query;
        if (fold_keys) {
            expand_keys(f, codes, f.groups, nullptr, nullptr, room.tile, stride);
            for (int64_t r = 0; r < rows; r++) {
                const float* q = room.query + r * room.depth;
                float* folded = room.folded + r * room.depth;
                vf dot = {};
                for (int64_t d = 0; d < f.head_dim; d += W) {
                    dot += load(q + d) * load(room.offset + d);
                    store(folded + d, load(q + d) * load(room.scale + d));
                }
                room.start[r] = sum(dot);
            }
            query = room.folded;
        } else {
            dequantize_block(f, dequantize_keys, codes, room.scale, room.offset, false, room.tile, stride, room.group);
        }
        product<false>(query, room.depth, room.tile, stride, scores, room.tokens, rows, stride, f.head_dim,
                       fold_keys ? room.start : nullptr);
    }

    void add_block(int64_t block, const float* weights) {
        const Format& f = a.values.format;
        const uint8_t* codes = load_block(a.values, block, 1);
        const int64_t length = f.block_length;
        if (!fold_values) {
            dequantize_block(f, dequantize_values, codes, room.scale, room.offset, true, room.tile, room.width, room.group);
            product<true>(weights, room.tokens, room.tile, room.width, room.output, room.width, rows,
                          round_up(larger(f.runs * f.group, f.head_dim), W), length);
            return;
        }
        const int64_t stride = round_up(length, W);
        for (int64_t run = 0; run < f.runs; run++) {
            const int64_t first = run * length;
            expand_values(f, codes + first * f.group_bytes, length, nullptr, nullptr, room.tile, f.group);
            for (int64_t r = 0; r < rows; r++) {
                const float* w = weights + r * room.tokens;
                float shift = 0;
                for (int64_t t = 0; t < length; t++) {
                    room.weights[r * stride + t] = w[t] * room.scale[first + t];
                    shift += w[t] * room.offset[first + t];
                }
                room.shift[r * a.values.format.runs + run] += shift;
            }
            product<true>(room.weights, stride, room.tile, f.group, room.output + run * f.group, room.width, rows, f.group,
                          length);
        }
    }

    void packed_step(int64_t first, int64_t count) {
        const int64_t length = a.keys.format.block_length, tokens = count * length;
        for (int64_t b = 0; b < count; b++) score_block(first + b, room.scores + b * length);
        apply_mask(room.scores, a.sink + first * length, tokens);
        soften(tokens);
        const Format& f = a.values.format;
        if (fold_values) memset(room.shift, 0, rows * a.values.format.runs * sizeof(float));
        for (int64_t b = 0; b < count; b++) add_block(first + b, room.scores + b * length);
        if (!fold_values) return;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t run = 0; run < f.runs; run++) {
                float *o = room.output + r * room.width + run * f.group, shift = room.shift[r * a.values.format.runs + run];
                for (int64_t c = 0; c < f.group; c += W) store(o + c, load(o + c) + shift);
            }
        }
    }

    // Rows of exact tokens as floats in the tile, padded with zeros to whole vectors.
    const float* exact_rows(const Tensor& x, int64_t first, int64_t count, int64_t channels) {
        const int64_t at = batch * x.batch_stride + kv_head * x.head_stride + first * x.row_stride, size = type_size(x.type);
        const int64_t padded = round_up(channels, W);
        for (int64_t t = 0; t < count; t++) {
            to_floats((const char*)x.data + (at + t * x.row_stride) * size, x.type, channels, 1, room.tile + t * padded, padded);
        }
        return room.tile;
    }

    // Calls `use` with rows of exact tokens, and how far they are apart: in their own type where they are, if they are whole
    // vectors.
    template <typename Use> void with_rows(const Tensor& x, int64_t first, int64_t count, int64_t channels, Use use) {
        const int64_t at = batch * x.batch_stride + kv_head * x.head_stride + first * x.row_stride;
        if (channels % W) return use(exact_rows(x, first, count, channels), round_up(channels, W));
        if (x.type == Type::float32) return use((const float*)x.data + at, x.row_stride);
        if (x.type == Type::bfloat16) return use((const Bfloat*)x.data + at, x.row_stride);
        use((const Half*)x.data + at, x.row_stride);
    }

    // The columns of the sink come before the packed ones, the others after.
    void mask_exact(int64_t first, int64_t count) const {
        const int64_t packed = a.keys.count * a.keys.format.block_length;
        const int64_t before = larger(0, smaller(a.sink - first, count));
        if (before > 0) apply_mask(room.scores, first, before);
        if (count > before) apply_mask(room.scores + before, packed + first + before, count - before);
    }

    void exact_step(int64_t first, int64_t count) {
        const int64_t depth = a.keys.format.head_dim, width = a.values.format.head_dim;
        with_rows(a.exact_keys, first, count, depth, [&](const auto* keys, int64_t stride) {
            products_by_rows(room.query, room.depth, keys, stride, room.scores, room.tokens, rows, count, round_up(depth, W));
        });
        mask_exact(first, count);
        soften(count);
        with_rows(a.exact_values, first, count, width, [&](const auto* values, int64_t stride) {
            product<true>(room.scores, room.tokens, values, stride, room.output, room.width, rows, round_up(width, W), count);
        });
    }

    void write_row(int64_t r, const float* sums, float top, float total) const {
        const Tensor& o = a.output;
        const int64_t head = head_of(r), query = query_of(r);
        const int64_t at = batch * o.batch_stride + head * o.head_stride + query * o.row_stride;
        from_floats(sums, a.values.format.head_dim, total > 0 ? 1 / total : 0, (char*)o.data + at * type_size(o.type), o.type);
        a.lse[(batch * a.heads + head) * a.queries + query] = total > 0 ? top + logf(total) : -INFINITY;
    }

    // A part of the tokens: packed blocks, and exact ones.
    struct Part {
        int64_t begin, end, exact_begin, exact_end;
    };

    Part part_of(int64_t split) const {
        const int64_t length = a.keys.format.block_length, packed = a.keys.count;
        const int64_t parts = packed + (a.exact_length + length - 1) / length;
        const int64_t begin = parts * split / a.splits, end = parts * (split + 1) / a.splits;
        return {smaller(begin, packed), smaller(end, packed), larger(0, begin - packed) * length,
                smaller(larger(0, end - packed) * length, a.exact_length)};
    }

    // Asks for the scales and offsets of blocks that come later, which may be past the end.
    void expect(const Blocks& b, int64_t first, int64_t count) const {
        const int64_t at = scale_of(b, batch, kv_head, first), bytes = count * b.scale_block * sizeof(uint16_t);
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch((const char*)(b.scale + at) + i, 0, 2);
            __builtin_prefetch((const char*)(b.offset + at) + i, 0, 2);
        }
    }

    // The same of exact tokens.
    void expect(const Tensor& x, int64_t first, int64_t count, int64_t channels) const {
        const int64_t size = type_size(x.type), at = batch * x.batch_stride + kv_head * x.head_stride + first * x.row_stride;
        for (int64_t t = 0; t < count; t++) {
            const char* row = (const char*)x.data + (at + t * x.row_stride) * size;
            for (int64_t i = 0; i < channels * size; i += 64) __builtin_prefetch(row + i, 0, 2);
        }
    }

    // Both kinds of steps, of somebody who has the queries.
    template <typename Steps> void take_steps(const Part& part, Steps& steps) const {
        // a share of the exact tokens is asked for in each packed step
        const int64_t count = (part.end - part.begin + room.step - 1) / room.step;
        const int64_t exact = part.exact_end - part.exact_begin, share = count ? (exact + count - 1) / count : 0;
        int64_t asked = part.exact_begin;
        for (int64_t b = part.begin; b < part.end; b += room.step) {
            expect(a.keys, b + room.step, room.step);
            expect(a.values, b + room.step, room.step);
            const int64_t tokens = smaller(share, part.exact_end - asked);
            expect(a.exact_keys, asked, tokens, a.keys.format.head_dim);
            expect(a.exact_values, asked, tokens, a.values.format.head_dim);
            asked += tokens;
            steps.packed_step(b, smaller(room.step, part.end - b));
        }
        for (int64_t t = part.exact_begin; t < part.exact_end; t += STEP) {
            steps.exact_step(t, smaller(STEP, part.exact_end - t));
        }
    }

    void write(int64_t index) const {
        const int64_t channels = a.values.format.head_dim;
        float* p = a.partial + index * a.partial_size;
        for (int64_t r = 0; r < rows; r++, p += channels + 2) {
            if (a.splits == 1) {
                write_row(r, room.output + r * room.width, room.maximum[r], room.total[r]);
                continue;
            }
            memcpy(p, room.output + r * room.width, channels * sizeof(float));
            p[channels] = room.maximum[r];
            p[channels + 1] = room.total[r];
        }
    }
};

}  // namespace HFKV_ISA
}  // namespace hfkv
