// grad_norm: norm = √Σ g² over one flat pool; halt = 1 if it was not 0 or if the norm or the loss is not finite, else 0
// moves  n·sizeof(GRAD) bytes; bound: memory
// grid   grad_norm_parts: a fixed number of blocks, whatever the device; grad_norm_total: one block; any n
// order  each thread its vectors in turn, a tree over the block, then over the blocks: the same on every device.
//        f64, so that tiny and huge gradients neither vanish nor overflow; bf16 squares are exact in f32 and 8 of them
//        are added there first
#include "prelude.cuh"

constexpr int THREADS = 512;
constexpr int N = Vec<GRAD>::N;

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

KERNEL __launch_bounds__(THREADS) grad_norm_parts(double* parts, const GRAD* grads, u64 n) {
    __shared__ double shared[THREADS];
    double sum = 0.0;
    const u64 vectors = n / N, step = (u64)gridDim.x * THREADS;
    const u64 first = (u64)blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 4
    for (u64 v = first; v < vectors; v += step) {
        float g[N];
        load_floats(g, grads + v * N);
        if constexpr (sizeof(GRAD) == 2) {
            float squares = 0.0f;
#pragma unroll
            for (int k = 0; k < N; k++) squares = __fmaf_rn(g[k], g[k], squares);
            sum += (double)squares;
        } else {
#pragma unroll
            for (int k = 0; k < N; k++) sum += (double)g[k] * (double)g[k];
        }
    }
    const u64 rest = vectors * N + first;
    if (rest < n) sum += (double)to_float(grads[rest]) * (double)to_float(grads[rest]);
    block_sum_f64<THREADS>(sum, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

KERNEL __launch_bounds__(THREADS) grad_norm_total(float* norm, float* halt, const float* loss,
                                                  const double* parts, u32 count) {
    __shared__ double shared[THREADS];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) sum += parts[i];
    block_sum_f64<THREADS>(sum, shared);
    if (threadIdx.x == 0) {
        const float total = (float)sqrt(sum);
        *norm = total;
        *halt = *halt == 0.0f && is_finite(total) && is_finite(*loss) ? 0.0f : 1.0f;
    }
}
