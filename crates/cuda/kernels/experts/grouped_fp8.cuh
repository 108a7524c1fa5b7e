// Tiles of products of 8-bit numbers on Hopper, as the tensor cores sum. A file that includes this defines what grouped_hopper.cuh asks
// for, with BYTES of 1, and LEFT, the format of the left operand; the right one is e4m3.
#pragma once

#include "common/fp8.cuh"
#include "experts/grouped_hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
static_assert(BYTES == 1, "8-bit numbers");
constexpr bool WIDE = LEFT::FRACTION == 2;

// Consumer: acc = this warpgroup's rows of a tile of at least one term, as the tensor cores sum.
template <class F> DEVICE void multiply_fast(float (&acc)[128], const Space& space, Turn& turn, u32 terms, F meanwhile) {
    const u32 group = threadIdx.x / GROUP - 1;
    const auto product = [&](u32 k, u32 stage) {
        const u32 a = space.a(stage) + group * BOX, b = space.b(stage);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < TERMS / 32; s++) {
            const u64 left = matrix_descriptor(a + s * 32, 16), right = matrix_descriptor(b + s * 32, 16);
            if constexpr (EPILOGUE_GROUPS < 2) {
                wgmma_fp8<WIDE>(acc, left, right, k > 0 || s > 0);
            } else {
                // With 512 threads the compiler refuses instructions of more than 128 registers.
                wgmma_fp8_128<WIDE, 0>(acc, left, right, k > 0 || s > 0);
                wgmma_fp8_128<WIDE, 64>(acc, left, matrix_descriptor(b + 2 * BOX + s * 32, 16), k > 0 || s > 0);
            }
        }
    };
    multiply_stages<TERMS>(space, turn, terms, product, meanwhile, acc);
}

DEVICE void scale_all(float (&acc)[128], float scale) {
#pragma unroll
    for (int i = 0; i < 128; i++) acc[i] *= scale;
}
#endif
