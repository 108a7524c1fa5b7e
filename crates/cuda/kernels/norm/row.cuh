// The arithmetic of norms: layer norm, by mean and variance, where CENTRED is true; RMS norm, by the root mean square, where false.
#pragma once

#include "norm/gain.cuh"

// The name of a kernel of NORM: layernorm or rmsnorm.
#define JOIN_NAMES(A, B) A##B
#define JOINED(A, B) JOIN_NAMES(A, B)

struct Rows {
    ACT* out;
    float* mean;  // and bias: null unless CENTRED
    float* rstd;
    const ACT* inp;
    const ACT* other;  // added to inp when there is a residual
    ACT* residual;
    const WEIGHT* weight;
    const WEIGHT* bias;
    float eps;
    u32 rows;
    u32 width;
};

enum Form { FWD, RESIDUAL, APPLY };

// The one place where a value is normalised: every form and path gives the same bits.
DEVICE float normal(float x, float mean, float rstd, float w, float b) {
    if constexpr (CENTRED) return __fmaf_rn((x - mean) * rstd, w, b);
    else return __fmul_rn(__fmul_rn(x, rstd), gain(w));
}

DEVICE float deviation(float x, float mean) { return CENTRED ? x - mean : x; }

DEVICE float rstd_of(float squares, float width, float eps) { return 1.0f / sqrtf(squares / width + eps); }

// Mean and rstd of a row: read for APPLY, else computed from `sum()` and `squares(mean)`, the sums over the row, and stored by the
// thread that is `first`.
struct Statistics {
    float mean, rstd;
};
template <Form FORM, class S, class Q>
DEVICE Statistics statistics(const Rows& p, u32 row, float width, bool first, S sum, Q squares) {
    Statistics of = {0.0f, 0.0f};
    if constexpr (FORM == APPLY) {
        if constexpr (CENTRED) of.mean = p.mean[row];
        of.rstd = p.rstd[row];
    } else {
        if constexpr (CENTRED) of.mean = sum() / width;
        of.rstd = rstd_of(squares(of.mean), width, p.eps);
        if (first) {
            if constexpr (CENTRED) p.mean[row] = of.mean;
            p.rstd[row] = of.rstd;
        }
    }
    return of;
}
