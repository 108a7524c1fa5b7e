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
// d_weight's kernel is also there for pairs of blocks, for an even number of rows of tiles: the same bits.
#define CLUSTER 2
constexpr int STAGES = 4, STORE_STAGES = 2, EPILOGUE_GROUPS = 0, BYTES = 2;
#include "experts/grouped_results.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// out (rows,n) from inp (rows,k) and the experts' weights: (n,k) where ALONG, else (k,n)
template <bool ALONG>
DEVICE void rows_product(const Target& out, const TensorMap& inp, const TensorMap& weight, const i32* offsets, Fault* fault,
                         u32 rows, u32 experts, u32 n, u32 k) {
    const Space space = prepare();
    const RowTiles<BM, BN> tiles(read_groups<BM>(space.groups, offsets, experts, rows, fault), n);
    Turn turn;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x != 0) return;
        tiles.each([&](const RowTile& tile) {
            const i32 column = (i32)tile.column, first = (i32)(tile.expert * (ALONG ? n : k));
            const Work work{(i32)tile.row, 0, ALONG ? first + column : column, ALONG ? 0 : first, k};
            copy_tile<true, ALONG>(space, turn, inp, weight, work);
        });
    } else {
        more_registers<MANY>();
        ResultStores stores(space);
        for (u64 t = blockIdx.x; t < tiles.count; t += gridDim.x) {
            RowTile tile;
            float acc[128];
            multiply<true, ALONG>(acc, space, turn, k, [&] { tile = tiles.at(t); });
            write(stores, out, tile.column, tile.row, tile.rows, n - tile.column, acc);
        }
        stores.close();
    }
}

// d_weight (E,oc,ic) from d_out (rows,oc) and inp (rows,ic)
template <bool PAIR>
DEVICE void weight_product(OUT* d_weight, const TensorMap& result, const TensorMap& d_out, const TensorMap& inp, const i32* offsets,
                           Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc, u32 adds) {
    constexpr u32 BLOCKS = PAIR ? 2 : 1;
    const Space space = prepare<PAIR>();
    const Groups groups = read_groups<BM>(space.groups, offsets, experts, rows, fault);
    if constexpr (PAIR) cluster_barrier();
    const u32 own = PAIR ? cluster_rank() : 0;
    const u32 tall = (oc + BLOCKS * BM - 1) / (BLOCKS * BM), wide = (ic + BN - 1) / BN;
    const u64 tiles = groups.fine ? (u64)experts * tall * wide : 0;  // of one block, or of both
    Turn turn;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x != 0) return;
        for (u64 t = blockIdx.x / BLOCKS; t < tiles; t += gridDim.x / BLOCKS) {
            const u32 expert = (u32)(t / (tall * wide)), inside = (u32)(t - (u64)expert * tall * wide);
            const i32 row = (i32)((inside / wide * BLOCKS + own) * BM), column = (i32)(inside % wide * BN);
            const i32 first = (i32)groups.first(expert);
            copy_tile<false, false, false, PAIR>(space, turn, d_out, inp, {row, first, column, first, groups.rows(expert)});
        }
    } else {
        more_registers<MANY>();
        ResultStores stores(space);
        for (u64 t = blockIdx.x / BLOCKS; t < tiles; t += gridDim.x / BLOCKS) {
            const u32 expert = (u32)(t / (tall * wide)), inside = (u32)(t - (u64)expert * tall * wide);
            const u32 row = (inside / wide * BLOCKS + own) * BM, column = inside % wide * BN, terms = groups.rows(expert);
            OUT* const to = d_weight + ((u64)expert * oc + row) * ic + column;
            if (terms == 0) {
                if (!adds) write_zeros(to, ic, oc - row, ic - column);
                continue;
            }
            float acc[128];
            multiply<false, false, PAIR>(acc, space, turn, terms, [] {});
            if (adds) add_old(acc, to, ic, oc - row, ic - column);
            write_weight(stores, result, d_weight, ic, column, expert * oc + row, oc - row, ic - column, acc);
        }
        stores.close();
        if constexpr (PAIR) {
            __syncwarp();
            cluster_barrier();  // the other block arrives at barriers of this one until it has read its last stage
        }
    }
}

#define ROWS_PRODUCT(ALONG, N, K) rows_product<ALONG>({result, out, N}, inp, weight, offsets, fault, rows, experts, N, K);
#define WEIGHT_PRODUCT(PAIR) weight_product<PAIR>(d_weight, result, d_out, inp, offsets, fault, rows, experts, ic, oc, adds);
#else
#define ROWS_PRODUCT(ALONG, N, K)
#define WEIGHT_PRODUCT(PAIR)
#endif

KERNEL __launch_bounds__(THREADS, 1)
    grouped_wgmma_fwd(bf16* out, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap inp,
                      const __grid_constant__ TensorMap weight, const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 ic,
                      u32 oc) {
    ROWS_PRODUCT(true, oc, ic)
}

KERNEL __launch_bounds__(THREADS, 1)
    grouped_wgmma_bwd_input(bf16* out, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap inp,
                            const __grid_constant__ TensorMap weight, const i32* offsets, Fault* fault, u32 rows, u32 experts,
                            u32 ic, u32 oc) {
    ROWS_PRODUCT(false, ic, oc)
}

#define WEIGHT_KERNEL(NAME, PAIR)                                                                                                 \
    NAME(OUT* d_weight, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap d_out,                        \
         const __grid_constant__ TensorMap inp, const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc, u32 adds) { \
        WEIGHT_PRODUCT(PAIR)                                                                                                      \
    }
KERNEL __launch_bounds__(THREADS, 1) WEIGHT_KERNEL(grouped_wgmma_bwd_weight, false)
KERNEL CLUSTERED __launch_bounds__(THREADS, 1) WEIGHT_KERNEL(grouped_wgmma_bwd_weight_pair, true)
