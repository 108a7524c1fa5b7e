// grouped_wgmma_fwd:        out[r] = weight[e]·inp[r] for the rows r of each expert e; weight (E,OC,C); bf16, Hopper only
// grouped_wgmma_bwd_input:  d_inp[r] = d_out[r]·weight[e]
// grouped_wgmma_bwd_weight: d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r] over the rows of each expert
// moves  each operand once per tile, mostly from L2; bound: tensor cores
// grid   a block on each multiprocessor: one warp starts copies, four steps of 64 terms ahead; two groups of four warps
//        multiply, 64x256 of a tile of 128x256 each, and walk over the tiles; needs C % 64 == 0, OC % 64 == 0, arrays at
//        multiples of 16 bytes
// order  a product's terms in turn, 16 at a time, in f32: repeatable
//
// A tile may reach beyond the last row of its expert: those rows are read, but not written. Where rows are terms of the sums
// (bwd_weight), those of other experts become zeros before they are used. Results in bf16 leave through shared memory by the copy
// engine, while the next tile is multiplied; stored from registers, a tile's 64 KB kept the tensor cores waiting for 4,400 cycles
// of 16,700 (768 terms).
#include "grouped.cuh"
#include "hopper.cuh"

constexpr int GROUP = 128, THREADS = 3 * GROUP;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;
constexpr int BOX = BK * BK * 2;  // bytes of 64 rows of 64 elements
constexpr int TILE_A = BM * BK * 2, TILE_B = BN * BK * 2, STAGE = TILE_A + TILE_B;
constexpr int OUTBOX = 16 * BK * 2;  // bytes of 16 rows of 64 results, two of them to a warp that multiplies
constexpr int OUTBOXES = 2 * (2 * GROUP / WARP) * OUTBOX;

extern __shared__ uint4 shared[];  // up to the next multiple of 1024: nothing; then stages, outboxes, barriers, groups

struct Space {
    u32 stages;  // address of the first
    u32 outboxes;
    u32 full, empty;  // addresses of the first of STAGES barriers each
    u32* groups;

    DEVICE u32 a(u32 stage) const { return stages + stage * STAGE; }
    DEVICE u32 b(u32 stage) const { return stages + stage * STAGE + TILE_A; }
};

// Where everything is; barriers are ready when it returns and the block has met.
DEVICE Space prepare() {
    u8* const start = reinterpret_cast<u8*>(shared);
    const u32 gap = (1024 - shared_address(start) % 1024) % 1024;
    const u32 stages = shared_address(start) + gap, outboxes = stages + STAGES * STAGE, full = outboxes + OUTBOXES;
    u8* const groups = start + gap + STAGES * STAGE + OUTBOXES + 16 * STAGES;
    const Space space{stages, outboxes, full, full + 8 * STAGES, reinterpret_cast<u32*>(groups)};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(space.full + 8 * s, 1);
            barrier_init(space.empty + 8 * s, 2 * GROUP / WARP);
        }
        barrier_init_fence();
    }
    return space;
}

// Which stage is next, and how often all were gone through.
struct Turn {
    u32 stage = 0, round = 0;
    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            round ^= 1;
        }
    }
};

// The work of a tile: where its operands start in their tensors, and its terms.
struct Work {
    i32 a_line, a_term;  // first row (or column) of the result, first term, as places in the tensor of the left operand
    i32 b_line, b_term;
    u32 terms;
};

// Starts the copies of a tile.
template <bool A_ALONG, bool B_ALONG>
DEVICE void copy_tile(const Space& space, Turn& turn, const TensorMap& a, const TensorMap& b, const Work& work) {
    for (u32 k = 0; k < work.terms; k += BK, turn.next()) {
        const u32 full = space.full + 8 * turn.stage, to_a = space.a(turn.stage), to_b = space.b(turn.stage);
        barrier_wait(space.empty + 8 * turn.stage, turn.round ^ 1);
        barrier_expect(full, STAGE);
        if constexpr (A_ALONG) {
            copy_box(to_a, a, work.a_term + (i32)k, work.a_line, full);
        } else {
#pragma unroll
            for (int i = 0; i < BM / BK; i++) copy_box(to_a + i * BOX, a, work.a_line + i * BK, work.a_term + (i32)k, full);
        }
        if constexpr (B_ALONG) {
            copy_box(to_b, b, work.b_term + (i32)k, work.b_line, full);
        } else {
#pragma unroll
            for (int i = 0; i < BN / BK; i++) copy_box(to_b + i * BOX, b, work.b_line + i * BK, work.b_term + (i32)k, full);
        }
    }
}

// Zeros for the terms from `first` on of a stage whose rows are terms. All threads that multiply take part.
DEVICE void clear_terms(const Space& space, u32 stage, u32 first) {
    u8* const start = reinterpret_cast<u8*>(shared) + (space.a(stage) - shared_address(shared));
    const u32 chunks = (BK - first) * 8;  // of 16 bytes in each box
    for (u32 i = threadIdx.x - GROUP; i < chunks * (STAGE / BOX); i += 2 * GROUP)
        *reinterpret_cast<uint4*>(start + i / chunks * BOX + first * 128 + i % chunks * 16) = uint4{0, 0, 0, 0};
    shared_fence();
    named_barrier<1, 2 * GROUP>();
}

// acc = this group's rows of a tile; there is at least one term. `meanwhile` is called while the last products are under way.
template <bool A_ALONG, bool B_ALONG, class F>
DEVICE void multiply(float (&acc)[128], const Space& space, Turn& turn, u32 terms, F meanwhile) {
    const u32 group = threadIdx.x / GROUP - 1;
    u32 before = 0;
    for (u32 k = 0; k < terms; k += BK, turn.next()) {
        barrier_wait(space.full + 8 * turn.stage, turn.round);
        if (!A_ALONG && terms - k < BK) clear_terms(space, turn.stage, terms - k);
        const u32 a = space.a(turn.stage) + group * BOX, b = space.b(turn.stage);
        product_fence();
#pragma unroll
        for (int s = 0; s < BK / 16; s++) {
            // 16 terms further: 32 bytes where they lie along a row, 16 rows where they are rows.
            const u64 left = operand(a + s * (A_ALONG ? 32 : 2048), A_ALONG ? 16 : BOX);
            const u64 right = operand(b + s * (B_ALONG ? 32 : 2048), B_ALONG ? 16 : BOX);
            product_256<A_ALONG, B_ALONG>(acc, left, right, k > 0 || s > 0);
        }
        product_commit();
        if (k > 0) {
            product_wait<1>();  // that of the stage before is done
            if (threadIdx.x % WARP == 0) barrier_arrive(space.empty + 8 * before);
        }
        before = turn.stage;
    }
    meanwhile();
    product_wait<0>();
    hold(acc);
    if (threadIdx.x % WARP == 0) barrier_arrive(space.empty + 8 * before);
}

// Where a result goes.
struct Target {
    const TensorMap& map;  // of boxes of 16 rows and 64 columns
    bf16* at;              // the first element of the tensor
    u64 stride;
};

// What is on its way out of a warp.
struct Outbox {
    u32 address;
    u32 turn = 0;

    DEVICE explicit Outbox(const Space& space) : address(space.outboxes + (threadIdx.x - GROUP) / WARP * 2 * OUTBOX) {}

    // 64 columns from x on, pairs of 8 columns at a time, of this warp's 16 rows from y on, of which `rows` exist.
    DEVICE void write(const Target& to, u32 x, u32 y, i32 rows, const u32 (&pairs)[8][2]) {
        const u32 lane = threadIdx.x % WARP;
        if (rows < 16) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i32 row = (i32)(lane / 4) + 8 * h;
                u32* const line = reinterpret_cast<u32*>(to.at + (y + (u64)row) * to.stride + x + lane % 4 * 2);
#pragma unroll
                for (int n = 0; n < 8; n++)
                    if (row < rows) line[4 * n] = pairs[n][h];
            }
            return;
        }
        if (lane == 0) store_wait<1>();  // the box before the last is out
        __syncwarp();
        const u32 box = address + turn * OUTBOX, row = lane % 16;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const u32 chunk = (n + lane / 16) ^ row % 8;
            store_matrices(box + row * 128 + chunk * 16, pairs[n][0], pairs[n][1], pairs[n + 1][0], pairs[n + 1][1]);
        }
        shared_fence();
        __syncwarp();
        if (lane == 0) {
            store_box(to.map, (i32)x, (i32)y, box);
            store_commit();
        }
        turn ^= 1;
    }

    // All boxes are out.
    DEVICE void close() {
        if (threadIdx.x % WARP == 0) store_wait<0>();
    }
};

// This warp's rows of a tile begin at this one.
DEVICE u32 own_rows() { return (threadIdx.x - GROUP) / WARP * 16; }

// Columns 64·J to 64·J + 63 of the tile, rounded.
template <int J> DEVICE void rounded(u32 (&pairs)[8][2], const float (&acc)[128]) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) pairs[n][h] = pack_bf16(acc[32 * J + 4 * n + 2 * h], acc[32 * J + 4 * n + 2 * h + 1]);
}

// The part of the tile at column x, row y that exists: `rows` and `columns`.
template <int J = 0>
DEVICE void write(Outbox& outbox, const Target& to, u32 x, u32 y, u32 rows, u32 columns, const float (&acc)[128]) {
    if constexpr (J < BN / BK) {
        u32 pairs[8][2];
        rounded<J>(pairs, acc);
        if (J * BK < columns) outbox.write(to, x + J * BK, y + own_rows(), (i32)rows - (i32)own_rows(), pairs);
        write<J + 1>(outbox, to, x, y, rows, columns, acc);
    }
}

DEVICE u32 own_row() { return own_rows() + threadIdx.x % WARP / 4; }

// f32 leaves from registers.
DEVICE void write_weight(Outbox& outbox, const TensorMap& map, bf16* at, u64 stride, u32 x, u32 y, u32 rows, u32 columns,
                         const float (&acc)[128]) {
    write(outbox, {map, at, stride}, x, y, rows, columns, acc);
}
DEVICE void write_weight(Outbox&, const TensorMap&, float* at, u64 stride, u32 x, u32 y, u32 rows, u32 columns,
                         const float (&acc)[128]) {
    float* const to = at + y * stride + x;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own_row() + 8 * h;
        float* const line = to + row * stride + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
            if (row < rows && 8 * n < columns)
                *reinterpret_cast<float2*>(line + 8 * n) = make_float2(acc[4 * n + 2 * h], acc[4 * n + 2 * h + 1]);
    }
}

DEVICE void write_zeros(OUT* to, u64 stride, u32 rows, u32 columns) {
    for (u32 i = threadIdx.x - GROUP; i < BM * BN; i += 2 * GROUP)
        if (i / BN < rows && i % BN < columns) to[i / BN * stride + i % BN] = from_float<OUT>(0.0f);
}

// acc += what is there already.
DEVICE void add_old(float (&acc)[128], const bf16* from, u64 stride, u32 rows, u32 columns) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own_row() + 8 * h;
        const bf16* const line = from + row * stride + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            const bool inside = row < rows && 8 * n < columns;
            const u32 old = inside ? *reinterpret_cast<const u32*>(line + 8 * n) : 0;
            acc[4 * n + 2 * h] += __uint_as_float(old << 16);
            acc[4 * n + 2 * h + 1] += __uint_as_float(old & 0xffff0000u);
        }
    }
}
DEVICE void add_old(float (&acc)[128], const float* from, u64 stride, u32 rows, u32 columns) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own_row() + 8 * h;
        const float* const line = from + row * stride + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            const bool inside = row < rows && 8 * n < columns;
            const float2 old = inside ? *reinterpret_cast<const float2*>(line + 8 * n) : make_float2(0.0f, 0.0f);
            acc[4 * n + 2 * h] += old.x;
            acc[4 * n + 2 * h + 1] += old.y;
        }
    }
}

// Registers of a thread that copies, and of one that multiplies: together those of the block.
constexpr int FEW = 40, MANY = 232;

// out (rows,n) from inp (rows,k) and the experts' weights: (n,k) where ALONG, else (k,n)
template <bool ALONG>
DEVICE void rows_product(const Target& out, const TensorMap& inp, const TensorMap& weight, const i32* offsets, Fault* fault,
                         u32 rows, u32 experts, u32 n, u32 k) {
    const Space space = prepare();
    const Groups groups = read_groups<BM>(space.groups, offsets, experts, rows, fault);
    const u32 columns = (n + BN - 1) / BN;
    const u64 tiles = (u64)groups.tiles * columns;
    Turn turn;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x != 0) return;
        for (u64 t = blockIdx.x; t < tiles; t += gridDim.x) {
            const Tile tile = groups.tile(t, columns);
            const i32 row = (i32)(groups.first(tile.expert) + tile.row * BM), column = (i32)(tile.column * BN);
            const i32 first = (i32)(tile.expert * (ALONG ? n : k));
            const Work work{row, 0, ALONG ? first + column : column, ALONG ? 0 : first, k};
            copy_tile<true, ALONG>(space, turn, inp, weight, work);
        }
    } else {
        more_registers<MANY>();
        Outbox outbox(space);
        for (u64 t = blockIdx.x; t < tiles; t += gridDim.x) {
            u32 first, there, column;
            float acc[128];
            multiply<true, ALONG>(acc, space, turn, k, [&] {
                const Tile tile = groups.tile(t, columns);
                first = groups.first(tile.expert) + tile.row * BM;
                there = groups.rows(tile.expert) - tile.row * BM;
                column = tile.column * BN;
            });
            write(outbox, out, column, first, there, n - column, acc);
        }
        outbox.close();
    }
}

#define ROWS_PRODUCT(ALONG, N, K) rows_product<ALONG>({result, out, N}, inp, weight, offsets, fault, rows, experts, N, K);
#else
#define ROWS_PRODUCT(ALONG, N, K)
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

KERNEL __launch_bounds__(THREADS, 1)
    grouped_wgmma_bwd_weight(OUT* d_weight, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap d_out, const __grid_constant__ TensorMap inp,
                             const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc, u32 adds) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const Space space = prepare();
    const Groups groups = read_groups<BM>(space.groups, offsets, experts, rows, fault);
    const u32 tall = (oc + BM - 1) / BM, wide = (ic + BN - 1) / BN;
    const u64 tiles = groups.fine ? (u64)experts * tall * wide : 0;
    Turn turn;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x != 0) return;
        for (u64 t = blockIdx.x; t < tiles; t += gridDim.x) {
            const u32 expert = (u32)(t / (tall * wide)), inside = (u32)(t - (u64)expert * tall * wide);
            const i32 row = (i32)(inside / wide * BM), column = (i32)(inside % wide * BN), first = (i32)groups.first(expert);
            copy_tile<false, false>(space, turn, d_out, inp, {row, first, column, first, groups.rows(expert)});
        }
    } else {
        more_registers<MANY>();
        Outbox outbox(space);
        for (u64 t = blockIdx.x; t < tiles; t += gridDim.x) {
            const u32 expert = (u32)(t / (tall * wide)), inside = (u32)(t - (u64)expert * tall * wide);
            const u32 row = inside / wide * BM, column = inside % wide * BN, terms = groups.rows(expert);
            OUT* const to = d_weight + ((u64)expert * oc + row) * ic + column;
            if (terms == 0) {
                if (!adds) write_zeros(to, ic, oc - row, ic - column);
                continue;
            }
            float acc[128];
            multiply<false, false>(acc, space, turn, terms, [] {});
            if (adds) add_old(acc, to, ic, oc - row, ic - column);
            write_weight(outbox, result, d_weight, ic, column, expert * oc + row, oc - row, ic - column, acc);
        }
        outbox.close();
    }
#endif
}
