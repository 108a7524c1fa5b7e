// scale_bias_relu: y = max(x scale + bias, 0) in rows of C; backward g = y > 0 ? d_y : 0, d_x = g scale, d_bias = Σ_rows g.
// NaN stays NaN and lets its gradient through, as in PyTorch.
//
// moves  forward 2·R·C·sizeof(T), and R·C/8 where it keeps the gate as bits for the backward; backward with bits 2·R·C·sizeof(T) +
//        R·C/8, with y instead 3·R·C·sizeof(T), less R·C·sizeof(T) where one number is the whole of d_y, and partial sums of
//        at most R·C·sizeof(Acc)/64 that mostly stay in L2. Bound: memory. Predicted on an H200 that copies
//        4.2 TB/s, 8192² f32: forward 0.128 ms, backward 0.130 ms with bits, 0.192 with y, + 0.006 for the sums
// grid   a thread owns UNIT columns (a vector, or one element where C or an address does not allow vectors) and, backward,
//        walks down rows; a block is a tile of columns by a group of rows, tiles of a group side by side; any R and C; bits
//        need C % 32 == 0
// order  d_bias: each thread its rows of the group in order, the threads of a column in order, then groups: 32
//        slices in order and a tree. Groups depend on R and C only, no atomics: bitwise repeatable
// bits   element e is bit e % 32 of word e / 32
#include "common/unaligned.cuh"
#include "common/partials.cuh"

constexpr int N = Vec<T>::N;
constexpr int THREADS = 256;
// Rows whose loads are in flight in a thread: `AHEAD` in src/eager/scale_bias_relu.rs. Forward it is one: many short-lived blocks are
// faster than few with more in flight, 0.1276 against 0.1320 ms with 4. So they are backward, but there the sums of a column are to
// be few: a warp of columns by 16 of rows with 4 in flight each takes 0.1403 ms, 256 threads side by side that walk 0.1508.
constexpr int BWD_THREADS = 512, BWD_AHEAD = 4;
// On a multiprocessor: as many as registers allow without spilling; with y there is more to hold.
#if __CUDA_ARCH__ < 900
constexpr int BWD_BLOCKS = sizeof(T) == 2 ? 1 : 2;
#else
constexpr int BWD_BLOCKS = 2;
#endif
constexpr int BWD_Y_BLOCKS = sizeof(T) == 2 ? 1 : 2;

// Below 0 becomes 0; NaN is not below.
DEVICE Acc relu(Acc x) { return x < 0 ? Acc(0) : x; }

template <int UNIT>
DEVICE void forward(T* y, u32* bits, const T* x, const T* bias, u64 rows, u64 cols, Acc scale, u32 tiles) {
    const u64 col = ((u64)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * UNIT;
    const u64 row = (u64)(blockIdx.x / tiles) * blockDim.y + threadIdx.y;
    if (col >= cols || row >= rows) return;
    const u64 at = row * cols + col;
    Slot<UNIT> v = fetch<UNIT>(x + at);
    const Slot<UNIT> b = fetch<UNIT>(bias + col);
#pragma unroll
    for (int i = 0; i < UNIT; i++) v.at[i] = from_acc<T>(relu(fma_of(to_acc(v.at[i]), scale, to_acc(b.at[i]))));
    put<UNIT>(y + at, v);
    if constexpr (UNIT == N) {
        if (!bits) return;
        u32 mine = 0;
#pragma unroll
        for (int i = 0; i < N; i++) mine |= (u32) !(to_acc(v.at[i]) <= 0) << i;
        // The lanes of a word are in one row, because C is a multiple of 32: all of them are here. Single bytes, each stored by
        // its own lanes, took 0.144 instead of 0.134 ms.
        constexpr u32 LANES = 32 / N;
        const u32 lane = (threadIdx.y * blockDim.x + threadIdx.x) % WARP, one = lane % LANES;
        const u32 those = (u32)((1ull << LANES) - 1) << (lane - one);
        mine <<= one * N;
#pragma unroll
        for (u32 d = 1; d < LANES; d *= 2) mine |= __shfl_xor_sync(those, mine, d);
        if (one == 0) bits[at / 32] = mine;
    }
}

// Where the gate comes from: the forward's result, or its bits.
template <int UNIT> struct ByResult {
    using Kept = Slot<UNIT>;
    const T* y;
    DEVICE Kept get(u64 at) const { return fetch<UNIT>(y + at); }
    DEVICE static bool open(const Kept& kept, int i) { return !(to_acc(kept.at[i]) <= 0); }
};
struct ByBits {
    using Kept = u32;
    const u8* bits;
    DEVICE Kept get(u64 at) const { return (u32)bits[at / 8] >> at % 8; }
    DEVICE static bool open(Kept kept, int i) { return kept >> i & 1; }
};

// `same`: d_y is one number, and g holds it already.
template <int UNIT, int ROWS, class Gate>
DEVICE void backward_rows(Acc (&sum)[UNIT], T* d_x, const T* d_y, u32 same, T one, Gate gate, u64 at, u64 step, Acc scale) {
    Slot<UNIT> g[ROWS];
    typename Gate::Kept kept[ROWS];
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        if (same) {
#pragma unroll
            for (int i = 0; i < UNIT; i++) g[j].at[i] = one;
        } else {
            g[j] = fetch<UNIT>(d_y + at + j * step);
        }
        kept[j] = gate.get(at + j * step);
    }
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
#pragma unroll
        for (int i = 0; i < UNIT; i++) {
            const Acc d = Gate::open(kept[j], i) ? to_acc(g[j].at[i]) : Acc(0);
            sum[i] += d;
            g[j].at[i] = from_acc<T>(d * scale);
        }
        if (d_x) put<UNIT>(d_x + at + j * step, g[j]);
    }
}

// d_x or partials may be null.
template <int UNIT, class Gate>
DEVICE void backward(T* d_x, Acc* partials, const T* d_y, u32 same, Gate gate, u64 rows, u64 cols, u64 group_rows, Acc scale,
                     u32 tiles) {
    __shared__ Acc sums[BWD_THREADS * UNIT];
    const u32 group = blockIdx.x / tiles;
    const u64 col = ((u64)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * UNIT;
    const u64 begin = group * group_rows, last = min(begin + group_rows, rows), step = blockDim.y * cols;
    Acc sum[UNIT] = {};
    if (col < cols) {
        const T one = *d_y;
        const u32 apart = blockDim.y;
        u64 row = begin + threadIdx.y, at = row * cols + col;
#pragma unroll 1
        for (; row + (BWD_AHEAD - 1) * apart < last; row += BWD_AHEAD * apart, at += BWD_AHEAD * step)
            backward_rows<UNIT, BWD_AHEAD>(sum, d_x, d_y, same, one, gate, at, step, scale);
#pragma unroll 1
        for (; row < last; row += apart, at += step)
            backward_rows<UNIT, 1>(sum, d_x, d_y, same, one, gate, at, step, scale);
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
    scale_bias_relu_fwd(T* y, u32* bits, const T* x, const T* bias, u64 rows, u64 cols, double scale, u32 tiles) {
    forward<N>(y, bits, x, bias, rows, cols, (Acc)scale, tiles);
}
KERNEL __launch_bounds__(THREADS)
    scale_bias_relu_fwd_any(T* y, u32*, const T* x, const T* bias, u64 rows, u64 cols, double scale, u32 tiles) {
    forward<1>(y, nullptr, x, bias, rows, cols, (Acc)scale, tiles);
}
KERNEL __launch_bounds__(BWD_THREADS, BWD_Y_BLOCKS)
    scale_bias_relu_bwd(T* d_x, Acc* partials, const T* d_y, u32 same, const T* y, u64 rows, u64 cols, u64 group_rows,
                        double scale, u32 tiles) {
    backward<N>(d_x, partials, d_y, same, ByResult<N>{y}, rows, cols, group_rows, (Acc)scale, tiles);
}
KERNEL __launch_bounds__(BWD_THREADS, BWD_BLOCKS)
    scale_bias_relu_bwd_bits(T* d_x, Acc* partials, const T* d_y, u32 same, const u8* bits, u64 rows, u64 cols,
                             u64 group_rows, double scale, u32 tiles) {
    backward<N>(d_x, partials, d_y, same, ByBits{bits}, rows, cols, group_rows, (Acc)scale, tiles);
}
KERNEL __launch_bounds__(BWD_THREADS, BWD_BLOCKS)
    scale_bias_relu_bwd_any(T* d_x, Acc* partials, const T* d_y, u32 same, const T* y, u64 rows, u64 cols, u64 group_rows,
                            double scale, u32 tiles) {
    backward<1>(d_x, partials, d_y, same, ByResult<1>{y}, rows, cols, group_rows, (Acc)scale, tiles);
}

// d_bias (C) = sums of partials (groups,C)
KERNEL __launch_bounds__(1024) scale_bias_relu_sums(T* d_bias, const Acc* partials, u32 groups, u64 cols) {
    const Acc total = column_sum(partials, groups, cols);
    const u64 mine = own_column();
    if (threadIdx.x % WARP == 0 && mine < cols) d_bias[mine] = from_acc<T>(total);
}
