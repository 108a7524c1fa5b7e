// y = f(x) and y = f(a, b), element by element, and the gradients
//
// moves  each array once; bound: memory. On a Hopper at its memory's speed an element of 2 bytes read and 2 written has time
//        for 27 instructions, hence the hardware's exp and division there: their error is far below that of such an element
// grid   a thread per vector of 16 bytes; where an array is not aligned to 16 bytes, or at the end, single elements; any n
// order  elementwise; in place is fine
#include "common/unaligned.cuh"
#include "elementwise/activation.cuh"

constexpr int N = Vec<T>::N;

// Calls f(x, y) with the elements at each index of this thread; an output may be null. One vector of each array to a thread: many
// short-lived blocks are faster than few with more in flight (on an H200 0.1276 against 0.1320 ms with four, 8192² f32).
template <int IN, int OUT, class F>
DEVICE void map(T* const (&out)[OUT], const T* const (&in)[IN], u64 n, u32 aligned, F f) {
    const u64 tile = (u64)blockDim.x * N, first = blockIdx.x * tile;
    if (aligned && first + tile <= n) {
        const u64 at = first + (u64)threadIdx.x * N;
        Vec<T> v[IN], to[OUT];
#pragma unroll
        for (int a = 0; a < IN; a++) v[a] = load(in[a] + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            Acc x[IN], y[OUT];
#pragma unroll
            for (int a = 0; a < IN; a++) x[a] = to_acc(v[a].at[i]);
            f(x, y);
#pragma unroll
            for (int o = 0; o < OUT; o++) to[o].at[i] = from_acc<T>(y[o]);
        }
#pragma unroll
        for (int o = 0; o < OUT; o++)
            if (OUT == 1 || out[o]) put(out[o] + at, to[o]);
        return;
    }
    const u64 end = min(n, first + tile);
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
        Acc x[IN], y[OUT];
#pragma unroll
        for (int a = 0; a < IN; a++) x[a] = to_acc(in[a][i]);
        f(x, y);
#pragma unroll
        for (int o = 0; o < OUT; o++)
            if (OUT == 1 || out[o]) out[o][i] = from_acc<T>(y[o]);
    }
}

constexpr bool SHORT = sizeof(T) == 2;
DEVICE float exp_in(float x) { return SHORT ? exp2_flush(x * LOG2E) : expf(x); }
DEVICE double exp_in(double x) { return exp(x); }
DEVICE float divide(float a, float b) { return SHORT ? a * reciprocal_fast(b) : a / b; }
DEVICE double divide(double a, double b) { return a / b; }

// 1 / (1 + e^-x), and its slope s (1 - s) without the cancellation in 1 - s.
struct Logistic {
    Acc value, slope;
};
DEVICE Logistic logistic(Acc x) {
    const Acc t = exp_in(x < 0 ? x : -x), p = divide(Acc(1), Acc(1) + t);
    return {x < 0 ? t * p : p, t * p * p};
}

// Infinities give what PyTorch gives: silu(-inf) is -inf / inf.
DEVICE Acc silu(Acc x) { return divide(x, Acc(1) + exp_in(-x)); }
DEVICE Acc silu_slope(Acc x) {
    const Logistic s = logistic(x);
    return fma_of(x, s.slope, s.value);
}

// (1 + tanh(u)) / 2 = 1 / (1 + e^-2u); this is 2u.
DEVICE Acc gelu_arg(Acc x) {
    constexpr Acc c = Acc(1.5957691216057308);  // 2 √(2/π)
    return c * fma_of(Acc(0.044715) * x * x, x, x);
}
struct Gelu {
    static DEVICE Acc value(Acc x) { return divide(x, Acc(1) + exp_in(-gelu_arg(x))); }

    static DEVICE Acc slope(Acc x) {
        constexpr Acc c = Acc(1.5957691216057308);
        const Logistic s = logistic(gelu_arg(x));
        const Acc inner = c * fma_of(Acc(3 * 0.044715) * x, x, Acc(1));
        return fma_of(x * s.slope, inner, s.value);
    }
};

// 2Φ(x) = 1 + erf(x / √2) and e^(-x²/2).
//
// For floats e^(y²) erfc(y) = t P(t) with t = 1 / (1 + p y), a minimax fit of the relative error: 6e-8 up to y = 9.5 where
// elements have 4 bytes, 8e-6 up to y = 4 where they have 2. The tail on the left keeps its digits, both gradients share
// one exp, and it takes half the instructions of erfcf, which would be slower than memory.
struct Normal {
    Acc twice, bell;
};
DEVICE Normal normal(Acc x) {
    if constexpr (sizeof(Acc) == 8) {
        return {Acc(erfc(x * Acc(-0.7071067811865475244))), exp_in(Acc(-0.5) * x * x)};
    } else {
        constexpr float LONG_P[] = {0.22562630f, 0.22657564f,  0.20095909f,  0.19696102f, 0.071513124f,
                                    0.09972248f, 0.073848441f, -0.13547418f, 0.040268138f};
        constexpr float SHORT_P[] = {0.27704808f, 0.33243796f, 0.051874112f, 0.53418237f, -0.19553615f};
        constexpr float P_LONG = 0.28284271f, P_SHORT = 0.35355339f;  // 0.4 / √2 and 0.5 / √2
        constexpr int DEGREE = SHORT ? 4 : 8;
        const float t = reciprocal_fast(__fmaf_rn(SHORT ? P_SHORT : P_LONG, fabsf((float)x), 1.0f));
        float sum = SHORT ? SHORT_P[4] : LONG_P[8];
#pragma unroll
        for (int i = DEGREE - 1; i >= 0; i--) sum = __fmaf_rn(sum, t, SHORT ? SHORT_P[i % 5] : LONG_P[i]);
        const Acc bell = exp_in(Acc(-0.5) * x * x), tail = Acc(sum * t) * bell;
        return {x < 0 ? tail : Acc(2) - tail, bell};
    }
}
DEVICE Acc gelu_of_erf(Acc x) { return Acc(0.5) * x * normal(x).twice; }
DEVICE Acc gelu_erf_slope(Acc x) {
    const Normal p = normal(x);
    return fma_of(x * p.bell, Acc(0.39894228040143267794), Acc(0.5) * p.twice);  // 1 / √(2π)
}

#define UNARY(NAME, EXPR)                                                                           \
    KERNEL NAME(T* y, const T* x, u64 n, u32 aligned, double a) {                                   \
        T* const out[1] = {y};                                                                      \
        const T* const in[1] = {x};                                                                 \
        const Acc k = (Acc)a;                                                                       \
        (void)k;                                                                                    \
        map<1, 1>(out, in, n, aligned, [=](const Acc(&v)[1], Acc(&to)[1]) {                         \
            const Acc x = v[0];                                                                     \
            to[0] = EXPR;                                                                           \
        });                                                                                         \
    }
#define BINARY(NAME, EXPR)                                                                          \
    KERNEL NAME(T* y, const T* a, const T* b, u64 n, u32 aligned) {                                 \
        T* const out[1] = {y};                                                                      \
        const T* const in[2] = {a, b};                                                              \
        map<2, 1>(out, in, n, aligned, [=](const Acc(&v)[2], Acc(&to)[1]) {                         \
            const Acc a = v[0], b = v[1];                                                           \
            to[0] = EXPR;                                                                           \
        });                                                                                         \
    }

UNARY(scale, k * x)
UNARY(silu_fwd, silu(x))
UNARY(gelu_erf, gelu_of_erf(x))
UNARY(square, x * x)
BINARY(add, a + b)
BINARY(mul, a * b)
BINARY(swiglu, silu(a) * b)
// a is d_y, b is x
BINARY(silu_bwd, a * silu_slope(b))
BINARY(gelu_erf_bwd, a * gelu_erf_slope(b))
BINARY(square_bwd, a * (b + b))

#define ACTIVATION(NAME, F)            \
    UNARY(NAME##_fwd, F::value(x))     \
    BINARY(NAME##_bwd, a * F::slope(b))
ACTIVATIONS(ACTIVATION)

// d_gate = d_y up silu'(gate), d_up = d_y silu(gate); either may be null
KERNEL swiglu_bwd(T* d_gate, T* d_up, const T* d_y, const T* gate, const T* up, u64 n, u32 aligned) {
    T* const out[2] = {d_gate, d_up};
    const T* const in[3] = {d_y, gate, up};
    map<3, 2>(out, in, n, aligned, [=](const Acc(&v)[3], Acc(&to)[2]) {
        to[0] = v[0] * v[2] * silu_slope(v[1]);
        to[1] = v[0] * silu(v[1]);
    });
}
