// linear_gelu_bwd: d_pre (rows,n) = (d_out (rows,k)·weight (k,n)) ∘ gelu'(pre), gelu' rounded to bf16; partials (rows/128, n) = sums of
//                  d_pre over each 128 rows; Hopper only
// linear_gelu_bwd_slopes: with SLOPES, the same from the rounded gelu'(pre) in the place of pre, as linear_gelu_fwd_slopes leaves it
// moves  each operand once per tile, mostly from L2, and 4 bytes an element of the result; bound: power, shared memory
// grid   a persistent block on each multiprocessor (product/linear_hopper.cuh); needs rows % 128 == 0, n % 256 == 0, k % 64 == 0,
//        arrays at multiples of 16 bytes
// order  a product's terms in order, 16 at a time, in f32; of 128 rows each helper sums its own in order, then the helpers in order:
//        repeatable, whatever the grid
//
// While a tile is multiplied, helpers turn the tile of pre into slopes, in place, unless they are there already; the consumers multiply by them, and leave the result
// there too. The helpers store it, sum its columns, and fetch the next tile of pre.
#include "product/linear_hopper.cuh"
#include "common/mma.cuh"
#include "elementwise/gelu.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
DEVICE u32 slopes(u32 pair) { return pack_bf16(Gelu::slope(low(pair)), Gelu::slope(high(pair))); }

// Starts the copies of a consumer's rows of a tile of pre, or their fetching into L2.
DEVICE void fetch(const Space& space, const TensorMap& pre, uint2 at, u32 consumer) {
    const u32 barrier = space.fetched + 8 * consumer;
    barrier_expect(barrier, RESULT);
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        tma_load(space.rows(consumer) + p * PART, pre, (i32)at.y + p * BK, (i32)(at.x + consumer * ROWS), barrier);
}
DEVICE void fetch_into_l2(const TensorMap& pre, uint2 at, u32 consumer) {
    const u32 lane = threadIdx.x % WARP;
    if (lane < PARTS) tma_prefetch(pre, (i32)(at.y + lane * BK), (i32)(at.x + consumer * ROWS));
}

// Stores a consumer's rows of a tile.
DEVICE void store(const Space& space, const TensorMap& d_pre, uint2 at, u32 consumer) {
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        tma_store(d_pre, (i32)at.y + p * BK, (i32)(at.x + consumer * ROWS), space.rows(consumer) + p * PART);
    tma_store_commit();
}

DEVICE void add(float (&sums)[8], const uint4& x) {
    const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) sums[2 * i] += low(pairs[i]), sums[2 * i + 1] += high(pairs[i]);
}

// Helper `mine`: its rows of pre become slopes. Without loads ahead, whose registers the arithmetic needs.
DEVICE void to_slopes(const Space& space, u32 mine, u32 parity) {
    const u32 lane = threadIdx.x % WARP;
    for (u32 row = mine * AT_ONCE; row < BM; row += TURN) {
        const u32 consumer = row / ROWS;
        barrier_wait(space.fetched + 8 * consumer, parity);
        Some x;
        x.load(space, row);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            const u32 y[4] = {slopes(x.at[i].x), slopes(x.at[i].y), slopes(x.at[i].z), slopes(x.at[i].w)};
            store_shared(chunk_at(space.rows(consumer), row % ROWS + i, lane), y);
        }
        __syncwarp();
        if (lane == 0 && (row + TURN) / ROWS != consumer) barrier_arrive(space.ready + 8 * consumer);
    }
}

// Helper `mine`. It fetches and stores the rows of every third consumer, and computes with its share of the rows of all.
DEVICE void differentiate(const Space& space, const Tiles& tiles, u32 mine, const TensorMap& d_pre, const TensorMap& pre, float* partials,
                          u32 n) {
    __shared__ float of_helpers[HELPERS][BN];  // read by the first helper, before the others can be done with the next tile
    const u32 lane = threadIdx.x % WARP;
    u32 parity = 0;
    if (lane == 0 && blockIdx.x < tiles.count())
        for (u32 w = mine; w < CONSUMERS; w += HELPERS) fetch(space, pre, tiles.at(blockIdx.x), w);
    for (u32 t = blockIdx.x; t < tiles.count(); t += gridDim.x, parity ^= 1) {
        const bool more = t + gridDim.x < tiles.count();
        const uint2 at = tiles.at(t), next = tiles.at(more ? t + gridDim.x : t);
        for (u32 w = mine; more && w < CONSUMERS; w += HELPERS) fetch_into_l2(pre, next, w);
        if constexpr (!SLOPES) to_slopes(space, mine, parity);
        float sums[8] = {};
        const auto add_rows = [&](u32 row, const Some& x) {
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) add(sums, x.at[i]);
        };
        walk(space, mine, space.filled, parity, add_rows, [&](u32 consumer) {
            if (lane == 0 && consumer % HELPERS == mine) store(space, d_pre, at, consumer);
        });
#pragma unroll
        for (int i = 0; i < 8; i++) of_helpers[mine][i * WARP + lane] = sums[i];
        named_barrier<1, HELPERS * WARP>();  // all have read the tile
        if (lane == 0) {
            tma_store_wait<0>();
            for (u32 w = mine; more && w < CONSUMERS; w += HELPERS) fetch(space, pre, next, w);
        }
        if (mine == 0) {
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (u32 w = 1; w < HELPERS; w++) sums[i] += of_helpers[w][i * WARP + lane];
            float4* const to = reinterpret_cast<float4*>(partials + at.x / BM * (u64)n + at.y + lane * 8);
            to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
            to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
        }
        __syncwarp();
    }
}

// Consumer: acc times the slopes in its rows of the result tile, in their place.
DEVICE void multiply_rows(u32 rows, const float (&acc)[128]) {
    const u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        u32 slope[4][4];
#pragma unroll
        for (int m = 0; m < 4; m++) ldmatrix(slope[m], chunk_at(rows, lane % 16, 8 * part + 2 * m + lane / 16));
#pragma unroll
        for (int m = 0; m < 4; m++) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int e = 32 * part + 8 * m + 2 * i;
                pairs[i] = pack_bf16(acc[e] * low(slope[m][i]), acc[e + 1] * high(slope[m][i]));
            }
            store_matrices(chunk_at(rows, lane % 16, 8 * part + 2 * m + lane / 16), pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}
#endif

#if SLOPES
#define NAME linear_gelu_bwd_slopes
#else
#define NAME linear_gelu_bwd
#endif

KERNEL __launch_bounds__(THREADS, 1)
    NAME(float* partials, const __grid_constant__ TensorMap d_pre, const __grid_constant__ TensorMap pre,
         const __grid_constant__ TensorMap d_out, const __grid_constant__ TensorMap weight, u32 rows, u32 n, u32 k) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const Space space = prepare();
    const Tiles tiles(rows, n);
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x == 0) produce<false>(space, tiles, d_out, weight, k);
        if (warp > 0) differentiate(space, tiles, warp - 1, d_pre, pre, partials, n);
        return;
    }
    more_registers<MANY>();
    const u32 consumer = warp - GROUP / WARP;
    Turn turn;
    u32 parity = 0;
    for (u32 t = blockIdx.x; t < tiles.count(); t += gridDim.x, parity ^= 1) {
        float acc[128];
        multiply<false>(acc, space, turn, k, [] {});
        barrier_wait((SLOPES ? space.fetched : space.ready) + 8 * consumer, parity);
        multiply_rows(space.rows(consumer), acc);
        shared_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(space.filled + 8 * consumer);
    }
#endif
}
