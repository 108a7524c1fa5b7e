// grad_norm: norm = √Σ g² over one flat pool; halt = 1 if it was not 0, if the norm or the loss is not finite, or if a kernel
//        of the step reported a fault (a router that met a NaN), else 0
// moves  n·sizeof(GRAD) bytes; bound: memory. Gradients of which sums of squares were left are not read: 8 bytes a sum instead
// grid   grad_norm_parts: a block for each piece of 65,536 elements; grad_norm_total: one block; any n
//        Where kernels have left sums of squares of the gradients that they wrote (experts/grouped_results.cuh), grad_norm_left adds those
//        up, a block for each 8,192 of a tensor, and grad_norm_rest has a block for each piece of what lies between these tensors
// order  each thread its vectors of a piece in order, a tree over the block, then over the pieces: the same on every device, and
//        whichever rank has a piece. Sums that were left are of a warp's part of a tile, and a block's threads take every 512th.
//        All sums are in f64, so that tiny and huge gradients neither vanish nor overflow. 8 squares of bf16, which are exact in f32, are
//        added there first; a thread whose sum shows that f32 was too narrow for them reads its part again, all in f64
#include "optimizer/squares.cuh"

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

// The sum over a piece, in thread 0.
DEVICE double piece_sum(const GRAD* grads, u64 n) {
    __shared__ double shared[THREADS];
    double sum = sum_of_squares<sizeof(GRAD) == 4>(grads, n);
    if (sizeof(GRAD) == 2 && !is_exact(sum)) sum = sum_of_squares<true>(grads, n);
    block_sum_f64<THREADS>(sum, shared);
    return sum;
}

KERNEL __launch_bounds__(THREADS) grad_norm_parts(double* parts, const GRAD* grads, u64 all) {
    const u64 start = blockIdx.x * PIECE, n = all - start < PIECE ? all - start : PIECE;
    const double sum = piece_sum(grads + start, n);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Where the part of a block begins, and how many there are of it.
struct Stretch {
    u64 first, count;
};

// Stretches of gradients, up to PIECE elements each.
KERNEL __launch_bounds__(THREADS) grad_norm_rest(double* parts, const GRAD* grads, const Stretch* stretches) {
    const Stretch own = stretches[blockIdx.x];
    const double sum = piece_sum(grads + own.first, own.count);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Stretches of sums, by the address of the first.
KERNEL __launch_bounds__(THREADS) grad_norm_left(double* parts, const Stretch* stretches) {
    __shared__ double shared[THREADS];
    const Stretch own = stretches[blockIdx.x];
    const double* const sums = reinterpret_cast<const double*>(own.first);
    double sum = 0.0;
#pragma unroll 4
    for (u64 i = threadIdx.x; i < own.count; i += THREADS) sum += sums[i];
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
