// The bias of a linear layer where the matrix product does not handle it. IN is the element type read, OUT the one written.
#include "common/partials.cuh"

constexpr int WARPS = 8;
constexpr int AHEAD = 4;  // loads in flight per thread

// N neighbouring elements as floats: one, or a vector.
template <int N> DEVICE void read(float (&to)[N], const IN* from) {
    if constexpr (N == 1) {
        to[0] = to_float(*from);
    } else {
        Vec<IN> v = load_once(from);
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = to_float(v.at[i]);
    }
}

template <int N> DEVICE void sum_rows(float* partials, const IN* x, u64 rows, u64 cols, u64 chunk_rows) {
    __shared__ float sums[WARPS][WARP * N];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 tile = (u64)blockIdx.x * WARP * N, col = tile + lane * N;
    const u64 first = (u64)blockIdx.y * chunk_rows;
    const u64 last = first + chunk_rows < rows ? first + chunk_rows : rows;
    float acc[N] = {};
    if (col < cols) {
        u64 row = first + warp;
        for (; row + (AHEAD - 1) * WARPS < last; row += AHEAD * WARPS) {
            float v[AHEAD][N];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) read<N>(v[j], x + (row + j * WARPS) * cols + col);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int i = 0; i < N; i++) acc[i] += v[j][i];
        }
        for (; row < last; row += WARPS) {
            float v[N];
            read<N>(v, x + row * cols + col);
#pragma unroll
            for (int i = 0; i < N; i++) acc[i] += v[i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) sums[warp][i * WARP + lane] = acc[i];
    __syncthreads();
    const u32 t = threadIdx.x;
    if (t < WARP * N && tile + t < cols) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w][t % N * WARP + t / N];
        partials[blockIdx.y * cols + tile + t] = total;
    }
}

// bias_partials: partials (chunks,C) = sums of x (rows,C) over each chunk of rows
// moves  rows*C*sizeof(IN) bytes; bound: memory
// grid   (ceil(C / (32 * N)), chunks) of 256 threads, N = 16 / sizeof(IN); needs C % N == 0 and x aligned to 16 bytes
// order  a warp takes every eighth row of a chunk, then the eight warps in order: fixed, no atomics
KERNEL __launch_bounds__(WARPS * WARP) bias_partials(float* partials, const IN* x, u64 rows, u64 cols, u64 chunk_rows) {
    sum_rows<Vec<IN>::N>(partials, x, rows, cols, chunk_rows);
}

// bias_partials_any: the same for any C, one column per lane: grid (ceil(C / 32), chunks)
KERNEL __launch_bounds__(WARPS * WARP)
    bias_partials_any(float* partials, const IN* x, u64 rows, u64 cols, u64 chunk_rows) {
    sum_rows<1>(partials, x, rows, cols, chunk_rows);
}

// bias_finish: d_bias (C) (+)= sums of partials (chunks,C)
// moves  4*chunks*C bytes; bound: latency
// grid   ceil(C / 32) blocks of 1024 threads: 32 columns by 32 slices of the chunks
// order  every 32nd chunk in order, then a fixed tree over the slices
KERNEL __launch_bounds__(1024) bias_finish(OUT* d_bias, const float* partials, u32 chunks, u64 cols, u32 adds) {
    float total = column_sum<4>(partials, chunks, cols);
    const u64 mine = own_column();
    if (threadIdx.x % WARP == 0 && mine < cols) {
        if (adds) total += to_float(d_bias[mine]);
        d_bias[mine] = from_float<OUT>(total);
    }
}

// bias_rows: out (rows,C) = bias (C) in every row; a product that adds to it rounds the sum once
// moves  rows*C*sizeof(OUT) bytes; bound: memory, not tuned: only for shapes the library has no bias for
// grid   any number of blocks, each takes rows in turn
KERNEL bias_rows(OUT* out, const OUT* bias, u64 rows, u64 cols) {
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        for (u64 col = threadIdx.x; col < cols; col += blockDim.x) out[row * cols + col] = bias[col];
    }
}
