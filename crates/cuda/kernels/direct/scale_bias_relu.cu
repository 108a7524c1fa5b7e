// direct/scale_bias_relu: y = max(x scale + bias, 0) in rows of C; backward g = y > 0 ? d_y : 0, d_x = g scale, d_bias = Σ_rows g.
// NaN stays NaN and lets its gradient through, as in PyTorch.
//
// moves  forward 2·R·C·sizeof(T); backward 3·R·C·sizeof(T), with d_bias and without (2 with d_bias alone), and partial sums of
//        at most 2·GROUPS·256·N·sizeof(Acc) = 17 MB that mostly stay in L2. Bound: memory. Predicted on an H200 that copies
//        4.3 TB/s, 8192² f32: forward 537 MB = 0.125 ms, backward 805 MB = 0.187 ms + 0.005 for the sums
// grid   a thread owns UNIT columns (a vector, or one element where C or an address does not allow vectors) and walks down
//        rows; a block is a tile of columns by a group of rows, tiles of a group side by side; any R and C
// order  d_bias: a thread its rows of the group in turn, the threads of a column in turn, then groups: 32 slices in turn and a
//        tree. Groups depend on R and C only, no atomics: bitwise repeatable
#include "direct.cuh"

constexpr int N = Vec<T>::N;
constexpr int THREADS = 256;
constexpr int FWD_AHEAD = 4;  // rows whose loads are in flight in a thread: `AHEAD` in src/direct/scale_bias_relu.rs
constexpr int BWD_AHEAD = 4;
constexpr int BWD_BLOCKS = sizeof(T) == 4 ? 4 : 3;  // on a multiprocessor: as many as registers allow without spilling

// UNIT elements of memory: one, or 16 bytes.
template <int UNIT> struct Unit {
    T at[UNIT];
};
template <> struct Unit<N> : Vec<T> {};

template <int UNIT> DEVICE Unit<UNIT> read(const T* from) {
    Unit<UNIT> out;
    if constexpr (UNIT == N) *static_cast<Vec<T>*>(&out) = load_once(from);
    else out.at[0] = *from;
    return out;
}
template <int UNIT> DEVICE void write(T* to, const Unit<UNIT>& value) {
    if constexpr (UNIT == N) store_once(to, static_cast<const Vec<T>&>(value));
    else *to = value.at[0];
}

// Below 0 becomes 0; NaN is not below.
DEVICE Acc relu(Acc x) { return x < 0 ? Acc(0) : x; }

// ROWS rows of a thread, `step` elements apart.
template <int UNIT, int ROWS> DEVICE void forward_rows(T* y, const T* x, const Acc (&b)[UNIT], u64 step, Acc scale) {
    Unit<UNIT> v[ROWS];
#pragma unroll
    for (int j = 0; j < ROWS; j++) v[j] = read<UNIT>(x + j * step);
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
#pragma unroll
        for (int i = 0; i < UNIT; i++) v[j].at[i] = from_acc<T>(relu(fma_of(to_acc(v[j].at[i]), scale, b[i])));
        write<UNIT>(y + j * step, v[j]);
    }
}

template <int UNIT>
DEVICE void forward(T* y, const T* x, const T* bias, u64 rows, u64 cols, Acc scale, u32 tiles) {
    const u64 col = ((u64)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * UNIT;
    const u64 first = (u64)(blockIdx.x / tiles) * (FWD_AHEAD * blockDim.y) + threadIdx.y;
    if (col >= cols || first >= rows) return;
    const u64 step = blockDim.y * cols;
    u64 at = first * cols + col;
    Unit<UNIT> few;
    if constexpr (UNIT == N) *static_cast<Vec<T>*>(&few) = load(bias + col);
    else few.at[0] = bias[col];
    Acc b[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; i++) b[i] = to_acc(few.at[i]);
    const u32 apart = blockDim.y;
    if (first + (FWD_AHEAD - 1) * apart < rows) {
        forward_rows<UNIT, FWD_AHEAD>(y + at, x + at, b, step, scale);
        return;
    }
#pragma unroll 1
    for (u64 row = first; row < rows; row += apart, at += step) forward_rows<UNIT, 1>(y + at, x + at, b, step, scale);
}

template <int UNIT, int ROWS>
DEVICE void backward_rows(Acc (&sum)[UNIT], T* d_x, const T* d_y, const T* y, u64 step, Acc scale) {
    Unit<UNIT> g[ROWS], v[ROWS];
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        g[j] = read<UNIT>(d_y + j * step);
        v[j] = read<UNIT>(y + j * step);
    }
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
#pragma unroll
        for (int i = 0; i < UNIT; i++) {
            const Acc d = to_acc(v[j].at[i]) <= 0 ? Acc(0) : to_acc(g[j].at[i]);
            sum[i] += d;
            g[j].at[i] = from_acc<T>(d * scale);
        }
        if (d_x) write<UNIT>(d_x + j * step, g[j]);
    }
}

// d_x or partials may be null.
template <int UNIT>
DEVICE void backward(T* d_x, Acc* partials, const T* d_y, const T* y, u64 rows, u64 cols, u64 group_rows, Acc scale,
                     u32 tiles) {
    __shared__ Acc sums[THREADS * UNIT];
    const u32 group = blockIdx.x / tiles;
    const u64 col = ((u64)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * UNIT;
    const u64 begin = group * group_rows, last = min(begin + group_rows, rows), step = blockDim.y * cols;
    Acc sum[UNIT] = {};
    if (col < cols) {
        const u32 apart = blockDim.y;
        u64 row = begin + threadIdx.y, at = row * cols + col;
#pragma unroll 1
        for (; row + (BWD_AHEAD - 1) * apart < last; row += BWD_AHEAD * apart, at += BWD_AHEAD * step)
            backward_rows<UNIT, BWD_AHEAD>(sum, d_x ? d_x + at : nullptr, d_y + at, y + at, step, scale);
#pragma unroll 1
        for (; row < last; row += apart, at += step)
            backward_rows<UNIT, 1>(sum, d_x ? d_x + at : nullptr, d_y + at, y + at, step, scale);
    }
    if (!partials) return;
    if (blockDim.y > 1) {
        Acc* mine = sums + (threadIdx.y * blockDim.x + threadIdx.x) * UNIT;
#pragma unroll
        for (int i = 0; i < UNIT; i++) mine[i] = sum[i];
        __syncthreads();
        if (threadIdx.y > 0) return;
#pragma unroll 2
        for (u32 r = 1; r < blockDim.y; r++) {
#pragma unroll
            for (int i = 0; i < UNIT; i++) sum[i] += mine[r * blockDim.x * UNIT + i];
        }
    }
    if (col < cols) {
#pragma unroll
        for (int i = 0; i < UNIT; i++) partials[group * cols + col + i] = sum[i];
    }
}

KERNEL __launch_bounds__(THREADS)
    scale_bias_relu_fwd(T* y, const T* x, const T* bias, u64 rows, u64 cols, double scale, u32 tiles) {
    forward<N>(y, x, bias, rows, cols, (Acc)scale, tiles);
}
KERNEL __launch_bounds__(THREADS)
    scale_bias_relu_fwd_any(T* y, const T* x, const T* bias, u64 rows, u64 cols, double scale, u32 tiles) {
    forward<1>(y, x, bias, rows, cols, (Acc)scale, tiles);
}
KERNEL __launch_bounds__(THREADS, BWD_BLOCKS)
    scale_bias_relu_bwd(T* d_x, Acc* partials, const T* d_y, const T* y, u64 rows, u64 cols, u64 group_rows, double scale,
                        u32 tiles) {
    backward<N>(d_x, partials, d_y, y, rows, cols, group_rows, (Acc)scale, tiles);
}
KERNEL __launch_bounds__(THREADS, BWD_BLOCKS)
    scale_bias_relu_bwd_any(T* d_x, Acc* partials, const T* d_y, const T* y, u64 rows, u64 cols, u64 group_rows,
                            double scale, u32 tiles) {
    backward<1>(d_x, partials, d_y, y, rows, cols, group_rows, (Acc)scale, tiles);
}

// d_bias (C) = sums of partials (groups,C): 32 columns a block, 32 slices of the groups
KERNEL __launch_bounds__(1024) scale_bias_relu_sums(T* d_bias, const Acc* partials, u32 groups, u64 cols) {
    __shared__ Acc sums[WARP][WARP + 1];
    const u32 lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const u64 col = (u64)blockIdx.x * WARP + lane;
    Acc sum = 0;
    if (col < cols) {
#pragma unroll 8
        for (u32 g = slice; g < groups; g += WARP) sum += partials[g * cols + col];
    }
    sums[slice][lane] = sum;
    __syncthreads();
    // Each warp now owns one column: its slices lie one per lane.
    const u64 mine = (u64)blockIdx.x * WARP + slice;
    const Acc total = warp_sum(sums[lane][slice]);
    if (lane == 0 && mine < cols) d_bias[mine] = from_acc<T>(total);
}
