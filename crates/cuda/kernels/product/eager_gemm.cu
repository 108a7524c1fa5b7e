// gemm: C = alpha*A.B + beta*C of f32, A (M,K), B (K,N), C (M,N) row-major, `batch` of each one after the other: what
// runs where there is no cuBLASLt. A and B may be stored transposed: elements are a_row and a_col, b_row and b_col apart.
//
// bound  FMA; reads A N/TILE times and B M/TILE times
// grid   one block of 256 threads per tile of TILE rows and columns of C, 4x4 elements per thread; any sizes
// order  over K in order by one thread: bitwise repeatable
//
// With beta = 0 the old C is not read.
#include "common/prelude.cuh"

constexpr int TILE = 64;
constexpr int DEPTH = 16;
constexpr int PITCH = TILE + 4;  // rows of A are written down a column of `a`: 4 words apart, in different banks

struct Size {
    u64 m, n, k;
    u64 a_row, a_col, b_row, b_col;
};

// The tile of A at (row, depth), transposed, and that of B at (depth, col); zeros outside.
DEVICE void load_tiles(float (&a)[DEPTH][PITCH], float (&b)[DEPTH][TILE], const float* from_a, const float* from_b,
                       const Size& size, u64 row, u64 col, u64 depth) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
        u64 r = row + i / DEPTH, k = depth + i % DEPTH;
        a[i % DEPTH][i / DEPTH] = r < size.m && k < size.k ? from_a[r * size.a_row + k * size.a_col] : 0.0f;
    }
#pragma unroll
    for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
        u64 k = depth + i / TILE, c = col + i % TILE;
        b[i / TILE][i % TILE] = k < size.k && c < size.n ? from_b[k * size.b_row + c * size.b_col] : 0.0f;
    }
}

KERNEL __launch_bounds__(256) gemm(float* c, const float* a, const float* b, u64 m, u64 n, u64 k, u64 a_row, u64 a_col,
                                   u64 b_row, u64 b_col, float alpha, float beta) {
    __shared__ float tile_a[DEPTH][PITCH], tile_b[DEPTH][TILE];
    const Size size = {m, n, k, a_row, a_col, b_row, b_col};
    const u64 across = (n + TILE - 1) / TILE, down = (m + TILE - 1) / TILE;
    const u64 batch = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
    const u64 row = tile / across * TILE, col = tile % across * TILE;
    a += batch * m * k, b += batch * k * n, c += batch * m * n;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

    float acc[4][4] = {};
    for (u64 depth = 0; depth < k; depth += DEPTH) {
        __syncthreads();  // all are done with the tiles before
        load_tiles(tile_a, tile_b, a, b, size, row, col, depth);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[r][e] = fmaf(tile_a[d][ty * 4 + r], tile_b[d][tx + 16 * e], acc[r][e]);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            u64 i = row + ty * 4 + r, j = col + tx + 16 * e;
            if (i >= m || j >= n) continue;
            float* to = c + i * n + j;
            *to = beta == 0.0f ? alpha * acc[r][e] : fmaf(alpha, acc[r][e], beta * *to);
        }
}
