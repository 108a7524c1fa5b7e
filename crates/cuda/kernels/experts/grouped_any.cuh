// Tiles of 128x128 of products of experts in f32 arithmetic, for operands of any shape and alignment.
#pragma once

#include "experts/grouped.cuh"

constexpr int BM = 128, BN = 128, BK = 16, THREADS = 256;
constexpr int PITCH = BM + 4;
constexpr int COPIES = BM * BK / THREADS;
static_assert(BM == BN, "both tiles are loaded alike");

extern __shared__ u32 group_space[];

// One operand: (lines of the result) x (terms of its sums) in memory where ALONG, else (terms) x (lines).
template <bool ALONG, class T = IN> struct Operand {
    const T* at;
    u64 stride;
    u32 lines;  // rows or columns of the result from the tile's first on

    // This thread's elements of a tile, terms k.. of `terms`; 0 outside.
    DEVICE void fetch(float (&to)[COPIES], u64 k, u64 terms) const {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const u32 n = threadIdx.x + i * THREADS;
            const u32 line = ALONG ? n / BK : n % BM, term = ALONG ? n % BK : n / BM;
            const u64 from = ALONG ? line * stride + k + term : (k + term) * stride + line;
            to[i] = line < lines && k + term < terms ? to_float(at[from]) : 0.0f;
        }
    }
    static DEVICE void put(float (*tile)[PITCH], const float (&from)[COPIES]) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const u32 n = threadIdx.x + i * THREADS;
            tile[ALONG ? n % BK : n / BM][ALONG ? n / BK : n % BM] = from[i];
        }
    }
};

typedef float Result[8][8];

DEVICE void zero(Result& acc) {
#pragma unroll
    for (int i = 0; i < 64; i++) acc[i / 8][i % 8] = 0.0f;
}

// A thread has rows 4y.. and 64+4y.., columns 4x.. and 64+4x.. of the tile.
DEVICE u32 spread(u32 at, int i) { return at * 4 + (i < 4 ? i : 60 + i); }

// acc[i][j] += Σ_k a(row i, k)·b(column j, k)
template <class A, class B> DEVICE void product(Result& acc, const A& a, const B& b, u64 terms) {
    __shared__ __align__(16) float tile_a[BK][PITCH], tile_b[BK][PITCH];
    const u32 y = threadIdx.x / 16, x = threadIdx.x % 16;
    float next_a[COPIES], next_b[COPIES];
    a.fetch(next_a, 0, terms);
    b.fetch(next_b, 0, terms);
    for (u64 k = 0; k < terms; k += BK) {
        __syncthreads();  // all are done with the tiles before
        a.put(tile_a, next_a);
        b.put(tile_b, next_b);
        __syncthreads();
        a.fetch(next_a, k + BK, terms);
        b.fetch(next_b, k + BK, terms);
#pragma unroll
        for (int term = 0; term < BK; term++) {
            float left[8], right[8];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const Vec<float> l = load(&tile_a[term][64 * h + 4 * y]), r = load(&tile_b[term][64 * h + 4 * x]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    left[4 * h + i] = l.at[i];
                    right[4 * h + i] = r.at[i];
                }
            }
#pragma unroll
            for (int i = 0; i < 64; i++) acc[i / 8][i % 8] = __fmaf_rn(left[i / 8], right[i % 8], acc[i / 8][i % 8]);
        }
    }
}

// The part of the tile that exists, times `scale`, to rows of `stride` elements.
template <class T>
DEVICE void write(T* to, u64 stride, u32 rows, u32 columns, const Result& acc, bool adds = false, float scale = 1.0f) {
    const u32 y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 row = spread(y, i), column = spread(x, j);
            if (row >= rows || column >= columns) continue;
            T* const place = to + row * stride + column;
            *place = from_float<T>(adds ? __fmaf_rn(scale, acc[i][j], to_float(*place)) : scale * acc[i][j]);
        }
}

DEVICE Groups groups_of(const i32* offsets, u32 experts, u32 rows, Fault* fault) {
    return read_groups<BM>(group_space, offsets, experts, rows, fault);
}
