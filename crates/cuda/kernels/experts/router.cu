// router_fwd:  per token probs = softmax(logits) in f32; experts: the K largest logits, of equal ones the lower number first;
//              weights: their probabilities over the sum of these. A logit that is not finite is a fault
// router_bwd:  d_logits = weights·(d_weights - Σ weights·d_weights) at the chosen experts
//              + row_scale·alpha·E·probs·(load - Σ probs·load)
// router_load: load = share of the tokens sent to each expert; aux (+)= row_scale·alpha·E·Σ_n Σ_e load·probs;
//              entropy (+)= -row_scale·Σ_n Σ_e probs·ln(probs); row_scale = loss_scale·counted
// moves  N·E·(sizeof(LOGIT) + 4) bytes, N·E·(sizeof(LOGIT) + 4), N·E·4, and 8 to 16 for each choice; bound: latency
// grid   a warp per token; router_load: blocks of a stretch of `probs` each, then one block. Any N, E and K
// order  lanes in order, then a butterfly; router_load in f64, blocks in order: repeatable
#include "common/prelude.cuh"

constexpr int WARPS = 8;
constexpr u32 ALL = 0xffffffffu;

DEVICE bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }

KERNEL __launch_bounds__(WARPS* WARP) router_fwd(float* probs, float* weights, i32* experts, const LOGIT* logits,
                                                 Fault* fault, u32 tokens, u32 all, u32 k) {
    const u32 token = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (token >= tokens) return;
    const LOGIT* const x = logits + (u64)token * all;
    float* const p = probs + (u64)token * all;
    float* const w = weights + (u64)token * k;
    i32* const chosen = experts + (u64)token * k;

    float max = -3.402823466e38f, strange = 0.0f;
    bool fine = true;
    for (u32 e = lane; e < all; e += WARP) {
        const float logit = to_float(x[e]);
        max = fmaxf(max, logit);
        if (fine && !finite(logit)) {
            fine = false;
            strange = logit;
        }
    }
    const u32 bad = __ballot_sync(ALL, !fine);
    if (bad) {
        if (lane == (u32)__ffs(bad) - 1) report(fault, 3, __float_as_int(strange), (i32)token, (i32)all);
        // Harmless values for what still runs until the host looks.
        for (u32 e = lane; e < all; e += WARP) p[e] = 0.0f;
        for (u32 j = lane; j < k; j += WARP) {
            w[j] = 0.0f;
            chosen[j] = 0;
        }
        return;
    }
    max = warp_max(max);
    float sum = 0.0f;
    for (u32 e = lane; e < all; e += WARP) sum += expf(to_float(x[e]) - max);
    sum = warp_sum(sum);
    for (u32 e = lane; e < all; e += WARP) p[e] = expf(to_float(x[e]) - max) / sum;

    // The next in the order: larger first, then by number.
    float last = 0.0f, total = 0.0f;
    u32 last_at = 0;
    for (u32 j = 0; j < k; j++) {
        float best = -__int_as_float(0x7f800000);
        u32 at = ~0u;
        for (u32 e = lane; e < all; e += WARP) {
            const float logit = to_float(x[e]);
            const bool left = j == 0 || logit < last || (logit == last && e > last_at);
            if (left && logit > best) {
                best = logit;
                at = e;
            }
        }
#pragma unroll
        for (int d = WARP / 2; d > 0; d >>= 1) {
            const float other = __shfl_xor_sync(ALL, best, d);
            const u32 other_at = __shfl_xor_sync(ALL, at, d);
            if (other > best || (other == best && other_at < at)) {
                best = other;
                at = other_at;
            }
        }
        last = best;
        last_at = at;
        const float share = expf(best - max) / sum;
        total += share;
        if (lane == j % WARP) {
            w[j] = share;
            chosen[j] = (i32)at;
        }
    }
    for (u32 j = lane; j < k; j += WARP) w[j] /= total;  // each lane what it wrote itself
}

// The factor of a mean over all rows of the step.
DEVICE double row_scale(const Scalars* scalars) { return (double)scalars->loss_scale * (double)scalars->counted; }

KERNEL __launch_bounds__(WARPS* WARP)
    router_bwd(LOGIT* d_logits, const float* d_weights, const float* probs, const float* weights, const i32* experts,
               const float* load, const Scalars* scalars, Fault* fault, float alpha, u32 tokens, u32 all, u32 k) {
    const u32 token = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (token >= tokens) return;
    const float* const p = probs + (u64)token * all;
    const float* const w = weights + (u64)token * k;
    const float* const d_w = d_weights + (u64)token * k;
    const i32* const chosen = experts + (u64)token * k;
    const float scale = (float)(row_scale(scalars) * (double)alpha * (double)all);
    // Loads and gradients are counted from those of the first choice: where its p is nearly 1, less their mean they are small
    // differences of large numbers otherwise.
    const float top = (u32)chosen[0] < all ? load[chosen[0]] : 0.0f, first = d_w[0];
    float mean = 0.0f, inner = 0.0f;
    for (u32 e = lane; e < all; e += WARP) mean = __fmaf_rn(p[e], load[e] - top, mean);
    for (u32 j = lane; j < k; j += WARP) {
        inner = __fmaf_rn(w[j], d_w[j] - first, inner);
        if ((u32)chosen[j] >= all) report(fault, 4, chosen[j], (i32)(token * k + j), (i32)all);
    }
    mean = warp_sum(mean);
    inner = warp_sum(inner);
    for (u32 e = lane; e < all; e += WARP) {
        float d = scale * (p[e] * ((load[e] - top) - mean));
        for (u32 j = 0; j < k; j++)
            if ((u32)chosen[j] == e) d += w[j] * ((d_w[j] - first) - inner);
        d_logits[(u64)token * all + e] = from_float<LOGIT>(d);
    }
}

DEVICE float share_of(const i32* offsets, u32 e, float tokens) {
    return (float)((double)offsets[e + 1] - (double)offsets[e]) / tokens;
}

constexpr int LOAD_THREADS = 256;

// partials[b] and partials[gridDim.x + b] are the sums of block b for aux and entropy.
KERNEL __launch_bounds__(LOAD_THREADS)
    router_load_parts(double* partials, const float* probs, const i32* offsets, u64 count, u64 chunk, u32 tokens, u32 all,
                      u32 entropy) {
    __shared__ double space[LOAD_THREADS];
    const u64 begin = blockIdx.x * chunk, end = count - begin < chunk ? count : begin + chunk;
    double balance = 0.0, nats = 0.0;
    for (u64 i = begin + threadIdx.x; i < end; i += LOAD_THREADS) {
        const float p = probs[i];
        balance += (double)p * (double)share_of(offsets, (u32)(i % all), (float)tokens);
        if (entropy && p > 0.0f) nats -= (double)(p * logf(p));
    }
    block_sum_f64<LOAD_THREADS>(balance, space);
    __syncthreads();
    block_sum_f64<LOAD_THREADS>(nats, space);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = balance;
        partials[gridDim.x + blockIdx.x] = nats;
    }
}

// `entropy` may be null.
KERNEL __launch_bounds__(LOAD_THREADS)
    router_load(float* load, float* aux, float* entropy, const double* partials, const i32* offsets, const Scalars* scalars,
                u32 count, float alpha, u32 tokens, u32 all, u32 adds) {
    __shared__ double space[LOAD_THREADS];
    for (u32 e = threadIdx.x; e < all; e += LOAD_THREADS) load[e] = share_of(offsets, e, (float)max(tokens, 1u));
    double balance = 0.0, nats = 0.0;
    for (u32 b = threadIdx.x; b < count; b += LOAD_THREADS) {
        balance += partials[b];
        nats += partials[count + b];
    }
    block_sum_f64<LOAD_THREADS>(balance, space);
    __syncthreads();
    block_sum_f64<LOAD_THREADS>(nats, space);
    if (threadIdx.x != 0) return;
    const double scale = row_scale(scalars);
    const float value = (float)(scale * (double)alpha * (double)all * balance);
    *aux = adds ? *aux + value : value;
    if (entropy) *entropy = adds ? *entropy + (float)(scale * nats) : (float)(scale * nats);
}
