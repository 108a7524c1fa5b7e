// A row of WIDTH elements in the registers of a warp: norm/fwd.cu stores it, norm/fp8.cu rounds it to 8 bits besides.
#pragma once

#include "norm/row.cuh"

constexpr int N = Vec<ACT>::N;
constexpr int VECS = WIDTH / N;
constexpr int PER_LANE = (VECS + WARP - 1) / WARP;

// Normalises a row. put(v, y) gets vector v of the result, not rounded, in the lane that has it.
template <Form FORM, class P> DEVICE void normalise_row(const Rows& p, u32 row, int lane, P put) {
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
            float a[N], b[N];
            to_floats(a, x[i]);
            to_floats(b, y[i]);
#pragma unroll
            for (int k = 0; k < N; k++) a[k] += b[k];
            round_to(x[i], a);
            store(p.residual + start + v * N, x[i]);
        }
    }
    const auto sum = [&] {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (VECS % WARP != 0 && lane + i * WARP >= VECS) continue;
            float a[N];
            to_floats(a, x[i]);
#pragma unroll
            for (int k = 0; k < N; k++) sum += a[k];
        }
        return warp_sum(sum);
    };
    const auto squares = [&](float mean) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (VECS % WARP != 0 && lane + i * WARP >= VECS) continue;
            forget(x[i]);
            float a[N];
            to_floats(a, x[i]);
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float d = deviation(a[k], mean);
                squares = __fmaf_rn(d, d, squares);
            }
        }
        return warp_sum(squares);
    };
    const auto [mean, rstd] = statistics<FORM>(p, row, WIDTH, lane == 0, sum, squares);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int v = lane + i * WARP;
        if (VECS % WARP != 0 && v >= VECS) continue;
        forget(x[i]);
        float a[N], w[N], b[N] = {}, y[N];
        to_floats(a, x[i]);
        load_floats(w, p.weight + v * N);
        if constexpr (CENTRED) load_floats(b, p.bias + v * N);
#pragma unroll
        for (int k = 0; k < N; k++) y[k] = normal(a[k], mean, rstd, w[k], b[k]);
        put(v, y);
    }
}
