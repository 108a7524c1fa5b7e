// The gradient of a row of logits, (softmax - onehot)·loss_scale: for kernels that write it in ACT and for those that round it on to 8 bits.
#pragma once

#include "common/prelude.cuh"

constexpr int N = Vec<ACT>::N;
// `IGNORED` of core/src/op/loss.rs: the target of a row that does not count.
constexpr i32 IGNORED = -100;

// A maximum and the sum of exp(x - maximum).
struct Sum {
    float max;
    float sum;
};

// exp(x - max)/sum·scale. A bf16 result hides the rounding of the form with everything in the exponent.
struct alignas(16) Scales {
    float max, inverse, scale, offset;
};
DEVICE Scales scales(Sum total, float scale) {
    const float inverse = 1.0f / total.sum;
    return {total.max, inverse, scale, log2f(inverse * fabsf(scale)) - total.max * LOG2E};
}
DEVICE float gradient(float x, const Scales& s) {
    if constexpr (sizeof(ACT) == 2) return copysignf(exp2_flush(__fmaf_rn(x, LOG2E, s.offset)), s.scale);
    return exp2_fast((x - s.max) * LOG2E) * (s.inverse * s.scale);
}
DEVICE float target_gradient(float x, const Scales& s) {
    return (exp2_fast((x - s.max) * LOG2E) * s.inverse - 1.0f) * s.scale;
}

// The gradients of one vector, whose first column is `first`. A negative target is that of a row that does not count.
DEVICE void gradients(float (&y)[N], const float (&x)[N], u32 first, i32 target, u32 vocab, const Scales& s) {
    if (target < 0) {
#pragma unroll
        for (int k = 0; k < N; k++) y[k] = 0.0f;
        return;
    }
#pragma unroll
    for (int k = 0; k < N; k++) y[k] = gradient(x[k], s);
    if ((u32)target / N == first / N) {
#pragma unroll
        for (int k = 0; k < N; k++)
            if (first + k == (u32)target) y[k] = target_gradient(x[k], s);
    }
    if (first + N > vocab) {
#pragma unroll
        for (int k = 0; k < N; k++)
            if (first + k >= vocab) y[k] = 0.0f;
    }
}
