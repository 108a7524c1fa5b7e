// 32 whole rows in 8 bits in shared memory, on their way to columns: what the kernels share that have rows of a tensor at hand.
#pragma once

#include "common/fp8.cuh"

// Rows of WIDTH columns, a constant of the file, 8 of them to a unit; WIDTH % 8 == 0.
struct RowTile {
    // Parts of 16 rows. A row of the tile has whole groups of 16 units, which are 32 banks.
    static constexpr int ROWS = 32, PARTS = ROWS / 16, STRIDE = (WIDTH / 8 + 15) / 16 * 16;
    static constexpr int UNITS = ROWS * STRIDE;
    uint2* units;

    // Where unit v of row r is: the lanes that read the parts of a column read from different banks.
    DEVICE static int place(int r, int v) { return r * STRIDE + (v ^ r / 16 * (16 / PARTS)); }

    DEVICE void put(int r, int v, uint2 unit) const { units[place(r, v)] = unit; }

    // Writes the columns to q_t (WIDTH,rows), where this tile begins at row `first`; by `threads` threads that have all seen what was put.
    // Four columns and 16 rows to a thread. Neighbours have the parts of the same columns, and write whole sectors of memory together.
    DEVICE void store_columns(u8* q_t, u32 rows, u32 first, int threads) const {
        const u32* words = reinterpret_cast<const u32*>(units);
        for (u32 i = threadIdx.x; i < WIDTH / 4 * PARTS; i += threads) {
            const int g = i / PARTS, part = i % PARTS;
            u32 w[16];
#pragma unroll
            for (int r = 0; r < 16; r++) w[r] = words[2 * place(16 * part + r, g / 2) + g % 2];
#pragma unroll
            for (int r = 0; r < 16; r += 4) transpose_bytes(w[r], w[r + 1], w[r + 2], w[r + 3]);
#pragma unroll
            for (int c = 0; c < 4; c++)
                *reinterpret_cast<uint4*>(q_t + (u64)(4 * g + c) * rows + first + 16 * part) =
                    make_uint4(w[c], w[4 + c], w[8 + c], w[12 + c]);
        }
    }
};
