// NORM_bwd: what norm/bwd.cu computes, in rows of bf16, WIDTH % 8 == 0, 256 <= WIDTH <= 2048, Hopper only
//
// moves  as there: (3 or, adding, 4)·rows·width·2 bytes and the partial sums; bound: memory
// grid   a block per multiprocessor of GROUPS groups of warps, a row per group, COLUMNS columns per lane. The rows that a group has
//        next come to a ring in shared memory by bulk copies, RING - 1 of them under way, so that registers hold what is computed
//        alone: x̂ and g of a row from one pass over it to the next, and the sums of columns. Then NORM_bwd_sums
// order  each group sums its rows in order, then groups in order, then the blocks in a fixed tree: repeatable on one
//        kind of device
//
// With FORMAT it is NORM_bwd_fp8: it also rounds its result, as it is stored, to 8 bits, in rows and in columns, as `quantize` of
// fp8/quantize.cu does: the same bits. It moves 2·rows·width bytes more. Blocks then take CHUNK rows at a time, and sums are in that order.
// Needs rows % CHUNK == 0, CHUNK % GROUPS == 0, WIDTH % 256 == 0, and 64·WIDTH bytes of shared memory behind the rings.
//
// COLUMNS is 8, or 10 for widths that leave no lane without work then: 1600 columns are 5 whole warps. Rows are loaded in the order in
// which their group passes over them, and one barrier of the group a row does all: behind it, its warps know each other's sums
// and have left the row before, whose place the next copy takes.
#include "common/hopper.cuh"
#include "norm/bwd.cuh"
#ifdef FORMAT
#include "norm/bwd_fp8.cuh"
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int GROUP = (WIDTH + COLUMNS * WARP - 1) / (COLUMNS * WARP);  // warps that share a row
constexpr int TEAM = GROUP * WARP;                                      // their lanes
constexpr int THREADS = GROUPS * TEAM;
constexpr bool FULL = TEAM * COLUMNS == WIDTH;
constexpr u32 ROW = WIDTH * sizeof(ACT);  // bytes
static_assert(sizeof(ACT) == 2 && (COLUMNS == 8 || (COLUMNS == 10 && FULL)), "a lane has a vector, or a vector and a pair");
static_assert(GROUP == 1 || GROUPS <= 15, "a named barrier for each group");

// What is held of a row: the input, its normalised form's gradient and, when adding, what d_inp was.
enum Held { INP, D_OUT, OLD, HELD };
constexpr u32 PLACE = (ROW + 127) / 128 * 128;  // with rows at odd multiples of 16 bytes the kernel took a fifth longer
constexpr u32 STAGE = HELD * PLACE;
static_assert(RING * STAGE >= TOTALS * WIDTH * sizeof(float), "in the end the sums of a group lie where its rows were");

// The next rows of a group in shared memory.
struct Ring {
    u32 rows;  // the address of the first
    u32 full;  // and of the first of the barriers that say when a row is there

    DEVICE u32 at(u32 stage, Held which) const { return rows + stage * STAGE + which * PLACE; }
    DEVICE void wait(const PipelineState<RING>& turn) const { barrier_wait(full + 8 * turn.stage, turn.round); }

    // By one thread.
    DEVICE void fetch(const Backward& p, u32 row, u32 stage) const {
        if (row >= p.rows) return;
        const u64 start = (u64)row * WIDTH;
        const u32 barrier = full + 8 * stage;
        barrier_expect(barrier, p.adds ? 3 * ROW : 2 * ROW);
        bulk_load(at(stage, INP), p.inp + start, ROW, barrier);
        bulk_load(at(stage, D_OUT), p.d_out + start, ROW, barrier);
        if (p.adds) bulk_load(at(stage, OLD), p.d_inp + start, ROW, barrier);
    }
};

// A lane's columns of a row: a vector of 8 and, where COLUMNS is 10, a pair behind the vectors of all lanes.
struct Columns {
    u32 pairs[COLUMNS / 2];

    DEVICE static int place(int lane, int k) { return k < 8 ? lane * 8 + k : TEAM * 8 + lane * 2 + k - 8; }
    DEVICE float operator[](int k) const { return k % 2 ? high(pairs[k / 2]) : low(pairs[k / 2]); }

    DEVICE void load(u32 row, int lane) {
        const uint4 v = load_shared(row + 16 * lane);
        pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
        if constexpr (COLUMNS == 10) pairs[4] = load_word(row + 2 * place(lane, 8));
    }
    DEVICE void store(ACT* row, int lane) const {
        // In PTX, since the compiler would take the vector apart where a pair follows.
        asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(row + 8 * lane), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                     : "memory");
        if constexpr (COLUMNS == 10) *reinterpret_cast<u32*>(row + place(lane, 8)) = pairs[4];
    }
};

// The sums over a group. `turn` alternates, so that one barrier a row is enough.
DEVICE void group_sum(Told& x, Told (*shared)[GROUP], int group, int turn) {
    // Half of the warp adds up one sum, half the other.
    constexpr int LANES = WARP / SUMS;
    const int lane = threadIdx.x % WARP;
    float sum = x.at[0];
    if constexpr (CENTRED) {
        const float other = lane < LANES ? x.at[1] : x.at[0];
        sum = (lane < LANES ? x.at[0] : x.at[1]) + __shfl_xor_sync(0xffffffffu, other, LANES);
    }
    sum = warp_sum<LANES>(sum);
    if constexpr (GROUP > 1) {
        if (lane % LANES == 0) shared[turn][threadIdx.x % TEAM / WARP].at[lane / LANES] = sum;
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(TEAM) : "memory");
        x = {};
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            const Told part = shared[turn][k];
#pragma unroll
            for (int s = 0; s < SUMS; s++) x.at[s] += part.at[s];
        }
    } else {
#pragma unroll
        for (int s = 0; s < SUMS; s++) x.at[s] = __shfl_sync(0xffffffffu, sum, s * LANES);
        __syncwarp();
    }
}

#ifdef FORMAT
constexpr u32 CHUNK = RowTile::ROWS;
static_assert(COLUMNS == 8 && FULL && CHUNK % GROUPS == 0, "the groups of a block have a chunk together, and a lane a unit");
#else
constexpr u32 CHUNK = GROUPS;
#endif
constexpr u32 ROUNDS = CHUNK / GROUPS;

// Row i of a group.
DEVICE u32 row_of(u32 group, u32 i) { return (blockIdx.x + i / ROUNDS * gridDim.x) * CHUNK + i % ROUNDS * GROUPS + group; }

DEVICE Statistics statistics_of(const Backward& p, u32 row) {
    return row < p.rows ? Statistics{p.mean_of(row), p.rstd[row]} : Statistics{};
}

extern __shared__ __align__(128) u8 rings[];

// With `narrowed`, a NarrowRows.
template <class... Narrowed> DEVICE void differentiate(const Backward& p, Narrowed... narrowed) {
    __shared__ u64 full[GROUPS][RING];
    __shared__ Told told[GROUPS][2][GROUP];
    const int group = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
    const bool works = FULL || lane * 8 < WIDTH;
    const Ring ring = {shared_address(rings) + group * RING * STAGE, shared_address(full[group])};
    if (threadIdx.x < GROUPS * RING) barrier_init(shared_address(full) + 8 * threadIdx.x, 1);
    barrier_init_fence();
    __syncthreads();

    if (lane == 0)
#pragma unroll 1
        for (u32 ahead = 0; ahead < RING - 1; ahead++) ring.fetch(p, row_of(group, ahead), ahead);
    float w[COLUMNS] = {}, sums[TOTALS][COLUMNS] = {};
#pragma unroll
    for (int k = 0; k < COLUMNS; k++)
        if (works) w[k] = gain(to_float(p.weight[Columns::place(lane, k)]));

    PipelineState<RING> turn;
    u32 row = row_of(group, 0);
    Statistics of = statistics_of(p, row);
    for (u32 i = 0; row < p.rows; i++, row = row_of(group, i), turn.next()) {
        const Statistics next = statistics_of(p, row_of(group, i + 1));
        float x[COLUMNS], g[COLUMNS];
        Columns inp = {}, d_out = {}, old = {}, out;
        ring.wait(turn);
        if (works) inp.load(ring.at(turn.stage, INP), lane);
        if (works) d_out.load(ring.at(turn.stage, D_OUT), lane);
        Told total = {};
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            const float d = d_out[k];
            x[k] = CENTRED ? __fmaf_rn(inp[k], of.rstd, -of.mean * of.rstd) : inp[k] * of.rstd;
            g[k] = d * w[k];
            total.at[0] = __fmaf_rn(g[k], x[k], total.at[0]);
            sums[0][k] = __fmaf_rn(d, x[k], sums[0][k]);
            if constexpr (CENTRED) {
                total.at[1] += g[k];
                sums[1][k] += d;
            }
        }
        group_sum(total, told[group], group, i % 2);
        // To where the row before was.
        if (lane == 0) ring.fetch(p, row_of(group, i + RING - 1), turn.stage ? turn.stage - 1 : RING - 1);
        if (p.adds && works) old.load(ring.at(turn.stage, OLD), lane);
        const float scale = of.rstd * (-1.0f / WIDTH), of_x = total.at[0] * scale, shift = CENTRED ? total.at[SUMS - 1] * scale : 0.0f;
        float y[COLUMNS];
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            y[k] = __fmaf_rn(x[k], of_x, CENTRED ? __fmaf_rn(g[k], of.rstd, shift) : g[k] * of.rstd);
            if (p.adds) y[k] += old[k];
        }
#pragma unroll
        for (int k = 0; k < COLUMNS; k += 2) out.pairs[k / 2] = pack_bf16(y[k], y[k + 1]);
        if (works) out.store(p.d_inp + (u64)row * WIDTH, lane);
        (narrowed.row(out.pairs, row, lane), ...);
#pragma unroll
        for (int k = 0; RESULT_SUMS && k < COLUMNS; k++) sums[TOTALS - 1][k] += out[k];
        if (i % ROUNDS == ROUNDS - 1) (narrowed.chunk(row), ...);
        of = next;
    }
    (narrowed.end(), ...);

    __syncthreads();  // every row has been read
    float* const own = reinterpret_cast<float*>(rings + group * RING * STAGE);
#pragma unroll
    for (int k = 0; k < COLUMNS; k++)
#pragma unroll
        for (int s = 0; s < TOTALS; s++)
            if (works) own[s * WIDTH + Columns::place(lane, k)] = sums[s][k];
    __syncthreads();
    store_partials<WIDTH, THREADS>(p, [&](int c) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < GROUPS; k++) sum += reinterpret_cast<const float*>(rings + k * RING * STAGE)[c];
        return sum;
    });
}

#ifdef FORMAT
KERNEL __launch_bounds__(THREADS, 1) JOINED(NORM, _bwd_fp8)(ARGS, NARROW) {
    const Quantized to = {q, q_t, inverse, seen, nullptr, amax, rows, WIDTH, margin, unknown};
    differentiate(BACKWARD, NarrowRows<THREADS>(to, reinterpret_cast<uint2*>(rings + GROUPS * RING * STAGE)));
}
#else
KERNEL __launch_bounds__(THREADS, 1) JOINED(NORM, _bwd)(ARGS) { differentiate(BACKWARD); }
#endif
#endif
