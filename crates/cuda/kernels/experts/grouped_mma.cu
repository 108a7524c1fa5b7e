// grouped_mma_fwd:        out[r] = weight[e]·inp[r] for the rows r of each expert e; weight (E,OC,C); bf16 on tensor cores
// grouped_mma_bwd_input:  d_inp[r] = d_out[r]·weight[e]
// grouped_mma_bwd_weight: d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r] over the rows of each expert
// moves  each operand once per tile of 128, mostly from L2; bound: tensor cores
// grid   as many blocks as the device holds, each walks over tiles of 128x128 and copies terms of the sums 32 at a time, three
//        steps ahead; needs C % 8 == 0, OC % 8 == 0, arrays at multiples of 16 bytes
// order  a product's terms in order, 16 at a time, in f32: repeatable
#include "experts/grouped_mma.cuh"
#include "experts/grouped_rows.cuh"

KERNEL __launch_bounds__(THREADS, 2)
    grouped_mma_fwd(bf16* out, const bf16* inp, const bf16* weight, const i32* offsets, Fault* fault, u32 rows, u32 experts,
                    u32 ic, u32 oc) {
    rows_product<true>(out, inp, weight, groups_of(offsets, experts, rows, fault), oc, ic);
}

KERNEL __launch_bounds__(THREADS, 2)
    grouped_mma_bwd_input(bf16* d_inp, const bf16* d_out, const bf16* weight, const i32* offsets, Fault* fault, u32 rows,
                          u32 experts, u32 ic, u32 oc) {
    rows_product<false>(d_inp, d_out, weight, groups_of(offsets, experts, rows, fault), ic, oc);
}

KERNEL __launch_bounds__(THREADS, 2)
    grouped_mma_bwd_weight(OUT* d_weight, const bf16* d_out, const bf16* inp, const i32* offsets, Fault* fault, u32 rows,
                           u32 experts, u32 ic, u32 oc, u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    WeightTiles<BM, BN>(groups, oc, ic).each([&](const WeightTile& tile) {
        const auto [expert, row, column] = tile;
        const u64 first = groups.first(expert);
        const u32 terms = groups.rows(expert);
        if (terms == 0 && adds) return;
        OUT* const to = d_weight + ((u64)expert * oc + row) * ic + column;
        Result acc;
        if (adds) read(acc, to, ic, oc - row, ic - column);
        else zero(acc);
        product(acc, Operand<false>{d_out + first * oc + row, oc, oc - row},
                Operand<false>{inp + first * ic + column, ic, ic - column}, terms);
        write(to, ic, oc - row, ic - column, acc);
    });
}
