// norm_bwd: with x̂ = (x - mean)·rstd (LAYER 0: mean = 0) and g = d_y·w, per row
//           d_x = rstd·(g - mean(g) - x̂·mean(g·x̂)), LAYER 0 without mean(g); over rows d_weight = Σ d_y·x̂, d_bias = Σ d_y
// moves  3·rows·cols·sizeof(T) bytes and the partial sums, blocks·cols·(1 + LAYER)·sizeof(Acc); bound: memory.
//        8192 x 8192 f32 on an H200: 0.81 GB, 0.19 ms
// grid   norm_bwd: as many blocks as are resident; a team of `lanes` threads (up to a warp, or a block) per row, VECS·N columns
//        to a thread, whose sums stay in registers. With `vector` (every row starts at a multiple of 16 bytes) the next row
//        is copied to shared memory meanwhile. Then norm_bwd_sums. Rows too wide for that: norm_bwd_rows, norm_bwd_columns, sums
// order  each team sums its rows in order, then teams in order, then norm_bwd_sums adds the blocks in a fixed tree:
//        repeatable on one kind of device
#include "common/async_copy.cuh"
#include "common/partials.cuh"
#include "common/rows.cuh"

struct Bwd {
    T* d_x;         // null: not wanted
    Acc* partials;  // null: not wanted
    const T* d_y;
    const T* x;
    const T* weight;  // null: 1
    const Acc* mean;
    const Acc* rstd;
    u64 rows, cols;
    u32 lanes;
};
#define ARGS                                                                                                         \
    T *d_x, Acc *partials, const T *d_y, const T *x, const T *weight, const Acc *mean, const Acc *rstd, u64 rows,     \
        u64 cols, u32 lanes
#define BWD {d_x, partials, d_y, x, weight, mean, rstd, rows, cols, lanes}

#ifdef VECS
constexpr int THREADS = 640;
struct Pair {
    Acc sum, dot;
};

// Sums of both over a team. `turn` alternates, so that one barrier a row is enough.
DEVICE Pair team_pair(Pair p, u32 lanes, Pair (*shared)[WARP], int turn) {
    for (u32 d = (lanes < WARP ? lanes : WARP) / 2; d > 0; d >>= 1) {
        if (LAYER) p.sum += __shfl_xor_sync(ALL, p.sum, d);
        p.dot += __shfl_xor_sync(ALL, p.dot, d);
    }
    if (lanes <= WARP) return p;
    const u32 lane = threadIdx.x % WARP;
    if (lane == 0) shared[turn][threadIdx.x / WARP] = p;
    __syncthreads();
    p = lane < blockDim.x / WARP ? shared[turn][lane] : Pair{0, 0};
#pragma unroll
    for (u32 d = WARP / 2; d > 0; d >>= 1) {
        if (LAYER) p.sum += __shfl_xor_sync(ALL, p.sum, d);
        p.dot += __shfl_xor_sync(ALL, p.dot, d);
    }
    return p;
}

// W = N: own vectors of x and d_y, of this row and the next, in shared memory; no other thread touches them, so they need
// no barrier. W = 1: element by element, twice from global memory.
template <int W> struct Source {
    const Bwd& p;
    uint4* space;  // [2 rows][x, d_y][VECS][threads]
    u32 at;

    DEVICE uint4* cell(int turn, int array, int i) const {
        return space + ((turn * 2 + array) * VECS + i) * blockDim.x + threadIdx.x;
    }
    DEVICE int column(int i) const { return (i * (int)p.lanes + (int)at) * W; }
    DEVICE bool has(int i) const { return column(i) < (int)p.cols; }
    DEVICE void start(u64 row, int turn) const {
        if constexpr (W == N) {
            if (row < p.rows) {
#pragma unroll
                for (int i = 0; i < VECS; i++) {
                    if (!has(i)) continue;
                    cp_async16(shared_address(cell(turn, 0, i)), p.x + row * p.cols + column(i));
                    cp_async16(shared_address(cell(turn, 1, i)), p.d_y + row * p.cols + column(i));
                }
            }
            cp_commit();
        }
    }
    DEVICE void get(Slot<W>& x, Slot<W>& d, u64 row, int turn, int i) const {
        if constexpr (W == N) {
            *reinterpret_cast<uint4*>(&x) = *cell(turn, 0, i);
            *reinterpret_cast<uint4*>(&d) = *cell(turn, 1, i);
        } else {
            x.at[0] = p.x[row * p.cols + column(i)];
            d.at[0] = p.d_y[row * p.cols + column(i)];
        }
    }
    DEVICE Slot<W> weights(int i) const {
        Slot<W> w;
        if (p.weight) {
            if constexpr (W == N) *reinterpret_cast<Vec<T>*>(&w) = load(p.weight + column(i));
            else w.at[0] = p.weight[column(i)];
        } else {
#pragma unroll
            for (int k = 0; k < W; k++) w.at[k] = from_acc<T>(1);
        }
        return w;
    }
};

template <int W> DEVICE void bwd(const Bwd& p, uint4* space) {
    __shared__ Pair pairs[2][WARP];
    constexpr int COUNT = VECS * (W == N ? 1 : N);
    const u32 teams = p.lanes <= WARP ? blockDim.x / p.lanes : 1, team = p.lanes <= WARP ? threadIdx.x / p.lanes : 0;
    const Source<W> source = {p, space, p.lanes <= WARP ? threadIdx.x & (p.lanes - 1) : threadIdx.x};
    Acc d_weight[COUNT][W] = {}, d_bias[LAYER ? COUNT : 1][W] = {};
    const u64 step = (u64)gridDim.x * teams;
    u64 base = (u64)blockIdx.x * teams;
    source.start(base + team, 0);
    const auto statistic = [&](const Acc* of, u64 row) { return of && row < p.rows ? of[row] : Acc(0); };
    Acc mean = statistic(LAYER ? p.mean : nullptr, base + team), rstd = statistic(p.rstd, base + team);
    for (int turn = 0; base < p.rows; base += step, turn ^= 1) {
        const u64 row = base + team;
        const bool there = row < p.rows;
        source.start(row + step, turn ^ 1);
        const Acc next_mean = statistic(LAYER ? p.mean : nullptr, row + step), next_rstd = statistic(p.rstd, row + step);
        if constexpr (W == N) cp_wait<1>();
        Pair pair = {0, 0};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (!there || !source.has(i)) continue;
            Slot<W> x, d;
            source.get(x, d, row, turn, i);
            const Slot<W> w = source.weights(i);
#pragma unroll
            for (int k = 0; k < W; k++) {
                const Acc dy = to_acc(d.at[k]), hat = (to_acc(x.at[k]) - mean) * rstd, g = dy * to_acc(w.at[k]);
                if (LAYER) {
                    pair.sum += g;
                    d_bias[LAYER ? i : 0][k] += dy;
                }
                pair.dot = fma_of(g, hat, pair.dot);
                d_weight[i][k] = fma_of(dy, hat, d_weight[i][k]);
            }
        }
        if (p.d_x) {
            pair = team_pair(pair, p.lanes, pairs, turn);
            const Acc sum = pair.sum / (Acc)p.cols, dot = pair.dot / (Acc)p.cols;
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (!there || !source.has(i)) continue;
                Slot<W> x, d, out;
                source.get(x, d, row, turn, i);
                const Slot<W> w = source.weights(i);
#pragma unroll
                for (int k = 0; k < W; k++) {
                    const Acc hat = (to_acc(x.at[k]) - mean) * rstd, g = to_acc(d.at[k]) * to_acc(w.at[k]);
                    out.at[k] = from_acc<T>((LAYER ? g - sum - hat * dot : g - hat * dot) * rstd);
                }
                put<W>(p.d_x + row * p.cols + source.column(i), out);
            }
        }
        mean = next_mean;
        rstd = next_rstd;
    }
    if (!p.partials) return;
    // The teams of the block add up in order, in the memory the rows came through.
    if constexpr (W == N) cp_wait<0>();
    __syncthreads();
    Acc* sums = reinterpret_cast<Acc*>(space);
    for (u32 turn = 0; turn < teams; turn++) {
        if (team == turn) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (!source.has(i)) continue;
#pragma unroll
                for (int k = 0; k < W; k++) {
                    const int c = source.column(i) + k;
                    sums[c] = turn ? sums[c] + d_weight[i][k] : d_weight[i][k];
                    if (LAYER) {
                        Acc& bias = sums[p.cols + c];
                        bias = turn ? bias + d_bias[LAYER ? i : 0][k] : d_bias[LAYER ? i : 0][k];
                    }
                }
            }
        }
        __syncthreads();
    }
    const u64 columns = p.cols * (1 + LAYER);
    for (u64 c = threadIdx.x; c < columns; c += blockDim.x) p.partials[blockIdx.x * columns + c] = sums[c];
}

KERNEL __launch_bounds__(THREADS, 1) norm_bwd(ARGS, u32 vector) {
    extern __shared__ uint4 space[];
    if (vector) bwd<N>(BWD, space);
    else bwd<1>(BWD, space);
}

#else
// A block per row.
KERNEL __launch_bounds__(512, 1) norm_bwd_rows(ARGS, u32 vector) {
    __shared__ Acc shared[2][WARP];
    const Team team(blockDim.x);
    const u64 start = team.row * cols;
    const T *row = x + start, *d = d_y + start;
    T* out = d_x + start;
    const Acc m = LAYER ? mean[team.row] : Acc(0), r = rstd[team.row];
    const auto weight_at = [=](i64 c) { return weight ? to_acc(weight[c]) : Acc(1); };
    LongSum sum, dot;
    stream(row, (i64)cols, team, vector, [&](auto batch) {
        Slots<decltype(batch)> a, b;
        batch.load(a, row, from_acc<T>(0));
        batch.load(b, d, from_acc<T>(0));
        Acc part = 0, part_dot = 0;
#pragma unroll
        for (int u = 0; u < batch.COUNT; u++) {
            if (!batch.has(u)) continue;
#pragma unroll
            for (int k = 0; k < batch.WIDTH; k++) {
                const Acc g = to_acc(b[u].at[k]) * weight_at(batch.column(u) + k);
                part += g;
                part_dot = fma_of(g, (to_acc(a[u].at[k]) - m) * r, part_dot);
            }
        }
        sum.add(part);
        dot.add(part_dot);
    });
    const Acc mean_g = LAYER ? team_sum(sum.total(), team.lanes, shared[0]) / (Acc)cols : Acc(0);
    const Acc mean_dot = team_sum(dot.total(), team.lanes, shared[1]) / (Acc)cols;
    stream(row, (i64)cols, team, vector, [&](auto batch) {
        Slots<decltype(batch)> a, b;
        batch.load(a, row, from_acc<T>(0));
        batch.load(b, d, from_acc<T>(0));
        batch.store(out, [&](int u, int k) {
            const Acc g = to_acc(b[u].at[k]) * weight_at(batch.column(u) + k), hat = (to_acc(a[u].at[k]) - m) * r;
            return (g - mean_g - hat * mean_dot) * r;
        });
    });
}

// One thread a column, blockIdx.y a chunk of rows.
KERNEL __launch_bounds__(256) norm_bwd_columns(Acc* partials, const T* d_y, const T* x, const Acc* mean, const Acc* rstd,
                                               u64 rows, u64 cols, u64 chunk) {
    const u64 c = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    const u64 begin = blockIdx.y * chunk, end = min(begin + chunk, rows);
    LongSum weights, biases;
#pragma unroll 4
    for (u64 row = begin; row < end; row++) {
        const Acc d = to_acc(d_y[row * cols + c]);
        weights.add(d * ((to_acc(x[row * cols + c]) - (LAYER ? mean[row] : Acc(0))) * rstd[row]));
        if (LAYER) biases.add(d);
    }
    Acc* to = partials + (u64)blockIdx.y * cols * (1 + LAYER) + c;
    to[0] = weights.total();
    if (LAYER) to[cols] = biases.total();
}

// d_weight and d_bias from `count` partial rows of [d_weight | d_bias].
KERNEL __launch_bounds__(1024) norm_bwd_sums(T* d_weight, T* d_bias, const Acc* partials, u32 count, u64 cols) {
    const u64 columns = cols * (1 + LAYER);
    const Acc sum = column_sum(partials, count, columns);
    const u64 mine = own_column();
    if (threadIdx.x % WARP > 0 || mine >= columns) return;
    T* to = mine < cols ? d_weight : d_bias;
    if (to) to[mine < cols ? mine : mine - cols] = from_acc<T>(sum);
}
#endif
