// What the consumers of the experts' products on Hopper do with a tile of results: rounded to bf16 and stored by TMA, or in f32 from
// registers; alone, or added to what is there. A file that includes this defines what grouped_hopper.cuh asks for, and OUT, the type of
// the gradient of weights.
#pragma once

#include "experts/grouped_hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The part of the tile at column x, row y that exists: `rows` and `columns`.
template <int J = 0>
DEVICE void write(ResultStores& stores, const Target& to, u32 x, u32 y, u32 rows, u32 columns, const float (&acc)[128]) {
    if constexpr (J < BN / BK) {
        u32 pairs[8][2];
        rounded<J>(pairs, acc);
        if (J * BK < columns) stores.write(to, x + J * BK, y + own_rows(), (i32)rows - (i32)own_rows(), pairs);
        write<J + 1>(stores, to, x, y, rows, columns, acc);
    }
}

DEVICE u32 own_row() { return own_rows() + threadIdx.x % WARP / 4; }

// f32 is stored from registers.
DEVICE void write_weight(ResultStores& stores, const TensorMap& map, bf16* at, u64 stride, u32 x, u32 y, u32 rows, u32 columns,
                         const float (&acc)[128]) {
    write(stores, {map, at, stride}, x, y, rows, columns, acc);
}
DEVICE void write_weight(ResultStores&, const TensorMap&, float* at, u64 stride, u32 x, u32 y, u32 rows, u32 columns,
                         const float (&acc)[128]) {
    float* const to = at + y * stride + x;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own_row() + 8 * h;
        float* const line = to + row * stride + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
            if (row < rows && 8 * n < columns)
                *reinterpret_cast<float2*>(line + 8 * n) = make_float2(acc[4 * n + 2 * h], acc[4 * n + 2 * h + 1]);
    }
}

DEVICE void write_zeros(OUT* to, u64 stride, u32 rows, u32 columns) {
    for (u32 i = threadIdx.x - GROUP; i < BM * BN; i += 2 * GROUP)
        if (i / BN < rows && i % BN < columns) to[i / BN * stride + i % BN] = from_float<OUT>(0.0f);
}

// acc += what is there already.
DEVICE void add_old(float (&acc)[128], const bf16* from, u64 stride, u32 rows, u32 columns) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own_row() + 8 * h;
        const bf16* const line = from + row * stride + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            const bool inside = row < rows && 8 * n < columns;
            const u32 old = inside ? *reinterpret_cast<const u32*>(line + 8 * n) : 0;
            acc[4 * n + 2 * h] += __uint_as_float(old << 16);
            acc[4 * n + 2 * h + 1] += __uint_as_float(old & 0xffff0000u);
        }
    }
}
DEVICE void add_old(float (&acc)[128], const float* from, u64 stride, u32 rows, u32 columns) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own_row() + 8 * h;
        const float* const line = from + row * stride + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            const bool inside = row < rows && 8 * n < columns;
            const float2 old = inside ? *reinterpret_cast<const float2*>(line + 8 * n) : make_float2(0.0f, 0.0f);
            acc[4 * n + 2 * h] += old.x;
            acc[4 * n + 2 * h + 1] += old.y;
        }
    }
}

// Registers of a producer thread and of a consumer thread: together those of the block.
constexpr int FEW = 40, MANY = 232;
#endif
