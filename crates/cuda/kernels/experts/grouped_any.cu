// grouped_any_fwd:        out[r] = weight[e]·inp[r] for the rows r of each expert e; weight (E,OC,C)
// grouped_any_bwd_input:  d_inp[r] = d_out[r]·weight[e]
// grouped_any_bwd_weight: d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r] over the rows of each expert
// moves  each operand once per tile of 128, mostly from L2; bound: f32 arithmetic
// grid   as many blocks as the device holds, each walks over tiles of 128x128; any shape, any alignment
// order  a product's terms in order in f32: repeatable
#include "experts/grouped_any.cuh"
#include "experts/grouped_rows.cuh"

KERNEL __launch_bounds__(THREADS) grouped_any_fwd(IN* out, const IN* inp, const IN* weight, const i32* offsets, Fault* fault,
                                                  u32 rows, u32 experts, u32 ic, u32 oc) {
    rows_product<true>(out, inp, weight, groups_of(offsets, experts, rows, fault), oc, ic);
}

KERNEL __launch_bounds__(THREADS) grouped_any_bwd_input(IN* d_inp, const IN* d_out, const IN* weight, const i32* offsets,
                                                        Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc) {
    rows_product<false>(d_inp, d_out, weight, groups_of(offsets, experts, rows, fault), ic, oc);
}

KERNEL __launch_bounds__(THREADS)
    grouped_any_bwd_weight(OUT* d_weight, const IN* d_out, const IN* inp, const i32* offsets, Fault* fault, u32 rows,
                           u32 experts, u32 ic, u32 oc, u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    WeightTiles<BM, BN>(groups, oc, ic).each([&](const WeightTile& tile) {
        const auto [expert, row, column] = tile;
        const u64 first = groups.first(expert);
        Result acc;
        zero(acc);
        product(acc, Operand<false>{d_out + first * oc + row, oc, oc - row},
                Operand<false>{inp + first * ic + column, ic, ic - column}, groups.rows(expert));
        write(d_weight + ((u64)expert * oc + row) * ic + column, ic, oc - row, ic - column, acc, adds);
    });
}
