// Which expert and which tile a block works on, where each of E experts has a stretch of rows: offsets (E+1).
//
// Blocks stay and walk over the tiles of all experts. The tiles of an expert are numbered in bands of BAND tiles of rows, and
// within a band row by row: what blocks read at about the same time is then in L2.
#pragma once

#include "common/prelude.cuh"

constexpr u32 BAND = 8;

// A tile of the result.
struct Tile {
    u32 expert;
    u32 row, column;  // of the expert's part of the result, in tiles
};

// The stretches, in shared memory.
struct Groups {
    const i32* offsets;  // E+1
    const u32* starts;   // tiles of rows before each expert, E+1
    u32 experts;
    u32 tiles;  // of rows
    bool fine;  // the offsets are valid; else there are no tiles

    DEVICE u32 first(u32 expert) const { return (u32)offsets[expert]; }
    DEVICE u32 rows(u32 expert) const { return (u32)(offsets[expert + 1] - offsets[expert]); }

    // Tile t of tiles·columns.
    DEVICE Tile tile(u64 t, u32 columns) const {
        const u32 at = (u32)(t / columns);
        u32 low = 0, high = experts;  // starts[low] <= at < starts[high]
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (starts[middle] <= at) low = middle;
            else high = middle;
        }
        const u32 tall = starts[low + 1] - starts[low];
        const u64 inside = t - (u64)starts[low] * columns;
        const u32 band = (u32)(inside / ((u64)BAND * columns)), rest = (u32)(inside - (u64)band * BAND * columns);
        const u32 thick = min(BAND, tall - band * BAND);
        return {low, band * BAND + rest % thick, rest / thick};
    }
};

// A tile of rows of an expert: its first row of all and its first column, and how many rows the expert has from there on.
struct RowTile {
    u32 expert, row, column, rows;
};

// The tiles of BM by BN of n columns of all experts' rows.
template <u32 BM, u32 BN> struct RowTiles {
    Groups groups;
    u32 columns;  // of tiles
    u64 count;

    DEVICE RowTiles(const Groups& groups, u32 n) : groups(groups), columns((n + BN - 1) / BN), count((u64)groups.tiles * columns) {}

    DEVICE RowTile at(u64 t) const {
        const Tile tile = groups.tile(t, columns);
        const u32 inside = tile.row * BM;
        return {tile.expert, groups.first(tile.expert) + inside, tile.column * BN, groups.rows(tile.expert) - inside};
    }

    // Calls f for each tile of this block.
    template <class F> DEVICE void each(F f) const {
        for (u64 t = blockIdx.x; t < count; t += gridDim.x) f(at(t));
    }
};

// Calls f(expert, row, column) for this block's tiles of BM by BN of all experts' weights (OC,IC).
template <int BM, int BN, class F> DEVICE void each_weight_tile(const Groups& groups, u32 oc, u32 ic, F f) {
    const u32 tall = (oc + BM - 1) / BM, wide = (ic + BN - 1) / BN;
    const u64 tiles = groups.fine ? (u64)groups.experts * tall * wide : 0;
    for (u64 t = blockIdx.x; t < tiles; t += gridDim.x) {
        const u32 expert = (u32)(t / (tall * wide)), inside = (u32)(t - (u64)expert * tall * wide);
        f(expert, inside / wide * BM, inside % wide * BN);
    }
}

// Reads the offsets; all threads of the block take part. `space` has 2·(E+1) words. Offsets that
// do not ascend from 0 to `rows` are a fault, and there are no tiles then.
template <int ROWS> DEVICE Groups read_groups(u32* space, const i32* offsets, u32 experts, u32 rows, Fault* fault) {
    i32* const ends = reinterpret_cast<i32*>(space);
    u32* const starts = space + experts + 1;
    for (u32 e = threadIdx.x; e <= experts; e += blockDim.x) ends[e] = offsets[e];
    __syncthreads();
    bool wrong = false;
    for (u32 e = threadIdx.x; e <= experts; e += blockDim.x) {
        const i32 least = e == 0 ? 0 : ends[e - 1], most = e == 0 ? 0 : (i32)rows;
        const bool off = ends[e] < least || ends[e] > most || (e == experts && ends[e] != (i32)rows);
        if (off && blockIdx.x == 0) report(fault, 6, ends[e], (i32)e, (i32)rows);
        wrong |= off;
    }
    if (__syncthreads_or(wrong)) return {ends, starts, experts, 0, false};
    if (threadIdx.x < WARP) {
        u32 before = 0;
        for (u32 first = 0; first < experts; first += WARP) {
            const u32 e = first + threadIdx.x;
            const u32 mine = e < experts ? ((u32)(ends[e + 1] - ends[e]) + ROWS - 1) / ROWS : 0;
            const u32 sum = warp_scan(mine);
            if (e < experts) starts[e] = before + sum - mine;
            before += __shfl_sync(0xffffffffu, sum, WARP - 1);
        }
        if (threadIdx.x == 0) starts[experts] = before;
    }
    __syncthreads();
    return {ends, starts, experts, starts[experts], true};
}
