// Norms of the engine. NORM is layernorm, with CENTRED true, or rmsnorm, with CENTRED false: no mean and no bias, which are null then.
// With PLUS_ONE, of rmsnorm, the weight is 1 + w.
// NORM_fwd:          out = (x - mean)·rstd·w + b per row of the width; rstd = 1/√(mean((x - mean)²) + eps); mean and rstd kept
// residual_NORM_fwd: x = a + b, rounded and stored first, then the same: equal to add followed by NORM_fwd
// NORM_apply:        out again from mean and rstd: the same bits
// moves  2·rows·width·sizeof(ACT) + 8·rows bytes, the residual form twice that; bound: memory
// grid   a warp per row. With WIDTH the row stays in registers; needs WIDTH % 8 == 0. Without, any width, the row is
//        read again for each pass. With ROW_BLOCKS a block per row: norm/row_block.cuh
// order  lanes in order, then a butterfly: repeatable. Variance from deviations: no digits lost to a large mean
#ifdef ROW_BLOCKS
#include "norm/row_block.cuh"
#else
#ifdef WIDTH
#include "norm/row_warp.cuh"
#else
#include "norm/row.cuh"
#endif

constexpr int WARPS = 8;
#ifdef WIDTH
template <Form FORM> DEVICE void normalise(const Rows& p) {
    const u32 row = blockIdx.x * WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= p.rows) return;
    normalise_row<FORM>(p, row, lane, [&](int v, const float(&y)[N]) { store_floats(p.out + (u64)row * WIDTH + v * N, y); });
}
#else
template <Form FORM> DEVICE void normalise(const Rows& p) {
    const u32 row = blockIdx.x * WARPS + threadIdx.x / WARP;
    const u32 lane = threadIdx.x % WARP;
    if (row >= p.rows) return;
    const u64 start = (u64)row * p.width;
    const ACT* x = p.inp + start;
    if (FORM == RESIDUAL) {
        for (u32 c = lane; c < p.width; c += WARP)
            p.residual[start + c] = from_float<ACT>(to_float(x[c]) + to_float(p.other[start + c]));
        x = p.residual + start;  // each lane reads back what it wrote itself
    }
    const auto sum = [&] {
        float sum = 0.0f;
        for (u32 c = lane; c < p.width; c += WARP) sum += to_float(x[c]);
        return warp_sum(sum);
    };
    const auto squares = [&](float mean) {
        float squares = 0.0f;
        for (u32 c = lane; c < p.width; c += WARP) {
            const float d = deviation(to_float(x[c]), mean);
            squares = __fmaf_rn(d, d, squares);
        }
        return warp_sum(squares);
    };
    const auto [mean, rstd] = statistics<FORM>(p, row, (float)p.width, lane == 0, sum, squares);
    for (u32 c = lane; c < p.width; c += WARP)
        p.out[start + c] = from_float<ACT>(
            normal(to_float(x[c]), mean, rstd, to_float(p.weight[c]), CENTRED ? to_float(p.bias[c]) : 0.0f));
}
#endif
#endif

// Blocks per multiprocessor: 0 leaves the number to the compiler.
#define NORM_KERNEL KERNEL __launch_bounds__(WARPS * WARP, CENTRED ? 0 : 2)

NORM_KERNEL JOINED(NORM, _fwd)(ACT* out, float* mean, float* rstd, const ACT* inp, const WEIGHT* weight, const WEIGHT* bias,
                              float eps, u32 rows, u32 width) {
    normalise<FWD>({out, mean, rstd, inp, nullptr, nullptr, weight, bias, eps, rows, width});
}

NORM_KERNEL JOINED(residual_, JOINED(NORM, _fwd))(ACT* residual, ACT* out, float* mean, float* rstd, const ACT* a, const ACT* b,
                                                const WEIGHT* weight, const WEIGHT* bias, float eps, u32 rows, u32 width) {
    normalise<RESIDUAL>({out, mean, rstd, a, b, residual, weight, bias, eps, rows, width});
}

NORM_KERNEL JOINED(NORM, _apply)(ACT* out, const ACT* inp, float* mean, float* rstd, const WEIGHT* weight, const WEIGHT* bias,
                                u32 rows, u32 width) {
    normalise<APPLY>({out, mean, rstd, inp, nullptr, nullptr, weight, bias, 0.0f, rows, width});
}
