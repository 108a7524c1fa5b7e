// What direct kernels share: any of four element types, memory of any alignment.
//
// Memory is read and written without hints. Marked "once", on an H200 8192² f32 took 0.1344 ms instead of 0.1273 right after a kernel
// that had left its own results in L2: they stay there, and what is marked has to do with the rest.
//
// T is the type in memory (double, float, bf16 or f16; the constant ELEM), Acc what it is computed in.
#pragma once

#include "prelude.cuh"

// IEEE half precision.
struct f16 {
    u16 bits;
};

DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <> DEVICE f16 from_float<f16>(float x) {
    f16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
}

using T = ELEM;

// A vector in one instruction: of vectors of 2-byte elements the compiler makes four stores of 4 bytes, a quarter slower.
template <class X> DEVICE void put(X* to, const Vec<X>& value) {
    const uint4& q = *reinterpret_cast<const uint4*>(&value);
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w) : "memory");
}

template <class X> struct AccOf {
    using type = float;
};
template <> struct AccOf<double> {
    using type = double;
};
using Acc = AccOf<T>::type;

template <class X> DEVICE Acc to_acc(X x) {
    if constexpr (sizeof(X) == 8) return x;
    else return to_float(x);
}
template <class X> DEVICE X from_acc(Acc x) {
    if constexpr (sizeof(X) == 8) return x;
    else return from_float<X>((float)x);
}

DEVICE float exp_of(float x) { return expf(x); }
DEVICE double exp_of(double x) { return exp(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE double log_of(double x) { return log(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE double tanh_of(double x) { return tanh(x); }
DEVICE float erf_of(float x) { return erff(x); }
DEVICE double erf_of(double x) { return erf(x); }
DEVICE float rsqrt_of(float x) { return 1.0f / sqrtf(x); }
DEVICE double rsqrt_of(double x) { return 1.0 / sqrt(x); }
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
DEVICE double max_of(double a, double b) { return fmax(a, b); }
DEVICE float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double fma_of(double a, double b, double c) { return fma(a, b, c); }

DEVICE double warp_sum(double x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
DEVICE double warp_max(double x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d >>= 1) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
