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

// The texts of prelude.cuh and floats.cuh are put before this one, so that your own files may have those names.

DEVICE u64 index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

template <class T> DEVICE typename AccOf<T>::type to_acc(T x) {
    if constexpr (sizeof(T) == 8) return x;
    else return to_float(x);
}
template <class T> DEVICE T from_acc(typename AccOf<T>::type x) {
    if constexpr (sizeof(T) == 8) return x;
    else return from_float<T>(x);
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
