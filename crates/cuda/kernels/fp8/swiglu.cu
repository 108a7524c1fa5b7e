// swiglu_quantize:     q = fp8(y·s) of y = silu(gate)·up, rounded to bf16 before, in rows and in columns (transposed) where the pointers are
//                      not null: the bits of elementwise/swiglu.cu and then fp8/quantize.cu. A row of inp (rows,2F) is [gate | up]
// swiglu_bwd_quantize: the gradients of gate and up, (rows,2F), in FORMAT, in rows and in columns, and y in e4m3 in columns: the bits of
//                      elementwise/swiglu.cu and then fp8/quantize.cu twice
//                      `inverse` = 1/s, s a power of two from `amax`; `seen` becomes the largest of the rounded numbers if that is larger
// moves  5 and 11 bytes for each of rows·F, with columns forward 1 more; bound: memory
// grid   (ceil(F / 128), ceil(rows / 128)) of 256 threads, 8 by 8 elements each, backward (ceil(F / 64), ceil(rows / 128)), 4 by 8 each; needs rows % 16 == 0 and F % 16 == 0
// order  elementwise; the maximum has no order
#include "common/arch.cuh"
#include "fp8/tile.cuh"
#include "elementwise/swiglu.cuh"

DEVICE float stored(float x) { return to_float(from_float<ACT>(x)); }

// silu(gate)·up of each element, as it would be stored.
struct Gated {
    const ACT* inp;
    u32 cols;
    Square gate, up;

    DEVICE void fetch(u32 row, u32 col) {
        const ACT* const from = inp + (u64)row * 2 * cols + col;
        gate.fetch(from, 2 * cols);
        up.fetch(from + cols, 2 * cols);
    }
    DEVICE void prepare() {}
    DEVICE void row(float (&out)[SIDE], int r) const {
        float opens[SIDE];
        gate.row(opens, r);
        up.row(out, r);
#pragma unroll
        for (int c = 0; c < SIDE; c++) out[c] = stored(swiglu<ACT>(opens[c], out[c]));
    }
};

KERNEL __launch_bounds__(2 * TILE)
    swiglu_quantize(u8* q, u8* q_t, float* inverse, u32* seen, const u32* amax, const ACT* inp, u32 rows, u32 cols, int margin, int unknown) {
    quantize_tile<false>({q, q_t, inverse, seen, nullptr, amax, rows, cols, margin, unknown}, Gated{inp, cols});
}

// The backward has tiles of its own: 128 rows by 64 columns, 4 by 8 elements to a thread.
constexpr int BACK_COLUMNS = 64, TALL = 4, WIDE_ACROSS = BACK_COLUMNS / SIDE;
// Blocks of a multiprocessor: some load while others store. The compiler for sm_100 would spill registers with four.
constexpr int BLOCKS = MAJOR == 10 ? 3 : 4;

// Eight numbers, scaled; what is not finite becomes NaN.
template <class F> DEVICE uint2 pack_row(const float (&x)[SIDE], float up) {
    float scaled[SIDE];
#pragma unroll
    for (int c = 0; c < SIDE; c++) scaled[c] = fmaf(x[c], 0.0f, x[c] * up);
    return make_uint2(pack_fp8<F>(scaled[0], scaled[1]) | pack_fp8<F>(scaled[2], scaled[3]) << 16,
                      pack_fp8<F>(scaled[4], scaled[5]) | pack_fp8<F>(scaled[6], scaled[7]) << 16);
}

// A tile by columns, 4 rows to a word. Groups of four words are permuted by the column, so that neither side has bank conflicts.
struct Turned {
    u32 words[BACK_COLUMNS][TILE / TALL];

    DEVICE void put(uint2 (&q)[TALL], u32 across, u32 down) {
        transpose_bytes(q[0].x, q[1].x, q[2].x, q[3].x);
        transpose_bytes(q[0].y, q[1].y, q[2].y, q[3].y);
#pragma unroll
        for (int c = 0; c < TALL; c++) {
            words[across * SIDE + c][down ^ across * 4] = q[c].x;
            words[across * SIDE + 4 + c][down ^ across * 4] = q[c].y;
        }
    }
    // To columns `first`.. of to (columns,rows), of which `columns` exist here.
    DEVICE void write(u8* to, u32 first, u32 columns, u32 rows) const {
#pragma unroll
        for (int i = threadIdx.x; i < BACK_COLUMNS * (TILE / 16); i += 2 * TILE) {
            const u32 c = i / (TILE / 16), part = i % (TILE / 16), row = blockIdx.y * TILE + part * 16;
            if (c < columns && row < rows)
                *reinterpret_cast<uint4*>(to + (u64)(first + c) * rows + row) =
                    *reinterpret_cast<const uint4*>(&words[c][(part ^ c / SIDE) * 4]);
        }
    }
};

KERNEL __launch_bounds__(2 * TILE, BLOCKS)
    swiglu_bwd_quantize(u8* q, u8* q_t, float* inverse, u32* seen, const u32* amax, u8* act_t, float* act_inverse, const u32* act_amax,
                        const ACT* d_out, const ACT* inp, u32 rows, u32 f, int margin, int unknown, int act_margin, int act_unknown) {
    __shared__ __align__(16) Turned turned[3];
    __shared__ u32 largest[2 * TILE / WARP];
    const u32 across = threadIdx.x % WIDE_ACROSS, down = threadIdx.x / WIDE_ACROSS;
    const u32 row = blockIdx.y * TILE + down * TALL, left = blockIdx.x * BACK_COLUMNS, col = left + across * SIDE;
    const bool inside = row < rows && col < f;
    const Scale scale = scale_of<FORMAT>(*amax, margin, unknown), act_scale = scale_of<E4M3>(*act_amax, act_margin, act_unknown);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *inverse = scale.down;
        *act_inverse = act_scale.down;
    }
    u32 most = 0;
    if (inside) {
        uint2 gates[TALL], ups[TALL], acts[TALL];
#pragma unroll
        for (int r = 0; r < TALL; r++) {
            const u64 narrow = (u64)(row + r) * f + col, wide = narrow + (u64)(row + r) * f;
            float d[SIDE], gate[SIDE], up[SIDE], act[SIDE];
            load_floats(d, d_out + narrow);
            load_floats(gate, inp + wide);
            load_floats(up, inp + wide + f);
#pragma unroll
            for (int c = 0; c < SIDE; c++) {
                act[c] = stored(swiglu_back(silu<ACT>(gate[c]), d[c], gate[c], up[c]));
                gate[c] = stored(gate[c]);
                up[c] = stored(up[c]);
                most = max(most, max(__float_as_uint(gate[c]) & 0x7fffffffu, __float_as_uint(up[c]) & 0x7fffffffu));
            }
            gates[r] = pack_row<FORMAT>(gate, scale.up);
            ups[r] = pack_row<FORMAT>(up, scale.up);
            acts[r] = pack_row<E4M3>(act, act_scale.up);
            *reinterpret_cast<uint2*>(q + wide) = gates[r];
            *reinterpret_cast<uint2*>(q + wide + f) = ups[r];
        }
        turned[0].put(gates, across, down);
        turned[1].put(ups, across, down);
        turned[2].put(acts, across, down);
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = most;
    __syncthreads();
    turned[0].write(q_t, left, f - left, rows);
    turned[1].write(q_t, f + left, f - left, rows);
    turned[2].write(act_t, left, f - left, rows);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < 2 * TILE / WARP; w++) most = max(most, largest[w]);
        if (most > *reinterpret_cast<volatile u32*>(seen)) atomicMax(seen, most);
    }
}
