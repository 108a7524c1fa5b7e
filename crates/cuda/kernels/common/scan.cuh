// A sum over all before, in one block.
#pragma once

#include "common/prelude.cuh"

// counts becomes, in place, the sum of all before. A block of 1024, each thread a stretch.
DEVICE void scan(u32* counts, u32 n) {
    __shared__ u32 warps[WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 each = (n + 1023) / 1024, begin = min(threadIdx.x * each, n), end = min(begin + each, n);
    u32 total = 0;
    for (u32 i = begin; i < end; i++) total += counts[i];
    u32 sum = total;  // of this and all lower lanes
#pragma unroll
    for (int d = 1; d < WARP; d <<= 1) {
        const u32 below = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += below;
    }
    if (lane == WARP - 1) warps[warp] = sum;
    __syncthreads();
    u32 before = sum - total;
    for (u32 w = 0; w < warp; w++) before += warps[w];
    for (u32 i = begin; i < end; i++) {
        const u32 count = counts[i];
        counts[i] = before;
        before += count;
    }
}
