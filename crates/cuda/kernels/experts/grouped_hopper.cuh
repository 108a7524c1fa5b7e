// Products of many experts' rows on Hopper. One producer warp starts TMA copies, STAGES steps of 128 bytes of terms ahead; two consumer
// warpgroups multiply, 64x256 of a tile of 128x256 each. Each consumer warp writes its results by TMA from STORE_STAGES tiles in
// shared memory, where other warps read them for the epilogue if EPILOGUE_APART: the rest of the producer's warpgroup, and with two
// EPILOGUE_GROUPS those of one more. A file that includes this defines STAGES, STORE_STAGES and EPILOGUE_GROUPS: 48 KB a stage, 16 KB a
// store stage, together less than 227 KB; and BYTES, those of a term: 2 (bf16) or 1 (8 bits).
//
// PAIR: the two blocks of a cluster multiply tiles with the same right operand, or at the same time two that share nothing. Of one that they
// share each copies one half to both, so that a third less is read from L2: at the power limit that counts, though nobody waits for L2.
#pragma once

#include "experts/grouped.cuh"
#include "common/cluster.cuh"
#include "common/hopper.cuh"

constexpr int GROUP = 128;
constexpr bool EPILOGUE_APART = EPILOGUE_GROUPS > 0;
constexpr int THREADS = (EPILOGUE_GROUPS == 2 ? 4 : 3) * GROUP;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int BM = 128, BN = 256, BK = 64;  // BK: columns of a TMA store
constexpr int LINE = 128, TERMS = LINE / BYTES;  // bytes of a line of a stage, and its terms
constexpr int BOX = 64 * LINE;  // bytes of 64 lines
constexpr int TILE_A = BM * LINE, TILE_B = BN * LINE, STAGE = TILE_A + TILE_B;
constexpr int STORE_TILE = 16 * BK * 2;  // bytes of 16 rows of 64 results: one TMA store
constexpr int CONSUMERS = 2 * GROUP / WARP;        // warps that multiply
constexpr int EPILOGUE_WARPS = EPILOGUE_APART ? EPILOGUE_GROUPS * GROUP / WARP - 1 : 0;  // all but the producer
constexpr int STORE_BYTES = STORE_STAGES * CONSUMERS * STORE_TILE;

extern __shared__ uint4 shared[];  // from the next multiple of 1024 on: stages, store tiles, barriers, groups

struct Space {
    u32 stages;  // address of the first
    u32 store_tiles;
    u32 full, empty;  // addresses of the first of STAGES barriers each
    u32 filled, drained;  // CONSUMERS barriers each if EPILOGUE_APART: a warp's store tiles are full; the epilogue has read them
    u32* groups;

    DEVICE u32 store_tile(u32 consumer) const { return store_tiles + consumer * STORE_STAGES * STORE_TILE; }
    DEVICE u32 a(u32 stage) const { return stages + stage * STAGE; }
    DEVICE u32 b(u32 stage) const { return stages + stage * STAGE + TILE_A; }
};

// Addresses in shared memory. The barriers may be used after the next __syncthreads; with PAIR after that and a cluster_barrier.
template <bool PAIR = false> DEVICE Space prepare() {
    u8* const start = reinterpret_cast<u8*>(shared);
    const u32 gap = (1024 - shared_address(start) % 1024) % 1024;
    const u32 stages = shared_address(start) + gap, store_tiles = stages + STAGES * STAGE, full = store_tiles + STORE_BYTES;
    u8* const groups = start + gap + STAGES * STAGE + STORE_BYTES + 16 * (STAGES + (EPILOGUE_APART ? CONSUMERS : 0));
    const u32 filled = full + 16 * STAGES;
    const Space space{stages, store_tiles, full, full + 8 * STAGES, filled, filled + 8 * CONSUMERS, reinterpret_cast<u32*>(groups)};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(space.full + 8 * s, 1);
            barrier_init(space.empty + 8 * s, PAIR ? 2 * CONSUMERS : CONSUMERS);
        }
        for (int w = 0; EPILOGUE_APART && w < CONSUMERS; w++) {
            barrier_init(space.filled + 8 * w, 1);
            barrier_init(space.drained + 8 * w, EPILOGUE_WARPS);
        }
        barrier_init_fence();
    }
    return space;
}

using Turn = PipelineState<STAGES>;

// A tile: where its operands start in their tensors, and its number of terms.
struct Work {
    i32 a_line, a_term;  // first row (or column) of the result, first term, as places in the tensor of the left operand
    i32 b_line, b_term;
    u32 terms;
    bool shares = true;  // the right operand with the other block of a pair
};

// The tiles of BM by WIDE of n columns of experts' rows, for single blocks or for pairs. All threads of the block take part.
template <bool PAIR, int WIDE>
DEVICE auto row_tiles(const Space& space, const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 n) {
    if constexpr (PAIR) {
        const PairTiles<BM, WIDE> tiles(read_pairs<BM>(space.groups, offsets, experts, rows, fault, (n + WIDE - 1) / WIDE), n,
                                        cluster_rank());
        cluster_barrier();
        return tiles;
    } else {
        return RowTiles<BM, WIDE>(read_groups<BM>(space.groups, offsets, experts, rows, fault), n);
    }
}

// The other block of a pair arrives at barriers of this one until it has read its last stage: consumers wait for that.
template <bool PAIR> DEVICE void part() {
    if constexpr (PAIR) {
        __syncwarp();
        cluster_barrier();
    }
}

// Producer: starts the copies of a tile. HALVES: the second half of the right operand's lines starts at `second`.
template <bool A_ALONG, bool B_ALONG, bool HALVES = false, bool PAIR = false>
DEVICE void copy_tile(const Space& space, Turn& turn, const TensorMap& a, const TensorMap& b, const Work& work, i32 second = 0) {
    fill_stages<TERMS, STAGE>(space, turn, work.terms, [&](i32 k, u32 stage, u32 full) {
        const u32 to_a = space.a(stage), to_b = space.b(stage);
        if constexpr (A_ALONG) {
            tma_load(to_a, a, work.a_term + k, work.a_line, full);
        } else {
#pragma unroll
            for (int i = 0; i < BM / 64; i++) tma_load(to_a + i * BOX, a, work.a_line + i * 64, work.a_term + k, full);
        }
        if (PAIR && work.shares) {
            static_assert(!PAIR || !B_ALONG || HALVES, "each block copies one half");
            const u32 own = cluster_rank();
            if constexpr (B_ALONG) {
                tma_load_to(3, to_b + own * (TILE_B / 2), b, work.b_term + k, own == 0 ? work.b_line : second, full);
            } else {
#pragma unroll
                for (u32 i = own * (BN / 128); i < (own + 1) * (BN / 128); i++)
                    tma_load_to(3, to_b + i * BOX, b, work.b_line + (i32)i * 64, work.b_term + k, full);
            }
        } else if constexpr (B_ALONG) {
            tma_load(to_b, b, work.b_term + k, work.b_line, full);
            if constexpr (HALVES) tma_load(to_b + TILE_B / 2, b, work.b_term + k, second, full);
        } else {
#pragma unroll
            for (int i = 0; i < BN / 64; i++) tma_load(to_b + i * BOX, b, work.b_line + i * 64, work.b_term + k, full);
        }
    });
}

// Zeros the terms from `first` on of a stage whose rows are terms. All consumer threads take part.
DEVICE void clear_terms(const Space& space, u32 stage, u32 first) {
    u8* const start = reinterpret_cast<u8*>(shared) + (space.a(stage) - shared_address(shared));
    const u32 chunks = (TERMS - first) * 8;  // of 16 bytes in each box
    for (u32 i = threadIdx.x - GROUP; i < chunks * (STAGE / BOX); i += 2 * GROUP)
        *reinterpret_cast<uint4*>(start + i / chunks * BOX + first * 128 + i % chunks * 16) = uint4{0, 0, 0, 0};
    shared_fence();
    named_barrier<1, 2 * GROUP>();
}

// Consumer: acc = this warpgroup's rows of a tile of at least one term. `meanwhile` is called while the last products run.
template <bool A_ALONG, bool B_ALONG, bool PAIR = false, class F>
DEVICE void multiply(float (&acc)[128], const Space& space, Turn& turn, u32 terms, F meanwhile) {
    const u32 group = threadIdx.x / GROUP - 1;
    const auto product = [&](u32 k, u32 stage) {
        if (!A_ALONG && terms - k < TERMS) clear_terms(space, stage, terms - k);
        const u32 a = space.a(stage) + group * BOX, b = space.b(stage);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < TERMS / 16; s++) {
            // The next 16 terms: 32 bytes further if terms are along a row, 16 rows further if rows are terms.
            const u64 left = matrix_descriptor(a + s * (A_ALONG ? 32 : 2048), A_ALONG ? 16 : BOX);
            const u64 right = matrix_descriptor(b + s * (B_ALONG ? 32 : 2048), B_ALONG ? 16 : BOX);
            wgmma_256<A_ALONG, B_ALONG>(acc, left, right, k > 0 || s > 0);
        }
    };
    multiply_stages<TERMS, PAIR>(space, turn, terms, product, meanwhile, acc);
}

// Where a result goes.
struct Target {
    const TensorMap& map;  // copies 16 rows of 64 columns
    bf16* at;              // the first element of the tensor
    u64 stride;
};

// The TMA stores of a consumer warp: a ring of STORE_STAGES tiles.
struct ResultStores {
    u32 address;
    u32 turn = 0;

    DEVICE explicit ResultStores(const Space& space) : address(space.store_tile((threadIdx.x - GROUP) / WARP)) {}

    // 64 columns from x on, pairs of 8 columns at a time, of this warp's 16 rows from y on, of which `rows` exist.
    DEVICE void write(const Target& to, u32 x, u32 y, i32 rows, const u32 (&pairs)[8][2]) {
        if (rows < 16) return write_some(to, x, y, rows, pairs);
        const u32 tile = next();
        store_rows(tile, pairs);
        send(to, x, y, tile);
    }

    // The same from registers, without TMA.
    DEVICE void write_some(const Target& to, u32 x, u32 y, i32 rows, const u32 (&pairs)[8][2]) const {
        const u32 lane = threadIdx.x % WARP;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i32 row = (i32)(lane / 4) + 8 * h;
            u32* const line = reinterpret_cast<u32*>(to.at + (y + (u64)row) * to.stride + x + lane % 4 * 2);
#pragma unroll
            for (int n = 0; n < 8; n++)
                if (row < rows) line[4 * n] = pairs[n][h];
        }
    }

    // The oldest tile of the ring, once its store has read it.
    DEVICE u32 next() {
        if (threadIdx.x % WARP == 0) tma_store_wait<STORE_STAGES - 1>();
        __syncwarp();
        const u32 tile = address + turn * STORE_TILE;
        turn = (turn + 1) % STORE_STAGES;
        return tile;
    }

    DEVICE void send(const Target& to, u32 x, u32 y, u32 tile) const {
        shared_fence();
        __syncwarp();
        if (threadIdx.x % WARP == 0) {
            tma_store(to.map, (i32)x, (i32)y, tile);
            tma_store_commit();
        }
    }

    // Waits until all stores have read their tiles.
    DEVICE void close() {
        if (threadIdx.x % WARP == 0) tma_store_wait<0>();
    }
};

// The first of this warp's rows of a tile.
DEVICE u32 own_rows() { return (threadIdx.x - GROUP) / WARP * 16; }

// Columns 64·J to 64·J + 63 of the tile, rounded.
template <int J> DEVICE void rounded(u32 (&pairs)[8][2], const float (&acc)[128]) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) pairs[n][h] = pack_bf16(acc[32 * J + 4 * n + 2 * h], acc[32 * J + 4 * n + 2 * h + 1]);
}
#endif
