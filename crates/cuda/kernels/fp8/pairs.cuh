// Pairs of bf16 numbers on their way to 8 bits, on Hopper and newer: as `quantize` of fp8/quantize.cu does with single ones, the same bits.
#pragma once

#include "common/floats.cuh"
#include "common/fp8.cuh"

// The parameters of a kernel that rounds a tensor, but for its sizes.
#define NARROW u8 *q, u8 *q_t, float *inverse, u32 *seen, const u32 *amax, int margin, int unknown

// What a thread needs to round numbers, and what it remembers of them.
struct Rounding {
    u32 up;        // the scale, twice
    u32 most = 0;  // the largest |x| so far, of each half by itself; NaN is the largest

    // Threads for which `first` is true write the inverse of the scale: one of the grid, or several the same.
    DEVICE Rounding(const Quantized& to, bool first) {
        const Scale scale = scale_of<FORMAT>(*to.amax, to.margin, to.unknown);
        up = pack_bf16(scale.up, scale.up);
        if (first) *to.inverse = scale.down;
    }

    // Two numbers, the first in the low byte. The product with a power of two rounds nothing that 8 bits can tell; infinity becomes NaN.
    DEVICE u32 round(u32 pair) {
        u32 scaled;
        asm("max.u16x2 %0, %0, %1;" : "+r"(most) : "r"(pair & 0x7fff7fffu));
        asm("{\n.reg .b32 product;\n"
            "mul.rn.bf16x2 product, %1, %2;\n"
            "fma.rn.bf16x2 %0, %1, %3, product;\n}"
            : "=r"(scaled)
            : "r"(pair), "r"(up), "r"(0u));
        return pack_fp8<FORMAT>(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xffff0000u));
    }

    // Counts the largest of the warp.
    DEVICE void tell(const Quantized& to) const {
        const u32 low = most & 0xffff, high = most >> 16;
        const u32 bits = __reduce_max_sync(0xffffffffu, low > high ? low : high) << 16;
        // Most warps see nothing new, and are spared the atomic.
        if (threadIdx.x % WARP == 0 && bits > *reinterpret_cast<volatile u32*>(to.seen)) atomicMax(to.seen, bits);
    }
};
