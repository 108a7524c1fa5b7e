// flash_any: causal attention for heads of any width, and the row sums every backward starts from
//
//   flash_delta*     delta = sum over a head's channels of d_out*out, (B,NH,T)
//   flash_any_*      the formulas of flash_f32.cu for heads too wide for its tiles; slow, one pass over all positions
//                    per 32*PART channels
//
// moves  flash_delta: 2*B*T*C*sizeof(ELEM) + 4*B*NH*T bytes; bound: memory
// grid   one warp per head and position (a query, or for d_k and d_v a key), 8 warps per block; any T, any HD
// order  positions in order (d_k and d_v: per head of queries, heads in order), channels by a fixed tree; no atomics:
//        bitwise repeatable
//
// ELEM is the type in memory (float or bf16).
#include "flash.cuh"

constexpr int PART = 8;  // channels per lane and pass

struct Row {
    u32 head, position;
    bool inside;
};

// The head and position of this warp.
DEVICE Row row_of(u32 seq, u32 total) {
    u64 warp = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    return {(u32)(warp / seq), (u32)(warp % seq), warp < (u64)total * seq};
}

DEVICE float dot(const ELEM* x, const ELEM* y, u32 hd) {
    float sum = 0.0f;
    for (u32 d = threadIdx.x % WARP; d < hd; d += WARP) sum = fmaf(to_float(x[d]), to_float(y[d]), sum);
    return warp_sum(sum);
}

// acc += factor * 32*PART channels of x from `from` on
DEVICE void add(float (&acc)[PART], float factor, const ELEM* x, u32 from, u32 hd) {
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        u32 d = from + i * WARP + threadIdx.x % WARP;
        if (d < hd) acc[i] = fmaf(factor, to_float(x[d]), acc[i]);
    }
}

DEVICE void write(ELEM* to, const float (&acc)[PART], float factor, u32 from, u32 hd) {
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        u32 d = from + i * WARP + threadIdx.x % WARP;
        if (d < hd) to[d] = from_float<ELEM>(acc[i] * factor);
    }
}

KERNEL flash_delta(float* delta, const ELEM* d_out, const ELEM* out, u32 seq, u32 heads, u32 hd, u32 total) {
    Row row = row_of(seq, total);
    if (!row.inside) return;
    Head at = head_at(row.head, seq, heads, heads, hd);
    size_t first = at.out + row.position * at.out_stride;
    float sum = dot(d_out + first, out + first, hd);
    if (threadIdx.x % WARP == 0) delta[at.row + row.position] = sum;
}

// The same where the 16-byte pieces of a head are a power of two up to 32, `lanes`: one thread per piece of (B,T,C).
KERNEL flash_delta_wide(float* delta, const ELEM* d_out, const ELEM* out, u32 seq, u32 heads, u32 lanes, u32 total) {
    constexpr int N = Vec<ELEM>::N;
    u64 piece = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = piece / lanes;
    bool inside = row < (u64)total * seq;
    float sum = 0.0f;
    if (inside) {
        Vec<ELEM> x = load(d_out + piece * N), y = load(out + piece * N);
#pragma unroll
        for (int i = 0; i < N; ++i) sum = fmaf(to_float(x.at[i]), to_float(y.at[i]), sum);
    }
    for (u32 d = lanes / 2; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (!inside || piece % lanes != 0) return;
    u64 token = row / heads, head = token / seq * heads + row % heads;
    delta[head * seq + token % seq] = sum;
}

KERNEL flash_any_fwd(ELEM* out, float* lse, const ELEM* qkv, u32 seq, u32 heads, u32 kv_heads, u32 hd, u32 total, u32,
                     float scale) {
    Row row = row_of(seq, total);
    if (!row.inside) return;
    Head at = head_at(row.head, seq, heads, kv_heads, hd);
    const ELEM *q = qkv + at.in + row.position * at.stride, *k = qkv + at.key, *v = qkv + at.value;
    float maximum = -__int_as_float(0x7f800000), sum = 0.0f;
    for (u32 j = 0; j <= row.position; ++j) {
        float s = dot(q, k + j * at.stride, hd) * scale, m = fmaxf(maximum, s);
        sum = sum * expf(maximum - m) + expf(s - m);
        maximum = m;
    }
    if (threadIdx.x % WARP == 0) lse[at.row + row.position] = maximum + logf(sum);
    for (u32 from = 0; from < hd; from += WARP * PART) {
        float acc[PART] = {};
        for (u32 j = 0; j <= row.position; ++j) {
            float s = dot(q, k + j * at.stride, hd) * scale;
            add(acc, expf(s - maximum), v + j * at.stride, from, hd);
        }
        write(out + at.out + row.position * at.out_stride, acc, 1.0f / sum, from, hd);
    }
}

struct Pair {
    float p, ds;
};

// What query i and key j (rows of q, d_out, k, v) have to do with each other.
DEVICE Pair pair(const ELEM* q, const ELEM* d_out, const ELEM* k, const ELEM* v, u32 hd, float scale, float lse,
                 float delta) {
    float p = expf(fmaf(dot(q, k, hd), scale, -lse));
    return {p, p * (dot(d_out, v, hd) - delta)};
}

KERNEL flash_any_bwd_q(ELEM* d_qkv, const ELEM* d_out, const ELEM* qkv, const float* lse, const float* delta, u32 seq,
                       u32 heads, u32 kv_heads, u32 hd, u32 total, u32, float scale) {
    Row row = row_of(seq, total);
    if (!row.inside) return;
    Head at = head_at(row.head, seq, heads, kv_heads, hd);
    size_t stride = at.stride, t = row.position;
    const ELEM *q = qkv + at.in + t * stride, *k = qkv + at.key, *v = qkv + at.value;
    for (u32 from = 0; from < hd; from += WARP * PART) {
        float acc[PART] = {};
        // The first position sees one key: its softmax is constant, its gradient exactly 0.
        for (u32 j = 0; j <= t && t > 0; ++j) {
            Pair x = pair(q, d_out + at.out + t * at.out_stride, k + j * stride, v + j * stride, hd, scale,
                          lse[at.row + t], delta[at.row + t]);
            add(acc, x.ds, k + j * stride, from, hd);
        }
        write(d_qkv + at.in + t * stride, acc, scale, from, hd);
    }
}

// A warp per head of keys and values; `total` is B*NKV.
KERNEL flash_any_bwd_kv(ELEM* d_qkv, const ELEM* d_out, const ELEM* qkv, const float* lse, const float* delta, u32 seq,
                        u32 heads, u32 kv_heads, u32 hd, u32 total, u32, float scale) {
    Row row = row_of(seq, total);
    if (!row.inside) return;
    u32 share = heads / kv_heads;
    Head at = head_at(row.head * share, seq, heads, kv_heads, hd);
    size_t stride = at.stride, t = row.position;
    const ELEM *k = qkv + at.key + t * stride, *v = qkv + at.value + t * stride;
    for (u32 from = 0; from < hd; from += WARP * PART) {
        float d_k[PART] = {}, d_v[PART] = {};
        for (u32 h = 0; h < share; ++h) {
            const float *lse_h = lse + at.row + h * (size_t)seq, *delta_h = delta + at.row + h * (size_t)seq;
            for (u32 i = t; i < seq; ++i) {
                const ELEM *q = qkv + at.in + h * hd + i * stride, *g = d_out + at.out + h * hd + i * at.out_stride;
                Pair x = pair(q, g, k, v, hd, scale, lse_h[i], delta_h[i]);
                if (i > 0) add(d_k, x.ds, q, from, hd);
                add(d_v, x.p, g, from, hd);
            }
        }
        write(d_qkv + at.key + t * stride, d_k, scale, from, hd);
        write(d_qkv + at.value + t * stride, d_v, 1.0f, from, hd);
    }
}
