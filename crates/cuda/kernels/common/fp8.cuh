// Numbers of 8 bits: E4M3 (4 bits of exponent, 3 of fraction, up to 448, no infinity) and E5M2 (5 and 2, up to 57344), and scales that
// are powers of two, so that scaling rounds nothing.
#pragma once

#include "common/prelude.cuh"

struct E4M3 {
    static constexpr int FRACTION = 3, LEAST = -6, MOST = 8;  // exponents of the least and the largest normal number
    static constexpr u32 LARGEST = 0x7e, NAN_BITS = 0x7f;
};
struct E5M2 {
    static constexpr int FRACTION = 2, LEAST = -14, MOST = 15;
    static constexpr u32 LARGEST = 0x7b, NAN_BITS = 0x7f;
};

// The nearest number of the format, ties to even; beyond the largest the largest; NaN stays NaN. The hardware has the same from sm_89 on.
template <class F> DEVICE u32 fp8_software(float x) {
    const u32 sign = __float_as_uint(x) >> 24 & 0x80, bits = __float_as_uint(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | F::NAN_BITS;
    constexpr int DROPPED = 23 - F::FRACTION;
    u32 out;
    if (bits < (u32)(127 + F::LEAST) << 23) {
        // Subnormal: adding a number whose last bit counts what the format's last bit counts rounds to it.
        const float one = __uint_as_float((u32)(127 + F::LEAST + DROPPED) << 23);
        out = __float_as_uint(__fadd_rn(__uint_as_float(bits), one)) - __float_as_uint(one);
    } else {
        const u32 half = (1u << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1);
        out = (bits + half >> DROPPED) - ((u32)(127 + F::LEAST - 1) << F::FRACTION);
        if (bits + half >= 0x7f800000u || out > F::LARGEST) out = F::LARGEST;
    }
    return sign | out;
}

// Two numbers, the first in the low byte.
template <class F> DEVICE u32 pack_fp8(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 out;
    if constexpr (F::FRACTION == 3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
#else
    return fp8_software<F>(low) | fp8_software<F>(high) << 8;
#endif
}

// A number of a format in memory.
template <class F> struct Number {
    u8 bits;
};

// The conversion is exact.
template <class F> DEVICE float to_float(Number<F> x) {
    const u32 rest = x.bits & 0x7f;
    constexpr u32 NO_NUMBER = F::FRACTION == 3 ? 0x7f : 0x7c;  // from here on NaN, and of E5M2 infinity
    // As if it were a float with a smaller exponent; the product puts that right, of subnormal numbers too.
    float value = __uint_as_float(rest << 23 - F::FRACTION) * __uint_as_float((u32)(253 + F::LEAST) << 23);
    if (rest >= NO_NUMBER) value = rest == 0x7c ? __uint_as_float(0x7f800000u) : __uint_as_float(0x7fc00000u);
    return x.bits & 0x80 ? -value : value;
}

// A tensor (rows,cols) that is rounded to 8 bits, how, and what is said of it. Null is what is not wanted.
struct Quantized {
    u8* q;
    u8* q_t;  // (cols,rows)
    float* inverse;
    u32* seen;
    float* partials;
    const u32* amax;
    u32 rows, cols;
    int margin, unknown;
};

// A factor 2^k and its inverse.
struct Scale {
    float up, down;
};

DEVICE float power_of_two(int k) { return __uint_as_float((u32)(127 + k) << 23); }

// The largest power of two that keeps `amax` (the bits of a number that is not negative) times 2^margin within the format. `unknown` is its
// exponent where amax is 0 or not finite: nothing is known then.
template <class F> DEVICE Scale scale_of(u32 amax, int margin, int unknown) {
    int k = unknown;
    if (amax != 0 && amax < 0x7f800000u) {
        const int exponent = (int)(amax >> 23) - 127;  // -127 for a subnormal, which the bound below covers
        k = F::MOST - margin - exponent - ((amax & 0x7fffffu) > 0x600000u ? 1 : 0);
    }
    k = k < -100 ? -100 : k > 100 ? 100 : k;
    return {power_of_two(k), power_of_two(-k)};
}

// The bytes of four words as a 4x4 matrix, transposed.
DEVICE void transpose_bytes(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    const u32 ef = __byte_perm(a, b, 0x7362), gh = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab, cd, 0x5410);
    b = __byte_perm(ab, cd, 0x7632);
    c = __byte_perm(ef, gh, 0x5410);
    d = __byte_perm(ef, gh, 0x7632);
}
