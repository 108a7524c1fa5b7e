// grouped_fp8_fast:       out[r] = (a[r]·b[e]ᵀ)·inverses for the rows r of each expert e, in 8 bits; b (E,N,K), or (N,E·K) where
//                         `beside`; Hopper only
// grouped_fp8_exact:      the same with sums in f32
// grouped_fp8_bwd_weight: d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r]·inverses over the rows of each expert, with sums in f32; d_out (OC,rows)
//                         and inp (C,rows)
//                         a and d_out are of the format LEFT, the right operands e4m3
// moves  each operand once per tile, mostly from L2; bound: tensor cores
// grid   a persistent block on each multiprocessor: a producer warp starts TMA copies, four stages of 128 terms ahead; two consumer
//        warpgroups multiply, 64x256 of a tile of 128x256 each; needs N % 64 == 0, K % 16 == 0 (K % 128 == 0 where `beside`),
//        OC % 64 == 0, C % 64 == 0, rows % 16 == 0, arrays at multiples of 16 bytes
//        d_weight's kernel is also there for pairs of blocks, for an even number of rows of tiles; `squares` as in experts/grouped_wgmma.cu
// order  a product's terms in order, 32 at a time: repeatable. The tensor cores keep 13 bits of their sums. Sums in f32 are of 128 terms
//        of theirs each, added in order, of half a tile at a time: with sums of a whole tile beside those of the tensor cores a thread
//        would need more registers than there are
//
// TMA copies begin at multiples of 128 bytes: 16 is what they need, and a fourth of the time is what other lines cost. Terms before the first of an expert and behind its last are those of others, and become
// zeros in shared memory. What lies outside of an array comes as zeros.
#define CLUSTER 2
constexpr int STAGES = 4, STORE_STAGES = 2, EPILOGUE_GROUPS = 0, BYTES = 1;
#include "common/fp8.cuh"
#include "experts/grouped_results.cuh"
#include "experts/grouped_fp8.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The low `count` bytes of a word, at most 4.
DEVICE u32 low_bytes(u32 count) { return count >= 4 ? ~0u : (1u << 8 * count) - 1; }

// Zeros the terms of a stage that are not of `first` to `end`. All consumer threads take part.
DEVICE void keep_terms(const Space& space, u32 stage, u32 first, u32 end) {
    u8* const start = reinterpret_cast<u8*>(shared) + (space.a(stage) - shared_address(shared));
    for (u32 i = threadIdx.x - GROUP; i < (BM + BN) * (LINE / 16); i += 2 * GROUP) {
        const u32 line = i / (LINE / 16), chunk = i % (LINE / 16);
        if (chunk * 16 >= first && chunk * 16 + 16 <= end) continue;
        u32* const at = reinterpret_cast<u32*>(start + line * LINE + (chunk ^ line % 8) * 16);
#pragma unroll
        for (u32 w = 0; w < 4; w++) {
            const u32 here = chunk * 16 + 4 * w;
            at[w] &= low_bytes(end < here ? 0 : end - here) & ~low_bytes(first < here ? 0 : first - here);
        }
    }
    shared_fence();
    named_barrier<1, 2 * GROUP>();
}

// multiply_fast with sums in f32. ENDS: the first `skipped` terms and those beyond the last are not zeros yet.
template <bool ENDS, bool PAIR, class F>
DEVICE void multiply_exact(float (&sum)[128], const Space& space, Turn& turn, u32 skipped, u32 terms, F meanwhile) {
    const u32 group = threadIdx.x / GROUP - 1;
#pragma unroll
    for (int i = 0; i < 128; i++) sum[i] = 0.0f;
    for (u32 k = 0; k < terms; k += TERMS, turn.next()) {
        barrier_wait(space.full + 8 * turn.stage, turn.round);
        const u32 first = k == 0 ? skipped : 0, end = min((u32)TERMS, terms - k);
        if (ENDS && (first > 0 || end < TERMS)) keep_terms(space, turn.stage, first, end);
        const u32 a = space.a(turn.stage) + group * BOX, b = space.b(turn.stage);
        float part[64];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < TERMS / 32; s++)
                wgmma_fp8_128<WIDE, 0>(part, matrix_descriptor(a + s * 32, 16), matrix_descriptor(b + h * 2 * BOX + s * 32, 16), s > 0);
            wgmma_commit();
            wgmma_wait<0>();
            hold(part);
            if (h == 1) release<PAIR>(space.empty + 8 * turn.stage);
#pragma unroll
            for (int i = 0; i < 64; i++) sum[64 * h + i] += part[i];
        }
    }
    meanwhile();
}

template <bool FAST>
DEVICE void rows_product(const Target& out, const TensorMap& a, const TensorMap& b, const Routed& routed, u32 k, u32 n, float scale,
                         bool beside) {
    const auto copy = [&](const Space& space, Turn& turn, const RowTile& tile) {
        const i32 column = (i32)tile.column;
        const i32 line = beside ? column : (i32)(tile.expert * n) + column, term = beside ? (i32)(tile.expert * k) : 0;
        copy_tile<true, true>(space, turn, a, b, {(i32)tile.row, 0, line, term, k});
    };
    rows_tiles<false>(out, routed, n, copy, [=](float (&acc)[128], const Space& space, Turn& turn, auto meanwhile) {
        if constexpr (FAST) multiply_fast(acc, space, turn, k, meanwhile);
        else multiply_exact<false, false>(acc, space, turn, 0, k, meanwhile);
        scale_all(acc, scale);
    });
}

#define ROWS_PRODUCT(FAST) \
    rows_product<FAST>({result, out, n}, a, b, {offsets, fault, rows, experts}, k, n, *a_inverse * *b_inverse, beside);
#else
#define ROWS_PRODUCT(FAST)
#endif

#define ROWS_KERNEL(NAME, FAST)                                                                                                  \
    KERNEL __launch_bounds__(THREADS, 1) NAME(                                                                                   \
        bf16* out, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, \
        const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 k, u32 n, const float* a_inverse, const float* b_inverse,   \
        u32 beside) {                                                                                                            \
        ROWS_PRODUCT(FAST)                                                                                                       \
    }
ROWS_KERNEL(grouped_fp8_fast, true)
ROWS_KERNEL(grouped_fp8_exact, false)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// d_weight (E,oc,ic) from d_out (oc,rows) and inp (ic,rows), of which the tensor map copies 256 lines, with PAIR 128
template <bool PAIR>
DEVICE void weight_product(const WeightTarget& to, const TensorMap& d_out, const TensorMap& inp, const Routed& routed, float scale) {
    const auto copy = [&](const Space& space, Turn& turn, const Groups& groups, const WeightTile& tile) {
        const u32 skipped = groups.first(tile.expert) % TERMS, own = groups.rows(tile.expert);
        const i32 first = (i32)(groups.first(tile.expert) - skipped), column = (i32)tile.column;
        const Work work{(i32)tile.row, first, column, first, own == 0 ? 0 : own + skipped};
        copy_tile<true, true, PAIR, PAIR>(space, turn, d_out, inp, work, column + BN / 2);
    };
    const auto product = [=](float (&acc)[128], const Space& space, Turn& turn, u32 first, u32 terms, LeftSquares& left) {
        const u32 skipped = first % TERMS;
        left.send();  // while products run there are no registers for it
        multiply_exact<true, PAIR>(acc, space, turn, skipped, skipped + terms, [] {});
        scale_all(acc, scale);
    };
    weight_tiles<PAIR>(to, routed, copy, product);
}
#define WEIGHT_PRODUCT(PAIR)                                                                                                     \
    weight_product<PAIR>({d_weight, result, ic, oc, adds, squares}, d_out, inp, {offsets, fault, rows, experts}, *d_out_inverse * *inp_inverse);
#else
#define WEIGHT_PRODUCT(PAIR)
#endif

#define WEIGHT_KERNEL(NAME, PAIR)                                                                                                \
    NAME(OUT* d_weight, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap d_out,                       \
         const __grid_constant__ TensorMap inp, const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc,         \
         const float* d_out_inverse, const float* inp_inverse, u32 adds, double* squares) {                                      \
        WEIGHT_PRODUCT(PAIR)                                                                                                     \
    }
KERNEL __launch_bounds__(THREADS, 1) WEIGHT_KERNEL(grouped_fp8_bwd_weight, false)
KERNEL CLUSTERED __launch_bounds__(THREADS, 1) WEIGHT_KERNEL(grouped_fp8_bwd_weight_pair, true)
