// Tiles of f32 (ELEM) in shared memory and the two products of attention as tf32 on tensor cores, for heads of HD channels: the
// interface of attention/tile_half.cuh.
//
// TERMS and what is computed: common/tf32.cuh. In f32 sums of few terms start from zero (8 of scores, a tile's of results) and are
// added to the whole by rounded additions.
//
// A tile holds positions as rows of HD channels, in chunks of 16 bytes that are permuted by row, so that the same chunk of 8 rows and
// two chunks of every other row are in different banks. Rows are read by ldmatrix, which takes a float for two elements. For
// products over positions, where columns are channels, lane (g, t) reads chunk g of 32 channels of rows 2t and 2t+1: terms
// may come in any order that both operands share, and results in any order of columns, so that these are two terms of four
// mma, whose column g is channel 4g, 4g+1, 4g+2 or 4g+3.
//
// Scores have the layout of attention/tile_half.cuh. Of results, element e of acc[m][4*i + j] is channel 32*i + 8*t + 4*(e%2) + j.
#pragma once

#include "attention/flash.cuh"
#include "common/tf32.cuh"

static_assert(HD % 32 == 0 && HD <= 128, "what fragments are made of and registers have room for");

constexpr int MT = TERMS == 1 && HD <= 64 ? 2 : 1;  // two tiles of 16 rows share what is read of the streamed tile
constexpr int WARPS = HD <= 64 ? 4 : 8;
constexpr int THREADS = WARPS * WARP;
constexpr int CHUNKS = HD / 4;
constexpr int PITCH = HD * 4;  // bytes from row to row
// Streamed positions: per stage of the forward, per stage of the backward, and of these at a time.
constexpr int FWD_STAGE = MT == 2 ? 64 : 32;
constexpr int BWD_STAGE = 32;
// Addresses of strided tensors take registers, and so do masks.
constexpr int BWD_PART = HD <= 64 && !((STRIDED || DROPS) && TERMS == 3) ? 32 : 16;
// Blocks per multiprocessor: as many as shared memory and registers allow.
constexpr int BLOCKS = HD > 64 ? 1 : LARGE ? 4 - MT : __CUDA_ARCH__ == 800 ? 2 : 1;
// Of flash_bwd_kv, which with the first keys of queries does not have enough in a third of sm_100's registers.
constexpr int KV_BLOCKS = MASKS && BLOCKS == 3 && MAJOR == 10 ? 2 : BLOCKS;
constexpr bool FWD_HELD = false;
constexpr bool BWD_HELD = false;
constexpr bool BALANCED = true;     // attention/flash_bwd.cu
constexpr bool SHORT = TERMS == 3;  // of registers: values needed only after the passes are computed again

// Weights are powers of 2 in tf32. In f32 the factor's rounding would cost large scores their last bits.
constexpr float POWER = TERMS == 1 ? LOG2E : 1.0f;
DEVICE float power(float x) { return TERMS == 1 ? exp2_flush(x) : expf(x); }
// The logarithm of `sum` weights relative to that of the score `maximum`. In f32 the product is rounded where weights had it
// rounded.
DEVICE float log_of_sum(float sum, float maximum, float scale) {
    if constexpr (TERMS == 1) return fmaf(maximum, scale, logf(sum));
    else return __fadd_rn(__fmul_rn(maximum, scale), logf(sum));
}

// Byte of a tile where a chunk starts.
DEVICE u32 chunk_at(u32 row, u32 chunk) { return row * PITCH + (chunk ^ row % 8) * 16; }

DEVICE void write(u32 to, const float (&from)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3])
                 : "memory");
}

#include "attention/tile.cuh"

// c += a . b, of 8 terms, in f32 by a rounded addition
DEVICE void product(float (&c)[4], const Split<4>& a, const Split<2>& b) {
    if constexpr (TERMS == 1) {
        chain(c, a, b);
    } else {
        float part[4] = {};
        chain(part, a, b);
#pragma unroll
        for (int e = 0; e < 4; ++e) c[e] += part[e];
    }
}

// This warp's rows of a resident tile as left operand, read at every use: registers are scarce, and one read serves many columns.
template <bool> struct Rows {
    u32 tile, row;

    // Channels 8k..: lanes point down 16 rows, then to the next chunk.
    DEVICE void get(Split<4> (&x)[MT], int k) const {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            ldmatrix(x[m].big, tile + chunk_at(row + 16 * m + lane() % 16, 2 * k + lane() / 16));
            if constexpr (TERMS == 3) x[m].split();
        }
    }
    // Waits for all copies of the block.
    DEVICE void hold() {
        if constexpr (TERMS == 1) {
            cp_wait<0>();
            __syncthreads();
            // Only this warp reads these rows, many times. Rounded like streamed tiles, so that scores are equal in every kernel.
#pragma unroll 4
            for (int i = lane(); i < 16 * MT * CHUNKS; i += WARP) {
                u32 at = tile + row * PITCH + i * 16;
                float y[4];
                read(y, at);
#pragma unroll
                for (int n = 0; n < 4; ++n) y[n] = __uint_as_float(near_tf32(y[n]));
                write(at, y);
            }
            __syncwarp();
        }
    }
};

// s += this warp's rows of a . rows col.. of tile b (N of them), over the channels
template <int N, bool HELD> DEVICE void scores(float (&s)[MT][N / 8][4], const Rows<HELD>& a, u32 b, u32 col) {
    // Rows of b are columns of the right operand: lanes point down 8 rows, to the next chunk, then to the next 8 rows.
    u32 down = lane() % 8 + lane() / 16 * 8, right = lane() / 8 % 2;
#pragma unroll 4
    for (int k = 0; k < HD / 8; ++k) {
        Split<4> x[MT];
        a.get(x, k);
#pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            u32 y[4];
            ldmatrix(y, b + chunk_at(col + 16 * n + down, 2 * k + right));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Split<2> z;
                z.set(0, __uint_as_float(y[2 * half]));
                z.set(1, __uint_as_float(y[2 * half + 1]));
#pragma unroll
                for (int m = 0; m < MT; ++m) product(s[m][2 * n + half], x[m], z);
            }
        }
    }
}

// acc += w . rows row.. of tile b (N of them). Where EXACT, w is not rounded but split in two, in tf32 too: errors of b are the same
// for all rows of w, and where those add up to zero, so do the results.
template <int N, bool EXACT = false> DEVICE void weighted(float (&acc)[MT][HD / 8][4], const float (&w)[MT][N / 8][4], u32 b, u32 row) {
    u32 t = lane() % 4 * 2, g = lane() / 4;
    u32 even = b + row * PITCH + chunk_at(t, g), odd = b + row * PITCH + chunk_at(t + 1, g);
    // The layout of results is that of a left operand, if its terms are taken in this order.
    auto left = [&](Split<4>(&x)[MT], int k) {
#pragma unroll
        for (int i = 0; i < 4 * MT; ++i) {
            float y = w[i / 4][k][i % 2 * 2 + i % 4 / 2];
            if constexpr (EXACT) x[i / 4].set_both(i % 4, y);
            else x[i / 4].set(i % 4, y);
        }
    };
    // Adds rows 8k.. of channels 32n.. to four times MT sums, which `sums` gives.
    auto step = [&](const Split<4>(&x)[MT], int k, int n, auto sums) {
        float y[2][4];
        read(y[0], even + 8 * k * PITCH + 128 * n);
        read(y[1], odd + 8 * k * PITCH + 128 * n);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            Split<2> z;
            z.set(0, y[0][j]);
            z.set(1, y[1][j]);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                if constexpr (EXACT && TERMS == 1) mma_tf32(sums(m, j), x[m].small, z.big);
                chain(sums(m, j), x[m], z);
            }
        }
    };
    if constexpr (TERMS == 1) {
#pragma unroll
        for (int k = 0; k < N / 8; ++k) {
            Split<4> x[MT];
            left(x, k);
#pragma unroll
            for (int n = 0; n < HD / 32; ++n)
                step(x, k, n, [&](int m, int j) -> float(&)[4] { return acc[m][4 * n + j]; });
        }
    } else {
        // No exponential follows, so the truncated sums of N terms are accurate enough.
#pragma unroll
        for (int n = 0; n < HD / 32; ++n) {
            float part[4][MT][4] = {};
#pragma unroll
            for (int k = 0; k < N / 8; ++k) {
                Split<4> x[MT];
                left(x, k);
                step(x, k, n, [&](int m, int j) -> float(&)[4] { return part[j][m]; });
            }
#pragma unroll
            for (int i = 0; i < 16 * MT; ++i) acc[i / 16][4 * n + i / 4 % 4][i % 4] += part[i / 4 % 4][i / 16][i % 4];
        }
    }
}

// Results times `factor` (per 8 rows of a lane) to memory, position `first` on. Four lanes write 128 bytes of a row.
DEVICE void store_tile(float* to, size_t stride, u32 first, u32 seq, const float (&acc)[MT][HD / 8][4],
                       const float (&factor)[MT][2], u8*, u32 row) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 position = first + row + 16 * m + row_of(2 * half);
            if (position >= seq) continue;
#pragma unroll
            for (int n = 0; n < HD / 16; ++n) {
                Vec<float> v;
#pragma unroll
                for (int j = 0; j < 4; ++j) v.at[j] = acc[m][n / 2 * 4 + j][2 * half + n % 2] * factor[m][half];
                store(to + position * stride + n / 2 * 32 + lane() % 4 * 8 + n % 2 * 4, v);
            }
        }
}
