// What norm/bwd_hopper.cu does with its rows beside storing them, where the tensor is rounded to 8 bits too.
#pragma once

#include "fp8/pairs.cuh"
#include "fp8/row_tile.cuh"

// Rows of a block, CHUNK at a time by all its BLOCK threads. While they write the columns of one chunk, the next goes to the other tile.
template <int BLOCK> struct NarrowRows {
    static constexpr u32 CHUNK = RowTile::ROWS;
    Quantized to;
    Rounding rounding;
    uint2* units;  // of two tiles
    u32 half = 0;

    DEVICE NarrowRows(const Quantized& to, uint2* units) : to(to), rounding(to, blockIdx.x == 0 && threadIdx.x == 0), units(units) {}

    // Eight columns of a row, which are its unit v.
    DEVICE void row(const u32 (&pairs)[4], u32 row, int v) {
        u32 two[4];
#pragma unroll
        for (int k = 0; k < 4; k++) two[k] = rounding.round(pairs[k]);
        const uint2 unit = make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
        *reinterpret_cast<uint2*>(to.q + (u64)row * WIDTH + v * 8) = unit;
        tile().put(row % CHUNK, v, unit);
    }
    // When all rows of a chunk, of which `row` is one, have been given to `row`.
    DEVICE void chunk(u32 row) {
        __syncthreads();
        tile().store_columns(to.q_t, to.rows, row - row % CHUNK, BLOCK);
        half ^= 1;
    }
    DEVICE void end() const { rounding.tell(to); }

   private:
    DEVICE RowTile tile() const { return {units + half * RowTile::UNITS}; }
};
