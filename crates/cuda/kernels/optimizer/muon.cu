// Muon's elementwise parts, on `count` matrices of `len` elements that start anywhere in the flat pools:
// muon_momentum: g = grad·min(1, grad_clip/(norm + 1e-6)), m = m + (1-μ)(g - m), u = g + μ(m - g), out = u/‖u‖, or 0 where
//        ‖u‖ < 1e-30; in two launches, because the norm must be known first: muon_momentum_parts sums u² of a block
// muon_update: w = w - lr·wd·w - lr·scale·inp
//        a norm that is not finite or a halt that is not 0 changes nothing, and `out` is 0 then
//        GRAD gradients; PARAM also the batch of matrices; the other types are in state.cuh
// moves  count·len·(2·sizeof(GRAD) + 3·sizeof(MOMENT) + sizeof(PARAM)) bytes; the update
//        count·len·(sizeof(PARAM) + 2·sizeof(MASTER)), with bf16 parameters 2 more, with i16 4; bound: memory
// grid   a block takes 8192 elements of a matrix, a thread 8 or 4 at a time; single elements where a matrix starts or ends
//        between those
// order  of the norm: each thread its elements in order, a tree over the block, then over the blocks of the matrix, in f64
#include "optimizer/state.cuh"

constexpr int THREADS = 256;
constexpr u32 BLOCK = 8192;

// Where a matrix starts in the pools; the highest bit says whether it decays.
constexpr u64 DECAYS = 1ull << 63;

// The elements of this block: those of a matrix, and where it starts in the pools and in the batch.
struct Place {
    u64 pool, batch, from, to;
    bool decays, whole;
};

DEVICE Place place_of(const u64* starts, u64 len) {
    Place p;
    const u32 blocks = (u32)((len + BLOCK - 1) / BLOCK), matrix = blockIdx.x / blocks;
    const u64 start = starts[matrix];
    p.pool = start & ~DECAYS;
    p.decays = (start & DECAYS) != 0;
    p.batch = matrix * len;
    p.from = (u64)(blockIdx.x % blocks) * BLOCK;
    p.to = p.from + BLOCK < len ? p.from + BLOCK : len;
    p.whole = (p.pool | len) % 8 == 0;  // then every access is aligned
    return p;
}

struct Momentum {
    float clip, momentum, rest;
};

DEVICE float nesterov(float g, float& m, const Momentum& k) {
    g *= k.clip;
    m = __fmaf_rn(k.rest, g - m, m);
    return __fmaf_rn(k.momentum, m - g, g);
}

DEVICE double square(float x) { return (double)x * (double)x; }

KERNEL __launch_bounds__(THREADS) muon_momentum_parts(double* parts, const MOMENT* moment1, const GRAD* grads,
                                                      const float* norm, const float* halt, const u64* starts,
                                                      const Scalars* scalars, u64 len, float momentum) {
    __shared__ double shared[THREADS];
    if (!is_good(norm, halt)) return;
    const Place p = place_of(starts, len);
    const Momentum k = {clip_of(scalars, *norm), momentum, 1.0f - momentum};
    double sum = 0.0;
    if (p.whole) {
        for (u64 i = p.from + threadIdx.x * N; i < p.to; i += THREADS * N) {
            float g[N], m[N];
            load_floats(g, grads + p.pool + i);
            load_floats(m, moment1 + p.pool + i);
#pragma unroll
            for (int e = 0; e < N; e++) sum += square(nesterov(g[e], m[e], k));
        }
    } else {
        for (u64 i = p.from + threadIdx.x; i < p.to; i += THREADS) {
            float m = to_float(moment1[p.pool + i]);
            sum += square(nesterov(to_float(grads[p.pool + i]), m, k));
        }
    }
    block_sum_f64<THREADS>(sum, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// The factor that makes the norm of this block's matrix 1; the same for all of its threads.
DEVICE float scale_of(const double* parts, u64 len, double* shared) {
    const u32 blocks = (u32)((len + BLOCK - 1) / BLOCK), first = blockIdx.x / blocks * blocks;
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < blocks; i += THREADS) sum += parts[first + i];
    block_sum_f64<THREADS>(sum, shared);
    const double norm = sqrt(sum);
    return norm < 1e-30 ? 0.0f : (float)(1.0 / norm);
}

DEVICE void store_first(float* moment, u64 i, const float (&m)[N], const StepKey&) { store_floats(moment + i, m); }
DEVICE void store_first(bf16* moment, u64 i, const float (&m)[N], const StepKey& k) {
    Vec<bf16> out;
#pragma unroll
    for (int e = 0; e < N; e += 4) {
        const u32 of_four = random_bits((i + e) / 4, MOMENTS, k);
#pragma unroll
        for (int j = 0; j < 4; j++) out.at[e + j].bits = round_randomly(m[e + j], moment_bits(of_four, j));
    }
    store(moment + i, out);
}
DEVICE void store_first_one(float* moment, u64 i, float m, const StepKey&) { moment[i] = m; }
DEVICE void store_first_one(bf16* moment, u64 i, float m, const StepKey& k) {
    moment[i].bits = round_randomly(m, moment_bits(random_bits(i / 4, MOMENTS, k), (u32)(i % 4)));
}

KERNEL __launch_bounds__(THREADS) muon_momentum(PARAM* out, MOMENT* moment1, const GRAD* grads, const float* norm,
                                                const float* halt, const u64* starts, const Scalars* scalars,
                                                const double* parts, u64 len, float momentum) {
    __shared__ double shared[THREADS];
    const Place p = place_of(starts, len);
    if (!is_good(norm, halt)) {
        for (u64 i = p.from + threadIdx.x; i < p.to; i += THREADS) out[p.batch + i] = from_float<PARAM>(0.0f);
        return;
    }
    const Momentum k = {clip_of(scalars, *norm), momentum, 1.0f - momentum};
    const float scale = scale_of(parts, len, shared);
    const StepKey keys = step_key(scalars);
    if (p.whole) {
        for (u64 i = p.from + threadIdx.x * N; i < p.to; i += THREADS * N) {
            float g[N], m[N], u[N];
            load_floats(g, grads + p.pool + i);
            load_floats(m, moment1 + p.pool + i);
#pragma unroll
            for (int e = 0; e < N; e++) u[e] = scale * nesterov(g[e], m[e], k);
            store_first(moment1, p.pool + i, m, keys);
            store_floats(out + p.batch + i, u);
        }
    } else {
        for (u64 i = p.from + threadIdx.x; i < p.to; i += THREADS) {
            float m = to_float(moment1[p.pool + i]);
            const float u = scale * nesterov(to_float(grads[p.pool + i]), m, k);
            store_first_one(moment1, p.pool + i, m, keys);
            out[p.batch + i] = from_float<PARAM>(u);
        }
    }
}

// `master` is the parameters themselves where they are f32.
KERNEL __launch_bounds__(THREADS) muon_update(PARAM* params, MASTER* master, const PARAM* inp, const float* norm,
                                              const float* halt, const u64* starts, const Scalars* scalars, u64 len,
                                              float scale) {
    if (!is_good(norm, halt)) return;
    const Place p = place_of(starts, len);
    const float step = scalars->lr * scale;
    const float keep = p.decays ? __fmaf_rn(-scalars->lr, scalars->weight_decay, 1.0f) : 1.0f;
    const StepKey keys = step_key(scalars);
    if (p.whole) {
        for (u64 i = p.from + threadIdx.x * N; i < p.to; i += THREADS * N) {
            float w[N], x[N];
            load_master(w, params + p.pool + i, master + p.pool + i);
            load_floats(x, inp + p.batch + i);
#pragma unroll
            for (int e = 0; e < N; e++) w[e] = __fmaf_rn(w[e], keep, -(step * x[e]));
            store_master(params, master, p.pool + i, w, keys);
        }
    } else {
        for (u64 i = p.from + threadIdx.x; i < p.to; i += THREADS) {
            const u64 at = p.pool + i;
            const float w = load_one(params + at, master + at);
            store_one(params, master, at, __fmaf_rn(w, keep, -(step * to_float(inp[p.batch + i]))), keys);
        }
    }
}
