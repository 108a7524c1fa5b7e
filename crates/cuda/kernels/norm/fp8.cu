// residual_NORM_fwd_fp8: residual_NORM_fwd of norm/fwd.cu, whose result is rounded to bf16 and then to 8 bits, in rows and in columns, as
//                        `quantize` of fp8/quantize.cu does: the same bits as these two. `out` in bf16 only where it is not null
// moves  rows·width·(3·sizeof(ACT) + 2) bytes, with out sizeof(ACT) more; bound: memory
// grid   ceil(rows / 32) blocks of 8 warps, 4 rows each, and 32·WIDTH bytes of shared memory, WIDTH rounded up to a multiple of 128; needs
//        rows % 32 == 0, WIDTH % 8 == 0
// order  that of norm/fwd.cu; the maximum has no order
#include "common/fp8.cuh"
#include "norm/row_warp.cuh"

constexpr int WARPS = 8, ROWS = 32;
// Parts of 16 rows. A row of the tile has whole groups of 16 units, which are 32 banks.
constexpr int PARTS = ROWS / 16, STRIDE = (VECS + 15) / 16 * 16;
static_assert(N == 8, "units of 8 columns");

// Where unit v of row r is: the lanes that read the parts of a column read from different banks.
DEVICE int place(int r, int v) { return r * STRIDE + (v ^ r / 16 * (16 / PARTS)); }

KERNEL __launch_bounds__(WARPS * WARP)
    JOINED(residual_, JOINED(NORM, _fwd_fp8))(u8* q, u8* q_t, float* inverse, u32* seen, const u32* amax, ACT* residual, ACT* out,
                                              float* mean, float* rstd, const ACT* a, const ACT* b, const WEIGHT* weight,
                                              const WEIGHT* bias, float eps, u32 rows, u32 width, int margin, int unknown) {
    extern __shared__ uint2 tile[];  // by rows, 8 columns to a unit, see `place`
    __shared__ u32 largest[WARPS];
    const Rows p = {out, mean, rstd, a, b, residual, weight, bias, eps, rows, width};
    const u32 warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const Scale scale = scale_of<FORMAT>(*amax, margin, unknown);
    if (blockIdx.x == 0 && threadIdx.x == 0) *inverse = scale.down;
    u32 most = 0;
#pragma unroll 1
    for (u32 r = warp; r < ROWS; r += WARPS) {
        const u32 row = blockIdx.x * ROWS + r;
        normalise_row<RESIDUAL>(p, row, lane, [&](int v, const float(&y)[N]) {
            float scaled[N];
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float value = to_float(from_float<ACT>(y[k]));
                const u32 size = __float_as_uint(value) & 0x7fffffffu;
                most = size > most ? size : most;
                scaled[k] = fmaf(value, 0.0f, value * scale.up);  // infinity becomes NaN
            }
            const u64 at = (u64)row * WIDTH + v * N;
            if (p.out) store_floats(p.out + at, y);
            const uint2 packed = make_uint2(pack_fp8<FORMAT>(scaled[0], scaled[1]) | pack_fp8<FORMAT>(scaled[2], scaled[3]) << 16,
                                            pack_fp8<FORMAT>(scaled[4], scaled[5]) | pack_fp8<FORMAT>(scaled[6], scaled[7]) << 16);
            *reinterpret_cast<uint2*>(q + at) = packed;
            tile[place(r, v)] = packed;
        });
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    // Four columns and 16 rows to a thread. Neighbours have the parts of the same columns, and write whole sectors of memory together.
    const u32* words = reinterpret_cast<const u32*>(tile);
    for (u32 i = threadIdx.x; i < WIDTH / 4 * PARTS; i += WARPS * WARP) {
        const int g = i / PARTS, part = i % PARTS;
        u32 w[16];
#pragma unroll
        for (int r = 0; r < 16; r++) w[r] = words[2 * place(16 * part + r, g / 2) + g % 2];
#pragma unroll
        for (int r = 0; r < 16; r += 4) transpose_bytes(w[r], w[r + 1], w[r + 2], w[r + 3]);
#pragma unroll
        for (int c = 0; c < 4; c++)
            *reinterpret_cast<uint4*>(q_t + (u64)(4 * g + c) * rows + blockIdx.x * ROWS + 16 * part) =
                make_uint4(w[c], w[4 + c], w[8 + c], w[12 + c]);
    }
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < WARPS; w++) most = largest[w] > most ? largest[w] : most;
        if (most > *reinterpret_cast<volatile u32*>(seen)) atomicMax(seen, most);
    }
}
