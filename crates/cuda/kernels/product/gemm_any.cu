// A matrix product for whatever the library refuses, and data to time the library's own with.
#include "common/prelude.cuh"

constexpr int TILE = 32;
constexpr int ROWS = 8;  // warps of a block

// gemm_any: d = alpha · op(a) · op(b) + beta · c, of column-major m by n matrices one after the other, f32 accumulation;
//           c may be d, and is not read where beta is 0
// moves  about (m*k*n/32 + k*n*m/32) elements through the caches; bound: arithmetic, not tuned
//        d and c have `d_n` elements from one column to the next: more than m only where there is one matrix
// grid   one block of 256 threads per 32 by 32 tile of d, tiles along m first, times the matrices; any shape; strides in
//        elements
// order  k in order: fixed, no atomics
KERNEL __launch_bounds__(TILE* ROWS)
    gemm_any(OUT* d, const OUT* c, const IN* a, const IN* b, u64 m, u64 n, u64 k, u64 a_k, u64 a_m, u64 b_k, u64 b_n,
             u64 d_n, float alpha, float beta) {
    __shared__ float as[TILE][TILE + 1], bs[TILE][TILE + 1];  // [k][m], [k][n]
    const u64 tiles_m = (m + TILE - 1) / TILE;
    const u64 m0 = blockIdx.x % tiles_m * TILE, n0 = blockIdx.x / tiles_m * TILE;
    const u32 lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;
    const bool a_along_m = a_m == 1, b_along_n = b_n == 1;  // lanes go along the axis that is contiguous
    d += blockIdx.y * m * n;
    c += blockIdx.y * m * n;
    a += blockIdx.y * m * k;
    b += blockIdx.y * k * n;
    float acc[TILE / ROWS] = {};
    for (u64 k0 = 0; k0 < k; k0 += TILE) {
#pragma unroll
        for (int i = 0; i < TILE; i += ROWS) {
            const u32 other = warp + i;
            const u32 am = a_along_m ? lane : other, ak = a_along_m ? other : lane;
            const u32 bn = b_along_n ? lane : other, bk = b_along_n ? other : lane;
            as[ak][am] = m0 + am < m && k0 + ak < k ? to_float(a[(m0 + am) * a_m + (k0 + ak) * a_k]) : 0.0f;
            bs[bk][bn] = n0 + bn < n && k0 + bk < k ? to_float(b[(n0 + bn) * b_n + (k0 + bk) * b_k]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int l = 0; l < TILE; l++) {
            const float x = as[l][lane];
#pragma unroll
            for (int i = 0; i < TILE / ROWS; i++) acc[i] += x * bs[l][warp + i * ROWS];
        }
        __syncthreads();  // the tiles are overwritten next
    }
#pragma unroll
    for (int i = 0; i < TILE / ROWS; i++) {
        const u64 row = m0 + lane, col = n0 + warp + i * ROWS;
        if (row < m && col < n) {
            const u64 at = col * d_n + row;
            const float sum = alpha * acc[i];
            d[at] = from_float<OUT>(beta == 0.0f ? sum : __fmaf_rn(beta, to_float(c[at]), sum));
        }
    }
}
