// The largest |x| of a block of 256 threads.
#pragma once

#include "common/prelude.cuh"

// The bits of the largest |x| of a vector, or `most` if that is larger.
DEVICE u32 largest_of(const Vec<ACT>& v, u32 most) {
#pragma unroll
    for (int k = 0; k < Vec<ACT>::N; k++) {
        const u32 size = __float_as_uint(to_float(v.at[k])) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    return most;
}

// Writes the largest of the block's numbers to `most`, if it is larger than what is there. Most blocks see nothing new, and are spared
// the atomic.
DEVICE void count_largest(u32 mine, u32* most) {
    __shared__ u32 largest[256 / WARP];
    mine = __reduce_max_sync(0xffffffffu, mine);
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 256 / WARP; w++) mine = largest[w] > mine ? largest[w] : mine;
        if (mine > *reinterpret_cast<volatile u32*>(most)) atomicMax(most, mine);
    }
}
