// rmsnorm_fwd:          out = x·rstd·w per row of the width, rstd = 1/√(mean(x²) + eps), kept
// residual_rmsnorm_fwd: x = a + b, rounded and stored first, then the same: equal to add followed by rmsnorm_fwd
// rmsnorm_apply:        out again from rstd: the same bits
// moves  2·rows·width·sizeof(ACT) + 4·rows bytes, the residual form twice that; bound: memory
// grid   a warp per row. With WIDTH the row stays in registers; needs WIDTH % 8 == 0. Without, any width, the row is
//        read again for each pass
// order  lanes in turn, then a butterfly: repeatable
#include "prelude.cuh"

#ifdef WIDTH
constexpr int N = Vec<ACT>::N;
constexpr int VECS = WIDTH / N;
constexpr int PER_LANE = (VECS + WARP - 1) / WARP;
#endif
constexpr int WARPS = 8;

struct Rows {
    ACT* out;
    float* rstd;
    const ACT* inp;
    const ACT* other;  // added to inp when there is a residual
    ACT* residual;
    const WEIGHT* weight;
    float eps;
    u32 rows;
    u32 width;
};

enum Form { FWD, RESIDUAL, APPLY };

// The one place where a value is normalised: every form and path gives the same bits.
DEVICE float normal(float x, float rstd, float w) { return __fmul_rn(__fmul_rn(x, rstd), w); }

DEVICE float rstd_of(float squares, float width, float eps) { return 1.0f / sqrtf(squares / width + eps); }

#ifdef WIDTH
template <Form FORM> DEVICE void normalise(const Rows& p) {
    const u32 row = blockIdx.x * WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= p.rows) return;
    const u64 start = (u64)row * WIDTH;
    Vec<ACT> x[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int v = lane + i * WARP;
        if (VECS % WARP == 0 || v < VECS) x[i] = load(p.inp + start + v * N);
    }
    if (FORM == RESIDUAL) {
        Vec<ACT> y[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int v = lane + i * WARP;
            if (VECS % WARP == 0 || v < VECS) y[i] = load(p.other + start + v * N);
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int v = lane + i * WARP;
            if (VECS % WARP != 0 && v >= VECS) continue;
            float sum[N];
#pragma unroll
            for (int k = 0; k < N; k++) sum[k] = to_float(x[i].at[k]) + to_float(y[i].at[k]);
            round_to(x[i], sum);
            store(p.residual + start + v * N, x[i]);
        }
    }
    float rstd;
    if (FORM == APPLY) {
        rstd = p.rstd[row];
    } else {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (VECS % WARP != 0 && lane + i * WARP >= VECS) continue;
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float value = to_float(x[i].at[k]);
                squares = __fmaf_rn(value, value, squares);
            }
        }
        rstd = rstd_of(warp_sum(squares), WIDTH, p.eps);
        if (lane == 0) p.rstd[row] = rstd;
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int v = lane + i * WARP;
        if (VECS % WARP != 0 && v >= VECS) continue;
        float w[N], y[N];
        load_floats(w, p.weight + v * N);
#pragma unroll
        for (int k = 0; k < N; k++) y[k] = normal(to_float(x[i].at[k]), rstd, w[k]);
        store_floats(p.out + start + v * N, y);
    }
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
    float rstd;
    if (FORM == APPLY) {
        rstd = p.rstd[row];
    } else {
        float squares = 0.0f;
        for (u32 c = lane; c < p.width; c += WARP) {
            const float value = to_float(x[c]);
            squares = __fmaf_rn(value, value, squares);
        }
        rstd = rstd_of(warp_sum(squares), (float)p.width, p.eps);
        if (lane == 0) p.rstd[row] = rstd;
    }
    for (u32 c = lane; c < p.width; c += WARP)
        p.out[start + c] = from_float<ACT>(normal(to_float(x[c]), rstd, to_float(p.weight[c])));
}
#endif

KERNEL __launch_bounds__(WARPS* WARP, 2)
    rmsnorm_fwd(ACT* out, float* rstd, const ACT* inp, const WEIGHT* weight, float eps, u32 rows, u32 width) {
    normalise<FWD>({out, rstd, inp, nullptr, nullptr, weight, eps, rows, width});
}

KERNEL __launch_bounds__(WARPS* WARP, 2)
    residual_rmsnorm_fwd(ACT* residual, ACT* out, float* rstd, const ACT* a, const ACT* b, const WEIGHT* weight, float eps,
                         u32 rows, u32 width) {
    normalise<RESIDUAL>({out, rstd, a, b, residual, weight, eps, rows, width});
}

KERNEL __launch_bounds__(WARPS* WARP, 2)
    rmsnorm_apply(ACT* out, const ACT* inp, float* rstd, const WEIGHT* weight, u32 rows, u32 width) {
    normalise<APPLY>({out, rstd, inp, nullptr, nullptr, weight, 0.0f, rows, width});
}
