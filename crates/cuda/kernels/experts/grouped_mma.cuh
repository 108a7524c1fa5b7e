// Tiles of 128x128 of products of experts in bf16 on tensor cores. Terms of the sums are copied 32 at a time, three steps
// ahead. Rows beyond an expert's last are zeros in shared memory: they are not read.
#pragma once

#include "experts/grouped.cuh"
#include "common/mma.cuh"

constexpr int BM = 128, BN = 128, BK = 32, STAGES = 4, THREADS = 256;
constexpr int TILE = BM * BK * 2, STAGE = 2 * TILE;  // bytes
constexpr int WM = 64, WN = 32;                      // a warp's part of the tile: 2 x 4 warps
constexpr int PITCH = BN * 2 + 16;                   // bytes from row to row of a bf16 result in shared memory
static_assert(BM * PITCH <= STAGES * STAGE && BM == BN, "the result has room");

extern __shared__ uint4 shared[];  // the stages, then the groups

DEVICE u32 warp_row() { return threadIdx.x / WARP / 4 * WM; }
DEVICE u32 warp_column() { return threadIdx.x / WARP % 4 * WN; }

// One operand: (lines of the result) x (terms of its sums) in memory where ALONG, else (terms) x (lines).
template <bool ALONG> struct Operand {
    const bf16* at;
    u64 stride;
    u32 lines;  // rows or columns of the result from the tile's first on

    // Byte of a tile where a chunk of 8 elements starts. Chunks are permuted so that the 8 rows that one ldmatrix reads are in
    // different banks.
    static DEVICE u32 chunk_at(u32 row, u32 chunk) {
        if constexpr (ALONG) return row * BK * 2 + (chunk ^ row / 2 % 4) * 16;
        else return row * BM * 2 + (chunk ^ row % 8) * 16;
    }
    // Starts copying terms k.. of `terms`; zeros outside.
    DEVICE void copy(u32 to, u32 k, u32 terms) const {
        constexpr int CHUNKS = (ALONG ? BK : BM) / 8;
#pragma unroll
        for (int i = 0; i < BM * BK / 8 / THREADS; i++) {
            const u32 n = i * THREADS + threadIdx.x, row = n / CHUNKS, chunk = n % CHUNKS;
            const bool inside = ALONG ? row < lines && k + chunk * 8 < terms : k + row < terms && chunk * 8 < lines;
            const u64 from = ALONG ? row * stride + k + chunk * 8 : (k + row) * stride + chunk * 8;
            cp_async16(to + chunk_at(row, chunk), at + (inside ? from : 0), inside);
        }
    }
    // 16 rows of the left operand, terms 16s.. of the tile.
    static DEVICE void left(u32 (&x)[4], u32 tile, u32 row, u32 s) {
        if constexpr (ALONG) ldmatrix(x, tile + chunk_at(row + lane() % 16, 2 * s + lane() / 16));
        else ldmatrix_trans(x, tile + chunk_at(16 * s + lane() / 16 * 8 + lane() % 8, row / 8 + lane() / 8 % 2));
    }
    // 16 columns of the right operand.
    static DEVICE void right(u32 (&x)[4], u32 tile, u32 column, u32 s) {
        if constexpr (ALONG) ldmatrix(x, tile + chunk_at(column + lane() % 8 + lane() / 16 * 8, 2 * s + lane() / 8 % 2));
        else ldmatrix_trans(x, tile + chunk_at(16 * s + lane() % 16, column / 8 + lane() / 16));
    }
};

typedef float Result[WM / 16][WN / 8][4];

// acc += Σ over the terms. No thread may use shared memory when it begins; all copies are done when it ends.
template <bool A, bool B>
DEVICE void product(Result& acc, const Operand<A>& a, const Operand<B>& b, u32 terms) {
    const u32 start = shared_address(shared), passes = (terms + BK - 1) / BK;
    const auto copy = [&](u32 pass) {
        if (pass < passes) {
            const u32 to = start + pass % STAGES * STAGE;
            a.copy(to, pass * BK, terms);
            b.copy(to + TILE, pass * BK, terms);
        }
        cp_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy(s);
    for (u32 pass = 0; pass < passes; pass++) {
        cp_wait<STAGES - 2>();
        __syncthreads();  // this pass's tiles are here, and all are done with those whose place the next copies take
        copy(pass + STAGES - 1);
        const u32 tile_a = start + pass % STAGES * STAGE, tile_b = tile_a + TILE;
#pragma unroll
        for (int s = 0; s < BK / 16; s++) {
            u32 x[WM / 16][4], y[WN / 16][4];
#pragma unroll
            for (int m = 0; m < WM / 16; m++) Operand<A>::left(x[m], tile_a, warp_row() + 16 * m, s);
#pragma unroll
            for (int n = 0; n < WN / 16; n++) Operand<B>::right(y[n], tile_b, warp_column() + 16 * n, s);
#pragma unroll
            for (int m = 0; m < WM / 16; m++)
#pragma unroll
                for (int n = 0; n < WN / 8; n++) mma<bf16>(acc[m][n], x[m], y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]);
        }
    }
    cp_wait<0>();
    __syncthreads();
}

// Calls f(row, column, two values) for all that a lane has of the tile.
template <class F> DEVICE void each_pair(Result& acc, F f) {
#pragma unroll
    for (int m = 0; m < WM / 16; m++)
#pragma unroll
        for (int n = 0; n < WN / 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                f(warp_row() + 16 * m + lane() / 4 + 8 * h, warp_column() + 8 * n + lane() % 4 * 2, acc[m][n][2 * h],
                  acc[m][n][2 * h + 1]);
}

DEVICE void zero(Result& acc) {
    each_pair(acc, [](u32, u32, float& a, float& b) { a = b = 0.0f; });
}

// Two neighbours in memory.
DEVICE float2 pair_at(const float* at) { return *reinterpret_cast<const float2*>(at); }
DEVICE float2 pair_at(const bf16* at) {
    const u32 both = *reinterpret_cast<const u32*>(at);
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}

// What is there already, of the part of the tile that exists.
template <class T> DEVICE void read(Result& acc, const T* from, u64 stride, u32 rows, u32 columns) {
    each_pair(acc, [=](u32 row, u32 column, float& a, float& b) {
        const bool inside = row < rows && column < columns;
        const float2 old = inside ? pair_at(from + row * stride + column) : make_float2(0.0f, 0.0f);
        a = old.x;
        b = old.y;
    });
}

// The part of the tile that exists, to rows of `stride` elements. Ends with a barrier.
DEVICE void write(float* to, u64 stride, u32 rows, u32 columns, Result& acc) {
    each_pair(acc, [=](u32 row, u32 column, float a, float b) {
        if (row < rows && column < columns) *reinterpret_cast<float2*>(to + row * stride + column) = make_float2(a, b);
    });
    __syncthreads();
}

// Eight numbers of bf16 added to eight others, each sum rounded once.
DEVICE uint4 sum_of(uint4 a, uint4 b) {
    u32 x[4] = {a.x, a.y, a.z, a.w};
    const u32 y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = pack_bf16(__uint_as_float(x[i] << 16) + __uint_as_float(y[i] << 16),
                         __uint_as_float(x[i] & 0xffff0000u) + __uint_as_float(y[i] & 0xffff0000u));
    return make_uint4(x[0], x[1], x[2], x[3]);
}

// Passes through shared memory, so that memory is written in whole chunks. Where it `adds`, the tile is rounded before the sum
// is.
DEVICE void write(bf16* to, u64 stride, u32 rows, u32 columns, Result& acc, bool adds = false) {
    u8* const space = reinterpret_cast<u8*>(shared);
    each_pair(acc, [=](u32 row, u32 column, float a, float b) {
        *reinterpret_cast<u32*>(space + row * PITCH + column * 2) = pack_bf16(a, b);
    });
    __syncthreads();
#pragma unroll 2
    for (int i = 0; i < BM * BN / 8 / THREADS; i++) {
        const u32 n = i * THREADS + threadIdx.x, row = n / (BN / 8), column = n % (BN / 8) * 8;
        if (row >= rows || column >= columns) continue;
        const uint4 v = *reinterpret_cast<const uint4*>(space + row * PITCH + column * 2);
        uint4* const place = reinterpret_cast<uint4*>(to + row * stride + column);
        *place = adds ? sum_of(v, *place) : v;
    }
    __syncthreads();
}

DEVICE Groups groups_of(const i32* offsets, u32 experts, u32 rows, Fault* fault) {
    u32* const space = reinterpret_cast<u32*>(reinterpret_cast<u8*>(shared) + STAGES * STAGE);
    return read_groups<BM>(space, offsets, experts, rows, fault);
}
