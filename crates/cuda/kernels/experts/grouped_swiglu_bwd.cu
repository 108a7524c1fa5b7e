// grouped_swiglu_bwd: d_act[r] = d_out[r]·weight[e] for the rows r of each expert e, weight (E,K,F); d_inp (rows,2F) = SwiGLU's gradient from
//                     d_act rounded to bf16 and inp (rows,2F), whose rows are [gate | up]; act (rows,F), if there is one, is the forward's
//                     result; bf16, Hopper only
// moves  10 bytes an element of d_act from and to memory, without act 8; operands once per tile, mostly from L2; bound: shared memory, power
// grid   a persistent block on each multiprocessor: a producer thread starts TMA copies, five stages of 64 terms ahead; two consumer
//        warpgroups have a tile of 128x128 each, in turns: while one multiplies, the other computes SwiGLU. Needs K % 64 == 0, F % 64 == 0,
//        arrays at multiples of 16 bytes
// order  a product's terms in order, 16 at a time, in f32; the rest elementwise: the bits of experts/grouped_wgmma.cu and then elementwise/swiglu.cu.
//        d_inp may be written over inp
//
// A tile may reach beyond the last row of its expert: those rows are read, but not written.
#include "experts/grouped.cuh"
#include "common/hopper.cuh"
#include "elementwise/swiglu.cuh"

constexpr int GROUP = 128;
constexpr int THREADS = 3 * GROUP;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int STAGES = 5;
constexpr u32 BM = 128, BN = 128, BK = 64;
constexpr int LINE = 128;       // bytes of a line of a stage, 64 terms or columns
constexpr int BOX = 64 * LINE;  // bytes of 64 lines: one TMA copy, half an operand of a stage
constexpr int OPERAND = 2 * BOX, STAGE = 2 * OPERAND;
constexpr int PART = 16 * LINE;              // bytes of 16 rows of 64 columns of d_act
constexpr int PARTS = 4;                     // of a consumer warp: two side by side, two 64 rows further down
constexpr u32 STEPS = 16, AT_ONCE = 4;       // of a warp's share of SwiGLU: with more of them at once, instructions come too slowly
constexpr u32 CONSUMERS = 2 * GROUP / WARP;  // warps that multiply
constexpr int FEW = 40, MANY = 232;          // registers of a producer thread and of a consumer thread: together those of the block

extern __shared__ uint4 shared[];  // from the next multiple of 1024 on: stages, parts, barriers, groups

struct Space {
    u32 stages, parts;  // addresses of the first stage and of the first part
    u32 full, empty;    // of the first of STAGES barriers each
    u32* groups;

    DEVICE u32 a(u32 stage) const { return stages + stage * STAGE; }
    DEVICE u32 b(u32 stage) const { return stages + stage * STAGE + OPERAND; }
};

// Addresses in shared memory. The barriers may be used after the next __syncthreads.
DEVICE Space prepare() {
    u8* const start = reinterpret_cast<u8*>(shared);
    const u32 gap = (1024 - shared_address(start) % 1024) % 1024;
    constexpr u32 TILES = STAGES * STAGE + CONSUMERS * PARTS * PART;
    const u32 stages = shared_address(start) + gap, full = stages + TILES;
    const Space space{stages, stages + STAGES * STAGE, full, full + 8 * STAGES, reinterpret_cast<u32*>(start + gap + TILES + 16 * STAGES)};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(space.full + 8 * s, 1);
            barrier_init(space.empty + 8 * s, GROUP / WARP);
        }
        barrier_init_fence();
    }
    return space;
}

struct Turn : PipelineState<STAGES> {
    DEVICE void skip(u32 steps) {
        const u32 to = stage + steps;
        stage = to % STAGES;
        round ^= to / STAGES & 1;
    }
};

// Producer: starts the copies of a tile from these places on; `term` is the first line of the expert's weight.
DEVICE void copy_tile(const Space& space, Turn& turn, const TensorMap& d_out, const TensorMap& weight, i32 row, i32 column, i32 term, u32 terms) {
    fill_stages<BK, STAGE>(space, turn, terms, [&](i32 k, u32 stage, u32 full) {
        const u32 b = space.b(stage);
        tma_load(space.a(stage), d_out, k, row, full);
        tma_load(b, weight, column, term + k, full);
        tma_load(b + BOX, weight, column + 64, term + k, full);
    });
}

// The order of the consumers: a group waits for its turn to multiply, and hands it over when it has got all its operands. The barriers of
// stages tell two rounds apart, so a group must not wait for its operands before the other one has got those ahead of them.
DEVICE void await_turn(u32 group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
DEVICE void hand_turn(u32 group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

// Consumer: acc = a tile of at least one term, 64 rows in each half. `meanwhile` is called while the last products run.
template <class F> DEVICE void multiply(float (&acc)[2][64], const Space& space, Turn& turn, u32 group, u32 terms, F meanwhile) {
    // Zeros, rather than a first product that does not add: acc would hold its registers during the epilogue too.
#pragma unroll
    for (int i = 0; i < 64; i++) acc[0][i] = acc[1][i] = 0.0f;
    await_turn(group);
    const auto product = [&](u32, u32 stage) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < BK / 16; s++) {
            const u64 right = matrix_descriptor(space.b(stage) + s * 2048, BOX);
#pragma unroll
            for (int m = 0; m < 2; m++)
                wgmma_128<true, false>(acc[m], matrix_descriptor(space.a(stage) + m * BOX + s * 32, 16), right, 1);
        }
    };
    const auto rest = [&] {
        hand_turn(group);
        meanwhile();
    };
    multiply_stages<BK>(space, turn, terms, product, rest, acc[0], acc[1]);
}

// 16 bytes from or to memory if `there`. There is no branch, so that arithmetic of other rows may be moved past.
DEVICE uint4 load_if(bool there, u64 from) {
    uint4 x;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
        "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(from), "r"((u32)there));
    return x;
}
DEVICE void store_if(bool there, u64 to, const uint4& x) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
        "@p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"((u32)there));
}

// d, gate and up become act, d_gate and d_up.
DEVICE void differentiate(u32& d, u32& gate, u32& up) {
    float gates[2] = {low(gate), high(gate)}, ups[2] = {low(up), high(up)};
    const float first = swiglu_back(silu<bf16>(gates[0]), low(d), gates[0], ups[0]);
    d = pack_bf16(first, swiglu_back(silu<bf16>(gates[1]), high(d), gates[1], ups[1]));
    gate = pack_bf16(gates[0], gates[1]);
    up = pack_bf16(ups[0], ups[1]);
}
DEVICE void differentiate(uint4& d, uint4& gate, uint4& up) {
    differentiate(d.x, gate.x, up.x);
    differentiate(d.y, gate.y, up.y);
    differentiate(d.z, gate.z, up.z);
    differentiate(d.w, gate.w, up.w);
}

// Gates and ups of some steps: two rows of 128 columns each, 8 columns to a lane.
struct Some {
    uint4 gate[AT_ONCE], up[AT_ONCE];
};

// A warp's rows of a tile, in STEPS: 16, and the 16 that are 64 rows further down.
struct Rows {
    u32 f, parts;         // columns of d_act; its parts in shared memory
    u64 from, to, again;  // addresses of this lane's first gate, of its gradient and of its act
    i32 rows;             // that exist from this lane's first on
    bool has_act;

    static DEVICE u32 row(u32 step) { return step / 8 * 64 + step % 8 * 2; }
    DEVICE bool exists(u32 step) const { return (i32)row(step) < rows; }

    DEVICE void load(Some& x, u32 first) const {
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            const u64 at = from + (u64)row(first + i) * (4 * f);
            const bool there = first < STEPS && exists(first + i);
            x.gate[i] = load_if(there, at);
            x.up[i] = load_if(there, at + 2 * f);
        }
    }

    DEVICE void finish(Some& x, u32 first) const {
        const u32 lane = threadIdx.x % WARP;
        uint4 d[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            const u32 step = first + i, inside = step % 8 * 2 + lane / 16;
            d[i] = load_shared(parts + (step / 8 * 2 + lane % 16 / 8) * PART + inside * LINE + (lane % 8 ^ inside % 8) * 16);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) differentiate(d[i], x.gate[i], x.up[i]);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            const u64 at = to + (u64)row(first + i) * (4 * f);
            store_if(exists(first + i), at, x.gate[i]);
            store_if(exists(first + i), at + 2 * f, x.up[i]);
            store_if(exists(first + i) && has_act, again + (u64)row(first + i) * (2 * f), d[i]);
        }
    }
};

// A part of the tile, rounded, in shared memory.
template <int P> DEVICE void leave(u32 parts, const float (&acc)[2][64]) {
    u32 pairs[8][2];
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = P % 2 * 32 + 4 * n + 2 * h;
            pairs[n][h] = pack_bf16(acc[P / 2][at], acc[P / 2][at + 1]);
        }
    store_rows(parts + P * PART, pairs);
}
#endif

KERNEL __launch_bounds__(THREADS, 1)
    grouped_swiglu_bwd(bf16* d_inp, bf16* act, const bf16* inp, const __grid_constant__ TensorMap d_out, const __grid_constant__ TensorMap weight,
                       const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 f, u32 k) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const Space space = prepare();
    const RowTiles<BM, BN> tiles(read_groups<BM>(space.groups, offsets, experts, rows, fault), f);
    Turn turn;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x != 0) return;
        tiles.each([&](const RowTile& tile) {
            copy_tile(space, turn, d_out, weight, (i32)tile.row, (i32)tile.column, (i32)(tile.expert * k), k);
        });
    } else {
        more_registers<MANY>();
        const u32 group = threadIdx.x / GROUP - 1, warp = threadIdx.x / WARP - GROUP / WARP, lane = threadIdx.x % WARP;
        Rows mine{f, space.parts + warp * PARTS * PART};
        mine.has_act = act != nullptr;
        if (group == 1) hand_turn(group);
        turn.skip(group * (k / BK));
        for (u64 t = blockIdx.x + group * (u64)gridDim.x; t < tiles.count; t += 2 * (u64)gridDim.x, turn.skip(k / BK)) {
            float acc[2][64];
            Some x;
            multiply(acc, space, turn, group, k, [&] {
                const RowTile tile = tiles.at(t);
                const u32 inside = warp % 4 * 16 + lane / 16, column = tile.column + lane % 16 * 8;
                const u64 row = tile.row + inside;
                mine.rows = column < f ? (i32)tile.rows - (i32)inside : 0;
                mine.from = reinterpret_cast<u64>(inp + row * 2 * f + column);
                mine.to = reinterpret_cast<u64>(d_inp + row * 2 * f + column);
                mine.again = reinterpret_cast<u64>(act + row * f + column);
                mine.load(x, 0);
            });
            __syncwarp();  // all lanes have read the parts of the tile before
            leave<0>(mine.parts, acc);
            leave<1>(mine.parts, acc);
            leave<2>(mine.parts, acc);
            leave<3>(mine.parts, acc);
            __syncwarp();
#pragma unroll 1
            for (u32 step = 0; step < STEPS; step += AT_ONCE) {
                Some next;
                mine.load(next, step + AT_ONCE);
                mine.finish(x, step);
                x = next;
            }
        }
    }
#endif
}
