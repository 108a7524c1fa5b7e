// What SwiGLU does to one element: the same bits wherever it is done.
#pragma once

#include "common/prelude.cuh"

// 1/(1 + e^-z). bf16 results hide what the hardware's forms lose; f32 ones would show it. It is 0 for z below -87.
template <class T> DEVICE float logistic(float z) {
    if constexpr (sizeof(T) == 2) return reciprocal_fast(1.0f + exp2_flush(z * -LOG2E));
    return 1.0f / (1.0f + expf(-z));
}

template <class T> DEVICE float swiglu(float gate, float up) { return gate * logistic<T>(gate) * up; }

// f of one element with its slope.
struct Gate {
    float value, slope;
};

template <class T> DEVICE Gate silu(float x) {
    const float s = logistic<T>(x);
    return {x * s, s * __fmaf_rn(x, 1.0f - s, 1.0f)};
}

// From the gradient d of the result: gate and up become their gradients. Gives the result again.
DEVICE float swiglu_back(const Gate& f, float d, float& gate, float& up) {
    const float result = f.value * up;
    gate = d * up * f.slope;
    up = d * f.value;
    return result;
}
