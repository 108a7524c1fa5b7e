// What kernels of eager ops share: any of four element types, memory of any alignment.
//
// Memory is read and written without cache hints. With evict-first hints, 8192² f32 took 0.1344 ms on an H200 instead of 0.1273 right
// after a kernel whose results were still in L2: those stay there, and hinted lines share what is left.
//
// T is the type in memory (double, float, bf16 or f16; the constant ELEM), Acc the type of computations.
#pragma once

#include "common/prelude.cuh"
#include "common/floats.cuh"

using T = ELEM;

// Stores a vector in one instruction: of 2-byte elements the compiler makes four stores of 4 bytes, which are a quarter slower.
template <class X> DEVICE void put(X* to, const Vec<X>& value) {
    const uint4& q = *reinterpret_cast<const uint4*>(&value);
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w) : "memory");
}

// W elements of a row: a vector of 16 bytes, or one element.
template <int W> struct alignas(W * sizeof(T)) Slot {
    T at[W];
};
template <int W> DEVICE Slot<W> fetch(const T* from) {
    Slot<W> s;
    if constexpr (W == 1) s.at[0] = from[0];
    else *reinterpret_cast<Vec<T>*>(&s) = load(from);
    return s;
}
template <int W> DEVICE void put(T* to, const Slot<W>& s) {
    if constexpr (W == 1) to[0] = s.at[0];
    else put(to, *reinterpret_cast<const Vec<T>*>(&s));
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
