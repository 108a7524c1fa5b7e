// grouped_wgmma_fwd:        out[r] = weight[e]·inp[r] for the rows r of each expert e; weight (E,OC,C); bf16, Hopper only
// grouped_wgmma_bwd_input:  d_inp[r] = d_out[r]·weight[e]
// grouped_wgmma_bwd_weight: d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r] over the rows of each expert
// moves  each operand once per tile, mostly from L2; bound: tensor cores
// grid   a persistent block on each multiprocessor: a producer warp starts TMA copies, four stages of 64 terms ahead; two
//        consumer warpgroups multiply, 64x256 of a tile of 128x256 each; needs C % 64 == 0, OC % 64 == 0, arrays at multiples of
//        16 bytes
// order  a product's terms in order, 16 at a time, in f32: repeatable
//
// A tile may reach beyond the last row of its expert: those rows are read, but not written. Where rows are terms of the sums
// (bwd_weight), those of other experts become zeros before they are used. Results in bf16 are stored by TMA from shared memory
// while the next tile is multiplied; stored from registers, the 64 KB of a tile kept the tensor cores waiting for 4,400 of 16,700
// cycles (768 terms).
// Each kernel is also there for pairs of blocks, that of d_weight for an even number of rows of tiles: the same bits. Where `squares` is not null (bf16
// that is not added to) each consumer warp leaves Σ d_weight² of its 16 rows of a tile there, (E, tiles of rows, tiles of columns, 8).
#define CLUSTER 2
constexpr int STAGES = 4, STORE_STAGES = 2, EPILOGUE_GROUPS = 0, BYTES = 2;
#include "experts/grouped_results.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// out (rows,n) from inp (rows,k) and the experts' weights: (n,k) where ALONG, else (k,n). With PAIR and ALONG their tensor map copies 128 rows,
// else 256.
template <bool ALONG, bool PAIR>
DEVICE void rows_product(const Target& out, const TensorMap& inp, const TensorMap& weight, const Routed& routed, u32 n, u32 k) {
    const auto copy = [&](const Space& space, Turn& turn, const RowTile& tile) {
        const i32 column = (i32)tile.column, first = (i32)(tile.expert * (ALONG ? n : k));
        const Work work{(i32)tile.row, 0, ALONG ? first + column : column, ALONG ? 0 : first, k, tile.shares};
        copy_tile<true, ALONG, ALONG && PAIR, PAIR>(space, turn, inp, weight, work, work.b_line + BN / 2);
    };
    rows_tiles<PAIR>(out, routed, n, copy, [=](float (&acc)[128], const Space& space, Turn& turn, auto meanwhile) {
        multiply<true, ALONG, PAIR>(acc, space, turn, k, meanwhile);
    });
}

// d_weight (E,oc,ic) from d_out (rows,oc) and inp (rows,ic)
template <bool PAIR> DEVICE void weight_product(const WeightTarget& to, const TensorMap& d_out, const TensorMap& inp, const Routed& routed) {
    const auto copy = [&](const Space& space, Turn& turn, const Groups& groups, const WeightTile& tile) {
        const i32 first = (i32)groups.first(tile.expert);
        const Work work{(i32)tile.row, first, (i32)tile.column, first, groups.rows(tile.expert)};
        copy_tile<false, false, false, PAIR>(space, turn, d_out, inp, work);
    };
    const auto product = [](float (&acc)[128], const Space& space, Turn& turn, u32, u32 terms, LeftSquares& left) {
        multiply<false, false, PAIR>(acc, space, turn, terms, [&] { left.send(); });
    };
    weight_tiles<PAIR>(to, routed, copy, product);
}

#define ROWS_PRODUCT(ALONG, PAIR, N, K) rows_product<ALONG, PAIR>({result, out, N}, inp, weight, {offsets, fault, rows, experts}, N, K);
#define WEIGHT_PRODUCT(PAIR) weight_product<PAIR>({d_weight, result, ic, oc, adds, squares}, d_out, inp, {offsets, fault, rows, experts});
#else
#define ROWS_PRODUCT(ALONG, PAIR, N, K)
#define WEIGHT_PRODUCT(PAIR)
#endif

#define ROWS_KERNEL(NAME, ALONG, PAIR, N, K)                                                                                      \
    NAME(bf16* out, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap inp,                              \
         const __grid_constant__ TensorMap weight, const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc) {     \
        ROWS_PRODUCT(ALONG, PAIR, N, K)                                                                                           \
    }
KERNEL __launch_bounds__(THREADS, 1) ROWS_KERNEL(grouped_wgmma_fwd, true, false, oc, ic)
KERNEL CLUSTERED __launch_bounds__(THREADS, 1) ROWS_KERNEL(grouped_wgmma_fwd_pair, true, true, oc, ic)
KERNEL __launch_bounds__(THREADS, 1) ROWS_KERNEL(grouped_wgmma_bwd_input, false, false, ic, oc)
KERNEL CLUSTERED __launch_bounds__(THREADS, 1) ROWS_KERNEL(grouped_wgmma_bwd_input_pair, false, true, ic, oc)

#define WEIGHT_KERNEL(NAME, PAIR)                                                                                                 \
    NAME(OUT* d_weight, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap d_out,                        \
         const __grid_constant__ TensorMap inp, const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc, u32 adds, \
         double* squares) {                                                                                                       \
        WEIGHT_PRODUCT(PAIR)                                                                                                      \
    }
KERNEL __launch_bounds__(THREADS, 1) WEIGHT_KERNEL(grouped_wgmma_bwd_weight, false)
KERNEL CLUSTERED __launch_bounds__(THREADS, 1) WEIGHT_KERNEL(grouped_wgmma_bwd_weight_pair, true)
