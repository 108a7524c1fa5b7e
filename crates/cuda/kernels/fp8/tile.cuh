// A tile of 128 by 128 elements in 8 bits, in rows and in columns: what the kernels that quantise share. 256 threads have 8 by 8
// elements each.
#pragma once

#include "common/fp8.cuh"

constexpr int TILE = 128, SIDE = 8, ACROSS = TILE / SIDE;

// Eight rows of eight elements of a thread, as they are in memory.
struct Square {
    static constexpr int VECS = SIDE / Vec<ACT>::N;
    Vec<ACT> at[SIDE][VECS];

    DEVICE void fetch(const ACT* from, u32 cols) {
#pragma unroll
        for (int r = 0; r < SIDE; r++)
#pragma unroll
            for (int v = 0; v < VECS; v++) at[r][v] = load(from + (u64)r * cols + v * Vec<ACT>::N);
    }
    DEVICE void row(float (&x)[SIDE], int r) const {
        constexpr int N = Vec<ACT>::N;
#pragma unroll
        for (int v = 0; v < VECS; v++) {
            float part[N];
            to_floats(part, at[r][v]);
#pragma unroll
            for (int c = 0; c < N; c++) x[v * N + c] = part[c];
        }
    }
};

// A source for quantize_tile: f(x) of each element of a tensor in memory.
template <class F> struct Of {
    const ACT* inp;
    u32 cols;
    F f;
    Square x;

    DEVICE void fetch(u32 row, u32 col) { x.fetch(inp + (u64)row * cols + col, cols); }
    DEVICE void prepare() {}
    DEVICE void row(float (&out)[SIDE], int r) const {
        x.row(out, r);
#pragma unroll
        for (int c = 0; c < SIDE; c++) out[c] = f(out[c]);
    }
};

// f of the numbers as they are.
struct Same {
    DEVICE float operator()(float x) const { return x; }
};

// `source.prepare()` is called by all threads, then `source.fetch(row, col)` reads the elements of a thread from there on, and
// `source.row(x, r)` gives row r of the eight. SUMS: with sums for the gradient of a bias, where `partials` is not null. `block` is the
// tile's place.
template <bool SUMS, class Source>
DEVICE void quantize_tile(const Quantized& p, Source source, const uint2 block = make_uint2(blockIdx.x, blockIdx.y)) {
    // By columns, 8 rows to a unit. Units of a column are permuted by its number, so that neither side has bank conflicts.
    __shared__ uint2 tile[TILE][ACROSS];
    __shared__ float sums[SUMS ? ACROSS : 1][TILE];
    __shared__ u32 largest[TILE * 2 / WARP];
    const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const u32 row = block.y * TILE + down * SIDE, col = block.x * TILE + across * SIDE;
    const bool inside = row < p.rows && col < p.cols;
    source.prepare();
    const Scale scale = scale_of<FORMAT>(*p.amax, p.margin, p.unknown);
    if (p.inverse && block.x == 0 && block.y == 0 && threadIdx.x == 0) *p.inverse = scale.down;

    u32 q[SIDE][2], most = 0;
    float sum[SIDE] = {};
    if (inside) {
        const u64 start = (u64)row * p.cols + col;
        source.fetch(row, col);
#pragma unroll
        for (int r = 0; r < SIDE; r++) {
            float value[SIDE], scaled[SIDE];
            source.row(value, r);
#pragma unroll
            for (int c = 0; c < SIDE; c++) {
                const u32 size = __float_as_uint(value[c]) & 0x7fffffffu;
                most = size > most ? size : most;
                if constexpr (SUMS) sum[c] += value[c];
                scaled[c] = fmaf(value[c], 0.0f, value[c] * scale.up);  // infinity becomes NaN: it must not pass for the largest number
            }
#pragma unroll
            for (int half = 0; half < 2; half++)
                q[r][half] = pack_fp8<FORMAT>(scaled[4 * half], scaled[4 * half + 1]) |
                             pack_fp8<FORMAT>(scaled[4 * half + 2], scaled[4 * half + 3]) << 16;
            if (p.q) *reinterpret_cast<uint2*>(p.q + start + (u64)r * p.cols) = make_uint2(q[r][0], q[r][1]);
        }
    }
    if (p.q_t && inside) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            transpose_bytes(q[0][half], q[1][half], q[2][half], q[3][half]);
            transpose_bytes(q[4][half], q[5][half], q[6][half], q[7][half]);
#pragma unroll
            for (int c = 0; c < 4; c++)
                tile[across * SIDE + 4 * half + c][down ^ across] = make_uint2(q[c][half], q[4 + c][half]);
        }
    }
    if (SUMS && p.partials) {
#pragma unroll
        for (int c = 0; c < SIDE; c++) sums[down][across * SIDE + c] = inside ? sum[c] : 0.0f;
    }
    if (p.seen) {
        most = __reduce_max_sync(0xffffffffu, most);
        if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = most;
    }
    __syncthreads();
    if (p.q_t) {
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
            const u32 c = i * ACROSS + down, unit = across;
            const u32 to_col = block.x * TILE + c, to_row = block.y * TILE + unit * SIDE;
            if (to_col < p.cols && to_row < p.rows)
                *reinterpret_cast<uint2*>(p.q_t + (u64)to_col * p.rows + to_row) = tile[c][unit ^ c / SIDE];
        }
    }
    if (SUMS && p.partials && threadIdx.x < TILE && block.x * TILE + threadIdx.x < p.cols) {
        float total = 0.0f;
#pragma unroll
        for (int d = 0; d < ACROSS; d++) total += sums[d][threadIdx.x];
        p.partials[(u64)block.y * p.cols + block.x * TILE + threadIdx.x] = total;
    }
    if (p.seen && threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < TILE * 2 / WARP; w++) most = largest[w] > most ? largest[w] : most;
        // Most blocks see nothing new, and are spared the atomic.
        if (most > *reinterpret_cast<volatile u32*>(p.seen)) atomicMax(p.seen, most);
    }
}
