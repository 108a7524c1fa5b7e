// dropout: out = inp·keep where the mask of common/dropout.cuh keeps an element, else 0; its own backward
// moves  2·N·C·sizeof(ACT) bytes; bound: memory
// grid   a thread per 16 columns of a row where rows are whole blocks of 16 (VECTORS), else per element; any N and C; in
//        place is fine
// order  elementwise
#include "common/dropout.cuh"

constexpr int BLOCK = 16;

KERNEL __launch_bounds__(256) dropout(ACT* out, const ACT* inp, const Scalars* scalars, u32 site, u32 threshold, float keep,
                                      u64 rows, u32 cols) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const Drops drops = make_drops(scalars, site, threshold, keep, cols);
#if VECTORS
    const u32 blocks = cols / BLOCK;
    if (index >= rows * blocks) return;
    const u64 row = index / blocks;
    const DropRow mask = drops.row(row);
    const u32 first = (u32)(index - row * blocks) * (BLOCK / 2);
    float x[BLOCK];
    load_floats(x, inp + index * BLOCK);
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i++) {
        const u32 word = mask.word(first + i);
        x[i] = drops.keeps_low(word) ? x[i] * keep : 0.0f;
        x[i + BLOCK / 2] = drops.keeps_high(word) ? x[i + BLOCK / 2] * keep : 0.0f;
    }
    store_floats(out + index * BLOCK, x);
#else
    if (index >= rows * cols) return;
    const u64 row = index / cols;
    const bool kept = drops.keeps(row, (u32)(index - row * cols));
    out[index] = from_float<ACT>(kept ? to_float(inp[index]) * keep : 0.0f);
#endif
}
