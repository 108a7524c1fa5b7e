// grad_norm: norm = √Σ g² over one flat pool; halt = 1 if it was not 0, if the norm or the loss is not finite, or if a kernel
//        of the step reported a fault (a router that met a NaN), else 0
// moves  n·sizeof(GRAD) bytes; bound: memory
// grid   grad_norm_parts: a block for each piece of 65,536 elements; grad_norm_total: one block; any n
// order  each thread its vectors of a piece in order, a tree over the block, then over the pieces: the same on every device, and
//        whichever rank has a piece.
//        f64, so that tiny and huge gradients neither vanish nor overflow. 8 squares of bf16, which are exact in f32, are
//        added there first; a thread whose sum shows that f32 was too narrow for them reads its part again, all in f64
#include "common/prelude.cuh"

constexpr int THREADS = 512;
constexpr int N = Vec<GRAD>::N;
constexpr u64 PIECE = 65536;

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// What this thread's vectors and its part of the rest add up to; WIDE: every square in f64.
template <bool WIDE> DEVICE double sum_of_squares(const GRAD* grads, u64 n) {
    double sum = 0.0;
    const u64 vectors = n / N, first = threadIdx.x;
#pragma unroll 4
    for (u64 v = first; v < vectors; v += THREADS) {
        float g[N];
        load_floats(g, grads + v * N);
        if constexpr (WIDE) {
#pragma unroll
            for (int k = 0; k < N; k++) sum += (double)g[k] * (double)g[k];
        } else {
            float squares = 0.0f;
#pragma unroll
            for (int k = 0; k < N; k++) squares = __fmaf_rn(g[k], g[k], squares);
            sum += (double)squares;
        }
    }
    const u64 rest = vectors * N + first;
    if (rest < n) sum += (double)to_float(grads[rest]) * (double)to_float(grads[rest]);
    return sum;
}

KERNEL __launch_bounds__(THREADS) grad_norm_parts(double* parts, const GRAD* grads, u64 all) {
    __shared__ double shared[THREADS];
    const u64 start = blockIdx.x * PIECE, n = all - start < PIECE ? all - start : PIECE;
    grads += start;
    double sum = sum_of_squares<sizeof(GRAD) == 4>(grads, n);
    // f32 rounds squares below 2⁻¹²⁶, which do not count in a sum of 2⁻⁸⁰ or more, and makes those beyond 3.4e38 infinite,
    // and with them the sum.
    if (sizeof(GRAD) == 2 && !(sum >= 8.3e-25 && sum <= 1e300)) sum = sum_of_squares<true>(grads, n);
    block_sum_f64<THREADS>(sum, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

KERNEL __launch_bounds__(THREADS) grad_norm_total(float* norm, float* halt, const float* loss, const Fault* fault,
                                                  const double* parts, u32 count) {
    __shared__ double shared[THREADS];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) sum += parts[i];
    block_sum_f64<THREADS>(sum, shared);
    if (threadIdx.x == 0) {
        const float total = (float)sqrt(sum);
        *norm = total;
        const bool good = is_finite(total) && is_finite(*loss) && fault->code == 0;
        *halt = *halt == 0.0f && good ? 0.0f : 1.0f;
    }
}
