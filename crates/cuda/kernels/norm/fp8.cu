// residual_NORM_fwd_fp8: residual_NORM_fwd of norm/fwd.cu, whose result is rounded to bf16 and then to 8 bits, in rows and in columns, as
//                        `quantize` of fp8/quantize.cu does: the same bits as these two. `out` in bf16 only where it is not null
// moves  rows·width·(3·sizeof(ACT) + 2) bytes, with out sizeof(ACT) more; bound: memory
// grid   ceil(rows / 32) blocks of 8 warps, 4 rows each, and 32·WIDTH bytes of shared memory, WIDTH rounded up to a multiple of 128; needs
//        rows % 32 == 0, WIDTH % 8 == 0
// order  that of norm/fwd.cu; the maximum has no order
#include "fp8/row_tile.cuh"
#include "norm/row_warp.cuh"

constexpr int WARPS = 8, ROWS = RowTile::ROWS;
static_assert(N == 8, "units of 8 columns");

KERNEL __launch_bounds__(WARPS * WARP)
    JOINED(residual_, JOINED(NORM, _fwd_fp8))(u8* q, u8* q_t, float* inverse, u32* seen, const u32* amax, ACT* residual, ACT* out,
                                              float* mean, float* rstd, const ACT* a, const ACT* b, const WEIGHT* weight,
                                              const WEIGHT* bias, float eps, u32 rows, u32 width, int margin, int unknown) {
    extern __shared__ uint2 units[];
    const RowTile tile{units};
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
            tile.put(r, v, packed);
        });
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    tile.store_columns(q_t, rows, blockIdx.x * ROWS, WARPS * WARP);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < WARPS; w++) most = largest[w] > most ? largest[w] : most;
        if (most > *reinterpret_cast<volatile u32*>(seen)) atomicMax(seen, most);
    }
}
