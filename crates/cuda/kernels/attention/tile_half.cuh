// Tiles of bf16 or f16 in shared memory and the two products of attention on tensor cores, for heads of HD channels.
//
// A tile holds positions as rows of HD channels. Rows of 8 chunks of 16 bytes would put one chunk of 8 rows into the same
// banks, which is how ldmatrix reads; so chunks are permuted by row where HD is a multiple of 64, and rows padded by
// one chunk elsewhere (an odd number of chunks then).
//
// A warp owns 16*MT rows of the resident tile; scores are float[MT][N/8][4] and results float[MT][HD/8][4] in the
// layout of mma's c: of 16 rows and 8 columns, element e is at row row_of(e), column column_of(e) of common/mma.cuh.
#pragma once

#include "attention/flash.cuh"
#include "common/mma.cuh"

static_assert(HD % 16 == 0 && HD <= 128, "what tiles and registers have room for");

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
#ifdef CACHED
constexpr bool OVER_CACHE = true;  // a block has a group of tokens (attention/places.cuh)
#else
constexpr bool OVER_CACHE = false;
#endif
constexpr int MT = HD <= 64 && !OVER_CACHE ? 2 : 1;  // two tiles of 16 rows share what is read of the streamed tile
constexpr int CHUNKS = HD / 8;
constexpr bool SWIZZLE = HD % 64 == 0;
constexpr int PITCH = (SWIZZLE ? HD : HD + 8) * 2;  // bytes from row to row

// Streamed positions: per stage of the forward, per stage of the backward, and of these at a time, as many as
// registers hold.
constexpr int FWD_STAGE = 64;
constexpr int BWD_STAGE = 64;
// The first keys of queries take registers too, and on the newest GPUs what is dropped.
constexpr int BWD_PART = (MASKS || (DROPS && MAJOR >= 10)) && MT == 2 && HD > 48 ? 16 : 32;
constexpr int BLOCKS = 2, KV_BLOCKS = BLOCKS;  // per multiprocessor: of all kernels, of flash_bwd_kv
// Whether rows are held in registers. With strided k and v, or limits of the keys, the compiler for the newest GPUs has no registers
// left for queries of this width (over a cache of any), and with dropout none has for two tiles of queries.
constexpr bool FWD_HELD = !((STRIDED || MASKS) && (HD == 64 || OVER_CACHE) && MAJOR >= 10) && !(DROPS && MT == 2);
constexpr bool BWD_HELD = true;
constexpr bool BALANCED = false;  // operands are rounded more than delta
constexpr bool SHORT = false;  // of registers for values needed only after the passes

// Weights are powers of 2.
constexpr float POWER = LOG2E;
DEVICE float power(float x) { return exp2_flush(x); }
// The logarithm of `sum` weights relative to that of the score `maximum`.
DEVICE float log_of_sum(float sum, float maximum, float scale) { return fmaf(maximum, scale, logf(sum)); }

// Byte of a tile where a chunk starts.
DEVICE u32 chunk_at(u32 row, u32 chunk) { return row * PITCH + (SWIZZLE ? chunk ^ row % 8 : chunk) * 16; }

#include "attention/tile.cuh"

// This warp's rows of a resident tile as left operand: in registers where `HELD`, else read at every use.
template <bool HELD> struct Rows {
    u32 tile, row;
    u32 held[HELD ? HD / 16 : 1][MT][4];

    // Columns 16k..: lanes point down 16 rows, then to the next chunk.
    DEVICE void load(u32 (&x)[MT][4], int k) const {
#pragma unroll
        for (int m = 0; m < MT; ++m) ldmatrix(x[m], tile + chunk_at(row + 16 * m + lane() % 16, 2 * k + lane() / 16));
    }
    // Waits for all copies of the block.
    DEVICE void hold() {
        if constexpr (HELD) {
            cp_wait<0>();
            __syncthreads();
#pragma unroll
            for (int k = 0; k < HD / 16; ++k) load(held[k], k);
        }
    }
    DEVICE void get(u32 (&x)[MT][4], int k) const {
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < 4 * MT; ++i) x[i / 4][i % 4] = held[k][i / 4][i % 4];
        } else {
            load(x, k);
        }
    }
};

// s += this warp's rows of a . rows col.. of tile b (N of them), over the channels
template <int N, bool HELD> DEVICE void scores(float (&s)[MT][N / 8][4], const Rows<HELD>& a, u32 b, u32 col) {
    // Rows of b are columns of the right operand: lanes point down 8 rows, to the next chunk, then to the next 8 rows.
    u32 down = lane() % 8 + lane() / 16 * 8, right = lane() / 8 % 2;
#pragma unroll
    for (int k = 0; k < HD / 16; ++k) {
        u32 x[MT][4];
        a.get(x, k);
#pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            u32 y[4];
            ldmatrix(y, b + chunk_at(col + 16 * n + down, 2 * k + right));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma<ELEM>(s[m][2 * n], x[m], y[0], y[1]);
                mma<ELEM>(s[m][2 * n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// acc += w . rows row.. of tile b (N of them); w is rounded to ELEM
template <int N, bool = false> DEVICE void weighted(float (&acc)[MT][HD / 8][4], const float (&w)[MT][N / 8][4], u32 b, u32 row) {
#pragma unroll
    for (int k = 0; k < N / 16; ++k) {
        // The layout of two results side by side is that of a left operand.
        u32 x[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&two)[4] = w[m][2 * k + i / 2];
                x[m][i] = pack<ELEM>(two[i % 2 * 2], two[i % 2 * 2 + 1]);
            }
#pragma unroll
        for (int n = 0; n < HD / 16; ++n) {
            u32 y[4];
            ldmatrix_trans(y, b + chunk_at(row + 16 * k + lane() % 16, 2 * n + lane() / 16));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma<ELEM>(acc[m][2 * n], x[m], y[0], y[1]);
                mma<ELEM>(acc[m][2 * n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// Results times `factor` (per 8 rows of a lane) to memory as rows of ELEM, position `first` on. Passes through the warp's
// own rows of a tile that no other warp reads any more, so that memory is written in whole chunks.
DEVICE void store_tile(ELEM* to, size_t stride, u32 first, u32 seq, const float (&acc)[MT][HD / 8][4],
                       const float (&factor)[MT][2], u8* tile, u32 row) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < HD / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float f = factor[m][half];
                u32 at = chunk_at(row + 16 * m + row_of(2 * half), n) + lane() % 4 * 4;
                *reinterpret_cast<u32*>(tile + at) = pack<ELEM>(acc[m][n][2 * half] * f, acc[m][n][2 * half + 1] * f);
            }
    __syncwarp();
#pragma unroll
    for (int i = lane(); i < 16 * MT * CHUNKS; i += WARP) {
        u32 r = i / CHUNKS, chunk = i % CHUNKS;
        if (first + row + r >= seq) continue;
        uint4 v = *reinterpret_cast<const uint4*>(tile + chunk_at(row + r, chunk));
        *reinterpret_cast<uint4*>(to + (first + row + r) * stride + chunk * 8) = v;
    }
}
