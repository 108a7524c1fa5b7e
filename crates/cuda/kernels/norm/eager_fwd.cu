// norm: LAYER 0: y = x·rstd·w, rstd = 1 / √(mean(x²) + eps); LAYER 1: y = (x - mean)·rstd·w + b, rstd = 1 / √(var + eps), per row of
//       cols. With `other`, x = inp + other, rounded and stored in `sums`, comes first. y may be inp or other
// moves  2·rows·cols·sizeof(T) bytes, with `other` twice that; bound: memory. 16384 x 4096 bf16 on an H200: 0.27 GB, 0.063 ms.
//        _any reads a row two or (LAYER) three times, after the first time mostly from L2
// grid   _held: a team of `lanes` threads (up to a warp, or a block) per row, VECS·16 bytes of it in a thread's registers;
//        rows, weight and bias start at multiples of 16 bytes, or (_edges) all rows start at the same offset from one; up to 512 threads,
//        640 with 8 vectors (not _edges; _add has up to 4). _whole: a block a row, of 64, 128, 256 or 512 threads that all
//        have 4 vectors. _any: any length, any address
// order  each thread its columns in order, then pairs at fixed distances: repeatable. Variance from deviations: no digits lost to
//        a large mean
#include "common/rows.cuh"

struct Norm {
    T* y;
    Acc* mean;  // null: not wanted; so is rstd
    Acc* rstd;
    const T* x;
    const T* other;
    T* sums;
    const T* weight;  // null: 1
    const T* bias;    // null: 0
    double eps;
    u64 rows, cols;
    u32 lanes, vector;
};

DEVICE Acc normal(Acc x, Acc mean, Acc rstd, Acc w, Acc b) {
#if LAYER
    return fma_of((x - mean) * rstd, w, b);
#else
    return x * rstd * w;
#endif
}

DEVICE Acc rstd_of(Acc squares, u64 cols, double eps) { return rsqrt_of(squares / (Acc)cols + (Acc)eps); }

DEVICE void write_statistics(const Norm& p, const Team& team, bool there, Acc mean, Acc rstd) {
    if (team.at != 0 || !there) return;
    if (p.mean) p.mean[team.row] = mean;
    if (p.rstd) p.rstd[team.row] = rstd;
}

#define ARGS                                                                                                    \
    T* y, Acc* mean, Acc* rstd, const T* x, const T* other, T* sums, const T* weight, const T* bias, \
              double eps, u64 rows, u64 cols, u32 lanes, u32 vector
#define NORM {y, mean, rstd, x, other, sums, weight, bias, eps, rows, cols, lanes, vector}

#ifdef VECS
constexpr int THREADS = VECS == 8 ? 640 : 512;

// N weights or biases from column c on, as they are in memory.
template <bool PACKED> DEVICE void weights(T (&w)[N], const T* from, int c, Acc none) {
    if (!from) {
#pragma unroll
        for (int k = 0; k < N; k++) w[k] = from_acc<T>(none);
    } else if (PACKED) {
        *reinterpret_cast<Vec<T>*>(&w) = load(from + c);
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) w[k] = from[c + k];
    }
}

// The weights of a row are loaded while it is summed: 0.1284 against 0.1304 ms, 8192² f32. More vectors leave no registers.
constexpr bool EARLY = sizeof(T) == 4 ? VECS <= 4 : VECS <= 2;
constexpr bool WHOLE_EARLY = sizeof(T) == 4;
struct Weights {
    Vec<T> v[EARLY ? VECS : 1];
};

template <bool PACKED>
DEVICE void finish(const Norm& p, T* y, Held& h, const Weights& early, const Place& place, Acc mean, Acc rstd) {
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        if (!place.has(i)) continue;
        const int c = place.column(i);
        Vec<T> w, b, out;
        if (PACKED && EARLY) w = early.v[EARLY ? i : 0];
        else weights<PACKED>(w.at, p.weight, c, 1);
        weights<PACKED>(b.at, LAYER ? p.bias : nullptr, c, 0);
#pragma unroll
        for (int k = 0; k < N; k++)
            out.at[k] = from_acc<T>(normal(to_acc(h.v[i].at[k]), mean, rstd, to_acc(w.at[k]), to_acc(b.at[k])));
        put(y + c, out);
    }
    if (!PACKED && place.has_edge()) {
        const int c = place.edge();
        const Acc w = p.weight ? to_acc(p.weight[c]) : Acc(1), b = LAYER && p.bias ? to_acc(p.bias[c]) : Acc(0);
        y[c] = from_acc<T>(normal(to_acc(h.edge), mean, rstd, w, b));
    }
}

// OTHER: x is a sum. PACKED: rows have no edges, and weights can be read as vectors.
template <bool OTHER, bool PACKED> DEVICE void held(const Norm& p) {
    __shared__ Acc shared[2][WARP];
    const Team team(p.lanes);
    const u64 start = team.row * p.cols;
    const bool there = team.row < p.rows;
    const Place place(p.x + start, there ? (int)p.cols : 0, team);
    Held h;
    place.load(h, p.x + start, from_acc<T>(0));
    if constexpr (OTHER) {
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            Vec<T> o = filled(from_acc<T>(0));
            load_if(o, p.other + start + place.column(i), place.has(i));
#pragma unroll
            for (int k = 0; k < N; k++) h.v[i].at[k] = from_acc<T>(to_acc(h.v[i].at[k]) + to_acc(o.at[k]));
            if (place.has(i)) put(p.sums + start + place.column(i), h.v[i]);
        }
        if (!PACKED && place.has_edge()) {
            h.edge = from_acc<T>(to_acc(h.edge) + to_acc(p.other[start + place.edge()]));
            p.sums[start + place.edge()] = h.edge;
        }
    }
    Weights early;
    if constexpr (PACKED && EARLY) {
#pragma unroll
        for (int i = 0; i < VECS; i++)
            if (place.has(i)) weights<true>(early.v[i].at, p.weight, place.column(i), 1);
    }
    Acc mean = 0, squares = 0;
#if LAYER
    each(h, [&](T x) { mean += to_acc(x); });
    mean = team_sum(mean, p.lanes, shared[0]) / (Acc)p.cols;
    h.forget();
#endif
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        if (LAYER && !place.has(i)) continue;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const Acc d = to_acc(h.v[i].at[k]) - mean;
            squares = fma_of(d, d, squares);
        }
    }
    if (!PACKED && place.has_edge()) {
        const Acc d = to_acc(h.edge) - mean;
        squares = fma_of(d, d, squares);
    }
    const Acc rstd = rstd_of(team_sum(squares, p.lanes, shared[1]), p.cols, p.eps);
    write_statistics(p, team, there, mean, rstd);
    h.forget();
    finish<PACKED>(p, p.y + start, h, early, place, mean, rstd);
}

// A row that fills a power of two of warps to the last vector, LAYER or not: no part of a row is missing anywhere, and mean and
// squares travel together, so that one barrier is enough. On an H200 8192² f32 0.1332 instead of 0.1365 ms, a copy 0.1312.
//
// Squares are sums of squared deviations from the mean of their own elements. Two parts of n elements with means a and b and sums
// q and q' make q + q' + (a - b)²·n/2 of the whole.
struct Part {
    Acc mean, squares;
    DEVICE void join(Part other, Acc n) {
#if LAYER
        const Acc apart = other.mean - mean;
        squares = fma_of(apart * apart, n / 2, squares + other.squares);
        mean = (mean + other.mean) / 2;
#else
        squares += other.squares;
#endif
    }
    DEVICE void join_lanes(u32 lanes, Acc n) {
        for (u32 d = 1; d < lanes; d *= 2, n *= 2)
            join({LAYER ? __shfl_xor_sync(ALL, mean, d) : Acc(0), __shfl_xor_sync(ALL, squares, d)}, n);
    }
};

DEVICE void whole(const Norm& p) {
    __shared__ Part parts[WARP];
    const u64 start = (u64)blockIdx.x * p.cols + threadIdx.x * N, step = blockDim.x * N;
    Vec<T> x[VECS], w[WHOLE_EARLY ? VECS : 1], b[WHOLE_EARLY ? VECS : 1];
#pragma unroll
    for (int i = 0; i < VECS; i++) x[i] = load(p.x + start + i * step);
    const auto of = [&](int i) { return (int)(threadIdx.x * N + i * step); };
    if constexpr (WHOLE_EARLY) {
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            weights<true>(w[i].at, p.weight, of(i), 1);
            weights<true>(b[i].at, LAYER ? p.bias : nullptr, of(i), 0);
        }
    }
    Part part = {};
#if LAYER
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int k = 0; k < N; k++) part.mean += to_acc(x[i].at[k]);
    part.mean /= VECS * N;
#endif
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int k = 0; k < N; k++) {
            const Acc d = to_acc(x[i].at[k]) - part.mean;
            part.squares = fma_of(d, d, part.squares);
        }
    const u32 lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    part.join_lanes(WARP, VECS * N);
    if (lane == 0) parts[threadIdx.x / WARP] = part;
    __syncthreads();
    part = parts[lane % warps];
    part.join_lanes(warps, VECS * N * WARP);
    const Acc rstd = rstd_of(part.squares, p.cols, p.eps);
    if (threadIdx.x == 0) {
        if (p.mean) p.mean[blockIdx.x] = part.mean;
        if (p.rstd) p.rstd[blockIdx.x] = rstd;
    }
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        forget(x[i]);
        Vec<T> late_w, late_b, out;
        if constexpr (!WHOLE_EARLY) {
            weights<true>(late_w.at, p.weight, of(i), 1);
            weights<true>(late_b.at, LAYER ? p.bias : nullptr, of(i), 0);
        }
        const Vec<T>&wi = WHOLE_EARLY ? w[WHOLE_EARLY ? i : 0] : late_w, &bi = WHOLE_EARLY ? b[WHOLE_EARLY ? i : 0] : late_b;
#pragma unroll
        for (int k = 0; k < N; k++)
            out.at[k] = from_acc<T>(normal(to_acc(x[i].at[k]), part.mean, rstd, to_acc(wi.at[k]), to_acc(bi.at[k])));
        put(p.y + start + i * step, out);
    }
}

#if VECS == 4
KERNEL __launch_bounds__(512, 2) norm_whole_held(ARGS) { whole(NORM); }
#endif
// norm_add_held alone uses `other` and `sums`.
KERNEL __launch_bounds__(THREADS, VECS == 8 ? 1 : 2) norm_held(ARGS) { held<false, true>(NORM); }
KERNEL __launch_bounds__(512, 1) norm_edges_held(ARGS) { held<false, false>(NORM); }
#if VECS <= 4
KERNEL __launch_bounds__(512, 1) norm_add_held(ARGS) { held<true, true>(NORM); }
#endif

#else
DEVICE void any(const Norm& p) {
    __shared__ Acc shared[2][WARP];
    const Team team(p.lanes);
    const bool there = team.row < p.rows;
    const i64 cols = there ? (i64)p.cols : 0;
    const u64 start = team.row * p.cols;
    const T* x = p.x + start;
    if (p.other) {
        const T* other = p.other + start;
        T* sums = p.sums + start;
        stream(x, cols, team, p.vector, [&](auto batch) {
            Slots<decltype(batch)> a, b;
            batch.load(a, x, from_acc<T>(0));
            batch.load(b, other, from_acc<T>(0));
            batch.store(sums, [&](int u, int k) { return to_acc(a[u].at[k]) + to_acc(b[u].at[k]); });
        });
        x = sums;  // each thread reads back what it wrote itself
    }
    Acc mean = 0;
#if LAYER
    LongSum sum;
    stream(x, cols, team, p.vector, [&](auto batch) {
        Slots<decltype(batch)> s;
        batch.load(s, x, from_acc<T>(0));
        Acc part = 0;
#pragma unroll
        for (auto& slot : s)
#pragma unroll
            for (T v : slot.at) part += to_acc(v);
        sum.add(part);
    });
    mean = team_sum(sum.total(), p.lanes, shared[0]) / (Acc)p.cols;
#endif
    LongSum squares;
    stream(x, cols, team, p.vector, [&](auto batch) {
        Slots<decltype(batch)> s;
        batch.load(s, x, from_acc<T>(mean));
        Acc part = 0;
#pragma unroll
        for (int u = 0; u < batch.COUNT; u++) {
            if (!batch.has(u)) continue;
#pragma unroll
            for (int k = 0; k < batch.WIDTH; k++) {
                const Acc d = to_acc(s[u].at[k]) - mean;
                part = fma_of(d, d, part);
            }
        }
        squares.add(part);
    });
    const Acc rstd = rstd_of(team_sum(squares.total(), p.lanes, shared[1]), p.cols, p.eps);
    write_statistics(p, team, there, mean, rstd);
    T* y = p.y + start;
    stream(x, cols, team, p.vector, [&](auto batch) {
        Slots<decltype(batch)> s;
        batch.load(s, x, from_acc<T>(0));
        batch.store(y, [&](int u, int k) {
            const i64 c = batch.column(u) + k;
            const Acc w = p.weight ? to_acc(p.weight[c]) : Acc(1), b = LAYER && p.bias ? to_acc(p.bias[c]) : Acc(0);
            return normal(to_acc(s[u].at[k]), mean, rstd, w, b);
        });
    });
}

KERNEL __launch_bounds__(512, 1) norm_any(ARGS) { any(NORM); }
#endif
