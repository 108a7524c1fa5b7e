// A block with a row of WIDTH elements of ACT: thread t takes the vectors t, t + THREADS and so on. WIDTH is a multiple of a vector.
#pragma once

#include "common/prelude.cuh"

constexpr int N = Vec<ACT>::N;
constexpr int VECS = WIDTH / N;
constexpr int STEPS = (VECS + 255) / 256;                                       // vectors of a thread
constexpr int THREADS = ((VECS + STEPS - 1) / STEPS + WARP - 1) / WARP * WARP;  // the fewest that need no more steps
constexpr int WARPS = THREADS / WARP;

// The block's sum, for all threads: a butterfly in each warp, then warps in order. `shared` has room for WARPS floats that no
// other sum uses.
DEVICE float row_sum(float x, float* shared) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) x += shared[w];
    return x;
}
