// What every kernel file shares: element types, 16-byte vectors, reductions, the scalar and fault blocks.
// NVRTC compiles without any header of CUDA's, so everything is declared here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

// The upper half of a float.
struct bf16 {
    u16 bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
template <class T> DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE bf16 from_float<bf16>(float x) {
    bf16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
}

// Sixteen bytes of T: 4 floats or 8 bf16. The one width in which kernels touch memory.
template <class T> struct alignas(16) Vec {
    static constexpr int N = 16 / sizeof(T);
    T at[N];
};

template <class T> DEVICE Vec<T> load(const T* from) {
    Vec<T> out;
    *reinterpret_cast<uint4*>(&out) = *reinterpret_cast<const uint4*>(from);
    return out;
}
template <class T> DEVICE void store(T* to, const Vec<T>& value) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&value);
}
// Not read again soon: does not push other data out of the caches.
template <class T> DEVICE Vec<T> load_once(const T* from) {
    Vec<T> out;
    uint4& q = *reinterpret_cast<uint4*>(&out);
    asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(from));
    return out;
}
template <class T> DEVICE void store_once(T* to, const Vec<T>& value) {
    const uint4& q = *reinterpret_cast<const uint4*>(&value);
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w) : "memory");
}

// An optimisation barrier: the compiler must not keep values derived from v, since converting again is cheaper than
// the registers to keep it in.
template <class T> DEVICE void forget(Vec<T>& v) {
    uint4& q = *reinterpret_cast<uint4*>(&v);
    asm volatile("" : "+r"(q.x), "+r"(q.y), "+r"(q.z), "+r"(q.w));
}

constexpr int WARP = 32;

DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
DEVICE double max_of(double a, double b) { return fmax(a, b); }

// Butterfly over a warp, or over each LANES lanes of it: every lane gets the same result, added in the same order.
template <int LANES = WARP, class A> DEVICE A warp_sum(A x) {
#pragma unroll
    for (int d = LANES / 2; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
template <int LANES = WARP, class A> DEVICE A warp_max(A x) {
#pragma unroll
    for (int d = LANES / 2; d > 0; d >>= 1) x = max_of(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
// The sum over this lane and all lower ones.
template <class A> DEVICE A warp_scan(A x) {
#pragma unroll
    for (int d = 1; d < WARP; d <<= 1) {
        const A below = __shfl_up_sync(0xffffffffu, x, d);
        if (threadIdx.x % WARP >= d) x += below;
    }
    return x;
}

// Per-step numbers, read from device memory so that a captured graph stays valid. The order is that of
// `scalar_block` in src/scalars.rs.
struct Scalars {
    u32 step;
    u32 micro_step;
    float loss_scale;
    float lr;
    float beta1;
    float beta2;
    float one_minus_beta1;
    float one_minus_beta2;
    float correction1;  // 1 / (1 - beta1^step)
    float correction2;  // 1 / (1 - beta2^step)
    float eps;
    float weight_decay;
    float grad_clip;
    u32 position;
    u64 seed;
    float counted;  // share of the step's rows that count
    u32 unused;
};

// What a kernel found wrong with its input; the host reads it when it waits. The order is that of
// `fault_text` in src/scalars.rs.
struct Fault {
    // 0 none, 1 token, 2 target, 3 logit (bits of a float), 4 expert, 5 row, 6 offsets of experts, 7 position in a
    // document, 8 pair, 9 position in a cache, 10 row of a cache
    i32 code;
    i32 value;
    i32 index;
    i32 limit;
};

DEVICE void report(Fault* fault, i32 code, i32 value, i32 index, i32 limit) {
    if (atomicCAS(&fault->code, 0, code) == 0) {
        fault->value = value;
        fault->index = index;
        fault->limit = limit;
    }
}

// Two floats as two bf16 in one word, the first in the low half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
// The larger numbers of two such words.
DEVICE u32 max_bf16(u32 a, u32 b) {
    u32 out;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// The two floats of such a word.
DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// The elements of a vector as floats.
template <class T> DEVICE void to_floats(float (&out)[Vec<T>::N], const Vec<T>& v) {
#pragma unroll
    for (int i = 0; i < Vec<T>::N; i++) out[i] = to_float(v.at[i]);
}
// In one instruction each, where the compiler needs two for every other one.
template <> DEVICE void to_floats<bf16>(float (&out)[8], const Vec<bf16>& v) {
    const uint4& q = *reinterpret_cast<const uint4*>(&v);
    const u32 pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = low(pairs[i]);
        out[2 * i + 1] = high(pairs[i]);
    }
}

// N elements of T as floats, in accesses as wide as they allow. `from` is aligned to N elements.
template <int N, class T> DEVICE void load_floats(float (&out)[N], const T* from) {
    constexpr int BYTES = N * (int)sizeof(T);
    static_assert(N == 1 || BYTES == 8 || BYTES % 16 == 0, "one element, 8 bytes, or whole vectors");
    if constexpr (N == 1) {
        out[0] = to_float(from[0]);
    } else if constexpr (BYTES == 8) {
        struct alignas(8) {
            T at[N];
        } half;
        *reinterpret_cast<uint2*>(&half) = *reinterpret_cast<const uint2*>(from);
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = to_float(half.at[i]);
    } else {
        constexpr int W = Vec<T>::N;
#pragma unroll
        for (int k = 0; k < N / W; k++) {
            float part[W];
            to_floats(part, load(from + k * W));
#pragma unroll
            for (int i = 0; i < W; i++) out[k * W + i] = part[i];
        }
    }
}

// A vector of T from floats, rounded.
DEVICE void round_to(Vec<float>& out, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) out.at[i] = x[i];
}
DEVICE void round_to(Vec<bf16>& out, const float (&x)[8]) {
    uint4& q = *reinterpret_cast<uint4*>(&out);
    q.x = pack_bf16(x[0], x[1]);
    q.y = pack_bf16(x[2], x[3]);
    q.z = pack_bf16(x[4], x[5]);
    q.w = pack_bf16(x[6], x[7]);
}

// The counterpart of load_floats.
template <int N, class T> DEVICE void store_floats(T* to, const float (&x)[N]) {
    constexpr int BYTES = N * (int)sizeof(T);
    static_assert(N == 1 || BYTES == 8 || BYTES % 16 == 0, "one element, 8 bytes, or whole vectors");
    if constexpr (N == 1) {
        to[0] = from_float<T>(x[0]);
    } else if constexpr (BYTES == 8) {
        static_assert(sizeof(T) == 2, "4 elements of 2 bytes");
        *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
    } else {
        constexpr int W = Vec<T>::N;
#pragma unroll
        for (int k = 0; k < N / W; k++) {
            float part[W];
#pragma unroll
            for (int i = 0; i < W; i++) part[i] = x[k * W + i];
            Vec<T> v;
            round_to(v, part);
            store(to + k * W, v);
        }
    }
}

// 2^x by the hardware: 2 units in the last place.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The same with results below 2^-126 as 0: spares the scaling that exp2_fast does for those. 0 for -inf.
DEVICE float exp2_flush(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1/x by the hardware, to 1 unit in the last place; what is below the smallest normal number becomes 0.
DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
constexpr float LOG2E = 1.4426950408889634f;

// The block's sum, in thread 0. Pairs at a fixed distance: the same order each time.
template <int THREADS> DEVICE void block_sum_f64(double& x, double* shared) {
    shared[threadIdx.x] = x;
    __syncthreads();
#pragma unroll
    for (int d = THREADS / 2; d > 0; d >>= 1) {
        if (threadIdx.x < d) shared[threadIdx.x] += shared[threadIdx.x + d];
        __syncthreads();
    }
    x = shared[0];
}
