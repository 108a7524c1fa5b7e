// rmsnorm_bwd: with x̂ = x·rstd and g = d_out·w, per row d_inp (+)= rstd·(g - x̂·mean(g·x̂)); over rows d_weight (+)= Σ d_out·x̂
// moves  (3 or, adding, 4)·rows·width·sizeof(ACT) bytes and the partial sums; bound: memory
// grid   with WIDTH (needs WIDTH % 8 == 0): as many blocks as the device holds, a group of GROUP warps per row, column
//        sums kept in registers, one partial row per block. Without: rmsnorm_bwd_rows, then rmsnorm_bwd_columns
// order  each group its rows in turn, groups in turn, then rmsnorm_bwd_sums adds the blocks in a fixed tree: repeatable on
//        one kind of device
#include "prelude.cuh"

constexpr int WARPS = 4;

// d_weight from `count` partial rows: 32 columns a block, 32 rows at a time.
KERNEL __launch_bounds__(1024) rmsnorm_bwd_sums(GRAD* d_weight, const float* partials, u32 count, u32 width, u32 adds) {
    __shared__ float tile[WARP][WARP + 1];
    const u32 lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const u64 column = (u64)blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (column < width) {
#pragma unroll 8
        for (u32 row = slice; row < count; row += WARP) sum += partials[(u64)row * width + column];
    }
    tile[slice][lane] = sum;
    __syncthreads();
    // Turned round, so that each warp adds up one column.
    sum = warp_sum(tile[lane][slice]);
    const u64 mine = (u64)blockIdx.x * WARP + slice;
    if (lane == 0 && mine < width) d_weight[mine] = from_float<GRAD>(adds ? to_float(d_weight[mine]) + sum : sum);
}

#ifdef WIDTH
constexpr int N = Vec<ACT>::N;
constexpr int VECS = WIDTH / N;
// Warps that share a row: few, but enough that a lane has at most 24 columns; their sums stay in registers.
constexpr int columns_per_lane(int warps) { return (VECS + warps * WARP - 1) / (warps * WARP) * N; }
constexpr int GROUP = columns_per_lane(1) <= 24 ? 1 : columns_per_lane(2) <= 24 ? 2 : 4;
constexpr int STRIDE = GROUP * WARP;
constexpr int PER_LANE = (VECS + STRIDE - 1) / STRIDE;
constexpr bool FULL = VECS % STRIDE == 0;
// The next row is fetched while this one is worked on, where registers allow.
constexpr bool AHEAD = sizeof(ACT) == 2;

// The weights of a vector's columns, as they are in memory.
struct alignas(N * sizeof(WEIGHT) >= 16 ? 16 : 8) Packed {
    WEIGHT at[N];
};

struct Row {
    Vec<ACT> x[PER_LANE];
    Vec<ACT> d[PER_LANE];
    float rstd;
};

DEVICE void fetch(Row& r, const ACT* inp, const ACT* d_out, const float* rstd, u32 row, int first) {
    const u64 start = (u64)row * WIDTH;
    r.rstd = rstd[row];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int v = first + i * STRIDE;
        if (FULL || v < VECS) {
            r.x[i] = load(inp + start + v * N);
            r.d[i] = load(d_out + start + v * N);
        }
    }
}

// Makes the compiler forget what it derived from v: converting again costs less than registers to remember it in.
template <class T> DEVICE void forget(Vec<T>& v) {
    uint4& q = *reinterpret_cast<uint4*>(&v);
    asm volatile("" : "+r"(q.x), "+r"(q.y), "+r"(q.z), "+r"(q.w));
}

// The sum over the warps of a row. `turn` alternates, so that one barrier a row is enough.
DEVICE float group_sum(float x, float (*shared)[WARPS], int warp, int turn) {
    x = warp_sum(x);
    if constexpr (GROUP > 1) {
        if (threadIdx.x % WARP == 0) shared[turn][warp] = x;
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / GROUP), "n"(GROUP * WARP) : "memory");
        x = 0.0f;
#pragma unroll
        for (int k = 0; k < GROUP; k++) x += shared[turn][warp / GROUP * GROUP + k];
    }
    return x;
}

KERNEL __launch_bounds__(WARPS* WARP, 3)
    rmsnorm_bwd(ACT* d_inp, float* partials, const ACT* d_out, const ACT* inp, const float* rstd, const WEIGHT* weight,
                u32 rows, u32 adds) {
    __shared__ float columns[WIDTH];
    __shared__ float sums[2][WARPS];
    const int warp = threadIdx.x / WARP, group = warp / GROUP;
    const int first = threadIdx.x % STRIDE;
    float d_weight[PER_LANE][N] = {};
    Packed w[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (FULL || first + i * STRIDE < VECS) w[i] = *(const Packed*)(weight + (first + i * STRIDE) * N);

    const u32 step = gridDim.x * (WARPS / GROUP);
    u32 row = blockIdx.x * (WARPS / GROUP) + group;
    Row now, next;
    if (AHEAD && row < rows) fetch(now, inp, d_out, rstd, row, first);
    for (int turn = 0; row < rows; row += step, turn ^= 1) {
        const u64 start = (u64)row * WIDTH;
        if (!AHEAD) fetch(now, inp, d_out, rstd, row, first);
        Vec<ACT> old[PER_LANE];
        if (adds) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++)
                if (FULL || first + i * STRIDE < VECS) old[i] = load(d_inp + start + (first + i * STRIDE) * N);
        }
        if (AHEAD && row + step < rows) fetch(next, inp, d_out, rstd, row + step, first);
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (!FULL && first + i * STRIDE >= VECS) continue;
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float d = to_float(now.d[i].at[k]), x = to_float(now.x[i].at[k]) * now.rstd;
                dot = __fmaf_rn(d * to_float(w[i].at[k]), x, dot);
                d_weight[i][k] = __fmaf_rn(d, x, d_weight[i][k]);
            }
        }
        dot = group_sum(dot, sums, warp, turn) / WIDTH;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (!FULL && first + i * STRIDE >= VECS) continue;
            float y[N];
            forget(now.x[i]);
            forget(now.d[i]);
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float x = to_float(now.x[i].at[k]) * now.rstd;
                y[k] = (to_float(now.d[i].at[k]) * to_float(w[i].at[k]) - x * dot) * now.rstd;
                if (adds) y[k] += to_float(old[i].at[k]);
            }
            store_floats(d_inp + start + (first + i * STRIDE) * N, y);
        }
        if (AHEAD) now = next;
    }
    for (int turn = 0; turn < WARPS / GROUP; turn++) {
        if (group == turn) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                if (!FULL && first + i * STRIDE >= VECS) continue;
#pragma unroll
                for (int k = 0; k < N; k++) {
                    const int c = (first + i * STRIDE) * N + k;
                    columns[c] = turn ? columns[c] + d_weight[i][k] : d_weight[i][k];
                }
            }
        }
        __syncthreads();
    }
    for (int c = threadIdx.x; c < WIDTH; c += WARPS * WARP) partials[(u64)blockIdx.x * WIDTH + c] = columns[c];
}
#else
// A warp per row.
KERNEL rmsnorm_bwd_rows(ACT* d_inp, const ACT* d_out, const ACT* inp, const float* rstd, const WEIGHT* weight, u32 rows,
                        u32 width, u32 adds) {
    const u32 row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const u64 start = (u64)row * width;
    const float r = rstd[row];
    float dot = 0.0f;
    for (u32 c = lane; c < width; c += WARP)
        dot = __fmaf_rn(to_float(d_out[start + c]) * to_float(weight[c]), to_float(inp[start + c]) * r, dot);
    dot = warp_sum(dot) / width;
    for (u32 c = lane; c < width; c += WARP) {
        const float g = to_float(d_out[start + c]) * to_float(weight[c]);
        const float y = (g - to_float(inp[start + c]) * r * dot) * r;
        d_inp[start + c] = from_float<ACT>(adds ? to_float(d_inp[start + c]) + y : y);
    }
}

// A block sums 32 columns of `chunk` rows: 8 warps take every eighth row, then add up in turn.
KERNEL __launch_bounds__(256)
    rmsnorm_bwd_columns(float* partials, const ACT* d_out, const ACT* inp, const float* rstd, u32 rows, u32 width, u32 chunk) {
    __shared__ float tile[8][WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 column = blockIdx.x * WARP + lane;
    const u32 begin = blockIdx.y * chunk, end = rows - begin < chunk ? rows : begin + chunk;
    float dot = 0.0f;
    if (column < width) {
        for (u32 row = begin + warp; row < end; row += 8) {
            const u64 at = (u64)row * width + column;
            dot = __fmaf_rn(to_float(d_out[at]), to_float(inp[at]) * rstd[row], dot);
        }
    }
    tile[warp][lane] = dot;
    __syncthreads();
    if (warp == 0 && column < width) {
        float total = 0.0f;
        for (int k = 0; k < 8; k++) total += tile[k][lane];
        partials[(u64)blockIdx.y * width + column] = total;
    }
}
#endif
