// NORM_bwd: the backward of NORM (norm/fwd.cu): with x̂ = (x - mean)·rstd and g = d_out·w, per row
//           d_inp (+)= rstd·(g - mean(g) - x̂·mean(g·x̂)); over rows d_weight (+)= Σ d_out·x̂, d_bias (+)= Σ d_out
//           With PLUS_ONE, of rmsnorm, w is 1 + weight.
//           Without CENTRED (rmsnorm) the means of x and of g are 0, and there is no d_bias
//           With RESULT_SUMS, which needs WIDTH <= 2048, also partial sums of d_inp over rows, behind the others: the bias gradient of the
//           layer whose result was added there
//           A Hopper GPU has norm/bwd_hopper.cu for rows of bf16 of 256 to 2048 columns
// moves  (3 or, adding, 4)·rows·width·sizeof(ACT) bytes and the partial sums; bound: memory
// grid   with WIDTH (needs WIDTH % 8 == 0) NORM_bwd: as many blocks as the device holds, a group of GROUP warps per row, column
//        sums kept in registers, one partial row per block. Without: NORM_bwd_rows, then NORM_bwd_columns. Then NORM_bwd_sums
// order  each group sums its rows in order, then groups in order, then the blocks in a fixed tree: repeatable on one
//        kind of device
#include "norm/bwd.cuh"

DEVICE float normal(float x, float mean, float rstd) { return (CENTRED ? x - mean : x) * rstd; }
// The gradient of an element: g is d_out·w, x normal, dot the mean of g·x and sum that of g.
DEVICE float gradient(float g, float x, float dot, float sum, float rstd) {
    return ((CENTRED ? g - sum : g) - x * dot) * rstd;
}

#ifdef WIDTH
constexpr int N = Vec<ACT>::N;
constexpr int VECS = WIDTH / N;
// Warps that share a row: few, but enough that a lane has at most MOST columns; their sums stay in registers.
constexpr int MOST = RESULT_SUMS ? 16 : 24;
constexpr int columns_per_lane(int warps) { return (VECS + warps * WARP - 1) / (warps * WARP) * N; }
constexpr int GROUP = columns_per_lane(1) <= MOST ? 1 : columns_per_lane(2) <= MOST ? 2 : columns_per_lane(4) <= MOST ? 4 : WARPS;
static_assert(columns_per_lane(GROUP) <= MOST, "WARPS is too small for WIDTH");
constexpr int STRIDE = GROUP * WARP;
constexpr int PER_LANE = (VECS + STRIDE - 1) / STRIDE;
constexpr bool FULL = VECS % STRIDE == 0;
// The next row is fetched while this one is processed, where registers allow; with what it is added to, where a lane has few columns.
constexpr bool AHEAD = sizeof(ACT) == 2;
constexpr bool ALL_AHEAD = AHEAD && PER_LANE <= 2;

// The weights of a vector's columns, as they are in memory.
struct alignas(N * sizeof(WEIGHT) >= 16 ? 16 : 8) Packed {
    WEIGHT at[N];
};

struct Row {
    Vec<ACT> x[PER_LANE];
    Vec<ACT> d[PER_LANE];
    Vec<ACT> old[PER_LANE];
    float mean;
    float rstd;
};

// What the gradient of a row is added to.
DEVICE void fetch_old(Row& r, const Backward& p, u32 row, int first) {
    if (!p.adds) return;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (FULL || first + i * STRIDE < VECS) r.old[i] = load(p.d_inp + (u64)row * WIDTH + (first + i * STRIDE) * N);
}

DEVICE void fetch(Row& r, const Backward& p, u32 row, int first) {
    const u64 start = (u64)row * WIDTH;
    r.mean = p.mean_of(row);
    r.rstd = p.rstd[row];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int v = first + i * STRIDE;
        if (FULL || v < VECS) {
            r.x[i] = load(p.inp + start + v * N);
            r.d[i] = load(p.d_out + start + v * N);
        }
    }
    if (ALL_AHEAD) fetch_old(r, p, row, first);
}

// The sums over the warps of a row. `turn` alternates, so that one barrier a row is enough.
DEVICE void group_sum(Told& x, Told (*shared)[WARPS], int warp, int turn) {
#pragma unroll
    for (float& sum : x.at) sum = warp_sum(sum);
    if constexpr (GROUP > 1) {
        if (threadIdx.x % WARP == 0) shared[turn][warp] = x;
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / GROUP), "n"(GROUP * WARP) : "memory");
        x = {};
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            const Told part = shared[turn][warp / GROUP * GROUP + k];
#pragma unroll
            for (int s = 0; s < SUMS; s++) x.at[s] += part.at[s];
        }
    }
}

DEVICE void differentiate(const Backward& p) {
    __shared__ float columns[TOTALS * WIDTH];
    __shared__ Told told[2][WARPS];
    const int warp = threadIdx.x / WARP, group = warp / GROUP;
    const int first = threadIdx.x % STRIDE;
    float d_weight[PER_LANE][N] = {}, d_bias[PER_LANE][N] = {}, result[PER_LANE][N] = {};
    Packed w[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (FULL || first + i * STRIDE < VECS) w[i] = *(const Packed*)(p.weight + (first + i * STRIDE) * N);

    const u32 step = gridDim.x * (WARPS / GROUP);
    u32 row = blockIdx.x * (WARPS / GROUP) + group;
    Row now, next;
    if (AHEAD && row < p.rows) fetch(now, p, row, first);
    for (int turn = 0; row < p.rows; row += step, turn ^= 1) {
        const u64 start = (u64)row * WIDTH;
        if (!AHEAD) fetch(now, p, row, first);
        if (!ALL_AHEAD) fetch_old(now, p, row, first);
        if (AHEAD && row + step < p.rows) fetch(next, p, row + step, first);
        float dot = 0.0f, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (!FULL && first + i * STRIDE >= VECS) continue;
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float d = to_float(now.d[i].at[k]), g = d * gain(to_float(w[i].at[k]));
                const float x = normal(to_float(now.x[i].at[k]), now.mean, now.rstd);
                dot = __fmaf_rn(g, x, dot);
                d_weight[i][k] = __fmaf_rn(d, x, d_weight[i][k]);
                if constexpr (CENTRED) {
                    sum += g;
                    d_bias[i][k] += d;
                }
            }
        }
        Told total;
        total.at[0] = dot;
        if constexpr (CENTRED) total.at[1] = sum;
        group_sum(total, told, warp, turn);
        dot = total.at[0] / WIDTH;
        if constexpr (CENTRED) sum = total.at[1] / WIDTH;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (!FULL && first + i * STRIDE >= VECS) continue;
            float y[N];
            forget(now.x[i]);
            forget(now.d[i]);
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float x = normal(to_float(now.x[i].at[k]), now.mean, now.rstd);
                y[k] = gradient(to_float(now.d[i].at[k]) * gain(to_float(w[i].at[k])), x, dot, sum, now.rstd);
                if (p.adds) y[k] += to_float(now.old[i].at[k]);
            }
            Vec<ACT> out;
            round_to(out, y);
            store(p.d_inp + start + (first + i * STRIDE) * N, out);
#pragma unroll
            for (int k = 0; RESULT_SUMS && k < N; k++) result[i][k] += to_float(out.at[k]);
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
                    if constexpr (CENTRED) columns[WIDTH + c] = turn ? columns[WIDTH + c] + d_bias[i][k] : d_bias[i][k];
                    const int r = SUMS * WIDTH + c;
                    if constexpr (RESULT_SUMS) columns[r] = turn ? columns[r] + result[i][k] : result[i][k];
                }
            }
        }
        __syncthreads();
    }
    store_partials<WIDTH, WARPS * WARP>(p, [&](int c) { return columns[c]; });
}
#else
// A warp per row.
DEVICE void differentiate_rows(const Backward& p) {
    const u32 row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= p.rows) return;
    const u64 start = (u64)row * p.width;
    const float mean = p.mean_of(row), rstd = p.rstd[row];
    float dot = 0.0f, sum = 0.0f;
    for (u32 c = lane; c < p.width; c += WARP) {
        const float g = to_float(p.d_out[start + c]) * gain(to_float(p.weight[c]));
        dot = __fmaf_rn(g, normal(to_float(p.inp[start + c]), mean, rstd), dot);
        if constexpr (CENTRED) sum += g;
    }
    dot = warp_sum(dot) / p.width;
    if constexpr (CENTRED) sum = warp_sum(sum) / p.width;
    for (u32 c = lane; c < p.width; c += WARP) {
        const float g = to_float(p.d_out[start + c]) * gain(to_float(p.weight[c]));
        const float y = gradient(g, normal(to_float(p.inp[start + c]), mean, rstd), dot, sum, rstd);
        p.d_inp[start + c] = from_float<ACT>(p.adds ? to_float(p.d_inp[start + c]) + y : y);
    }
}

// A block sums 32 columns of `chunk` rows: 8 warps take every eighth row, then add up in order.
DEVICE void sum_columns(const Backward& p, u32 chunk) {
    __shared__ float tile[SUMS][8][WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 column = blockIdx.x * WARP + lane;
    const u32 begin = blockIdx.y * chunk, end = p.rows - begin < chunk ? p.rows : begin + chunk;
    float dot = 0.0f, sum = 0.0f;
    if (column < p.width) {
        for (u32 row = begin + warp; row < end; row += 8) {
            const u64 at = (u64)row * p.width + column;
            const float d = to_float(p.d_out[at]);
            dot = __fmaf_rn(d, normal(to_float(p.inp[at]), p.mean_of(row), p.rstd[row]), dot);
            if constexpr (CENTRED) sum += d;
        }
    }
    tile[0][warp][lane] = dot;
    if constexpr (CENTRED) tile[1][warp][lane] = sum;
    __syncthreads();
    if (warp < SUMS && column < p.width) {
        float total = 0.0f;
        for (int k = 0; k < 8; k++) total += tile[warp][k][lane];
        p.partials[((u64)blockIdx.y * SUMS + warp) * p.width + column] = total;
    }
}
#endif

#ifdef WIDTH
constexpr int RESIDENT = WARPS == 4 ? 3 : AHEAD && WARPS == 8 ? 2 : 1;  // blocks per multiprocessor
KERNEL __launch_bounds__(WARPS * WARP, RESIDENT) JOINED(NORM, _bwd)(ARGS) { differentiate(BACKWARD); }
#else
KERNEL JOINED(NORM, _bwd_rows)(ARGS) { differentiate_rows(BACKWARD); }
KERNEL __launch_bounds__(256) JOINED(NORM, _bwd_columns)(ARGS, u32 chunk) { sum_columns(BACKWARD, chunk); }
#endif
