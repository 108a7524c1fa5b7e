// How an update keeps its state: master weights and moments in 16 or 32 bits, and the random bits that round them.
// PARAM weights; MASTER float, or i16: the bits of it that bf16 weights lack; MOMENT float or bf16.
// order  bf16 parameters beside f32 masters are rounded up or down by 16 random bits, as are bf16 moments: a function of
//        seed, step and index, the same bits as core/src/rounding.rs. Beside i16 they are the nearest
#pragma once
#include "common/random.cuh"

typedef short i16;

// Elements of an access: 8 where state has 16 bits, so that its accesses have 16 bytes.
constexpr int N = sizeof(MASTER) == 2 || sizeof(MOMENT) == 2 ? 8 : 4;
constexpr u32 MOMENTS = 0x51ed270bu;

// Whether a step may change anything: neither one that went wrong nor one after it may.
DEVICE bool is_good(const float* norm, const float* halt) { return *halt == 0.0f && fabsf(*norm) <= 3.4028234e38f; }

// The factor of the gradients.
DEVICE float clip_of(const Scalars* s, float norm) {
    return s->grad_clip > 0.0f ? fminf(s->grad_clip / (norm + 1e-6f), 1.0f) : 1.0f;
}

// 32 random bits for a group of elements: 2·group and 2·group + 1 where they are weights.
DEVICE u32 random_bits(u64 group, u32 salt, const StepKey& k) {
    return mix(mix((u32)group ^ k.first ^ salt) + (u32)(group >> 32) + k.second);
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

DEVICE void store_master(float*, float* master, u64 i, const float (&w)[N], const StepKey&) {
    store_floats(master + i, w);  // which are the parameters
}
DEVICE void store_master(bf16* params, float* master, u64 i, const float (&w)[N], const StepKey& k) {
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
DEVICE void store_master(bf16* params, i16* master, u64 i, const float (&w)[N], const StepKey&) {
    Vec<bf16> high;
    Vec<i16> low;
#pragma unroll
    for (int e = 0; e < N; e++) split(w[e], high.at[e], low.at[e]);
    store(params + i, high);
    store(master + i, low);
}
DEVICE void store_one(float*, float* master, u64 i, float w, const StepKey&) { master[i] = w; }
DEVICE void store_one(bf16* params, float* master, u64 i, float w, const StepKey& k) {
    master[i] = w;
    const u32 random = random_bits(i / 2, 0, k);
    params[i].bits = round_randomly(w, i % 2 ? random >> 16 : random);
}
DEVICE void store_one(bf16* params, i16* master, u64 i, float w, const StepKey&) { split(w, params[i], master[i]); }

// The 16 bits that decide about each moment of an element: the first in the low half.
DEVICE u32 moment_bits(u32 of_four, u32 which) { return mix(of_four + GOLDEN * which); }

DEVICE void store_moments(float* moment1, float* moment2, u64 i, const float (&m)[N], const float (&v)[N], const StepKey&) {
    store_floats(moment1 + i, m);
    store_floats(moment2 + i, v);
}
// Whether none can become an infinity by rounding, nor is one or a NaN: then nothing has to be looked at.
DEVICE bool are_small(const float (&x)[N]) {
    bool small = true;
#pragma unroll
    for (int e = 0; e < N; e++) small = small && fabsf(x[e]) < __uint_as_float(0x7f7f0000u);
    return small;
}
// Two neighbours in one word, each with the low half of its random bits.
template <bool SMALL> DEVICE u32 round_two(float a, float b, u32 for_a, u32 for_b) {
    if constexpr (!SMALL) return round_randomly(a, for_a) | (u32)round_randomly(b, for_b) << 16;
    return __byte_perm(__float_as_uint(a) + (for_a & 0xffffu), __float_as_uint(b) + (for_b & 0xffffu), 0x7632);
}
template <bool SMALL>
DEVICE void round_moments(Vec<bf16>& first, Vec<bf16>& second, u64 i, const float (&m)[N], const float (&v)[N], const StepKey& k) {
    u32* const one = reinterpret_cast<u32*>(&first);
    u32* const two = reinterpret_cast<u32*>(&second);
#pragma unroll
    for (int e = 0; e < N; e += 2) {
        const u32 of_four = random_bits((i + e) / 4, MOMENTS, k);
        const u32 a = moment_bits(of_four, e % 4), b = moment_bits(of_four, e % 4 + 1);
        one[e / 2] = round_two<SMALL>(m[e], m[e + 1], a, b);
        two[e / 2] = round_two<SMALL>(v[e], v[e + 1], a >> 16, b >> 16);
    }
}
DEVICE void store_moments(bf16* moment1, bf16* moment2, u64 i, const float (&m)[N], const float (&v)[N],
                          const StepKey& k) {
    Vec<bf16> first, second;
    if (are_small(m) && are_small(v)) round_moments<true>(first, second, i, m, v, k);
    else round_moments<false>(first, second, i, m, v, k);
    store(moment1 + i, first);
    store(moment2 + i, second);
}
DEVICE void store_moment(float& one, float& two, u64, float m, float v, const StepKey&) { one = m, two = v; }
DEVICE void store_moment(bf16& one, bf16& two, u64 i, float m, float v, const StepKey& k) {
    const u32 random = moment_bits(random_bits(i / 4, MOMENTS, k), (u32)(i % 4));
    one.bits = round_randomly(m, random);
    two.bits = round_randomly(v, random >> 16);
}
