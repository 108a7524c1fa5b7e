// adamw: g = grad·min(1, grad_clip/(norm + 1e-6)), m = β₁m + (1-β₁)g, v = β₂v + (1-β₂)g²,
//        w = w - lr·wd·w - lr·(m/(1-β₁ᵗ)) / (√(v/(1-β₂ᵗ)) + eps) over flat pools; a norm that is not finite or a
//        halt that is not 0 changes nothing
//        GRAD gradients; the other types are in state.cuh
// moves  n·(sizeof(GRAD) + 2·sizeof(MASTER) + 4·sizeof(MOMENT)) bytes, with bf16 parameters 2·n more, with i16 4·n; bound: memory
// grid   a block takes 2048 elements, a thread 8: 4 of each half, so that every access of a warp is one stretch; where state has 16
//        bits a block takes 1024 and a thread 8 in a row, so that its accesses have 16 bytes; any n
// order  elementwise; rounding as in state.cuh
#include "optimizer/state.cuh"

constexpr int HALVES = 8 / N;
constexpr int THREADS = HALVES == 1 ? 128 : 256;

// What all elements of a step share.
struct Step : StepKey {
    float clip, rest1, beta2, rest2, root, eps, size, keep;
};

DEVICE Step step_of(const Scalars* s, float norm) {
    Step k;
    k.clip = clip_of(s, norm);
    k.rest1 = s->one_minus_beta1;
    k.beta2 = s->beta2;
    k.rest2 = s->one_minus_beta2;
    k.root = sqrtf(s->correction2);
    k.eps = s->eps;
    k.size = s->lr * s->correction1;
    k.keep = __fmaf_rn(-s->lr, s->weight_decay, 1.0f);
    static_cast<StepKey&>(k) = step_key(s);
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

// The elements from `first` on of a block, up to `n`. The second moment of element i is moment2[i].
DEVICE void update_block(PARAM* params, MASTER* master, const GRAD* grads, MOMENT* moment1, MOMENT* moment2,
                         const float* norm, const u32* decays, const Scalars* scalars, u64 block, u64 n) {
    const u64 first = block + threadIdx.x * N;
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
    const Step k = step_of(scalars, *norm);
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

// `decays` has a bit for each 16 elements. `master` is the parameters themselves where they are f32.
KERNEL __launch_bounds__(THREADS) adamw(PARAM* params, MASTER* master, const GRAD* grads, MOMENT* moment1, MOMENT* moment2,
                                        const float* norm, const float* halt, const u32* decays, const Scalars* scalars,
                                        u64 n) {
    if (!is_good(norm, halt)) return;
    const u64 block = (u64)blockIdx.x * (HALVES * THREADS * N);
    update_block(params, master, grads, moment1, moment2, norm, decays, scalars, block, n);
}

// The elements of a block or fewer, whose second moments are `skipped` elements closer to the start of their pool.
struct Tile {
    u64 first, end, skipped;
};

// The same on the elements of some tiles, where another optimizer has the others.
KERNEL __launch_bounds__(THREADS) adamw_tiles(PARAM* params, MASTER* master, const GRAD* grads, MOMENT* moment1,
                                              MOMENT* moment2, const float* norm, const float* halt, const u32* decays,
                                              const Scalars* scalars, const Tile* tiles) {
    if (!is_good(norm, halt)) return;
    const Tile tile = tiles[blockIdx.x];
    update_block(params, master, grads, moment1, moment2 - tile.skipped, norm, decays, scalars, tile.first, tile.end);
}
