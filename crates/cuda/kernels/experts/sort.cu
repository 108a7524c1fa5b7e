// route_sort: sorts routes (token·K + j) by expert, stable: order[row] = route, places[route] = row, rows
//             offsets[e]..offsets[e+1] are expert e's. An expert that does not exist is a fault
// moves  20 bytes a route; bound: latency
// grid   three launches: route_count (each block a stretch of `rounds`·blockDim routes), route_scan (one block),
//        route_scatter. Shared memory: 4·E bytes, and 4·E for each warp of route_scatter
// order  integers: counts are exact in any order, ranks within a stretch by position
#include "common/scan.cuh"

// The expert of a route; one that does not exist counts as the last, so that rows stay a permutation.
DEVICE u32 expert_at(const i32* experts, u32 i, u32 all) { return min((u32)experts[i], all - 1); }

// counts[e][block]
KERNEL __launch_bounds__(1024) route_count(u32* counts, const i32* experts, Fault* fault, u32 routes, u32 all, u32 rounds) {
    extern __shared__ u32 seen[];
    for (u32 e = threadIdx.x; e < all; e += blockDim.x) seen[e] = 0;
    __syncthreads();
    for (u32 r = 0; r < rounds; r++) {
        const u32 i = (blockIdx.x * rounds + r) * blockDim.x + threadIdx.x;
        if (i >= routes) break;
        atomicAdd(&seen[expert_at(experts, i, all)], 1u);
        if ((u32)experts[i] >= all) report(fault, 4, experts[i], (i32)i, (i32)all);
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < all; e += blockDim.x) counts[e * gridDim.x + blockIdx.x] = seen[e];
}

KERNEL __launch_bounds__(1024) route_scan(u32* counts, u32 n) { scan(counts, n); }

KERNEL __launch_bounds__(1024) route_scatter(i32* order, i32* places, i32* offsets, const i32* experts, const u32* starts,
                                             u32 routes, u32 all, u32 rounds) {
    extern __shared__ u32 seen[];  // where the next route of each expert goes, then the same for each warp
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    u32* const next = seen;
    u32* const mine = seen + all * (1 + warp);
    for (u32 e = threadIdx.x; e < all; e += blockDim.x) {
        next[e] = starts[e * gridDim.x + blockIdx.x];
        if (blockIdx.x == 0) offsets[e] = (i32)next[e];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) offsets[all] = (i32)routes;
    for (u32 r = 0; r < rounds; r++) {
        const u32 first = (blockIdx.x * rounds + r) * blockDim.x, i = first + threadIdx.x;
        if (first >= routes) break;
        for (u32 e = lane; e < all; e += WARP) mine[e] = 0;
        __syncwarp();
        const u32 expert = i < routes ? expert_at(experts, i, all) : ~0u;  // lanes past the end match each other only
        const u32 same = __match_any_sync(0xffffffffu, expert);
        const u32 rank = __popc(same & ((1u << lane) - 1));
        if (rank == 0 && i < routes) mine[expert] = __popc(same);
        __syncthreads();
        for (u32 e = threadIdx.x; e < all; e += blockDim.x) {
            u32 before = next[e];
            for (u32 w = 0; w < warps; w++) {
                const u32 count = seen[all * (1 + w) + e];
                seen[all * (1 + w) + e] = before;
                before += count;
            }
            next[e] = before;
        }
        __syncthreads();
        if (i < routes) {
            const u32 row = mine[expert] + rank;
            places[i] = (i32)row;
            order[row] = (i32)i;
        }
        __syncwarp();  // before the counts of this warp are cleared
    }
}
