// Products of f32 as products of tf32 on tensor cores (sm_80 and newer).
//
// TERMS is 1 or 3. With 1, operands become tf32 (11 bits) by near_tf32. With 3, an operand x is big + small, both tf32, where
// big is x rounded and small what is left of it (12 bits, of which one is cut off at times: 2^-24 of x); a product is
// small.big + big.small + big.big, and what is left out is below 2^-22 of it. Tensor cores cut off sums instead of rounding
// them, which over many terms adds up in one direction: so sums of few terms should start from zero, and be added to the
// whole by an ordinary, rounded addition.
#pragma once

#include "common/mma.cuh"

static_assert(TERMS == 1 || TERMS == 3, "tf32 or f32");

DEVICE void read(float (&to)[4], u32 from) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(from)
                 : "memory");
}
// N numbers of an operand.
template <int N> struct Split {
    u32 big[N], small[N];

    // The numbers in the place of `big`.
    DEVICE void split() {
#pragma unroll
        for (int i = 0; i < N; ++i) set(i, __uint_as_float(big[i]));
    }
    DEVICE void set(int i, float x) {
        if constexpr (TERMS == 1) big[i] = near_tf32(x);
        else set_both(i, x);
    }
    // The nearest tf32, in two instructions, and the rest. A NaN may become 0 here; then it is in `small`.
    DEVICE void set_both(int i, float x) {
        big[i] = __float_as_uint(x) + 0x1000 & 0xffffe000;
        small[i] = __float_as_uint(x - __uint_as_float(big[i]));
    }
};

// c += a . b, of 8 terms, by tensor cores alone
DEVICE void chain(float (&c)[4], const Split<4>& a, const Split<2>& b) {
    if constexpr (TERMS == 3) {
        mma_tf32(c, a.small, b.big);
        mma_tf32(c, a.big, b.small);
    }
    mma_tf32(c, a.big, b.big);
}
