// permute_quantize: q = fp8(x·s) of x[r] = inp[order[r] / K], in rows and in columns (transposed) where the pointers are not null: the bits of
//                   `permute` of experts/permute.cu and then of fp8/quantize.cu
// moves  rows·cols·2 bytes, and each token's row from L2 but for its first time; bound: memory
// grid   (ceil(cols / 128), ceil(rows / 128)) of 256 threads, 8 by 8 elements each; needs rows % 16 == 0 and cols % 16 == 0
// order  the maximum has no order. A route that does not exist is a fault and counts as route 0
#include "fp8/tile.cuh"

struct Routed {
    const ACT* inp;
    const i32* order;
    Fault* fault;
    u32 rows, cols, k;
    Square x;

    DEVICE void fetch(u32 row, u32 col) {
        i32 route[SIDE];
#pragma unroll
        for (int r = 0; r < SIDE; r++) route[r] = order[row + r];
#pragma unroll
        for (int r = 0; r < SIDE; r++) {
            const bool there = (u32)route[r] < rows;
            if (!there && threadIdx.x % ACROSS == 0) report(fault, 5, route[r], (i32)(row + r), (i32)rows);
            const ACT* const from = inp + (u64)(there ? (u32)route[r] / k : 0) * cols + col;
#pragma unroll
            for (int v = 0; v < Square::VECS; v++) x.at[r][v] = load(from + v * Vec<ACT>::N);
        }
    }
    DEVICE void prepare() {}
    DEVICE void row(float (&out)[SIDE], int r) const { x.row(out, r); }
};

KERNEL __launch_bounds__(2 * TILE)
    permute_quantize(u8* q, u8* q_t, float* inverse, u32* seen, const u32* amax, const ACT* inp, const i32* order, Fault* fault, u32 rows,
                     u32 cols, u32 k, int margin, int unknown) {
    quantize_tile<false>({q, q_t, inverse, seen, nullptr, amax, rows, cols, margin, unknown}, Routed{inp, order, fault, rows, cols, k});
}
