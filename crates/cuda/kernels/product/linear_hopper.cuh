// Products of bf16 matrices on Hopper whose epilogue is computed by warps of its own while the next tile is multiplied. One producer
// thread starts TMA copies, STAGES steps of 64 terms ahead; two consumer warpgroups multiply, 64x256 of a tile of 128x256 each. Each
// consumer warp leaves its 16 rows in the block's result tile in shared memory, from where they are stored, and where the helpers, the
// three other warps of the producer's warpgroup, exchange numbers with it.
//
// The tensor cores and the copies of operands take most of what shared memory can move, so that a load from there takes long: helpers load
// rows before they compute with those before.
#pragma once

#include "common/hopper.cuh"

constexpr int GROUP = 128;
constexpr int THREADS = 3 * GROUP;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int BM = 128, BN = 256, BK = 64;
constexpr int STAGES = 3;
constexpr int LINE = 128;       // bytes of a line of a stage, 64 terms
constexpr int BOX = 64 * LINE;  // bytes of 64 lines
constexpr int TILE_A = BM * LINE, TILE_B = BN * LINE, STAGE = TILE_A + TILE_B;
constexpr u32 ROWS = 16;           // of a consumer warp
constexpr int PART = ROWS * LINE;  // bytes of 64 columns of them: one TMA copy
constexpr int PARTS = BN / BK;
constexpr int RESULT = PARTS * PART;
constexpr u32 CONSUMERS = 2 * GROUP / WARP;  // warps that multiply
constexpr u32 HELPERS = GROUP / WARP - 1;
constexpr u32 AT_ONCE = 4;           // rows that a helper takes at a time, 8 columns to a lane
constexpr u32 TURN = HELPERS * AT_ONCE;  // rows that all helpers take at a time
constexpr int FEW = 104, MANY = 200;  // registers of a producer or helper thread, and of a consumer thread: together those of the block
static_assert(TURN <= ROWS, "every helper has rows of every consumer");

extern __shared__ uint4 shared[];  // from the next multiple of 1024 on: stages, the result tile, barriers

struct Space {
    u32 stages, results;         // addresses of the first stage and of the result tile
    u32 full, empty;             // of the first of STAGES barriers each
    u32 filled, ready, fetched;  // of the first of CONSUMERS barriers each, for a consumer's rows: it wrote them; helpers did their part; TMA did

    DEVICE u32 rows(u32 consumer) const { return results + consumer * RESULT; }
    DEVICE u32 a(u32 stage) const { return stages + stage * STAGE; }
    DEVICE u32 b(u32 stage) const { return stages + stage * STAGE + TILE_A; }
};

// Addresses in shared memory; the barriers are ready for all.
DEVICE Space prepare() {
    const u32 start = shared_address(shared), stages = start + (1024 - start % 1024) % 1024;
    const u32 results = stages + STAGES * STAGE, full = results + CONSUMERS * RESULT, filled = full + 16 * STAGES;
    const Space space{stages, results, full, full + 8 * STAGES, filled, filled + 8 * CONSUMERS, filled + 16 * CONSUMERS};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(space.full + 8 * s, 1);
            barrier_init(space.empty + 8 * s, CONSUMERS);
        }
        for (u32 w = 0; w < CONSUMERS; w++) {
            barrier_init(space.filled + 8 * w, 1);
            barrier_init(space.ready + 8 * w, HELPERS);
            barrier_init(space.fetched + 8 * w, 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    return space;
}

using Turn = PipelineState<STAGES>;

// The tiles of the blocks, one after the other: bands of BAND rows of tiles, in a band column after column.
struct Tiles {
    u32 tall, columns;

    DEVICE Tiles(u32 rows, u32 n) : tall(rows / BM), columns(n / BN) {}
    DEVICE u32 count() const { return tall * columns; }
    // First row and column of a tile.
    DEVICE uint2 at(u32 t) const {
        const u32 band = t / (BAND * columns), inside = t - band * BAND * columns;
        const u32 high = min((u32)BAND, tall - band * BAND);
        return {(band * BAND + inside % high) * BM, inside / high * BN};
    }
};

// Producer: starts the copies of all tiles. The right operand is (n,k) where ALONG, else (k,n).
template <bool ALONG>
DEVICE void produce(const Space& space, const Tiles& tiles, const TensorMap& a, const TensorMap& b, u32 terms) {
    Turn turn;
    for (u32 t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
        const uint2 at = tiles.at(t);
        fill_stages<BK, STAGE>(space, turn, terms, [&](i32 k, u32 stage, u32 full) {
            const u32 to_b = space.b(stage);
            tma_load(space.a(stage), a, k, (i32)at.x, full);
            if constexpr (ALONG) {
                tma_load(to_b, b, k, (i32)at.y, full);
            } else {
#pragma unroll
                for (int i = 0; i < BN / 64; i++) tma_load(to_b + i * BOX, b, (i32)at.y + i * 64, k, full);
            }
        });
    }
}

// Consumer: acc = this warpgroup's rows of a tile. `meanwhile` is called while the last products run.
template <bool ALONG, class F> DEVICE void multiply(float (&acc)[128], const Space& space, Turn& turn, u32 terms, F meanwhile) {
    const u32 group = threadIdx.x / GROUP - 1;
    const auto product = [&](u32 k, u32 stage) {
        const u32 a = space.a(stage) + group * BOX, b = space.b(stage);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < BK / 16; s++) {
            const u64 left = matrix_descriptor(a + s * 32, 16);
            const u64 right = matrix_descriptor(b + s * (ALONG ? 32 : 2048), ALONG ? 16 : BOX);
            wgmma_256<true, ALONG>(acc, left, right, k > 0 || s > 0);
        }
    };
    multiply_stages<BK>(space, turn, terms, product, meanwhile, acc);
}

// The place of 16 bytes in a consumer's rows: `chunk` of 8 columns of `row`.
DEVICE u32 chunk_at(u32 rows, u32 row, u32 chunk) { return rows + chunk / 8 * PART + row * LINE + ((chunk % 8) ^ row % 8) * 16; }

// Some rows of one consumer, 8 columns of each.
struct Some {
    uint4 at[AT_ONCE];

    DEVICE void load(const Space& space, u32 row) {
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) at[i] = load_shared(chunk_at(space.rows(row / ROWS), row % ROWS + i, threadIdx.x % WARP));
    }
};

// Helper `mine`: calls `use(row, x)` for its rows x of a tile, from `row` on, each loaded when the consumer's barrier at `barriers` has
// reached this phase; and `done(consumer)` behind its last rows of a consumer.
template <class U, class D> DEVICE void walk(const Space& space, u32 mine, u32 barriers, u32 parity, U use, D done) {
    Some now, next;
    barrier_wait(barriers, parity);
    now.load(space, mine * AT_ONCE);
    for (u32 row = mine * AT_ONCE; row < BM; row += TURN) {
        const u32 further = row + TURN;
        if (further < BM) {
            barrier_wait(barriers + 8 * (further / ROWS), parity);
            next.load(space, further);
        }
        use(row, now);
        if (further / ROWS != row / ROWS) done(row / ROWS);
        now = next;
    }
}
#endif
