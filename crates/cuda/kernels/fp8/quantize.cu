// quantize:        q = fp8(x·s) of x (rows,cols), in rows and in columns (transposed), for products whose operands must both be K-major;
//                  s is a power of two from `amax`, and `inverse` = 1/s
// quantize_NAME_fwd: the same of f(x) for each activation f of activation.cuh
// quantize_NAME_bwd: the same of x·f'(pre)
//                  Beside it, where the pointers are not null: `seen` becomes the largest |x| if that is larger, and `partials` the sums
//                  of x over every 128 rows, for the gradient of a bias. Numbers that are not finite become NaN.
// moves  rows·cols·(sizeof(ACT) + 2) bytes, with pre sizeof(ACT) more; bound: memory
// grid   (ceil(cols / 128), ceil(rows / 128)) of 256 threads, 8 by 8 elements each; needs rows % 16 == 0 and cols % 16 == 0
// order  sums: 8 rows of a thread in order, then the 16 threads of a column in order. The maximum has no order
#include "fp8/tile.cuh"
#include "fp8/amax.cuh"
#include "elementwise/activation.cuh"
#include "elementwise/gelu.cuh"

// x·f(pre) of each element.
template <class F> struct Times {
    const ACT* inp;
    const ACT* pre;
    u32 cols;
    F f;
    Square x, y;

    DEVICE void fetch(u32 row, u32 col) {
        x.fetch(inp + (u64)row * cols + col, cols);
        y.fetch(pre + (u64)row * cols + col, cols);
    }
    DEVICE void prepare() {}
    DEVICE void row(float (&out)[SIDE], int r) const {
        float before[SIDE];
        x.row(out, r);
        y.row(before, r);
#pragma unroll
        for (int c = 0; c < SIDE; c++) out[c] *= f(before[c]);
    }
};

template <class F> DEVICE void quantize_of(const Quantized& p, const ACT* inp, F f) {
    quantize_tile<true>(p, Of<F>{inp, p.cols, f});
}
template <class F> DEVICE void quantize_times(const Quantized& p, const ACT* inp, const ACT* pre, F f) {
    quantize_tile<true>(p, Times<F>{inp, pre, p.cols, f});
}

#define QUANTIZE KERNEL __launch_bounds__(2 * TILE)

QUANTIZE quantize(u8* q, u8* q_t, float* inverse, u32* seen, float* partials, const u32* amax, const ACT* inp, u32 rows, u32 cols,
                  int margin, int unknown) {
    quantize_of({q, q_t, inverse, seen, partials, amax, rows, cols, margin, unknown}, inp, Same());
}

#define WITH_ACTIVATION(NAME, F)                                                                                             \
    QUANTIZE quantize_##NAME##_fwd(u8* q, u8* q_t, float* inverse, u32* seen, float* partials, const u32* amax, const ACT* inp, \
                                   u32 rows, u32 cols, int margin, int unknown) {                                            \
        quantize_of({q, q_t, inverse, seen, partials, amax, rows, cols, margin, unknown}, inp,                               \
                    [](float x) { return F::value(x); });                                                                    \
    }                                                                                                                        \
    QUANTIZE quantize_##NAME##_bwd(u8* q, u8* q_t, float* inverse, u32* seen, float* partials, const u32* amax, const ACT* inp, \
                                   const ACT* pre, u32 rows, u32 cols, int margin, int unknown) {                            \
        quantize_times({q, q_t, inverse, seen, partials, amax, rows, cols, margin, unknown}, inp, pre,                       \
                       [](float pre) { return F::slope(pre); });                                                             \
    }
ACTIVATIONS(WITH_ACTIVATION)

// amax: the bits of the largest |x|, over `most`, which holds 0 or a maximum so far
// moves  n·sizeof(ACT) bytes; bound: memory
// grid   any number of blocks of 256 threads; needs n % 8 == 0
KERNEL __launch_bounds__(256) amax(u32* most, const ACT* inp, u64 n) {
    constexpr int N = Vec<ACT>::N;
    u32 mine = 0;
    for (u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * N; i < n; i += (u64)gridDim.x * 256 * N) mine = largest_of(load(inp + i), mine);
    count_largest(mine, most);
}

// scale_update: of n pairs (largest element of earlier steps, of this one) the first becomes the second, or `decay` times itself if that is
//               larger; it stays where the second is 0 or not finite. The second becomes 0
// moves  16*n bytes; bound: latency
// grid   ceil(n / 256) blocks of 256 threads
// order  elementwise
KERNEL __launch_bounds__(256) scale_update(float2* scales, u32 n, float decay) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    float2 pair = scales[i];
    const u32 seen = __float_as_uint(pair.y);
    if (seen != 0 && seen < 0x7f800000u) pair.x = fmaxf(pair.y, pair.x * decay);
    pair.y = 0.0f;
    scales[i] = pair;
}
