// linear_gelu_fwd:        pre (rows,n) = inp (rows,k)·weight (n,k)ᵀ + bias, rounded to bf16; out = gelu of the rounded pre; Hopper only
// linear_gelu_fwd_slopes: with SLOPES, gelu'(pre) rounded to bf16 in the place of pre, which is all that linear_gelu_bwd makes of it: the helpers
//                         then compute little more here, and nothing there
// moves  each operand once per tile, mostly from L2, and 4 bytes an element of the result; bound: power, registers' ports, shared memory
// grid   a persistent block on each multiprocessor (product/linear_hopper.cuh); needs rows % 128 == 0, n % 256 == 0, k % 64 == 0,
//        arrays at multiples of 16 bytes
// order  a product's terms in order, 16 at a time, in f32; the rest elementwise: repeatable
#include "product/linear_hopper.cuh"
#include "elementwise/gelu.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// GELU of 8 numbers; with SLOPES these become their slopes.
DEVICE uint4 activated(uint4& x) {
    u32* const pairs[4] = {&x.x, &x.y, &x.z, &x.w};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (SLOPES) {
            const float2 first = Gelu::fast(low(*pairs[i])), second = Gelu::fast(high(*pairs[i]));
            out[i] = pack_bf16(first.x, second.x);
            *pairs[i] = pack_bf16(first.y, second.y);
        } else {
            out[i] = pack_bf16(Gelu::fast_value(low(*pairs[i])), Gelu::fast_value(high(*pairs[i])));
        }
    }
    return {out[0], out[1], out[2], out[3]};
}

// Helper `mine`: out, and with SLOPES those, from the rows of pre in the result tile.
DEVICE void activate(const Space& space, const Tiles& tiles, u32 mine, bf16* out, bf16* slopes, u64 n) {
    const u32 lane = threadIdx.x % WARP;
    u32 parity = 0;
    for (u32 t = blockIdx.x; t < tiles.count(); t += gridDim.x, parity ^= 1) {
        const uint2 at = tiles.at(t);
        const u64 start = at.x * n + at.y + lane * 8;
        const auto use = [&](u32 row, Some& x) {
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                *reinterpret_cast<uint4*>(out + start + (row + i) * n) = activated(x.at[i]);
                if constexpr (SLOPES) *reinterpret_cast<uint4*>(slopes + start + (row + i) * n) = x.at[i];
            }
        };
        walk(space, mine, space.filled, parity, use, [&](u32 consumer) {
            __syncwarp();
            if (lane == 0) barrier_arrive(space.ready + 8 * consumer);
        });
    }
}

// The biases of a thread's columns, two to a word.
DEVICE void read_bias(u32 (&bias)[32], const bf16* from, u32 column) {
    const u32* const at = reinterpret_cast<const u32*>(from + column) + threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 32; n++) bias[n] = from == nullptr ? 0 : __ldg(at + 4 * n);
}

// Consumer: its rows of a tile of pre go to the result tile.
DEVICE void write_rows(u32 rows, const float (&acc)[128], const u32 (&bias)[32]) {
    const u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < 32; m += 2) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int e = 4 * m + 2 * i;
            pairs[i] = pack_bf16(acc[e] + low(bias[m + i / 2]), acc[e + 1] + high(bias[m + i / 2]));
        }
        store_matrices(chunk_at(rows, lane % 16, m + lane / 16), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}
#endif

#if SLOPES
#define NAME linear_gelu_fwd_slopes
#else
#define NAME linear_gelu_fwd
#endif

KERNEL __launch_bounds__(THREADS, 1)
    NAME(bf16* out, bf16* slopes, const __grid_constant__ TensorMap pre, const __grid_constant__ TensorMap inp,
         const __grid_constant__ TensorMap weight, const bf16* bias, u32 rows, u32 n, u32 k) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const Space space = prepare();
    const Tiles tiles(rows, n);
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x == 0) produce<true>(space, tiles, inp, weight, k);
        if (warp > 0) activate(space, tiles, warp - 1, out, slopes, n);
        return;
    }
    more_registers<MANY>();
    const u32 consumer = warp - GROUP / WARP, mine = space.rows(consumer);
    Turn turn;
    u32 parity = 1;
    for (u32 t = blockIdx.x; t < tiles.count(); t += gridDim.x, parity ^= 1) {
        const uint2 at = tiles.at(t);
        float acc[128];
        u32 biases[32];
        multiply<true>(acc, space, turn, k, [&] { read_bias(biases, bias, at.y); });
        barrier_wait(space.ready + 8 * consumer, parity);  // helpers have read the tile before
        if (!SLOPES && lane == 0) tma_store_wait<0>();
        __syncwarp();
        write_rows(mine, acc, biases);
        if (!SLOPES) shared_fence();
        __syncwarp();
        if (lane == 0) {
            if (!SLOPES) {
#pragma unroll
                for (int p = 0; p < PARTS; p++) tma_store(pre, (i32)at.y + p * BK, (i32)(at.x + consumer * ROWS), mine + p * PART);
                tma_store_commit();
            }
            barrier_arrive(space.filled + 8 * consumer);
        }
    }
    if (lane == 0) tma_store_wait<0>();
#endif
}
