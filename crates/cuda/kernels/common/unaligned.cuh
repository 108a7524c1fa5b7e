// What kernels of eager ops share: any of four element types, memory of any alignment.
//
// Memory is read and written without hints. Marked "once", on an H200 8192² f32 took 0.1344 ms instead of 0.1273 right after a kernel
// that had left its own results in L2: they stay there, and what is marked has to do with the rest.
//
// T is the type in memory (double, float, bf16 or f16; the constant ELEM), Acc what it is computed in.
#pragma once

#include "common/prelude.cuh"
#include "common/floats.cuh"

using T = ELEM;

// A vector in one instruction: of vectors of 2-byte elements the compiler makes four stores of 4 bytes, a quarter slower.
template <class X> DEVICE void put(X* to, const Vec<X>& value) {
    const uint4& q = *reinterpret_cast<const uint4*>(&value);
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w) : "memory");
}

using Acc = AccOf<T>::type;

template <class X> DEVICE Acc to_acc(X x) {
    if constexpr (sizeof(X) == 8) return x;
    else return to_float(x);
}
template <class X> DEVICE X from_acc(Acc x) {
    if constexpr (sizeof(X) == 8) return x;
    else return from_float<X>((float)x);
}
