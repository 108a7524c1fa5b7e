// What both files of NORM_bwd share: its arguments, and its last step NORM_bwd_sums, which adds up their partial rows.
#pragma once

#include "common/partials.cuh"
#include "norm/row.cuh"

constexpr int SUMS = CENTRED ? 2 : 1;  // over rows: d_weight, and d_bias
#ifndef RESULT_SUMS
#define RESULT_SUMS 0
#endif
constexpr int TOTALS = SUMS + RESULT_SUMS;

struct Backward {
    ACT* d_inp;
    float* partials;  // rows of [d_weight | d_bias], then rows of sums of d_inp
    const ACT* d_out;
    const ACT* inp;
    const float* mean;  // null unless CENTRED
    const float* rstd;
    const WEIGHT* weight;
    u32 rows;
    u32 width;
    u32 adds;

    DEVICE float mean_of(u32 row) const {
        if constexpr (CENTRED) return mean[row];
        else return 0.0f;
    }
};

// What the warps of a row exchange: their sums of g·x̂, and of g.
struct alignas(4 * SUMS) Told {
    float at[SUMS];
};

// The block's partial rows, of width C: column(c) is its sum of column c of [d_weight | d_bias | sums of d_inp].
template <int C, int THREADS, class F> DEVICE void store_partials(const Backward& p, F column) {
#pragma unroll 2
    for (int c = threadIdx.x; c < SUMS * C; c += THREADS) p.partials[(u64)blockIdx.x * SUMS * C + c] = column(c);
    float* const of_result = p.partials + ((u64)gridDim.x * SUMS + blockIdx.x) * C;
#pragma unroll 2
    for (int c = threadIdx.x; RESULT_SUMS && c < C; c += THREADS) of_result[c] = column(SUMS * C + c);
}

// d_weight and d_bias from `count` partial rows.
DEVICE void add_partials(GRAD* d_weight, GRAD* d_bias, const float* partials, u32 count, u32 width, u32 adds) {
    const u64 columns = SUMS * (u64)width;
    const float sum = column_sum(partials, count, columns);
    const u64 mine = own_column();
    if (threadIdx.x % WARP == 0 && mine < columns) {
        GRAD* const to = !CENTRED || mine < width ? d_weight + mine : d_bias + (mine - width);
        *to = from_float<GRAD>(adds ? to_float(*to) + sum : sum);
    }
}

KERNEL __launch_bounds__(1024)
    JOINED(NORM, _bwd_sums)(GRAD* d_weight, GRAD* d_bias, const float* partials, u32 count, u32 width, u32 adds) {
    add_partials(d_weight, d_bias, partials, count, width, adds);
}

#define ARGS                                                                                                             \
    ACT *d_inp, float *partials, const ACT *d_out, const ACT *inp, const float *mean, const float *rstd,                  \
        const WEIGHT *weight, u32 rows, u32 width, u32 adds
#define BACKWARD {d_inp, partials, d_out, inp, mean, rstd, weight, rows, width, adds}
