// softmax:     y = e^(x - max) / Σ, per row of cols; y may be x
// softmax_bwd: d_x = y·(d_y - Σ d_y·y)
// log_softmax: y = x - max - log Σ, and per row losses = -y[target], NaN where the target is out of range
// moves  2 (backward 3)·rows·cols·sizeof(T) bytes; _any reads twice, the second time mostly from L2. Bound: memory.
//        8192 x 8192 f32 on an H200: 0.54 GB, 0.125 ms (backward 0.81 GB, 0.19 ms)
// LOG    compiles log_softmax, else the other two; VECS the _held ones, else the _any ones
// grid   _held: a team of `lanes` threads (up to a warp, or a block) per row, VECS·16 bytes of each array in a thread's
//        registers; rows of all arrays start at the same offset from a multiple of 16 bytes. _any: any length, any address
// order  each thread its columns in order, then pairs at fixed distances: repeatable
#include "common/rows.cuh"

#ifdef VECS
// Blocks to a multiprocessor hold 96 KB of rows or more. Compiled for sm_100 and newer the kernels need more registers.
#if __CUDA_ARCH__ >= 1000
constexpr int THREADS = VECS == 8 ? 768 : 512, BLOCKS = VECS == 8 ? 1 : 2;
#else
constexpr int THREADS = VECS == 8 ? 1024 : 512, BLOCKS = VECS == 8 ? 1 : 3;
#endif

// Where T is what it is computed in, e^(x - max) takes the place of x.
template <bool LOGS>
DEVICE void held(T* y, const T* x, u64 rows, int width, u32 lanes, Acc* losses, const i32* targets) {
    __shared__ Acc shared[2][WARP];
    const Team team(lanes);
    const int cols = team.row < rows ? width : 0;
    x += team.row * width;
    y += team.row * width;
    const Place place(x, cols, team);
    Acc at_target = nan();
    if (LOGS && team.at == 0 && cols > 0) {
        const i32 target = targets[team.row];
        if ((u32)target < (u32)cols) at_target = to_acc(x[target]);
    }
    Held h;
    place.load(h, x, from_acc<T>(-infinity()));
    Acc max = -infinity(), sum = 0;
    each(h, [&](T v) { max = max_of(max, to_acc(v)); });
    max = team_max(max, lanes, shared[0]);
    h.forget();
    each(h, [&](T& v) {
        const Acc e = weight_of(to_acc(v) - max);
        if constexpr (sizeof(T) >= 4 && !LOGS) v = from_acc<T>(e);
        sum += e;
    });
    sum = team_sum(sum, lanes, shared[1]);
    h.forget();
    if constexpr (LOGS) {
        const Acc log_sum = log_of(sum);
        place.store(y, [&](int i, int k) { return to_acc(at(h, i, k)) - max - log_sum; });
        if (team.at == 0 && cols > 0) losses[team.row] = log_sum - (at_target - max);
    } else if constexpr (sizeof(T) >= 4) {
        const Acc inverse = Acc(1) / sum;
        place.store(y, [&](int i, int k) { return to_acc(at(h, i, k)) * inverse; });
    } else {
        const Acc log2_sum = log_of(sum) * (Acc)LOG2E;
        place.store(y, [&](int i, int k) { return exp2_fast(fma_of(to_acc(at(h, i, k)) - max, (Acc)LOG2E, -log2_sum)); });
    }
}

#ifdef LOG
KERNEL __launch_bounds__(THREADS, VECS == 8 ? BLOCKS : 2)
    log_softmax_held(T* y, Acc* losses, const T* x, const i32* targets, u64 rows, u32 cols, u32 lanes) {
    held<true>(y, x, rows, (int)cols, lanes, losses, targets);
}
#else
KERNEL __launch_bounds__(THREADS, BLOCKS) softmax_held(T* y, const T* x, u64 rows, u32 cols, u32 lanes) {
    held<false>(y, x, rows, (int)cols, lanes, nullptr, nullptr);
}

#if VECS <= 4
KERNEL __launch_bounds__(1024) softmax_bwd_held(T* d_x, const T* d_y, const T* y, u64 rows, u32 width, u32 lanes) {
    __shared__ Acc shared[WARP];
    const Team team(lanes);
    const int cols = team.row < rows ? (int)width : 0;
    d_x += team.row * width;
    d_y += team.row * width;
    y += team.row * width;
    const Place place(y, cols, team);
    Held p, d;
    place.load(p, y, from_acc<T>(0));
    place.load(d, d_y, from_acc<T>(0));
    Acc dot = to_acc(p.edge) * to_acc(d.edge);
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        Acc few = 0;
#pragma unroll
        for (int k = 0; k < N; k++) few = fma_of(to_acc(d.v[i].at[k]), to_acc(p.v[i].at[k]), few);
        dot += few;
    }
    dot = team_sum(dot, lanes, shared);
    p.forget();
    d.forget();
    place.store(d_x, [&](int i, int k) { return to_acc(at(p, i, k)) * (to_acc(at(d, i, k)) - dot); });
}
#endif
#endif

#else
template <bool LOGS>
DEVICE void any(T* y, const T* x, u64 rows, i64 width, u32 lanes, u32 vector, Acc* losses, const i32* targets) {
    __shared__ Acc shared[2][WARP];
    const Team team(lanes);
    const i64 cols = team.row < rows ? width : 0;
    x += team.row * width;
    y += team.row * width;
    Acc at_target = nan();
    if (LOGS && team.at == 0 && cols > 0) {
        const i64 target = targets[team.row];
        if (target >= 0 && target < cols) at_target = to_acc(x[target]);
    }
    const Total total = online(x, cols, team, vector, shared);
    const Acc inverse = Acc(1) / total.sum, log_sum = log_of(total.sum);
    stream(x, cols, team, vector, [&](auto batch) {
        Slots<decltype(batch)> s;
        batch.load(s, x, from_acc<T>(0));
        batch.store(y, [&](int u, int k) {
            const Acc v = to_acc(s[u].at[k]) - total.max;
            return LOGS ? v - log_sum : weight_of(v) * inverse;
        });
    });
    if (LOGS && team.at == 0 && cols > 0) losses[team.row] = log_sum - (at_target - total.max);
}

#ifdef LOG
KERNEL __launch_bounds__(512, 1) log_softmax_any(T* y, Acc* losses, const T* x, const i32* targets, u64 rows, u64 cols,
                                               u32 lanes, u32 vector) {
    any<true>(y, x, rows, (i64)cols, lanes, vector, losses, targets);
}
#else
KERNEL __launch_bounds__(512, 1) softmax_any(T* y, const T* x, u64 rows, u64 cols, u32 lanes, u32 vector) {
    any<false>(y, x, rows, (i64)cols, lanes, vector, nullptr, nullptr);
}

KERNEL __launch_bounds__(512, 1)
    softmax_bwd_any(T* d_x, const T* d_y, const T* y, u64 rows, u64 width, u32 lanes, u32 vector) {
    __shared__ Acc shared[WARP];
    const Team team(lanes);
    const i64 cols = team.row < rows ? (i64)width : 0;
    d_x += team.row * width;
    d_y += team.row * width;
    y += team.row * width;
    LongSum sum;
    stream(y, cols, team, vector, [&](auto batch) {
        Slots<decltype(batch)> p, d;
        batch.load(p, y, from_acc<T>(0));
        batch.load(d, d_y, from_acc<T>(0));
        Acc part = 0;
#pragma unroll
        for (int u = 0; u < batch.COUNT; u++)
#pragma unroll
            for (int k = 0; k < batch.WIDTH; k++) part = fma_of(to_acc(d[u].at[k]), to_acc(p[u].at[k]), part);
        sum.add(part);
    });
    const Acc dot = team_sum(sum.total(), team.lanes, shared);
    stream(y, cols, team, vector, [&](auto batch) {
        Slots<decltype(batch)> p, d;
        batch.load(p, y, from_acc<T>(0));
        batch.load(d, d_y, from_acc<T>(0));
        batch.store(d_x, [&](int u, int k) { return to_acc(p[u].at[k]) * (to_acc(d[u].at[k]) - dot); });
    });
}
#endif
#endif
