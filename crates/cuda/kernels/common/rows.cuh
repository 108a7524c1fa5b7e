// Rows of T split among threads. A row is a body of vectors of 16 bytes, wherever it starts, and up to 2·N - 2 single elements
// before and after it: its edges.
#pragma once

#include "common/unaligned.cuh"

constexpr int N = Vec<T>::N;
constexpr u32 ALL = 0xffffffffu;

template <class X> struct Limits;
template <> struct Limits<float> {
    static constexpr float LEAST = -3.402823466e38f;
};
template <> struct Limits<double> {
    static constexpr double LEAST = -1.7976931348623157e308;
};
// The least finite number: finite, so that differences to it are never NaN.
constexpr Acc LEAST = Limits<Acc>::LEAST;
DEVICE Acc infinity() { return (Acc)__int_as_float(0x7f800000); }
DEVICE Acc nan() { return (Acc)__int_as_float(0x7fc00000); }

// e^x for x <= 0. A 2-byte result hides the error of the hardware's exponential.
DEVICE Acc weight_of(Acc x) {
    if constexpr (sizeof(T) == 2) return exp2_fast(x * LOG2E);
    else return exp_of(x);
}

// The threads of a row: `lanes`, a power of two up to a warp, or else the whole block (then whole warps).
struct Team {
    u32 lanes, at;
    u64 row;
    DEVICE explicit Team(u32 lanes) : lanes(lanes) {
        if (lanes <= WARP) {
            at = threadIdx.x & (lanes - 1);
            row = (u64)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
        } else {
            at = threadIdx.x;
            row = blockIdx.x;
        }
    }
};

// One value from all threads of a row, the same in each. `shared` has WARP words; between two uses of it there is a barrier.
// Pairs at fixed distances: repeatable.
template <class X, class F> DEVICE X reduce(X x, u32 lanes, X none, X* shared, F f) {
    for (u32 d = (lanes < WARP ? lanes : WARP) / 2; d > 0; d >>= 1) x = f(x, __shfl_xor_sync(ALL, x, d));
    if (lanes <= WARP) return x;
    const u32 lane = threadIdx.x % WARP;
    if (lane == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = lane < blockDim.x / WARP ? shared[lane] : none;
#pragma unroll
    for (u32 d = WARP / 2; d > 0; d >>= 1) x = f(x, __shfl_xor_sync(ALL, x, d));
    return x;
}
DEVICE Acc team_sum(Acc x, u32 lanes, Acc* shared) {
    return reduce(x, lanes, Acc(0), shared, [](Acc a, Acc b) { return a + b; });
}
DEVICE Acc team_max(Acc x, u32 lanes, Acc* shared) {
    return reduce(x, lanes, -infinity(), shared, [](Acc a, Acc b) { return max_of(a, b); });
}

// Where the body and the edges of a row are.
template <class I> struct Parts {
    I head;    // elements before the body
    I body;    // vectors
    u32 ends;  // elements before and after the body
    DEVICE Parts(const T* row, I cols) {
        head = (I)((16 - (u64)row % 16) % 16 / sizeof(T));
        if (head > cols) head = cols;
        body = (cols - head) / N;
        ends = (u32)(cols - body * N);
    }
    // The column of an edge element.
    DEVICE I edge(u32 e) const { return (I)e < head ? (I)e : (I)e + body * N; }
};

DEVICE Vec<T> filled(T x) {
    Vec<T> v;
#pragma unroll
    for (int k = 0; k < N; k++) v.at[k] = x;
    return v;
}

// Loads where `there` and else leaves v as it is; without a branch, so that many loads are in flight.
DEVICE void load_if(Vec<T>& v, const T* from, bool there) {
    uint4& q = *reinterpret_cast<uint4*>(&v);
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(q.x), "+r"(q.y), "+r"(q.z), "+r"(q.w)
                 : "l"(from), "r"((u32)there));
}

#ifdef VECS
// A thread's share of a row in registers: VECS vectors of the body and an edge element, `fill` in place of missing elements. A team
// has at least 2·N - 2 threads if a row may have edges.
struct Held {
    Vec<T> v[VECS];
    T edge;
    DEVICE void forget() {
#pragma unroll
        for (int i = 0; i < VECS; i++) ::forget(v[i]);
    }
};

struct Place {
    Parts<int> parts;
    u32 lanes, at;
    DEVICE Place(const T* row, int cols, const Team& team) : parts(row, cols), lanes(team.lanes), at(team.at) {}
    DEVICE int slot(int i) const { return i * (int)lanes + (int)at; }
    DEVICE bool has(int i) const { return slot(i) < parts.body; }
    DEVICE bool has_edge() const { return at < parts.ends; }
    DEVICE int column(int i) const { return parts.head + slot(i) * N; }
    DEVICE int edge() const { return parts.edge(at); }

    DEVICE void load(Held& to, const T* row, T fill) const {
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            to.v[i] = filled(fill);
            load_if(to.v[i], row + column(i), has(i));
        }
        to.edge = has_edge() ? row[edge()] : fill;
    }
    // row[c] = f(element i, k of the held, c) rounded; k is N for the edge element.
    template <class F> DEVICE void store(T* row, F f) const {
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            if (!has(i)) continue;
            Vec<T> out;
#pragma unroll
            for (int k = 0; k < N; k++) out.at[k] = from_acc<T>(f(i, k));
            put(row + column(i), out);
        }
        if (has_edge()) row[edge()] = from_acc<T>(f(0, N));
    }
};

// Element k of vector i; k = N is the edge.
DEVICE T at(const Held& h, int i, int k) { return k == N ? h.edge : h.v[i].at[k < N ? k : 0]; }

// f for each held element, the fill values included.
template <class F> DEVICE void each(Held& h, F f) {
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int k = 0; k < N; k++) f(h.v[i].at[k]);
    f(h.edge);
}
#endif

// A compensated sum (Kahan): its error does not grow with its length.
struct LongSum {
    Acc sum = 0, rest = 0;
    DEVICE void add(Acc x) {
        const Acc y = x - rest, t = sum + y;
        rest = (t - sum) - y;
        sum = t;
    }
    DEVICE void scale(Acc factor) {
        sum *= factor;
        rest *= factor;
    }
    // An infinite sum leaves NaN behind as its rest.
    DEVICE Acc total() const { return sum - sum == 0 ? sum - rest : sum; }
};

// U slots a stride apart, of which those before `end` exist.
template <int W, int U> struct Batch {
    static constexpr int WIDTH = W, COUNT = U;
    i64 first, stride, end;
    DEVICE i64 column(int u) const { return first + u * stride; }
    DEVICE bool has(int u) const { return column(u) < end; }
    // Their elements in a row; `fill` in place of missing ones.
    DEVICE void load(Slot<W> (&s)[U], const T* row, T fill) const {
        if (has(U - 1)) {
#pragma unroll
            for (int u = 0; u < U; u++) s[u] = fetch<W>(row + column(u));
        } else {
#pragma unroll
            for (int u = 0; u < U; u++) {
                if (has(u)) {
                    s[u] = fetch<W>(row + column(u));
                } else {
#pragma unroll
                    for (int k = 0; k < W; k++) s[u].at[k] = fill;
                }
            }
        }
    }
    // The elements are f(u, k), rounded.
    template <class F> DEVICE void store(T* row, F f) const {
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (!has(u)) continue;
            Slot<W> s;
#pragma unroll
            for (int k = 0; k < W; k++) s.at[k] = from_acc<T>(f(u, k));
            put<W>(row + column(u), s);
        }
    }
};
template <class B> using Slots = Slot<B::WIDTH>[B::COUNT];

// Vectors, or single elements, that a thread loads before it uses them.
constexpr int UNROLL = sizeof(T) == 8 ? 2 : 4, SINGLE = 4;

// Calls f(batch) for all that a thread has of columns from..to of a row. `vector`: rows of all arrays start at the
// same offset from a multiple of 16 bytes.
template <class F> DEVICE void stream(const T* row, i64 cols, const Team& team, u32 vector, F f) {
    if (vector) {
        const Parts<i64> parts(row, cols);
        const i64 stride = (i64)team.lanes * N, end = parts.head + parts.body * N;
        for (i64 c = parts.head + (i64)team.at * N; c < end; c += stride * UNROLL) f(Batch<N, UNROLL>{c, stride, end});
        for (u32 e = team.at; e < parts.ends; e += team.lanes) f(Batch<1, 1>{parts.edge(e), 1, cols});
    } else {
        for (i64 c = team.at; c < cols; c += (i64)team.lanes * SINGLE) f(Batch<1, SINGLE>{c, team.lanes, cols});
    }
}

// max x and Σ e^(x - max).
struct Total {
    Acc max, sum;
};

// Of a row, in one pass. A NaN or +∞ makes the sum NaN; without anything above -∞ it is 0 and the maximum LEAST.
DEVICE Total online(const T* row, i64 cols, const Team& team, u32 vector, Acc (*shared)[WARP]) {
    Acc top = LEAST;
    LongSum sum;
    stream(row, cols, team, vector, [&](auto batch) {
        Slots<decltype(batch)> s;
        batch.load(s, row, from_acc<T>(-infinity()));
        Acc now = top;
#pragma unroll
        for (auto& slot : s)
#pragma unroll
            for (T x : slot.at) now = max_of(now, to_acc(x));
        if (now > top) {
            sum.scale(weight_of(top - now));
            top = now;
        }
        Acc part = 0;
#pragma unroll
        for (auto& slot : s) {
            Acc few = 0;
#pragma unroll
            for (T x : slot.at) few += weight_of(to_acc(x) - top);
            part += few;
        }
        sum.add(part);
    });
    const Acc max = team_max(top, team.lanes, shared[0]);
    return {max, team_sum(sum.total() * weight_of(top - max), team.lanes, shared[1])};
}

// The class index of a row; `wide`: indices are i64.
DEVICE i64 target_of(const void* targets, u32 wide, u64 row) {
    return wide ? static_cast<const i64*>(targets)[row] : (i64)static_cast<const i32*>(targets)[row];
}
