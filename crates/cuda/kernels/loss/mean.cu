// loss_mean: loss (+)= loss_scale·Σ losses
// moves  4·n bytes; bound: latency
// grid   one block; any n
// order  thread t takes t, t + 1024, ... in f64, then a tree: repeatable
#include "common/prelude.cuh"

KERNEL __launch_bounds__(1024) loss_mean(float* loss, const float* losses, const Scalars* scalars, u64 n, u32 adds) {
    __shared__ double shared[1024];
    double sum = 0.0;
#pragma unroll 8
    for (u64 i = threadIdx.x; i < n; i += 1024) sum += (double)losses[i];
    block_sum_f64<1024>(sum, shared);
    if (threadIdx.x == 0) {
        const float mean = (float)(sum * (double)scalars->loss_scale);
        *loss = adds ? *loss + mean : mean;
    }
}
