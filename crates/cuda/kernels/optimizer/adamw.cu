// adamw: g = grad·min(1, grad_clip/(norm + 1e-6)), m = β₁m + (1-β₁)g, v = β₂v + (1-β₂)g²,
//        w = w - lr·wd·w - lr·(m/(1-β₁ᵗ)) / (√(v/(1-β₂ᵗ)) + eps) over flat pools; a norm that is not finite or a
//        halt that is not 0 changes nothing
//        PARAM weights, GRAD gradients; MASTER float, or i16: the bits of it that bf16 weights lack; MOMENT float or bf16
// moves  n·(sizeof(GRAD) + 2·sizeof(MASTER) + 4·sizeof(MOMENT)) bytes, with bf16 parameters 2·n more, with i16 4·n; bound: memory
// grid   a block takes 2048 elements, a thread 8: 4 of each half, so that every access of a warp is one stretch, or 8 in a
//        row where state has 16 bits, so that its accesses have 16 bytes; any n
// order  elementwise. Beside f32 masters bf16 parameters are w rounded up or down by 16 random bits, as are bf16 moments:
//        a function of seed, step and index, the same bits as core/src/rounding.rs. Beside i16 they are the nearest
#include "common/prelude.cuh"

typedef short i16;

constexpr int THREADS = 256;
constexpr int N = sizeof(MASTER) == 2 || sizeof(MOMENT) == 2 ? 8 : 4;
constexpr int HALVES = 8 / N;
constexpr u32 GOLDEN = 0x9e3779b9u;
constexpr u32 MOMENTS = 0x51ed270bu;

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
    k.key0 = mix((u32)s->seed ^ mix(s->step + GOLDEN));
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

// 32 random bits for a group of elements: 2·group and 2·group + 1 where they are weights.
DEVICE u32 random_bits(u64 group, u32 salt, const Step& k) {
    return mix(mix((u32)group ^ k.key0 ^ salt) + (u32)(group >> 32) + k.key1);
}

// Adds 16 random bits below the last kept one and cuts: up with the probability of what is cut off. Neither makes an
// infinity of a finite number nor a number of a NaN.
DEVICE u16 round_randomly(float w, u32 random) {
    const u32 bits = __float_as_uint(w);
    if ((bits & 0x7f800000u) == 0x7f800000u) return from_float<bf16>(w).bits;
    const u32 sum = bits + (random & 0xffffu);
    return (u16)(((sum & 0x7f800000u) == 0x7f800000u ? bits : sum) >> 16);
}

// A bf16 parameter and the 16 bits that it lacks are the pattern of an f32 together: `split_master` of rounding.rs.
DEVICE float join(bf16 param, i16 rest) { return __uint_as_float(((u32)param.bits << 16) + (u32)(i32)rest); }
DEVICE void split(float w, bf16& param, i16& rest) {
    const u32 bits = w == w ? __float_as_uint(w) : 0x7fc00000u;
    param.bits = (u16)((bits + 0x8000u) >> 16);
    rest = (i16)bits;
}

// The master, N elements or one: f32, or made of the parameter and what it lacks.
template <class P> DEVICE void load_master(float (&w)[N], const P*, const float* master) { load_floats(w, master); }
DEVICE void load_master(float (&w)[N], const bf16* params, const i16* master) {
    const Vec<bf16> high = load(params);
    const Vec<i16> low = load(master);
#pragma unroll
    for (int e = 0; e < N; e++) w[e] = join(high.at[e], low.at[e]);
}
template <class P> DEVICE float load_one(const P*, const float* master) { return *master; }
DEVICE float load_one(const bf16* params, const i16* master) { return join(*params, *master); }

DEVICE void store_master(float*, float* master, u64 i, const float (&w)[N], const Step&) {
    store_floats(master + i, w);  // which are the parameters
}
DEVICE void store_master(bf16* params, float* master, u64 i, const float (&w)[N], const Step& k) {
    store_floats(master + i, w);
    struct alignas(2 * N) {
        u32 at[N / 2];
    } out;
#pragma unroll
    for (int p = 0; p < N / 2; p++) {
        const u32 random = random_bits(i / 2 + p, 0, k);
        out.at[p] = round_randomly(w[2 * p], random) | (u32)round_randomly(w[2 * p + 1], random >> 16) << 16;
    }
    *reinterpret_cast<decltype(out)*>(params + i) = out;
}
DEVICE void store_master(bf16* params, i16* master, u64 i, const float (&w)[N], const Step&) {
    Vec<bf16> high;
    Vec<i16> low;
#pragma unroll
    for (int e = 0; e < N; e++) split(w[e], high.at[e], low.at[e]);
    store(params + i, high);
    store(master + i, low);
}
DEVICE void store_one(float*, float* master, u64 i, float w, const Step&) { master[i] = w; }
DEVICE void store_one(bf16* params, float* master, u64 i, float w, const Step& k) {
    master[i] = w;
    const u32 random = random_bits(i / 2, 0, k);
    params[i].bits = round_randomly(w, i % 2 ? random >> 16 : random);
}
DEVICE void store_one(bf16* params, i16* master, u64 i, float w, const Step&) { split(w, params[i], master[i]); }

// The 16 bits that decide about each moment of an element: the first in the low half.
DEVICE u32 moment_bits(u32 of_four, u32 which) { return mix(of_four + GOLDEN * which); }

DEVICE void store_moments(float* moment1, float* moment2, u64 i, const float (&m)[N], const float (&v)[N], const Step&) {
    store_floats(moment1 + i, m);
    store_floats(moment2 + i, v);
}
DEVICE void store_moments(bf16* moment1, bf16* moment2, u64 i, const float (&m)[N], const float (&v)[N],
                          const Step& k) {
    Vec<bf16> first, second;
#pragma unroll
    for (int e = 0; e < N; e += 4) {
        const u32 of_four = random_bits((i + e) / 4, MOMENTS, k);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 random = moment_bits(of_four, j);
            first.at[e + j].bits = round_randomly(m[e + j], random);
            second.at[e + j].bits = round_randomly(v[e + j], random >> 16);
        }
    }
    store(moment1 + i, first);
    store(moment2 + i, second);
}
DEVICE void store_moment(float& one, float& two, u64, float m, float v, const Step&) { one = m, two = v; }
DEVICE void store_moment(bf16& one, bf16& two, u64 i, float m, float v, const Step& k) {
    const u32 random = moment_bits(random_bits(i / 4, MOMENTS, k), (u32)(i % 4));
    one.bits = round_randomly(m, random);
    two.bits = round_randomly(v, random >> 16);
}

// `decays` has a bit for each 16 elements. `master` is the parameters themselves where they are f32.
KERNEL __launch_bounds__(THREADS) adamw(PARAM* params, MASTER* master, const GRAD* grads, MOMENT* moment1, MOMENT* moment2,
                                        const float* norm, const float* halt, const u32* decays, const Scalars* scalars,
                                        u64 n) {
    const float total = *norm;
    if (*halt != 0.0f || !(fabsf(total) <= 3.4028234e38f)) return;
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
        load_master(w[h], params + i, master + i);
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
            store_moments(moment1, moment2, i, m[h], v[h], k);
            store_master(params, master, i, w[h], k);
        } else {
            for (u64 e = i; e < n; e++) {
                float one = load_one(params + e, master + e), m1 = to_float(moment1[e]), m2 = to_float(moment2[e]);
                update(one, to_float(grads[e]), m1, m2, decays[e / 512] >> (e / 16 % 32) & 1, k);
                store_moment(moment1[e], moment2[e], e, m1, m2, k);
                store_one(params, master, e, one, k);
            }
        }
    }
}
