// gemm_tf32_wgmma: what product/gemm_tf32.cu computes, by warpgroups; Hopper only
//
// moves  4*(m*k*n/128 + n*k*m/128) bytes through the caches; bound: tensor cores
// grid   a persistent block on each multiprocessor walks over tiles of 128 by 128 and slices: four producer warps load operands,
//        STAGES stages of 32 terms ahead, two consumer warpgroups multiply 64 by 128 each; sizes as in product/gemm_tf32.cu
// order  as in product/gemm_tf32.cu: terms in order by 32, sums of 32 added by rounded additions; repeatable
//
// wgmma takes the right operand (a, columns) from shared memory, and only with terms side by side: the producers read it into
// registers a step ahead, split it, transpose it if necessary, and store both parts. The left operand (b, rows) is copied as it is
// and split in the registers of the consumers.
#define TERMS 3
#include "product/gemm_tf32.cuh"
#include "common/hopper.cuh"
#include "common/tf32.cuh"

constexpr int GROUP = 128;
constexpr int THREADS = 3 * GROUP;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int STAGES = 4;
constexpr u32 STAGE = 3 * BYTES;  // big and small parts of a, then b
constexpr int FEW = 96, MANY = 200;  // registers of a producer and of a consumer thread: together those of the block

extern __shared__ uint4 shared[];  // from the next multiple of 1024 on: stages

using Turn = PipelineState<STAGES>;

struct Operands {
    const float *a, *b;
    u32 m, n, k;
    u64 lda, ldb;
    u32 span, count;  // terms of a slice, tiles of all slices

    DEVICE Place place(u32 index) const { return place_of(index, m, n, k, span); }
};

// A thread's chunks of a stage of a: if terms are along rows, chunk i%8 of rows i/8 + 16j; else terms 4(i%8).. of positions 4(i/8)..
// and 64 further.
struct Chunks {
    Vec<float> at[8];

    DEVICE void read(const Operands& op, const Place& place, u32 step) {
        u32 i = threadIdx.x, from = place.first + step * DEPTH;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u32 position = place.m0 + (ALONG_A ? i / 8 + 16 * j : i / 8 * 4 + j / 4 * 64);
            u32 term = from + i % 8 * 4 + (ALONG_A ? 0 : j % 4);
            bool inside = position < op.m && term < place.end;
            u64 where = ALONG_A ? position * op.lda + term : term * op.lda + position;
            at[j] = Vec<float>{};
            if (inside) at[j] = load(op.a + where);
        }
    }

    // Both parts to a stage.
    DEVICE void write(u32 to) const {
        u32 i = threadIdx.x;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            Split<4> x;
#pragma unroll
            for (int e = 0; e < 4; ++e) x.set(e, ALONG_A ? at[j].at[e] : at[j / 4 * 4 + e].at[j % 4]);
            u32 row = ALONG_A ? i / 8 + 16 * j : i / 8 * 4 + j / 4 * 64 + j % 4;
            store_shared(to + along_at(row, i % 8), x.big);
            store_shared(to + BYTES + along_at(row, i % 8), x.small);
        }
    }
};

DEVICE void produce(const Operands& op, u32 stages, u32 full, u32 empty) {
    Turn turn;
    Chunks chunks;
    u32 index = blockIdx.x;
    Place next = op.place(index);
    chunks.read(op, next, 0);
    while (true) {
        Place now = next;
        for (u32 i = 0; i < now.steps; ++i, turn.next()) {
            u32 to = stages + turn.stage * STAGE;
            barrier_wait(empty + 8 * turn.stage, turn.round ^ 1);
            load_tile<ALONG_B, GROUP>(to + 2 * BYTES, op.b, op.ldb, now.n0, op.n, now.first + i * DEPTH, now.end);
            barrier_arrive_copied(full + 8 * turn.stage);
            chunks.write(to);
            shared_fence();
            barrier_arrive(full + 8 * turn.stage);
            u32 step = i + 1;
            if (step == now.steps) {
                index += gridDim.x, step = 0;
                if (index >= op.count) return cp_wait<0>();
                next = op.place(index);
            }
            chunks.read(op, next, step);
        }
    }
}

// A warp's 16 rows from `row` on, terms 8s..: lane (g, t) holds terms t and t+4 of rows g and g+8; across, of 2g and 2g+1.
DEVICE void left(Split<4>& x, u32 tile, u32 row, int s) {
    if constexpr (ALONG_B) {
        ldmatrix(x.big, tile + along_at(row + lane() % 16, 2 * s + lane() / 16));
    } else {
        u32 chunk = row / 4 + lane() / 8, term = 8 * s + lane() % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            load_pair(x.big[2 * h], x.big[2 * h + 1], tile + across_at(term + 4 * h, chunk) + lane() / 4 % 2 * 8);
    }
    x.split();
}

DEVICE void multiply(const Operands& op, float* d, float* parts, const float* bias, u32 adds, u32 stages, u32 full, u32 empty) {
    Turn turn;
    u32 row = (threadIdx.x - GROUP) / WARP * 16, g = lane() / 4, t = lane() % 4;
    for (u32 index = blockIdx.x; index < op.count; index += gridDim.x) {
        Place place = op.place(index);
        float acc[64] = {};
        for (u32 i = 0; i < place.steps; ++i, turn.next()) {
            u32 a = stages + turn.stage * STAGE;
            barrier_wait(full + 8 * turn.stage, turn.round);
            Split<4> x[DEPTH / 8];
#pragma unroll
            for (int s = 0; s < DEPTH / 8; ++s) left(x[s], a + 2 * BYTES, row, s);
            float part[64];
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < DEPTH / 8; ++s) {
                u64 big = matrix_descriptor(a + 32 * s, 16), small = matrix_descriptor(a + BYTES + 32 * s, 16);
                wgmma_tf32(part, x[s].small, big, s > 0);
                wgmma_tf32(part, x[s].big, small, 1);
                wgmma_tf32(part, x[s].big, big, 1);
            }
            wgmma_commit();
            wgmma_wait<0>();
            hold(part);
            if (lane() == 0) barrier_arrive(empty + 8 * turn.stage);
#pragma unroll
            for (int e = 0; e < 64; ++e) acc[e] += part[e];
        }
        float* to = parts == nullptr ? d : parts + (u64)place.slice * op.m * op.n;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 line = place.n0 + row + (ALONG_B ? g + 8 * h : 2 * g + h);
            if (line >= op.n) continue;
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j) {
                u32 c = place.m0 + 8 * j + 2 * t;
                if (c >= op.m) continue;
                float2* at = reinterpret_cast<float2*>(to + (u64)line * op.m + c);
                float2 y = make_float2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
                if (bias != nullptr) y.x += bias[c], y.y += bias[c + 1];
                if (adds) {
                    float2 old = *at;
                    y.x += old.x, y.y += old.y;
                }
                *at = y;
            }
        }
    }
}
#endif

KERNEL __launch_bounds__(THREADS, 1)
    gemm_tf32_wgmma(float* d, float* parts, const float* a, const float* b, const float* bias, u32 m, u32 n, u32 k, u64 lda, u64 ldb,
                    u32 span, u32 adds, u32 count) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ u64 barriers[2 * STAGES];
    u32 base = shared_address(shared), stages = base + (1024 - base % 1024) % 1024;
    u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 2 * GROUP);  // every producer thread, once for its copies and once for its stores
            barrier_init(empty + 8 * s, 2 * GROUP / WARP);
        }
        barrier_init_fence();
    }
    __syncthreads();
    Operands op{a, b, m, n, k, lda, ldb, span, count};
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        produce(op, stages, full, empty);
    } else {
        more_registers<MANY>();
        multiply(op, d, parts, bias, adds, stages, full, empty);
    }
#endif
}
