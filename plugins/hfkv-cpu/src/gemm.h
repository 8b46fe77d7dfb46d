// C += A B for a few rows of A and a tile B that is in the cache, accumulated in registers.
#pragma once

#include "simd.h"

namespace hfkv {
namespace HFKV_ISA {

template <int R, int C, bool ADD, typename B>
INLINE void product_tile(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                         const float* start) {
    vf acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) acc[r][j] = ADD ? load(c + r * ldc + j * W) : set(start ? start[r] : 0.f);
    }
    for (int64_t k = 0; k < depth; k++) {
        vf row[C];
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) row[j] = load(b + k * ldb + j * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vf x = set(a[r * lda + k]);
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) acc[r][j] += x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) store(c + r * ldc + j * W, acc[r][j]);
    }
}

template <int C, bool ADD, typename B>
static void product_rows(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                         int64_t depth, const float* start) {
    int64_t r = 0;
#define ROWS(R) product_tile<R, C, ADD>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, start ? start + r : nullptr)
    for (; rows - r > 6 || rows - r == 4; r += 4) ROWS(4);
    switch (rows - r) {
        case 6: ROWS(3); r += 3; ROWS(3); break;
        case 5: ROWS(3); r += 3; ROWS(2); break;
        case 3: ROWS(3); break;
        case 2: ROWS(2); break;
        case 1: ROWS(1); break;
    }
#undef ROWS
}

// `columns` is a multiple of W. ADD: on top of what is in C; otherwise each row starts from `start` (null: zero).
template <bool ADD, typename B>
static void product(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                    int64_t columns, int64_t depth, const float* start = nullptr) {
    int64_t j = 0;
    for (; j + COLUMNS * W <= columns; j += COLUMNS * W) {
        product_rows<COLUMNS, ADD>(a, lda, b + j, ldb, c + j, ldc, rows, depth, start);
    }
    if (COLUMNS > 2 && j + 2 * W <= columns) {
        product_rows<2, ADD>(a, lda, b + j, ldb, c + j, ldc, rows, depth, start);
        j += 2 * W;
    }
    for (; j < columns; j += W) product_rows<1, ADD>(a, lda, b + j, ldb, c + j, ldc, rows, depth, start);
}

template <int R, typename B>
INLINE void dots_of_four(const float* a, int64_t lda, const B* const b[4], float* c, int64_t ldc, int64_t depth) {
    vf acc[R][4] = {};
    for (int64_t k = 0; k < depth; k += W) {
        vf token[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) token[j] = load(b[j] + k);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const vf x = load(a + r * lda + k);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) acc[r][j] += x * token[j];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store_sums(c + r * ldc, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

// C[row][token] = A[row] . B[token], both `depth` long, a multiple of W. C has room for a multiple of four tokens.
template <typename B>
static void products_by_rows(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                             int64_t tokens, int64_t depth) {
    // 16 sums where there are 32 registers
    constexpr int ROWS = COLUMNS;
    for (int64_t t = 0; t < tokens; t += 4) {
        const B* four[4];
        for (int64_t j = 0; j < 4; j++) {
            four[j] = b + smaller(t + j, tokens - 1) * ldb;
            // what comes some tokens later
            for (int64_t k = 0; k < depth; k += 64 / sizeof(B)) __builtin_prefetch(four[j] + 8 * ldb + k);
        }
        int64_t r = 0;
        for (; r + ROWS <= rows; r += ROWS) dots_of_four<ROWS>(a + r * lda, lda, four, c + r * ldc + t, ldc, depth);
        for (; r < rows; r++) dots_of_four<1>(a + r * lda, lda, four, c + r * ldc + t, ldc, depth);
    }
}

}  // namespace HFKV_ISA
}  // namespace hfkv
