// grouped_fp8_any:            out[r] = (a[r]·b[e]ᵀ)·inverses for the rows r of each expert e; b (E,N,K), or (N,E·K) where `beside`
// grouped_fp8_any_bwd_weight: d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r]·inverses over the rows of each expert; d_out (OC,rows), inp (C,rows)
//                             Operands in 8 bits, LEFT and RIGHT are their formats
// moves  each operand once per tile of 128, mostly from L2; bound: f32 arithmetic
// grid   as many blocks as the device holds, each walks over tiles of 128x128; any shape, any GPU
// order  a product's terms in order in f32: repeatable
#include "common/fp8.cuh"
#define IN Number<LEFT>
#include "experts/grouped_any.cuh"

KERNEL __launch_bounds__(THREADS)
    grouped_fp8_any(OUT* out, const Number<LEFT>* a, const Number<RIGHT>* b, const i32* offsets, Fault* fault, u32 rows, u32 experts,
                    u32 k, u32 n, const float* a_inverse, const float* b_inverse, u32 beside) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    const float scale = *a_inverse * *b_inverse;
    RowTiles<BM, BN>(groups, n).each([&](const RowTile& tile) {
        const u64 row = tile.row;
        const u32 column = tile.column, there = tile.rows;
        const u64 stride = beside ? (u64)experts * k : k;
        const Number<RIGHT>* const of = beside ? b + column * stride + (u64)tile.expert * k : b + ((u64)tile.expert * n + column) * k;
        Result acc;
        zero(acc);
        product(acc, Operand<true, Number<LEFT>>{a + row * k, k, there}, Operand<true, Number<RIGHT>>{of, stride, n - column}, k);
        write(out + row * n + column, n, there, n - column, acc, false, scale);
    });
}

KERNEL __launch_bounds__(THREADS)
    grouped_fp8_any_bwd_weight(OUT* d_weight, const Number<LEFT>* d_out, const Number<RIGHT>* inp, const i32* offsets, Fault* fault,
                               u32 rows, u32 experts, u32 ic, u32 oc, const float* d_out_inverse, const float* inp_inverse, u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    const float scale = *d_out_inverse * *inp_inverse;
    WeightTiles<BM, BN>(groups, oc, ic).each([&](const WeightTile& tile) {
        const auto [expert, row, column] = tile;
        const u64 first = groups.first(expert);
        Result acc;
        zero(acc);
        product(acc, Operand<true, Number<LEFT>>{d_out + (u64)row * rows + first, rows, oc - row},
                Operand<true, Number<RIGHT>>{inp + (u64)column * rows + first, rows, ic - column}, groups.rows(expert));
        write(d_weight + ((u64)expert * oc + row) * ic + column, ic, oc - row, ic - column, acc, adds, scale);
    });
}
