// flash_fwd: out = softmax(scale*q.k^T, causal).v and lse = log(sum(exp(scale*q.k^T))), bf16 on tensor cores
//
// moves  2*B*T*(W + C) + 4*B*NH*T bytes at least, keys and values again per tile of queries (mostly from L2); bound: tensor cores
// grid   one block of 4 warps per head and BM queries, 16*MT of them per warp, passing over tiles of BN keys that are
//        copied while the tile before is worked on; needs HD % 16 == 0, HD <= 128, any T
// order  keys ascending in f32, weights rounded to bf16; no atomics: bitwise repeatable
//
// Positions beyond T are zeros in shared memory. Keys beyond T are later than every query, so the causal mask hides them.
#include "flash_tile.cuh"

constexpr int BM = 16 * MT * WARPS;
constexpr int BN = 64;

extern __shared__ uint4 shared[];

// s becomes 2^(scale2*(s - maximum)); the running maximum, sum and results follow. A lane's sum is of its own columns.
DEVICE void softmax(float (&s)[MT][BN / 8][4], float (&acc)[MT][HD / 8][4], float (&maximum)[MT][2],
                    float (&sum)[MT][2], float scale2) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = maximum[m][h];
#pragma unroll
            for (int n = 0; n < BN / 8; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            // Finite: every query sees key 0, which is in the first tile. At that tile the maximum was -inf: shrink is 0.
            float shift = top * scale2, shrink = exp2_flush(fmaf(maximum[m][h], scale2, -shift));
            maximum[m][h] = top;
            float part = 0.0f;
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) {
                    s[m][n][e] = exp2_flush(fmaf(s[m][n][e], scale2, -shift));
                    part += s[m][n][e];
                }
            sum[m][h] = fmaf(sum[m][h], shrink, part);
#pragma unroll
            for (int n = 0; n < HD / 8; ++n) {
                acc[m][n][2 * h] *= shrink;
                acc[m][n][2 * h + 1] *= shrink;
            }
        }
}

// Hides keys later than the query; `first` is the first query of the warp minus the first key of the tile.
DEVICE void mask(float (&s)[MT][BN / 8][4], int first) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (8 * n + column_of(e) > first + 16 * m + row_of(e)) s[m][n][e] = -__int_as_float(0x7f800000);
}

KERNEL __launch_bounds__(THREADS, 2) flash_fwd(bf16* out, float* lse, const bf16* qkv, u32 seq, u32 heads, u32 kv_heads,
                                               u32, u32 total, u32 group, float scale) {
    u8* tile_q = reinterpret_cast<u8*>(shared);
    u32 q = shared_address(tile_q), k = q + BM * PITCH, v = k + 2 * BN * PITCH;  // k and v: two stages each
    u32 tiles = (seq + BM - 1) / BM;
    Work work = work_of(blockIdx.x, tiles, total, group);
    Head at = head_at(work.head, seq, heads, kv_heads, HD);
    u32 first = (tiles - 1 - work.tile) * BM, row = threadIdx.x / WARP * 16 * MT;
    u32 passes = (min(first + BM, seq) - 1) / BN + 1;
    load_tile<BM>(q, qkv + at.in, at.stride, first, seq);
    load_tile<BN>(k, qkv + at.key, at.stride, 0, seq);
    load_tile<BN>(v, qkv + at.value, at.stride, 0, seq);
    cp_commit();

    Rows<true> queries{q, row};
    queries.hold();
    float acc[MT][HD / 8][4] = {}, maximum[MT][2], sum[MT][2] = {};
#pragma unroll
    for (int m = 0; m < MT; ++m) maximum[m][0] = maximum[m][1] = -__int_as_float(0x7f800000);
    for (u32 j = 0; j < passes; ++j) {
        cp_wait<0>();
        __syncthreads();  // tile j is here, and all are done with tile j-1, whose place the next copies take
        u32 stage = j % 2 * BN * PITCH, other = BN * PITCH - stage, key = j * BN;
        if (j + 1 < passes) {
            load_tile<BN>(k + other, qkv + at.key, at.stride, key + BN, seq);
            load_tile<BN>(v + other, qkv + at.value, at.stride, key + BN, seq);
            cp_commit();
        }
        if (key >= first + row + 16 * MT) continue;  // later than all queries of this warp
        float s[MT][BN / 8][4] = {};
        scores<BN>(s, queries, k + stage, 0);
        if (key + BN > first + row + 1) mask(s, (int)(first + row) - (int)key);
        softmax(s, acc, maximum, sum, scale * LOG2E);
        weighted<BN>(acc, s, v + stage, 0);
    }

    float factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float whole = sum[m][h] + __shfl_xor_sync(0xffffffffu, sum[m][h], 1);
            whole += __shfl_xor_sync(0xffffffffu, whole, 2);
            factor[m][h] = 1.0f / whole;
            u32 query = first + row + 16 * m + row_of(2 * h);
            if (lane() % 4 == 0 && query < seq) lse[at.row + query] = fmaf(maximum[m][h], scale, logf(whole));
        }
    store_tile(out + at.out, at.out_stride, first, seq, acc, factor, tile_q, row);
}
