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
    const u32* starts;   // tiles of rows, or pairs of tiles, before each expert, E+1
    u32 experts;
    u32 tiles;  // all of these
    bool fine;  // the offsets are valid; else there are no tiles

    DEVICE u32 first(u32 expert) const { return (u32)offsets[expert]; }
    DEVICE u32 rows(u32 expert) const { return (u32)(offsets[expert + 1] - offsets[expert]); }

    // The expert that tile of rows or pair `at` is of.
    DEVICE u32 expert_of(u32 at) const {
        u32 low = 0, high = experts;  // starts[low] <= at < starts[high]
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (starts[middle] <= at) low = middle;
            else high = middle;
        }
        return low;
    }

    // Tile t of tiles·columns.
    DEVICE Tile tile(u64 t, u32 columns) const {
        const u32 expert = expert_of((u32)(t / columns));
        return in_bands<BAND>(expert, t - (u64)starts[expert] * columns, starts[expert + 1] - starts[expert], columns);
    }

    // Tile `inside` of tall·columns of an expert.
    template <u32 THICK> static DEVICE Tile in_bands(u32 expert, u64 inside, u32 tall, u32 columns) {
        const u32 band = (u32)(inside / ((u64)THICK * columns)), rest = (u32)(inside - (u64)band * THICK * columns);
        const u32 thick = min(THICK, tall - band * THICK);
        return {expert, band * THICK + rest % thick, rest / thick};
    }
};

// A tile of rows of an expert: its first row of all and its first column, and how many rows the expert has from there on.
struct RowTile {
    u32 expert, row, column, rows;
    bool shares = false;  // its columns with the tile of the other block of a pair
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

    // The tiles of this block: every stride() from first() on.
    static DEVICE u32 first() { return blockIdx.x; }
    static DEVICE u32 stride() { return gridDim.x; }

    // Calls f for each tile of this block.
    template <class F> DEVICE void each(F f) const {
        for (u64 t = first(); t < count; t += stride()) f(at(t));
    }
};

// The same for pairs of blocks, by read_pairs: two tiles of an expert one above the other, which share their columns, or, where its number of
// tiles of rows is odd, two neighbours of the last of these rows. The second one of the last pair of these may be a tile that exists
// already, of which no rows are left.
template <u32 BM, u32 BN> struct PairTiles {
    Groups groups;
    u32 columns;  // of tiles
    u64 count;    // of pairs
    u32 own;      // which tile of a pair is this block's

    DEVICE PairTiles(const Groups& groups, u32 n, u32 own) : groups(groups), columns((n + BN - 1) / BN), count(groups.tiles), own(own) {}

    DEVICE RowTile at(u64 t) const {
        const u32 expert = groups.expert_of((u32)t), rows = groups.rows(expert), tall = (rows + BM - 1) / BM;
        const u32 pair = (u32)t - groups.starts[expert], above = tall / 2 * columns;
        if (pair < above) {
            const Tile tile = Groups::in_bands<BAND / 2>(expert, pair, tall / 2, columns);
            const u32 inside = (2 * tile.row + own) * BM;
            return {expert, groups.first(expert) + inside, tile.column * BN, rows - inside, true};
        }
        const u32 column = 2 * (pair - above) + own, inside = (tall - 1) * BM;
        const bool exists = column < columns;
        return {expert, groups.first(expert) + inside, (exists ? column : column - 1) * BN, exists ? rows - inside : 0, false};
    }

    static DEVICE u32 first() { return blockIdx.x / 2; }
    static DEVICE u32 stride() { return gridDim.x / 2; }

    template <class F> DEVICE void each(F f) const {
        for (u64 t = first(); t < count; t += stride()) f(at(t));
    }
};

// A tile of an expert's weights (OC,IC): its first row and column.
struct WeightTile {
    u32 expert, row, column;
};

// The tiles of BM by BN of all experts' weights, for single blocks, or for clusters of BLOCKS with tiles one above the other.
template <u32 BM, u32 BN, u32 BLOCKS = 1> struct WeightTiles {
    u32 tall, wide;  // tiles of a cluster
    u64 count;
    u32 own;  // which tile of a cluster is this block's

    DEVICE WeightTiles(const Groups& groups, u32 oc, u32 ic, u32 own = 0)
        : tall((oc + BLOCKS * BM - 1) / (BLOCKS * BM)), wide((ic + BN - 1) / BN),
          count(groups.fine ? (u64)groups.experts * tall * wide : 0), own(own) {}

    DEVICE WeightTile at(u64 t) const {
        const u32 expert = (u32)(t / (tall * wide)), inside = (u32)(t - (u64)expert * tall * wide);
        return {expert, (inside / wide * BLOCKS + own) * BM, inside % wide * BN};
    }

    // The number of a tile, the same whatever BLOCKS is, if that divides the rows of tiles.
    DEVICE u64 number(const WeightTile& tile) const {
        return ((u64)tile.expert * tall * BLOCKS + tile.row / BM) * wide + tile.column / BN;
    }

    DEVICE u64 first() const { return blockIdx.x / BLOCKS; }
    DEVICE u64 stride() const { return gridDim.x / BLOCKS; }

    template <class F> DEVICE void each(F f) const {
        for (u64 t = first(); t < count; t += stride()) f(at(t));
    }
};

// Reads the offsets; all threads of the block take part. `space` has 2·(E+1) words. Offsets that
// do not ascend from 0 to `rows` are a fault, and there are no tiles then. An expert has tiles_of(its rows) tiles.
template <class F> DEVICE Groups read_groups_of(u32* space, const i32* offsets, u32 experts, u32 rows, Fault* fault, F tiles_of) {
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
            const u32 mine = e < experts ? tiles_of((u32)(ends[e + 1] - ends[e])) : 0;
            const u32 sum = warp_scan(mine);
            if (e < experts) starts[e] = before + sum - mine;
            before += __shfl_sync(0xffffffffu, sum, WARP - 1);
        }
        if (threadIdx.x == 0) starts[experts] = before;
    }
    __syncthreads();
    return {ends, starts, experts, starts[experts], true};
}

// Tiles of ROWS rows.
template <int ROWS> DEVICE Groups read_groups(u32* space, const i32* offsets, u32 experts, u32 rows, Fault* fault) {
    return read_groups_of(space, offsets, experts, rows, fault, [](u32 own) { return (own + ROWS - 1) / ROWS; });
}

// Pairs of tiles of ROWS rows, of so many columns of tiles.
template <int ROWS> DEVICE Groups read_pairs(u32* space, const i32* offsets, u32 experts, u32 rows, Fault* fault, u32 columns) {
    return read_groups_of(space, offsets, experts, rows, fault, [=](u32 own) {
        const u32 tall = (own + ROWS - 1) / ROWS;
        return tall / 2 * columns + tall % 2 * ((columns + 1) / 2);
    });
}
