// GELU as the engine's kernels compute it. ACT is the type that results are rounded to.
#pragma once

#include "common/prelude.cuh"

constexpr float ROOT = 0.7978845608028654f;
constexpr float CUBE = 0.044715f;

// 1/(1 + e^-z). The fast forms are accurate enough for bf16 results, not for f32.
DEVICE float logistic(float z) {
    if constexpr (sizeof(ACT) == 2) return __fdividef(1.0f, 1.0f + __expf(-z));
    return 1.0f / (1.0f + expf(-z));
}

// x·s(2u), u = √(2/π)·(x + 0.044715·x³), s the logistic function: the tanh form of GELU. Its slope is s + x·s·(1 - s)·2u'.
struct Gelu {
    static DEVICE float value(float x) { return x * logistic(2.0f * ROOT * (x + CUBE * x * x * x)); }

    // The same in half as many instructions, accurate enough for bf16.
    static DEVICE float fast_value(float x) {
        const float t = exp2_flush(x * __fmaf_rn(-2.0f * LOG2E * ROOT * CUBE, x * x, -2.0f * LOG2E * ROOT));
        return x * reciprocal_fast(1.0f + t);
    }

    static DEVICE float slope(float x) {
        if constexpr (sizeof(ACT) == 2) return fast_slope(x);
        const float z = 2.0f * ROOT * (x + CUBE * x * x * x);
        // From e^-|z|, so that s·(1 - s) loses no digits where s is near 1.
        const float t = expf(-fabsf(z));
        const float p = 1.0f / (1.0f + t);
        // Beyond 30 s·(1 - s) is 0; the bound keeps 0·∞ away.
        const float y = fminf(fmaxf(x, -30.0f), 30.0f);
        return (z < 0.0f ? t * p : p) + t * p * p * y * (2.0f * ROOT * (1.0f + 3.0f * CUBE * y * y));
    }

    // Value and slope together, for little more than one of them costs, and accurate enough for bf16. The slope is finite for all numbers: it is bounded
    // where the logistic function is 0 or 1. NaN stays.
    static DEVICE float2 fast(float x) {
        const float y = bounded(x, 1e4f), square = y * y;
        const float t = exp2_flush(y * __fmaf_rn(-2.0f * LOG2E * ROOT * CUBE, square, -2.0f * LOG2E * ROOT));
        const float s = reciprocal_fast(1.0f + t);
        const float steep = y * __fmaf_rn(6.0f * ROOT * CUBE, square, 2.0f * ROOT);  // x·2u'
        return make_float2(x * s, __fmaf_rn((1.0f - s) * steep, s, s));
    }
    static DEVICE float fast_slope(float x) { return fast(x).y; }

private:
    // x, but no larger than `most` either way.
    static DEVICE float bounded(float x, float most) {
        float y;
#if __CUDA_ARCH__ >= 860
        asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
#else
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(-most));
#endif
        return y;
    }
};
