// Prefix sums in one block.
#pragma once

#include "common/prelude.cuh"

// Replaces each count by the sum of all counts before it. A block of 1024 threads, a stretch of counts to each.
DEVICE void scan(u32* counts, u32 n) {
    __shared__ u32 warps[WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 each = (n + 1023) / 1024, begin = min(threadIdx.x * each, n), end = min(begin + each, n);
    u32 total = 0;
    for (u32 i = begin; i < end; i++) total += counts[i];
    const u32 sum = warp_scan(total);
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
