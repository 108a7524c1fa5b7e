// The arithmetic of norms: by mean and variance (CENTRED), or by the root mean square. Files define CENTRED before they include
// this.
#pragma once

#include "common/prelude.cuh"

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
    else return __fmul_rn(__fmul_rn(x, rstd), w);
}

DEVICE float deviation(float x, float mean) { return CENTRED ? x - mean : x; }

DEVICE float rstd_of(float squares, float width, float eps) { return 1.0f / sqrtf(squares / width + eps); }
