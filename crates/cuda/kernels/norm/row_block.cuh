// A block per row, for rows too few to fill the device, where latency is what counts, or too wide for a warp. Weight and bias are read before the kernel ahead
// has ended.
// order  a thread's columns in order, a butterfly, then warps in order: repeatable
#pragma once

#include "common/chain.cuh"
#include "common/row_block.cuh"
#include "norm/row.cuh"

// Calls f(step, vector) for each vector of this thread.
template <class F> DEVICE void each_vector(F f) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int v = threadIdx.x + s * THREADS;
        if (v < VECS) f(s, v);
    }
}

// Weight and bias of this thread's columns.
struct Parameters {
    float weight[STEPS][N] = {}, bias[STEPS][N] = {};

    DEVICE void read(const Rows& p) {
        each_vector([&](int s, int v) {
            load_floats(weight[s], p.weight + v * N);
            if constexpr (CENTRED) load_floats(bias[s], p.bias + v * N);
        });
    }
};

// One row; this thread's part of the result in `out`. All results are stored if `stores`.
template <Form FORM> DEVICE void normalise_row(Vec<ACT> (&out)[STEPS], const Rows& p, const Parameters& parameters, u32 row, bool stores) {
    __shared__ float sums[2][WARPS];
    const u64 start = (u64)row * WIDTH;
    float x[STEPS][N] = {};
    each_vector([&](int s, int v) {
        load_floats(x[s], p.inp + start + v * N);
        if constexpr (FORM == RESIDUAL) {
            float y[N];
            load_floats(y, p.other + start + v * N);
            Vec<ACT> sum;
#pragma unroll
            for (int k = 0; k < N; k++) y[k] += x[s][k];
            round_to(sum, y);
            if (stores) store(p.residual + start + v * N, sum);
            to_floats(x[s], sum);
        }
    });
    const auto sum = [&] {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < N; k++) sum += x[s][k];  // 0 beyond the row
        return row_sum(sum, sums[0]);
    };
    const auto squares = [&](float mean) {
        float squares = 0.0f;
        each_vector([&](int s, int) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float d = deviation(x[s][k], mean);
                squares = __fmaf_rn(d, d, squares);
            }
        });
        return row_sum(squares, sums[1]);
    };
    const Statistics of = statistics<FORM>(p, row, WIDTH, stores && threadIdx.x == 0, sum, squares);
    each_vector([&](int s, int v) {
        float y[N];
#pragma unroll
        for (int k = 0; k < N; k++) y[k] = normal(x[s][k], of.mean, of.rstd, parameters.weight[s][k], parameters.bias[s][k]);
        round_to(out[s], y);
        if (stores) store(p.out + start + v * N, out[s]);
    });
}

template <Form FORM> DEVICE void normalise(const Rows& p) {
    start_next();
    Parameters parameters;
    parameters.read(p);
    wait_for_previous();
    Vec<ACT> out[STEPS] = {};
    normalise_row<FORM>(out, p, parameters, blockIdx.x, true);
}
