// Rows normalised by their mean and variance (CENTRED), or by their root mean square: what norm/layernorm.cu and norm/rmsnorm.cu share.
// They define CENTRED before they include this.
// grid   a warp per row. With WIDTH the row stays in registers; needs WIDTH % 8 == 0. Without, any width, the row is
//        read again for each pass. With FEW a block per row: norm/row_block.cuh
// order  lanes in turn, then a butterfly: repeatable. Variance from deviations: no digits lost to a large mean
#pragma once

#ifdef FEW
#include "norm/row_block.cuh"
#else
#include "norm/row.cuh"

constexpr int WARPS = 8;
#ifdef WIDTH
constexpr int N = Vec<ACT>::N;
constexpr int VECS = WIDTH / N;
constexpr int PER_LANE = (VECS + WARP - 1) / WARP;

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
    float mean = 0.0f, rstd;
    if (FORM == APPLY) {
        if constexpr (CENTRED) mean = p.mean[row];
        rstd = p.rstd[row];
    } else {
        if constexpr (CENTRED) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                if (VECS % WARP != 0 && lane + i * WARP >= VECS) continue;
#pragma unroll
                for (int k = 0; k < N; k++) sum += to_float(x[i].at[k]);
            }
            mean = warp_sum(sum) / WIDTH;
        }
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (VECS % WARP != 0 && lane + i * WARP >= VECS) continue;
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float d = deviation(to_float(x[i].at[k]), mean);
                squares = __fmaf_rn(d, d, squares);
            }
        }
        rstd = rstd_of(warp_sum(squares), WIDTH, p.eps);
        if (lane == 0) {
            if constexpr (CENTRED) p.mean[row] = mean;
            p.rstd[row] = rstd;
        }
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int v = lane + i * WARP;
        if (VECS % WARP != 0 && v >= VECS) continue;
        float w[N], b[N] = {}, y[N];
        load_floats(w, p.weight + v * N);
        if constexpr (CENTRED) load_floats(b, p.bias + v * N);
#pragma unroll
        for (int k = 0; k < N; k++) y[k] = normal(to_float(x[i].at[k]), mean, rstd, w[k], b[k]);
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
    float mean = 0.0f, rstd;
    if (FORM == APPLY) {
        if constexpr (CENTRED) mean = p.mean[row];
        rstd = p.rstd[row];
    } else {
        if constexpr (CENTRED) {
            const float width = (float)p.width;
            float sum = 0.0f;
            for (u32 c = lane; c < p.width; c += WARP) sum += to_float(x[c]);
            mean = warp_sum(sum) / width;
        }
        float squares = 0.0f;
        for (u32 c = lane; c < p.width; c += WARP) {
            const float d = deviation(to_float(x[c]), mean);
            squares = __fmaf_rn(d, d, squares);
        }
        rstd = rstd_of(warp_sum(squares), (float)p.width, p.eps);
        if (lane == 0) {
            if constexpr (CENTRED) p.mean[row] = mean;
            p.rstd[row] = rstd;
        }
    }
    for (u32 c = lane; c < p.width; c += WARP)
        p.out[start + c] = from_float<ACT>(
            normal(to_float(x[c]), mean, rstd, to_float(p.weight[c]), CENTRED ? to_float(p.bias[c]) : 0.0f));
}
#endif
#endif
