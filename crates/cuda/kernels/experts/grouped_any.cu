// grouped_any_fwd:        out[r] = weight[e]·inp[r] for the rows r of each expert e; weight (E,OC,C)
// grouped_any_bwd_input:  d_inp[r] = d_out[r]·weight[e]
// grouped_any_bwd_weight: d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r] over the rows of each expert
// moves  each operand once per tile of 128, mostly from L2; bound: f32 arithmetic
// grid   as many blocks as the device holds, each walks over tiles of 128x128; any shape, any alignment
// order  a product's terms in turn in f32: repeatable
#include "experts/grouped.cuh"

constexpr int BM = 128, BN = 128, BK = 16, THREADS = 256;
constexpr int PITCH = BM + 4;
constexpr int COPIES = BM * BK / THREADS;
static_assert(BM == BN, "both tiles are loaded alike");

extern __shared__ u32 group_space[];

// A matrix with rows of `stride` elements: (rows or columns of the result) x (terms of its sums) if ALONG, else transposed.
struct Matrix {
    const IN* at;
    u64 stride;
    u32 count;  // rows or columns of the result, from the tile's first on
};

// This thread's elements of a tile, terms k.. of `terms`; 0 outside.
template <bool ALONG> DEVICE void fetch(float (&to)[COPIES], const Matrix& m, u64 k, u64 terms) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const u32 at = threadIdx.x + i * THREADS;
        const u32 line = ALONG ? at / BK : at % BM, term = ALONG ? at % BK : at / BM;
        const u64 from = ALONG ? line * m.stride + k + term : (k + term) * m.stride + line;
        to[i] = line < m.count && k + term < terms ? to_float(m.at[from]) : 0.0f;
    }
}
template <bool ALONG> DEVICE void put(float (*tile)[PITCH], const float (&from)[COPIES]) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const u32 at = threadIdx.x + i * THREADS;
        tile[ALONG ? at % BK : at / BM][ALONG ? at / BK : at % BM] = from[i];
    }
}

// A thread has rows 4y.. and 64+4y.., columns 4x.. and 64+4x.. of the tile.
DEVICE u32 spread(u32 at, int i) { return at * 4 + (i < 4 ? i : 60 + i); }

// acc[i][j] = Σ_k a(row i, k)·b(column j, k)
template <bool A_ALONG, bool B_ALONG>
DEVICE void product(float (&acc)[8][8], const Matrix& a, const Matrix& b, u64 terms) {
    __shared__ __align__(16) float tile_a[BK][PITCH], tile_b[BK][PITCH];
    const u32 y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 64; i++) acc[i / 8][i % 8] = 0.0f;
    float next_a[COPIES], next_b[COPIES];
    fetch<A_ALONG>(next_a, a, 0, terms);
    fetch<B_ALONG>(next_b, b, 0, terms);
    for (u64 k = 0; k < terms; k += BK) {
        __syncthreads();  // all are done with the tiles before
        put<A_ALONG>(tile_a, next_a);
        put<B_ALONG>(tile_b, next_b);
        __syncthreads();
        fetch<A_ALONG>(next_a, a, k + BK, terms);
        fetch<B_ALONG>(next_b, b, k + BK, terms);
#pragma unroll
        for (int term = 0; term < BK; term++) {
            float left[8], right[8];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const Vec<float> l = load(&tile_a[term][64 * h + 4 * y]), r = load(&tile_b[term][64 * h + 4 * x]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    left[4 * h + i] = l.at[i];
                    right[4 * h + i] = r.at[i];
                }
            }
#pragma unroll
            for (int i = 0; i < 64; i++) acc[i / 8][i % 8] = __fmaf_rn(left[i / 8], right[i % 8], acc[i / 8][i % 8]);
        }
    }
}

// The part of the tile that exists, to rows of `stride` elements.
template <class T>
DEVICE void write(T* to, u64 stride, u32 rows, u32 columns, const float (&acc)[8][8], bool adds) {
    const u32 y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 row = spread(y, i), column = spread(x, j);
            if (row >= rows || column >= columns) continue;
            T* const place = to + row * stride + column;
            *place = from_float<T>(adds ? to_float(*place) + acc[i][j] : acc[i][j]);
        }
}

// out (rows,n) from inp (rows,k) and the experts' weights: (n,k) where ALONG, else (k,n).
template <bool ALONG>
DEVICE void rows_product(IN* out, const IN* inp, const IN* weight, const i32* offsets, Fault* fault, u32 rows, u32 experts,
                         u32 n, u32 k) {
    const Groups groups = read_groups<BM>(group_space, offsets, experts, rows, fault);
    const u32 columns = (n + BN - 1) / BN;
    for (u64 t = blockIdx.x; t < (u64)groups.tiles * columns; t += gridDim.x) {
        const Tile tile = groups.tile(t, columns);
        const u32 inside = tile.row * BM, column = tile.column * BN;
        const u64 row = groups.first(tile.expert) + inside;
        const u32 tall = groups.rows(tile.expert) - inside, wide = n - column;
        const IN* const w = weight + (u64)tile.expert * n * k + (ALONG ? (u64)column * k : (u64)column);
        float acc[8][8];
        product<true, ALONG>(acc, {inp + row * k, k, tall}, {w, ALONG ? k : n, wide}, k);
        write(out + row * n + column, n, tall, wide, acc, false);
    }
}

KERNEL __launch_bounds__(THREADS) grouped_any_fwd(IN* out, const IN* inp, const IN* weight, const i32* offsets, Fault* fault,
                                                  u32 rows, u32 experts, u32 ic, u32 oc) {
    rows_product<true>(out, inp, weight, offsets, fault, rows, experts, oc, ic);
}

KERNEL __launch_bounds__(THREADS) grouped_any_bwd_input(IN* d_inp, const IN* d_out, const IN* weight, const i32* offsets,
                                                        Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc) {
    rows_product<false>(d_inp, d_out, weight, offsets, fault, rows, experts, ic, oc);
}

KERNEL __launch_bounds__(THREADS)
    grouped_any_bwd_weight(OUT* d_weight, const IN* d_out, const IN* inp, const i32* offsets, Fault* fault, u32 rows,
                           u32 experts, u32 ic, u32 oc, u32 adds) {
    const Groups groups = read_groups<BM>(group_space, offsets, experts, rows, fault);
    const u32 tall = (oc + BM - 1) / BM, wide = (ic + BN - 1) / BN;
    if (!groups.fine) return;
    for (u64 t = blockIdx.x; t < (u64)experts * tall * wide; t += gridDim.x) {
        const u32 expert = (u32)(t / (tall * wide)), inside = (u32)(t - (u64)expert * tall * wide);
        const u32 row = inside / wide * BM, column = inside % wide * BN;
        const u64 first = groups.first(expert);
        float acc[8][8];
        product<false, false>(acc, {d_out + first * oc + row, oc, oc - row}, {inp + first * ic + column, ic, ic - column},
                              groups.rows(expert));
        write(d_weight + ((u64)expert * oc + row) * ic + column, ic, oc - row, ic - column, acc, adds);
    }
}
