// quantize:        q = fp8(x·s) of x (rows,cols), in rows and in columns (transposed), for products whose operands must both be K-major;
//                  s is a power of two from `amax`, and `inverse` = 1/s
// quantize_NAME_fwd: the same of f(x) for each activation f of activation.cuh
// quantize_NAME_bwd: the same of x·f'(pre)
//                  Beside it, where the pointers are not null: `seen` becomes the largest |x| if that is larger, and `partials` the sums
//                  of x over every 128 rows, for the gradient of a bias. Numbers that are not finite become NaN.
// moves  rows·cols·(sizeof(ACT) + 2) bytes, with pre sizeof(ACT) more; bound: memory
// grid   (ceil(cols / 128), ceil(rows / 128)) of 256 threads, 8 by 8 elements each; needs rows % 16 == 0 and cols % 16 == 0
// order  sums: 8 rows of a thread in order, then the 16 threads of a column in order. The maximum has no order
#include "common/fp8.cuh"
#include "elementwise/activation.cuh"
#include "elementwise/gelu.cuh"

constexpr int TILE = 128, SIDE = 8, ACROSS = TILE / SIDE;

struct Quantized {
    u8* q;
    u8* q_t;
    float* inverse;
    u32* seen;
    float* partials;
    const u32* amax;
    u32 rows, cols;
    int margin, unknown;
};

// f(x, y) of each element, y from `other` if OTHER.
template <bool OTHER, class F> DEVICE void quantize_tile(const Quantized& p, const ACT* inp, const ACT* other, F f) {
    // By columns, 8 rows to a unit. Units of a column are permuted by its number, so that neither side has bank conflicts.
    __shared__ uint2 tile[TILE][ACROSS];
    __shared__ float sums[ACROSS][TILE];
    __shared__ u32 largest[TILE * 2 / WARP];
    const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const u32 row = blockIdx.y * TILE + down * SIDE, col = blockIdx.x * TILE + across * SIDE;
    const bool inside = row < p.rows && col < p.cols;
    const Scale scale = scale_of<FORMAT>(*p.amax, p.margin, p.unknown);
    if (p.inverse && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.inverse = scale.down;

    u32 q[SIDE][2], most = 0;
    float sum[SIDE] = {};
    if (inside) {
        const u64 start = (u64)row * p.cols + col;
        constexpr int VECS = SIDE / Vec<ACT>::N;
        Vec<ACT> x[SIDE][VECS], y[OTHER ? SIDE : 1][VECS];
#pragma unroll
        for (int r = 0; r < SIDE; r++)
#pragma unroll
            for (int v = 0; v < VECS; v++) x[r][v] = load(inp + start + (u64)r * p.cols + v * Vec<ACT>::N);
        if constexpr (OTHER) {
#pragma unroll
            for (int r = 0; r < SIDE; r++)
#pragma unroll
                for (int v = 0; v < VECS; v++) y[r][v] = load(other + start + (u64)r * p.cols + v * Vec<ACT>::N);
        }
#pragma unroll
        for (int r = 0; r < SIDE; r++) {
            float scaled[SIDE];
#pragma unroll
            for (int c = 0; c < SIDE; c++) {
                const float value = f(to_float(x[r][c / Vec<ACT>::N].at[c % Vec<ACT>::N]),
                                      OTHER ? to_float(y[OTHER ? r : 0][c / Vec<ACT>::N].at[c % Vec<ACT>::N]) : 0.0f);
                const u32 size = __float_as_uint(value) & 0x7fffffffu;
                most = size > most ? size : most;
                sum[c] += value;
                scaled[c] = fmaf(value, 0.0f, value * scale.up);  // infinity becomes NaN: it must not pass for the largest number
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
    if (p.partials) {
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
            const u32 to_col = blockIdx.x * TILE + c, to_row = blockIdx.y * TILE + unit * SIDE;
            if (to_col < p.cols && to_row < p.rows)
                *reinterpret_cast<uint2*>(p.q_t + (u64)to_col * p.rows + to_row) = tile[c][unit ^ c / SIDE];
        }
    }
    if (p.partials && threadIdx.x < TILE && blockIdx.x * TILE + threadIdx.x < p.cols) {
        float total = 0.0f;
#pragma unroll
        for (int d = 0; d < ACROSS; d++) total += sums[d][threadIdx.x];
        p.partials[(u64)blockIdx.y * p.cols + blockIdx.x * TILE + threadIdx.x] = total;
    }
    if (p.seen && threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < TILE * 2 / WARP; w++) most = largest[w] > most ? largest[w] : most;
        // Most blocks see nothing new, and are spared the atomic.
        if (most > *reinterpret_cast<volatile u32*>(p.seen)) atomicMax(p.seen, most);
    }
}

#define QUANTIZE KERNEL __launch_bounds__(2 * TILE)

QUANTIZE quantize(u8* q, u8* q_t, float* inverse, u32* seen, float* partials, const u32* amax, const ACT* inp, u32 rows, u32 cols,
                  int margin, int unknown) {
    quantize_tile<false>({q, q_t, inverse, seen, partials, amax, rows, cols, margin, unknown}, inp, nullptr,
                         [](float x, float) { return x; });
}

#define WITH_ACTIVATION(NAME, F)                                                                                             \
    QUANTIZE quantize_##NAME##_fwd(u8* q, u8* q_t, float* inverse, u32* seen, float* partials, const u32* amax, const ACT* inp, \
                                   u32 rows, u32 cols, int margin, int unknown) {                                            \
        quantize_tile<false>({q, q_t, inverse, seen, partials, amax, rows, cols, margin, unknown}, inp, nullptr,             \
                             [](float x, float) { return F::value(x); });                                                    \
    }                                                                                                                        \
    QUANTIZE quantize_##NAME##_bwd(u8* q, u8* q_t, float* inverse, u32* seen, float* partials, const u32* amax, const ACT* inp, \
                                   const ACT* pre, u32 rows, u32 cols, int margin, int unknown) {                            \
        quantize_tile<true>({q, q_t, inverse, seen, partials, amax, rows, cols, margin, unknown}, inp, pre,                  \
                            [](float x, float pre) { return x * F::slope(pre); });                                           \
    }
ACTIVATIONS(WITH_ACTIVATION)

// amax: the bits of the largest |x|, over `most`, which holds 0 or a maximum so far
// moves  n·sizeof(ACT) bytes; bound: memory
// grid   any number of blocks of 256 threads; needs n % 8 == 0
KERNEL __launch_bounds__(256) amax(u32* most, const ACT* inp, u64 n) {
    __shared__ u32 largest[256 / WARP];
    constexpr int N = Vec<ACT>::N;
    u32 mine = 0;
    for (u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * N; i < n; i += (u64)gridDim.x * 256 * N) {
        const Vec<ACT> v = load(inp + i);
#pragma unroll
        for (int k = 0; k < N; k++) {
            const u32 size = __float_as_uint(to_float(v.at[k])) & 0x7fffffffu;
            mine = size > mine ? size : mine;
        }
    }
    mine = __reduce_max_sync(0xffffffffu, mine);
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 256 / WARP; w++) mine = largest[w] > mine ? largest[w] : mine;
        if (mine > *reinterpret_cast<volatile u32*>(most)) atomicMax(most, mine);
    }
}

// scale_update: of n pairs (largest element of earlier steps, of this one) the first becomes the second, or `decay` times itself if that is
//               larger; it stays where the second is 0 or not finite. The second becomes 0
// moves  16*n bytes; bound: latency
// grid   ceil(n / 256) blocks of 256 threads
// order  elementwise
KERNEL __launch_bounds__(256) scale_update(float2* scales, u32 n, float decay) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    float2 pair = scales[i];
    const u32 seen = __float_as_uint(pair.y);
    if (seen != 0 && seen < 0x7f800000u) pair.x = fmaxf(pair.y, pair.x * decay);
    pair.y = 0.0f;
    scales[i] = pair;
}
