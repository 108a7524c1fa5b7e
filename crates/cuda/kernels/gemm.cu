// A matrix product for whatever the library refuses, and data to time the library's own with.
#include "prelude.cuh"

constexpr int TILE = 32;
constexpr int ROWS = 8;  // warps of a block

// gemm_any: d (column-major m by n) (+)= op(a) · op(b), f32 accumulation
// moves  about (m*k*n/32 + k*n*m/32) elements through the caches; bound: arithmetic, not tuned
// grid   one block of 256 threads per 32 by 32 tile of d, tiles along m first; any shape; strides in elements
// order  k in turn: fixed, no atomics
KERNEL __launch_bounds__(TILE* ROWS)
    gemm_any(OUT* d, const IN* a, const IN* b, u64 m, u64 n, u64 k, u64 a_k, u64 a_m, u64 b_k, u64 b_n, u32 adds) {
    __shared__ float as[TILE][TILE + 1], bs[TILE][TILE + 1];  // [k][m], [k][n]
    const u64 tiles_m = (m + TILE - 1) / TILE;
    const u64 m0 = blockIdx.x % tiles_m * TILE, n0 = blockIdx.x / tiles_m * TILE;
    const u32 lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;
    const bool a_along_m = a_m == 1, b_along_n = b_n == 1;  // lanes go along the axis that is contiguous
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
            OUT* to = d + col * m + row;
            *to = from_float<OUT>(adds ? acc[i] + to_float(*to) : acc[i]);
        }
    }
}

// noise: bf16 numbers spread evenly over [-1, 1), which read as f32 are so too
// moves  16*n bytes; bound: memory
// grid   any number of blocks
KERNEL noise(uint4* out, u64 n) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 h = (u32)i * 4u + j;
            h = (h ^ (h >> 16)) * 0x85ebca6bu;
            h = (h ^ (h >> 13)) * 0xc2b2ae35u;
            h ^= h >> 16;
            const float scale = 1.0f / 32768.0f;
            const bf16 low = from_float<bf16>((short)(h & 0xffff) * scale);
            const bf16 high = from_float<bf16>((short)(h >> 16) * scale);
            word[j] = (u32)high.bits << 16 | low.bits;
        }
        out[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

// checksum: *sum += a number that depends on every word of x (n,4) and on its place
// moves  16*n bytes; bound: memory
// grid   any number of whole warps
// order  integers: any order gives the same sum, so the atomics are harmless
KERNEL checksum(u64* sum, const uint4* x, u64 n) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    u64 mine = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint4 v = x[i];
        const u64 low = (u64)v.y << 32 | v.x, high = (u64)v.w << 32 | v.z;
        mine += (low ^ (low >> 29)) * (4 * i + 1) + (high ^ (high >> 29)) * (4 * i + 3);
    }
#pragma unroll
    for (int d = WARP / 2; d > 0; d >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, d);
    if (threadIdx.x % WARP == 0) atomicAdd(sum, mine);
}
