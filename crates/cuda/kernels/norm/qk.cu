// qk_norm_fwd: of qkv (B,T,W), W = (NH + 2·NKV)·HD, each head of queries and keys: out = x·rstd·w, rstd = 1/√(mean(x²) + eps), kept;
//              heads of values are copied, or left where they are if out is inp
// qk_norm_bwd: d_qkv, the gradient of out, becomes rstd·(g - x̂·mean(g·x̂)) with g = d·w, x̂ = x·rstd; sums of d·x̂ over all
//              heads of queries and of keys to `partials`, rows of [d_q_weight | d_k_weight]. Then qk_norm_bwd_sums
// With PLUS_ONE w is 1 + weight. With Q_SCALE, the bits of a float, queries are multiplied by it once more
// moves  2·B·T·W·sizeof(ACT) forward, 3·B·T·(NH + NKV)·HD·sizeof(ACT) backward; bound: memory
// grid   with HEAD_LANES (a power of two; needs HD % (16 / sizeof(ACT)) == 0 and HD <= HEAD_LANES·16 / sizeof(ACT), and aligned rows): HEAD_LANES
//        lanes per head, a vector each. Without, a warp per head, any HD; qk_norm_bwd_columns before qk_norm_bwd_rows
// order  lanes in order, then a butterfly; sums over heads: each group its own in order, groups in order, then blocks in a fixed
//        tree: repeatable on one kind of device
#include "common/partials.cuh"
#include "norm/gain.cuh"

constexpr int THREADS = 256;  // also in src/op/qk_norm.rs

// Where the heads are.
struct Heads {
    u32 queries, keys, dim;

    // The first element of a head of a token.
    DEVICE u64 first(u64 token, u32 head) const { return (token * (queries + 2 * keys) + head) * dim; }
    DEVICE u32 normed() const { return queries + keys; }
};

// Division by 32 bits is much faster.
DEVICE u64 divided(u64 x, u32 by, u64 most) { return most >> 32 ? x / by : (u32)x / by; }

DEVICE float rstd_of(float squares, u32 dim, float eps) { return 1.0f / sqrtf(squares / (float)dim + eps); }
DEVICE float normal(float x, float rstd, float w) { return __fmul_rn(__fmul_rn(x, rstd), w); }

#ifdef Q_SCALE
DEVICE float scaled(float x, bool query) { return query ? x * __uint_as_float(Q_SCALE) : x; }
#else
DEVICE float scaled(float x, bool) { return x; }
#endif
// What a head is multiplied by.
DEVICE float factor(float w, bool query) { return scaled(gain(w), query); }

#ifdef HEAD_LANES
constexpr int N = Vec<ACT>::N;
constexpr int GROUPS = THREADS / HEAD_LANES;  // of a block

// `count` heads, `per_token` of them for a token: all, or all but those of values.
KERNEL __launch_bounds__(THREADS)
    qk_norm_fwd(ACT* out, float* rstd, const ACT* inp, const WEIGHT* q_weight, const WEIGHT* k_weight, float eps, u64 count,
                u32 per_token, u32 queries, u32 keys, u32 dim) {
    const Heads heads = {queries, keys, dim};
    const u64 mine = (u64)blockIdx.x * GROUPS + threadIdx.x / HEAD_LANES;
    const u32 column = threadIdx.x % HEAD_LANES * N;
    const u64 token = divided(mine, per_token, count);
    const u32 head = (u32)(mine - token * per_token);
    const bool has = mine < count && column < dim;  // all lanes take part in the sums
    const u64 at = heads.first(token, head) + column;
    Vec<ACT> x = {};
    if (has) x = load(inp + at);
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < N; k++) squares = __fmaf_rn(to_float(x.at[k]), to_float(x.at[k]), squares);
    squares = warp_sum<HEAD_LANES>(squares);
    if (!has) return;
    if (head >= heads.normed()) {
        store(out + at, x);
        return;
    }
    const float scale = rstd_of(squares, dim, eps);
    if (column == 0) rstd[token * heads.normed() + head] = scale;
    float w[N], y[N];
    load_floats(w, (head < queries ? q_weight : k_weight) + column);
#pragma unroll
    for (int k = 0; k < N; k++) y[k] = normal(to_float(x.at[k]), scale, factor(w[k], head < queries));
    store_floats(out + at, y);
}

// Each group of HEAD_LANES takes every so many heads of queries, then of keys.
KERNEL __launch_bounds__(THREADS)
    qk_norm_bwd(ACT* d_qkv, float* partials, const ACT* inp, const float* rstd, const WEIGHT* q_weight, const WEIGHT* k_weight,
                u32 tokens, u32 queries, u32 keys, u32 dim) {
    __shared__ float sums[2][GROUPS][HEAD_LANES * N];
    const Heads heads = {queries, keys, dim};
    const u32 group = threadIdx.x / HEAD_LANES, lane = threadIdx.x % HEAD_LANES, column = lane * N;
    const bool inside = column < dim;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const u32 of_part = part ? keys : queries, before = part ? queries : 0;
        const u64 count = (u64)tokens * of_part, step = (u64)gridDim.x * GROUPS;
        float w[N] = {}, total[N] = {};
        if (inside) load_floats(w, (part ? k_weight : q_weight) + column);
#pragma unroll
        for (int k = 0; k < N; k++) w[k] = factor(w[k], !part);
        // the groups of a warp stay together: all lanes take part in the sums
        for (u64 first = (u64)blockIdx.x * GROUPS; first < count; first += step) {
            const u64 mine = first + group, token = divided(mine, of_part, count);
            const u32 head = before + (u32)(mine - token * of_part);
            const bool has = inside && mine < count;
            const u64 at = heads.first(token, head) + column;
            float d[N] = {}, x[N] = {}, scale = 0.0f;
            if (has) {
                scale = rstd[token * heads.normed() + head];
                load_floats(d, d_qkv + at);
                load_floats(x, inp + at);
            }
            float dot = 0.0f;
#pragma unroll
            for (int k = 0; k < N; k++) {
                x[k] *= scale;
                dot = __fmaf_rn(d[k] * w[k], x[k], dot);
                total[k] = __fmaf_rn(d[k], x[k], total[k]);
            }
            dot = warp_sum<HEAD_LANES>(dot) / (float)dim;
            if (!has) continue;
            float y[N];
#pragma unroll
            for (int k = 0; k < N; k++) y[k] = (d[k] * w[k] - x[k] * dot) * scale;
            store_floats(d_qkv + at, y);
        }
#pragma unroll
        for (int k = 0; k < N; k++) sums[part][group][column + k] = scaled(total[k], !part);
    }
    __syncthreads();
    for (u32 c = threadIdx.x; c < 2 * dim; c += THREADS) {
        float sum = 0.0f;
        for (int g = 0; g < GROUPS; g++) sum += c < dim ? sums[0][g][c] : sums[1][g][c - dim];
        partials[(u64)blockIdx.x * 2 * dim + c] = sum;
    }
}
#else
constexpr int WARPS = THREADS / WARP;

KERNEL __launch_bounds__(THREADS)
    qk_norm_fwd(ACT* out, float* rstd, const ACT* inp, const WEIGHT* q_weight, const WEIGHT* k_weight, float eps, u64 count,
                u32 per_token, u32 queries, u32 keys, u32 dim) {
    const Heads heads = {queries, keys, dim};
    const u64 mine = (u64)blockIdx.x * WARPS + threadIdx.x / WARP;
    const u32 lane = threadIdx.x % WARP;
    if (mine >= count) return;
    const u64 token = divided(mine, per_token, count);
    const u32 head = (u32)(mine - token * per_token);
    const ACT* const x = inp + heads.first(token, head);
    ACT* const y = out + heads.first(token, head);
    if (head >= heads.normed()) {
        for (u32 c = lane; c < dim; c += WARP) y[c] = x[c];
        return;
    }
    float squares = 0.0f;
    for (u32 c = lane; c < dim; c += WARP) squares = __fmaf_rn(to_float(x[c]), to_float(x[c]), squares);
    const float scale = rstd_of(warp_sum(squares), dim, eps);
    if (lane == 0) rstd[token * heads.normed() + head] = scale;
    const WEIGHT* const w = head < queries ? q_weight : k_weight;
    for (u32 c = lane; c < dim; c += WARP) y[c] = from_float<ACT>(normal(to_float(x[c]), scale, factor(to_float(w[c]), head < queries)));
}

// A warp per head of queries and keys.
KERNEL __launch_bounds__(THREADS)
    qk_norm_bwd_rows(ACT* d_qkv, float* partials, const ACT* inp, const float* rstd, const WEIGHT* q_weight,
                     const WEIGHT* k_weight, u32 tokens, u32 queries, u32 keys, u32 dim) {
    const Heads heads = {queries, keys, dim};
    const u64 mine = (u64)blockIdx.x * WARPS + threadIdx.x / WARP;
    const u32 lane = threadIdx.x % WARP;
    if (mine >= (u64)tokens * heads.normed()) return;
    const u64 token = mine / heads.normed();
    const u32 head = (u32)(mine - token * heads.normed());
    ACT* const d = d_qkv + heads.first(token, head);
    const ACT* const x = inp + heads.first(token, head);
    const WEIGHT* const w = head < queries ? q_weight : k_weight;
    const float scale = rstd[mine];
    float dot = 0.0f;
    for (u32 c = lane; c < dim; c += WARP)
        dot = __fmaf_rn(to_float(d[c]) * factor(to_float(w[c]), head < queries), to_float(x[c]) * scale, dot);
    dot = warp_sum(dot) / (float)dim;
    for (u32 c = lane; c < dim; c += WARP) {
        const float g = to_float(d[c]) * factor(to_float(w[c]), head < queries);
        d[c] = from_float<ACT>((g - to_float(x[c]) * scale * dot) * scale);
    }
}

// A block sums 32 columns of the heads of `chunk` tokens: warps take every so many heads of queries, then of keys, and add up in
// order.
KERNEL __launch_bounds__(THREADS)
    qk_norm_bwd_columns(const ACT* d_qkv, float* partials, const ACT* inp, const float* rstd, const WEIGHT* q_weight,
                        const WEIGHT* k_weight, u32 tokens, u32 queries, u32 keys, u32 dim, u32 chunk) {
    __shared__ float tile[2][WARPS][WARP];
    const Heads heads = {queries, keys, dim};
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    const u32 begin = blockIdx.y * chunk, end = tokens - begin < chunk ? tokens : begin + chunk;
    for (int part = 0; part < 2; part++) {
        const u32 of_part = part ? keys : queries, before = part ? queries : 0;
        float sum = 0.0f;
        if (column < dim) {
            for (u64 i = warp; i < (u64)(end - begin) * of_part; i += WARPS) {
                const u64 token = begin + i / of_part;
                const u32 head = before + (u32)(i % of_part);
                const u64 at = heads.first(token, head) + column;
                sum = __fmaf_rn(to_float(d_qkv[at]), to_float(inp[at]) * rstd[token * heads.normed() + head], sum);
            }
        }
        tile[part][warp][lane] = scaled(sum, !part);
    }
    __syncthreads();
    if (warp < 2 && column < dim) {
        float sum = 0.0f;
        for (int k = 0; k < WARPS; k++) sum += tile[warp][k][lane];
        partials[((u64)blockIdx.y * 2 + warp) * dim + column] = sum;
    }
}
#endif

// Both gradients from `count` partial rows.
KERNEL __launch_bounds__(1024)
    qk_norm_bwd_sums(GRAD* d_q_weight, GRAD* d_k_weight, const float* partials, u32 count, u32 dim, u32 adds) {
    const float sum = column_sum(partials, count, 2 * (u64)dim);
    const u64 mine = own_column();
    if (threadIdx.x % WARP == 0 && mine < 2 * (u64)dim) {
        GRAD* const to = mine < dim ? d_q_weight + mine : d_k_weight + (mine - dim);
        *to = from_float<GRAD>(adds ? to_float(*to) + sum : sum);
    }
}
