// Sums over rows in two steps: kernels leave partial rows, and this adds them up.
#pragma once

#include "common/prelude.cuh"
#include "common/floats.cuh"

// The column that a warp of the last step sums.
DEVICE u64 own_column() { return (u64)blockIdx.x * WARP + threadIdx.x / WARP; }

// Sum of own_column() over `count` partial rows, in all lanes, for blocks of 1024 threads: 32 columns, 32 rows at a time. Every 32nd
// row in order, UNROLL of them under way, then a fixed tree: repeatable.
template <int UNROLL = 8, class A> DEVICE A column_sum(const A* partials, u32 count, u64 columns) {
    __shared__ A tile[WARP][WARP + 1];
    const u32 lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const u64 column = (u64)blockIdx.x * WARP + lane;
    A sum = 0;
    if (column < columns) {
#pragma unroll UNROLL
        for (u32 row = slice; row < count; row += WARP) sum += partials[row * columns + column];
    }
    tile[slice][lane] = sum;
    __syncthreads();
    // Turned round, so that each warp adds up one column.
    return warp_sum(tile[lane][slice]);
}
