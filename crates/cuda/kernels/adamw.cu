// adamw: g = grad·min(1, grad_clip/(norm + 1e-6)), m = β₁m + (1-β₁)g, v = β₂v + (1-β₂)g²,
//        w = w - lr·wd·w - lr·(m/(1-β₁ᵗ)) / (√(v/(1-β₂ᵗ)) + eps) over flat pools; a norm that is not finite changes nothing
// moves  24·n bytes and sizeof(GRAD)·n, with bf16 parameters 2·n more; bound: memory
// grid   a block takes 2048 elements, a thread 4 of each half: every access of a warp is one stretch; any n
// order  elementwise. bf16 parameters are w rounded up or down by 16 random bits, a function of seed, step and index
#include "prelude.cuh"

constexpr int THREADS = 256;
constexpr int N = 4;
constexpr int HALVES = 2;

// What all elements of a step share.
struct Step {
    float clip, rest1, beta2, rest2, root, eps, size, keep;
    u32 key0, key1;
};

// Each input bit reaches every output bit.
DEVICE u32 mix(u32 x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

DEVICE Step step_of(const Scalars* s, float norm) {
    Step k;
    k.clip = s->grad_clip > 0.0f ? fminf(s->grad_clip / (norm + 1e-6f), 1.0f) : 1.0f;
    k.rest1 = s->one_minus_beta1;
    k.beta2 = s->beta2;
    k.rest2 = s->one_minus_beta2;
    k.root = sqrtf(s->correction2);
    k.eps = s->eps;
    k.size = s->lr * s->correction1;
    k.keep = __fmaf_rn(-s->lr, s->weight_decay, 1.0f);
    k.key0 = mix((u32)s->seed ^ mix(s->step + 0x9e3779b9u));
    k.key1 = mix((u32)(s->seed >> 32) ^ k.key0);
    return k;
}

DEVICE float root_of(float x) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE void update(float& w, float g, float& m, float& v, bool decay, const Step& k) {
    g *= k.clip;
    m = __fmaf_rn(k.rest1, g - m, m);
    v = __fmaf_rn(k.beta2, v, k.rest2 * (g * g));
    const float denominator = __fmaf_rn(root_of(v), k.root, k.eps);
    // Gaps between parameters are all 0 and stay so, with eps = 0 too.
    const float ratio = m == 0.0f ? 0.0f : __fdividef(m, denominator);
    w = __fmaf_rn(w, decay ? k.keep : 1.0f, -(k.size * ratio));
}

// 32 random bits for the elements 2·pair and 2·pair + 1.
DEVICE u32 random_bits(u64 pair, const Step& k) { return mix(mix((u32)pair ^ k.key0) + (u32)(pair >> 32) + k.key1); }

// Adds 16 random bits below the last kept one and cuts: up with the probability of what is cut off. Neither makes an
// infinity of a finite number nor a number of a NaN.
DEVICE u16 round_randomly(float w, u32 random) {
    const u32 bits = __float_as_uint(w);
    if ((bits & 0x7f800000u) == 0x7f800000u) return from_float<bf16>(w).bits;
    const u32 sum = bits + (random & 0xffffu);
    return (u16)(((sum & 0x7f800000u) == 0x7f800000u ? bits : sum) >> 16);
}

DEVICE void write_param(float*, u64, const float (&)[N], const Step&) {}  // the parameters are the master
DEVICE void write_param(bf16* params, u64 i, const float (&w)[N], const Step& k) {
    const u32 a = random_bits(i / 2, k), b = random_bits(i / 2 + 1, k);
    uint2 out;
    out.x = round_randomly(w[0], a) | (u32)round_randomly(w[1], a >> 16) << 16;
    out.y = round_randomly(w[2], b) | (u32)round_randomly(w[3], b >> 16) << 16;
    *reinterpret_cast<uint2*>(params + i) = out;
}
DEVICE void write_one(float*, u64, float, const Step&) {}
DEVICE void write_one(bf16* params, u64 i, float w, const Step& k) {
    const u32 random = random_bits(i / 2, k);
    params[i].bits = round_randomly(w, i % 2 ? random >> 16 : random);
}

// `decays` has a bit for each 16 elements. `master` is what is updated: the parameters themselves where they are f32.
KERNEL __launch_bounds__(THREADS) adamw(PARAM* params, float* master, const GRAD* grads, float* moment1, float* moment2,
                                        const float* norm, const u32* decays, const Scalars* scalars, u64 n) {
    const float total = *norm;
    if (!(fabsf(total) <= 3.4028234e38f)) return;
    const u64 first = (u64)blockIdx.x * (HALVES * THREADS * N) + threadIdx.x * N;
    if (first >= n) return;
    float w[HALVES][N], g[HALVES][N], m[HALVES][N], v[HALVES][N];
    u32 bits[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const u64 i = first + h * THREADS * N;
        if (i + N > n) continue;
        load_floats(g[h], grads + i);
        load_floats(m[h], moment1 + i);
        load_floats(v[h], moment2 + i);
        load_floats(w[h], master + i);
        bits[h] = decays[i / 512];
    }
    const Step k = step_of(scalars, total);
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const u64 i = first + h * THREADS * N;
        if (i + N <= n) {
            const bool decay = bits[h] >> (i / 16 % 32) & 1;
#pragma unroll
            for (int e = 0; e < N; e++) update(w[h][e], g[h][e], m[h][e], v[h][e], decay, k);
            store_floats(moment1 + i, m[h]);
            store_floats(moment2 + i, v[h]);
            store_floats(master + i, w[h]);
            write_param(params, i, w[h], k);
        } else {
            for (u64 e = i; e < n; e++) {
                float one = master[e], m1 = moment1[e], m2 = moment2[e];
                update(one, to_float(grads[e]), m1, m2, decays[e / 512] >> (e / 16 % 32) & 1, k);
                moment1[e] = m1;
                moment2[e] = m2;
                master[e] = one;
                write_one(params, e, one, k);
            }
        }
    }
}
