// grouped_lora_any_fwd:        out[r, part] += scale·hidden[r, part]·b[e, part]ᵀ for the rows r of each expert e
// grouped_lora_any_bwd:        d_hidden[r, part] = scale·d_out[r, part]·b[e, part], and d_inp[r] += d_hidden[r]·a[e]
// grouped_lora_any_bwd_weight: d_b[e, part] (+)= scale·Σ_r d_out[r, part]ᵀ·hidden[r, part] over the rows of each expert
// moves  each operand once per tile of 128, and the result twice where it adds; bound: f32 arithmetic, memory in low ranks
// grid   as many blocks as the device holds, each walks over tiles of 128x128; any shape, any alignment
// order  a product's terms in order in f32, then scaled and added: repeatable
#include "experts/grouped_any.cuh"

template <class T>
DEVICE void finish(T* to, u64 stride, u32 rows, u32 columns, const Result& acc, float scale, bool adds) {
    write(to, stride, rows, columns, acc, adds, scale);
}

#include "experts/grouped_lora.cuh"

KERNEL __launch_bounds__(THREADS)
    grouped_lora_any_fwd(IN* out, const IN* hidden, const IN* b, const i32* offsets, Fault* fault, u32 rows, u32 experts,
                         u32 n, u32 k, u32 ld_to, u32 ld_left, u32 ld_right, u64 step, float scale, u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    lora_rows<true>(out, hidden, b, groups, n, k, {ld_to, ld_left, ld_right, step}, scale, adds);
}

KERNEL __launch_bounds__(THREADS)
    grouped_lora_any_bwd(IN* to, const IN* left, const IN* weight, const i32* offsets, Fault* fault, u32 rows, u32 experts,
                         u32 n, u32 k, u32 ld_to, u32 ld_left, u32 ld_right, u64 step, float scale, u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    lora_rows<false>(to, left, weight, groups, n, k, {ld_to, ld_left, ld_right, step}, scale, adds);
}

KERNEL __launch_bounds__(THREADS)
    grouped_lora_any_bwd_weight(OUT* d_b, const IN* d_out, const IN* hidden, const i32* offsets, Fault* fault, u32 rows,
                                u32 experts, u32 n, u32 m, u32 ld_to, u32 ld_left, u32 ld_right, u64 step, float scale,
                                u32 adds) {
    const Groups groups = groups_of(offsets, experts, rows, fault);
    lora_weights(d_b, d_out, hidden, groups, m, n, {ld_to, ld_left, ld_right, step}, scale, adds);
}
