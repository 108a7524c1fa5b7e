// fill: out = value
// moves  n·sizeof(ACT) bytes; bound: memory
// grid   a thread per 16 bytes, the last one takes the rest; any n
// order  elementwise
#include "common/prelude.cuh"

KERNEL fill(ACT* out, u64 n, float value) {
    constexpr int N = Vec<ACT>::N;
    const u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        Vec<ACT> v;
#pragma unroll
        for (int k = 0; k < N; k++) v.at[k] = from_float<ACT>(value);
        store(out + i, v);
    } else {
        for (u64 k = i; k < n; k++) out[k] = from_float<ACT>(value);
    }
}
