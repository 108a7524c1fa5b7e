// What SwiGLU does to one element: the same bits wherever it is done.
#pragma once

#include "common/prelude.cuh"

// 1/(1 + e^-z). bf16 results hide what the hardware's forms lose; f32 ones would show it. It is 0 for z below -87.
template <class T> DEVICE float logistic(float z) {
    if constexpr (sizeof(T) == 2) {
        float e, s;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -LOG2E));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
        return s;
    }
    return 1.0f / (1.0f + expf(-z));
}

template <class T> DEVICE float swiglu(float gate, float up) { return gate * logistic<T>(gate) * up; }
