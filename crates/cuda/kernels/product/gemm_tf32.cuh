// What the kernels of f32 products share: tiles in shared memory, which tile a block has, and the sum of slices.
//
// An operand's tile is TILE positions (rows or columns of the result) by DEPTH terms, rows of 16-byte chunks: a row is a position
// if terms are side by side in memory (ALONG), else a term. Chunks are permuted by row, so that what 8 lanes read is in different
// banks.
#pragma once

#include "common/async_copy.cuh"

constexpr int TILE = 128;
constexpr int DEPTH = 32;                // terms of a stage
constexpr u32 BYTES = TILE * DEPTH * 4;  // of an operand's stage
constexpr u32 BAND = 8;                  // tiles along n
constexpr u32 ALONG_PITCH = DEPTH * 4, ACROSS_PITCH = TILE * 4;

DEVICE u32 along_at(u32 row, u32 chunk) { return row * ALONG_PITCH + (chunk ^ row % 8) * 16; }
DEVICE u32 across_at(u32 term, u32 chunk) { return term * ACROSS_PITCH + (chunk ^ term % 4 * 2) * 16; }

// Starts copying terms from.. of positions first.. of an operand by THREADS threads; zeros beyond.
template <bool ALONG, int THREADS>
DEVICE void load_tile(u32 to, const float* x, u64 ld, u32 first, u32 count, u32 from, u32 end) {
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / 4 / THREADS; ++i) {
        u32 n = i * THREADS + threadIdx.x;
        u32 row = ALONG ? n / 8 : n / 32, chunk = ALONG ? n % 8 : n % 32;
        u32 position = first + (ALONG ? row : chunk * 4), term = from + (ALONG ? chunk * 4 : row);
        bool inside = position < count && term < end;
        u64 at = ALONG ? position * ld + term : term * ld + position;
        cp_async16(to + (ALONG ? along_at(row, chunk) : across_at(row, chunk)), x + (inside ? at : 0), inside);
    }
}

// A tile of d and a slice of the terms.
struct Place {
    u32 n0, m0;
    u32 first, end, steps;  // terms, and stages of them
    u32 slice;
};
// Number `index` of tiles*slices: slice by slice, BAND tiles along n at a time.
DEVICE Place place_of(u32 index, u32 m, u32 n, u32 k, u32 span) {
    u32 tiles_m = (m + TILE - 1) / TILE, tiles_n = (n + TILE - 1) / TILE, tiles = tiles_m * tiles_n;
    u32 slice = index / tiles, block = index % tiles;
    u32 band = block / (BAND * tiles_m) * BAND, rest = block % (BAND * tiles_m), high = min(BAND, tiles_n - band);
    u32 first = slice * span, end = min(k, first + span);
    return {(band + rest % high) * TILE, rest / high * TILE, first, end, (end - first + DEPTH - 1) / DEPTH, slice};
}

// d (+)= the sum of `slices` parts of `count` elements
// moves  4*(slices + 1)*count bytes; bound: memory
// grid   a thread for every four elements, 256 to a block
// order  slices in order
KERNEL __launch_bounds__(256) gemm_tf32_sum(float* d, const float* parts, u64 count, u32 slices, u32 adds) {
    u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (at >= count) return;
    Vec<float> sum = load(parts + at);
    for (u32 i = 1; i < slices; ++i) {
        Vec<float> x = load(parts + i * count + at);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.at[e] += x.at[e];
    }
    if (adds) {
        Vec<float> x = load(d + at);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.at[e] += x.at[e];
    }
    store(d + at, sum);
}
