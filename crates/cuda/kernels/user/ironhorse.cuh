// What a kernel of your own may use: `#include "ironhorse.cuh"`. NVRTC needs no other header for it.
//
//   u8 u16 u32 u64 i32 i64     integers by size
//   bf16 f16                   16-bit floats: to_float(x), from_float<bf16>(f)
//   AccOf<T>::type             what to compute in: double for double, else float; to_acc(x), from_acc<T>(a)
//   Vec<T>                     16 bytes of T: load(p), store(p, v), v.at[i], Vec<T>::N; p aligned to 16 bytes
//   warp_sum warp_max          over 32 lanes, every lane gets the same result
//   block_sum                  over a block of up to 1024 threads; all threads must call it
//   index()                    this thread's number in a grid of one dimension, in 64 bits
//   exp_of log_of tanh_of erf_of sqrt_of rsqrt_of max_of fma_of   by the type of the argument
#pragma once

#include "prelude.cuh"

DEVICE u64 index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

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

template <class T> struct AccOf {
    using type = float;
};
template <> struct AccOf<double> {
    using type = double;
};

template <class T> DEVICE typename AccOf<T>::type to_acc(T x) {
    if constexpr (sizeof(T) == 8) return x;
    else return to_float(x);
}
template <class T> DEVICE T from_acc(typename AccOf<T>::type x) {
    if constexpr (sizeof(T) == 8) return x;
    else return from_float<T>(x);
}

DEVICE float exp_of(float x) { return expf(x); }
DEVICE double exp_of(double x) { return exp(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE double log_of(double x) { return log(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE double tanh_of(double x) { return tanh(x); }
DEVICE float erf_of(float x) { return erff(x); }
DEVICE double erf_of(double x) { return erf(x); }
DEVICE float sqrt_of(float x) { return sqrtf(x); }
DEVICE double sqrt_of(double x) { return sqrt(x); }
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

// Warps first, then one warp over them: the order is fixed. Needs whole warps.
template <class A> DEVICE A block_sum(A x) {
    __shared__ A part[WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_sum(x);
    __syncthreads();  // a call before this one may still read
    if (lane == 0) part[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP ? part[lane] : A(0));
}
