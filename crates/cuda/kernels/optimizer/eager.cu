// AdamW and the clipping of gradients, f32
//
// adamw_step: m += rest1 (g - m), v = beta2 v + rest2 g², w = w keep - size m / (√v root + eps), the numbers made by the host
// moves  28·n bytes; bound: memory
//
// clip_parts, clip_total, clip_scale: total_norm = √Σ grad²; grad *= clip / (total_norm + 1e-6) where that is below 1 or NaN
// moves  4·n bytes, and 8·n more where it clips; bound: memory
//
// grid   vectors where the arrays are aligned to 16 bytes, else single elements; any n
// order  adamw_step, clip_scale: elementwise. The norm in f64: a fixed number of blocks, each thread its elements in order, a
//        tree over the block, a tree over the blocks: the same bits on every device
#include "common/prelude.cuh"

constexpr int THREADS = 256;
constexpr int N = 4;
constexpr int NORM_THREADS = 512;

struct Step {
    float keep, beta2, rest1, rest2, size, root, eps;
};

// Division and root are the exact ones; memory leaves time for them.
DEVICE void update(float& w, float g, float& m, float& v, const Step& k) {
    m = __fmaf_rn(k.rest1, g - m, m);
    v = __fmaf_rn(k.beta2, v, k.rest2 * (g * g));
    const float denominator = __fmaf_rn(sqrtf(v), k.root, k.eps);
    w = __fmaf_rn(w, k.keep, -(k.size * (m / denominator)));
}

KERNEL __launch_bounds__(THREADS)
    adamw_step(float* param, const float* grad, float* m, float* v, u64 n, float keep, float beta2, float rest1,
               float rest2, float size, float root, float eps, u32 aligned) {
    const Step k = {keep, beta2, rest1, rest2, size, root, eps};
    const u64 first = (u64)blockIdx.x * (THREADS * N);
    const u64 i = first + threadIdx.x * N;
    if (aligned && i + N <= n) {
        Vec<float> w = load(param + i), one = load(m + i), two = load(v + i);
        const Vec<float> g = load(grad + i);
#pragma unroll
        for (int e = 0; e < N; e++) update(w.at[e], g.at[e], one.at[e], two.at[e], k);
        store(param + i, w);
        store(m + i, one);
        store(v + i, two);
        return;
    }
    // Without vectors neighbouring threads take neighbouring elements; one thread takes the elements after the last vector.
    const u64 begin = aligned ? i : first + threadIdx.x, end = min(n, aligned ? i + N : first + THREADS * N);
    for (u64 e = begin; e < end; e += aligned ? 1 : THREADS) update(param[e], grad[e], m[e], v[e], k);
}

DEVICE double square(float x) { return (double)x * (double)x; }

KERNEL __launch_bounds__(NORM_THREADS) clip_parts(double* parts, const float* grad, u64 n, u32 aligned) {
    __shared__ double shared[NORM_THREADS];
    double sum = 0.0;
    const u64 first = (u64)blockIdx.x * NORM_THREADS + threadIdx.x, step = (u64)gridDim.x * NORM_THREADS;
    const u64 vectors = aligned ? n / N : 0;
#pragma unroll 4
    for (u64 v = first; v < vectors; v += step) {
        const Vec<float> g = load(grad + v * N);
#pragma unroll
        for (int e = 0; e < N; e++) sum += square(g.at[e]);
    }
#pragma unroll 4
    for (u64 i = vectors * N + first; i < n; i += step) sum += square(grad[i]);
    block_sum_f64<NORM_THREADS>(sum, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

KERNEL __launch_bounds__(NORM_THREADS) clip_total(float* norm, const double* parts, u32 count) {
    __shared__ double shared[NORM_THREADS];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += NORM_THREADS) sum += parts[i];
    block_sum_f64<NORM_THREADS>(sum, shared);
    if (threadIdx.x == 0) *norm = (float)sqrt(sum);
}

KERNEL __launch_bounds__(THREADS) clip_scale(float* grad, const float* norm, float clip, u64 n, u32 aligned) {
    const float factor = clip / (*norm + 1e-6f);
    if (factor >= 1.0f) return;
    const u64 first = (u64)blockIdx.x * (THREADS * N), i = first + threadIdx.x * N;
    if (aligned && i + N <= n) {
        Vec<float> g = load(grad + i);
#pragma unroll
        for (int e = 0; e < N; e++) g.at[e] *= factor;
        store(grad + i, g);
        return;
    }
    const u64 begin = aligned ? i : first + threadIdx.x, end = min(n, aligned ? i + N : first + THREADS * N);
    for (u64 e = begin; e < end; e += aligned ? 1 : THREADS) grad[e] *= factor;
}
