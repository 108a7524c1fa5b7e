// argmax: per row best = the index of the largest of the first `vocab` columns, the lowest of equal ones; the first NaN,
//         if there is one
// moves  rows·vocab·sizeof(ACT) bytes; bound: memory
// grid   a block per row; any shape. `vector`: rows are whole vectors of 16 bytes
// order  the maximum of pairs (logit, index), which are all different: the same in any order
#include "common/prelude.cuh"

constexpr int N = Vec<ACT>::N;

// A number that is larger where the logit is and, for equal logits, where the index is lower. 0 stands for no logit.
DEVICE u64 key(float x, u32 at) {
    const u32 bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)(x == x ? ordered : 0xffffffffu) << 32 | ~at;
}

DEVICE u64 warp_largest(u64 mine) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(0xffffffffu, mine, d);
        mine = other > mine ? other : mine;
    }
    return mine;
}

KERNEL __launch_bounds__(512) argmax(i32* best, const ACT* logits, u32 vocab, u32 padded, u32 vector) {
    __shared__ u64 warps[WARP];
    const ACT* const line = logits + (u64)blockIdx.x * padded;
    u64 mine = 0;
    const auto take = [&](float x, u32 at) {
        const u64 here = key(x, at);
        mine = here > mine ? here : mine;
    };
    const u32 whole = vector ? vocab / N : 0;  // vectors without padding
    for (u32 v = threadIdx.x; v < whole; v += blockDim.x) {
        float x[N];
        load_floats(x, line + v * N);
#pragma unroll
        for (int k = 0; k < N; k++) take(x[k], v * N + k);
    }
    for (u32 c = whole * N + threadIdx.x; c < vocab; c += blockDim.x) take(to_float(line[c]), c);
    mine = warp_largest(mine);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = mine;
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    mine = warp_largest(threadIdx.x < blockDim.x / WARP ? warps[threadIdx.x] : 0);
    if (threadIdx.x == 0) best[blockIdx.x] = (i32)~(u32)mine;
}
