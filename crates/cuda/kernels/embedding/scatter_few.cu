// scatter_few: table[idx[i]] += rows[i] for few i, f32; for many, embedding/bwd.cu sorts first
// moves  8·n·C bytes, each touched row of the table twice, and n² / 2 comparisons of indices; bound: latency
// grid   (C / 256, n): the block of the first i with an index adds up all of that index. Any C; an index outside
//        0..limit is skipped
// order  that of i: the bits of the host's loop
#include "common/prelude.cuh"

KERNEL __launch_bounds__(256) scatter_few(float* table, const float* rows, const i32* idx, u32 n, u64 width, u32 limit) {
    const u32 mine = (u32)idx[blockIdx.y];
    if (mine >= limit) return;
    // A barrier that counts, so that all threads leave or stay.
    bool earlier = false;
    for (u32 j = threadIdx.x; j < blockIdx.y; j += blockDim.x) earlier |= (u32)idx[j] == mine;
    if (__syncthreads_or(earlier)) return;
    const u64 col = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= width) return;
    float sum = table[mine * width + col];
#pragma unroll 4
    for (u32 j = blockIdx.y; j < n; j++)
        if ((u32)idx[j] == mine) sum += rows[j * width + col];
    table[mine * width + col] = sum;
}
