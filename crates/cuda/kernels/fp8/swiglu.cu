// swiglu_quantize:     q = fp8(y·s) of y = silu(gate)·up, rounded to bf16 before, in rows and in columns (transposed) where the pointers are
//                      not null: the bits of elementwise/swiglu.cu and then fp8/quantize.cu. A row of inp (rows,2F) is [gate | up]
// swiglu_bwd_quantize: the gradients of gate and up, (rows,2F), in FORMAT, in rows and in columns, and y in e4m3 in columns: the bits of
//                      elementwise/swiglu.cu and then fp8/quantize.cu twice
//                      `inverse` = 1/s, s a power of two from `amax`; `seen` becomes the largest of the rounded numbers if that is larger
// moves  5 and 11 bytes for each of rows·F, with columns forward 1 more; bound: memory
// grid   (ceil(F / 128), ceil(rows / 128)) of 256 threads, 8 by 8 elements each; needs rows % 16 == 0 and F % 16 == 0
// order  elementwise; the maximum has no order
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

using Bytes = u32[SIDE][2];  // eight rows of eight numbers

// Eight numbers, scaled; what is not finite becomes NaN.
template <class F> DEVICE void pack_row(u32 (&to)[2], const float (&x)[SIDE], float up) {
    float scaled[SIDE];
#pragma unroll
    for (int c = 0; c < SIDE; c++) scaled[c] = fmaf(x[c], 0.0f, x[c] * up);
#pragma unroll
    for (int h = 0; h < 2; h++)
        to[h] = pack_fp8<F>(scaled[4 * h], scaled[4 * h + 1]) | pack_fp8<F>(scaled[4 * h + 2], scaled[4 * h + 3]) << 16;
}

// Writes the tile of all threads in columns: to (cols,rows) from column `first` of this tensor on, `cols` of which exist from there.
DEVICE void write_columns(u8* to, Bytes& q, u32 first, u32 cols, u32 rows, bool inside) {
    __shared__ uint2 tile[TILE][ACROSS];  // as that of quantize_tile
    const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    __syncthreads();  // all have read what was there before
    if (inside) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            transpose_bytes(q[0][half], q[1][half], q[2][half], q[3][half]);
            transpose_bytes(q[4][half], q[5][half], q[6][half], q[7][half]);
#pragma unroll
            for (int c = 0; c < 4; c++) tile[across * SIDE + 4 * half + c][down ^ across] = make_uint2(q[c][half], q[4 + c][half]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
        const u32 c = i * ACROSS + down, row = blockIdx.y * TILE + across * SIDE;
        if (c < cols && row < rows) *reinterpret_cast<uint2*>(to + (u64)(first + c) * rows + row) = tile[c][across ^ c / SIDE];
    }
}

KERNEL __launch_bounds__(2 * TILE, 2)
    swiglu_bwd_quantize(u8* q, u8* q_t, float* inverse, u32* seen, const u32* amax, u8* act_t, float* act_inverse, const u32* act_amax,
                        const ACT* d_out, const ACT* inp, u32 rows, u32 f, int margin, int unknown, int act_margin, int act_unknown) {
    __shared__ u32 largest[2 * TILE / WARP];
    const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const u32 row = blockIdx.y * TILE + down * SIDE, left = blockIdx.x * TILE, col = left + across * SIDE;
    const bool inside = row < rows && col < f;
    const Scale scale = scale_of<FORMAT>(*amax, margin, unknown), act_scale = scale_of<E4M3>(*act_amax, act_margin, act_unknown);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *inverse = scale.down;
        *act_inverse = act_scale.down;
    }
    Bytes gates, ups, acts;
    u32 most = 0;
    if (inside) {
#pragma unroll
        for (int r = 0; r < SIDE; r++) {
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
            pack_row<FORMAT>(gates[r], gate, scale.up);
            pack_row<FORMAT>(ups[r], up, scale.up);
            pack_row<E4M3>(acts[r], act, act_scale.up);
            *reinterpret_cast<uint2*>(q + wide) = make_uint2(gates[r][0], gates[r][1]);
            *reinterpret_cast<uint2*>(q + wide + f) = make_uint2(ups[r][0], ups[r][1]);
        }
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = most;
    write_columns(q_t, gates, left, f - left, rows, inside);
    write_columns(q_t, ups, f + left, f - left, rows, inside);
    write_columns(act_t, acts, left, f - left, rows, inside);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < 2 * TILE / WARP; w++) most = max(most, largest[w]);
        if (most > *reinterpret_cast<volatile u32*>(seen)) atomicMax(seen, most);
    }
}
