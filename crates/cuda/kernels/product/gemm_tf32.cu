// gemm_tf32: d (column-major m by n) (+)= op(a) . op(b) (+ bias), f32 as three products of tf32 each (common/tf32.cuh)
//
// moves  4*(m*k*n/128 + n*k*m/128) bytes through the caches; bound: tensor cores
// grid   one block of 8 warps per 128 by 128 tile of d and slice of `span` terms, eight tiles along n at a time, so that
//        their operands stay in L2; m, n, k and the distances of rows multiples of 4, addresses of 16 bytes
// order  terms in order by 32, sums of 32 added by rounded additions; slices go to `parts` and are added in order by
//        gemm_tf32_sum; no atomics: bitwise repeatable
//
// ALONG_A and ALONG_B say whether terms of an operand are side by side in memory. Rows of the mma are columns of d (b's), so that
// its neighbours are d's.
#define TERMS 3
#include "product/gemm_tf32.cuh"
#include "common/tf32.cuh"

constexpr int STAGES = 3;
constexpr int THREADS = 256;
constexpr int MT = 4, NT = 4;  // a warp's part: 64 rows and 32 columns of mma

// What a lane holds of neighbours in d.
constexpr int WIDE = ALONG_A ? 2 : 4;
struct alignas(4 * WIDE) Neighbours {
    float at[WIDE];
};

extern __shared__ uint4 shared[];

// Two tiles of 16 rows from `row` on, terms 8s..: lane (g, t) holds terms t and t+4. Across, of 32 rows the one of tile i, half h
// and place g is 4g + 2i + h.
template <bool ALONG> DEVICE void left(Split<4> (&x)[2], u32 tile, u32 row, int s) {
    if constexpr (ALONG) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ldmatrix(x[i].big, tile + along_at(row + 16 * i + lane() % 16, 2 * s + lane() / 16));
            x[i].split();
        }
    } else {
        float y[2][4];
        u32 chunk = row / 4 + lane() / 4, term = 8 * s + lane() % 4;
        read(y[0], tile + across_at(term, chunk));
        read(y[1], tile + across_at(term + 4, chunk));
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i / 4].set(i % 4, y[i % 4 / 2][i / 4 * 2 + i % 2]);
    }
}

// Four tiles of 8 columns from `column` on. Across, of 32 columns the one of tile j and place g is 4g + j.
template <bool ALONG> DEVICE void right(Split<2> (&x)[NT], u32 tile, u32 column, int s) {
    if constexpr (ALONG) {
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            u32 y[4];
            ldmatrix(y, tile + along_at(column + 8 * j + lane() % 8 + lane() / 16 * 8, 2 * s + lane() / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; ++i) x[j + i / 2].set(i % 2, __uint_as_float(y[i]));
        }
    } else {
        float y[2][4];
        u32 chunk = column / 4 + lane() / 4, term = 8 * s + lane() % 4;
        read(y[0], tile + across_at(term, chunk));
        read(y[1], tile + across_at(term + 4, chunk));
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i / 2].set(i % 2, y[i % 2][i / 2]);
    }
}

// `parts`, where not null, takes the product of each slice instead of d. bias, one for each of m, may be null.
KERNEL __launch_bounds__(THREADS, 1)
    gemm_tf32(float* d, float* parts, const float* a, const float* b, const float* bias, u32 m, u32 n, u32 k, u64 lda, u64 ldb,
              u32 span, u32 adds) {
    Place at = place_of(blockIdx.x, m, n, k, span);
    u32 warp = threadIdx.x / WARP, row = warp / 4 * 64, column = warp % 4 * 32;
    u32 base = shared_address(shared), steps = at.steps;
    auto pass = [&](u32 i) {
        if (i < steps) {
            u32 to = base + i % STAGES * 2 * BYTES, from = at.first + i * DEPTH;
            load_tile<ALONG_B, THREADS>(to, b, ldb, at.n0, n, from, at.end);
            load_tile<ALONG_A, THREADS>(to + BYTES, a, lda, at.m0, m, from, at.end);
        }
        cp_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) pass(i);

    float acc[MT][NT][4] = {};
    for (u32 i = 0; i < steps; ++i) {
        cp_wait<STAGES - 2>();
        __syncthreads();  // this stage is here, and all are done with the one before, whose place the next copies take
        pass(i + STAGES - 1);
        u32 rows = base + i % STAGES * 2 * BYTES, columns = rows + BYTES;
        float part[MT][NT][4] = {};
#pragma unroll 2
        for (int s = 0; s < DEPTH / 8; ++s) {
            Split<2> y[NT];
            right<ALONG_A>(y, columns, column, s);
#pragma unroll
            for (int pair = 0; pair < MT; pair += 2) {
                Split<4> x[2];
                left<ALONG_B>(x, rows, row + 16 * pair, s);
#pragma unroll
                for (int j = 0; j < 2 * NT; ++j) chain(part[pair + j / NT][j % NT], x[j / NT], y[j % NT]);
            }
        }
#pragma unroll
        for (int e = 0; e < MT * NT * 4; ++e) acc[e / 16][e / 4 % 4][e % 4] += part[e / 16][e / 4 % 4][e % 4];
    }

    float* to = parts == nullptr ? d : parts + (u64)at.slice * m * n;
    u32 g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
        u32 line = at.n0 + row + (ALONG_B ? 8 * i + g : i / 4 * 32 + 4 * g + i % 4);
        if (line >= n) continue;
#pragma unroll
        for (int j = 0; j < 8 / WIDE; ++j) {
            u32 c = at.m0 + column + (ALONG_A ? 8 * j + 2 * t : 8 * t + 4 * j);
            if (c >= m) continue;
            Neighbours* place = reinterpret_cast<Neighbours*>(to + (u64)line * m + c);
            Neighbours x, old;
            if (adds) old = *place;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) {
                x.at[e] = ALONG_A ? acc[i / 2][j][i % 2 * 2 + e] : acc[i / 2][e][i % 2 * 2 + j % 2];
                if (bias != nullptr) x.at[e] += bias[c + e];
                if (adds) x.at[e] += old.at[e];
            }
            *place = x;
        }
    }
}
