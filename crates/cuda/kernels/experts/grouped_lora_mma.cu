// grouped_lora_mma_fwd:        out[r, part] += scale·hidden[r, part]·b[e, part]ᵀ for the rows r of each expert e
// grouped_lora_mma_bwd:        d_hidden[r, part] = scale·d_out[r, part]·b[e, part], and d_inp[r] += d_hidden[r]·a[e]
// grouped_lora_mma_bwd_weight: d_b[e, part] (+)= scale·Σ_r d_out[r, part]ᵀ·hidden[r, part] over the rows of each expert
// moves  each operand once per tile of 128, and the result twice where it adds; bound: memory in low ranks
// grid   as many blocks as the device holds, each walks over tiles of 128x128; bf16, needs ranks, widths and strides that are
//        multiples of 8, and columns that begin at multiples of 16 bytes
// order  a product's terms in order, 16 at a time, in f32, then scaled and, where it adds to bf16, rounded before the sum is:
//        repeatable
#include "experts/grouped_mma.cuh"

DEVICE void scaled(Result& acc, float scale) {
    each_pair(acc, [=](u32, u32, float& a, float& b) { a *= scale, b *= scale; });
}

DEVICE void finish(bf16* to, u64 stride, u32 rows, u32 columns, Result& acc, float scale, bool adds) {
    scaled(acc, scale);
    write(to, stride, rows, columns, acc, adds);
}

DEVICE void finish(float* to, u64 stride, u32 rows, u32 columns, Result& acc, float scale, bool adds) {
    scaled(acc, scale);
    if (adds)
        each_pair(acc, [=](u32 row, u32 column, float& a, float& b) {
            if (row >= rows || column >= columns) return;
            const float2 old = pair_at(to + row * stride + column);
            a += old.x, b += old.y;
        });
    write(to, stride, rows, columns, acc);
}

#include "experts/grouped_lora.cuh"

KERNEL __launch_bounds__(THREADS, 2)
    grouped_lora_mma_fwd(bf16* out, const bf16* hidden, const bf16* b, const i32* offsets, Fault* fault, u32 rows, u32 experts,
                         u32 n, u32 k, u32 ld_to, u32 ld_left, u32 ld_right, u64 step, float scale, u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    lora_rows<true>(out, hidden, b, groups, n, k, {ld_to, ld_left, ld_right, step}, scale, adds);
}

KERNEL __launch_bounds__(THREADS, 2)
    grouped_lora_mma_bwd(bf16* to, const bf16* left, const bf16* weight, const i32* offsets, Fault* fault, u32 rows, u32 experts,
                         u32 n, u32 k, u32 ld_to, u32 ld_left, u32 ld_right, u64 step, float scale, u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    lora_rows<false>(to, left, weight, groups, n, k, {ld_to, ld_left, ld_right, step}, scale, adds);
}

// Two blocks at a time would have too few registers.
KERNEL __launch_bounds__(THREADS, 1)
    grouped_lora_mma_bwd_weight(OUT* d_b, const bf16* d_out, const bf16* hidden, const i32* offsets, Fault* fault, u32 rows,
                                u32 experts, u32 n, u32 m, u32 ld_to, u32 ld_left, u32 ld_right, u64 step, float scale,
                                u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    lora_weights(d_b, d_out, hidden, groups, m, n, {ld_to, ld_left, ld_right, step}, scale, adds);
}
