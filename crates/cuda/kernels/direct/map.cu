// direct/map: y = f(x) and y = f(a, b), element by element, and the gradients
//
// moves  each array once; bound: memory. On a Hopper at its memory's speed an element of 2 bytes read and 2 written has time
//        for 27 instructions, hence the hardware's exp and division there: their error is far below such an element's
// grid   a thread per UNROLL vectors of 16 bytes that lie a block apart; where an array is not aligned to 16 bytes, or at
//        the end, single elements; any n
// order  elementwise; in place is fine
#include "direct.cuh"

constexpr int N = Vec<T>::N;
// Vectors of each array that a thread has in flight: `unroll` in src/direct/elementwise.rs.
template <int IN> constexpr int UNROLL = IN == 1 ? 4 : 2;

// Calls f(x, y) with the elements at each index of this thread; all its vectors are loaded first. An output may be null.
template <int IN, int OUT, class F>
DEVICE void map(T* const (&out)[OUT], const T* const (&in)[IN], u64 n, u32 aligned, F f) {
    constexpr int U = UNROLL<IN>;
    const u64 tile = (u64)blockDim.x * N * U, first = blockIdx.x * tile;
    if (aligned && first + tile <= n) {
        Vec<T> v[U][IN];
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int a = 0; a < IN; a++) v[u][a] = load_once(in[a] + first + ((u64)u * blockDim.x + threadIdx.x) * N);
#pragma unroll
        for (int u = 0; u < U; u++) {
            Vec<T> to[OUT];
#pragma unroll
            for (int i = 0; i < N; i++) {
                Acc x[IN], y[OUT];
#pragma unroll
                for (int a = 0; a < IN; a++) x[a] = to_acc(v[u][a].at[i]);
                f(x, y);
#pragma unroll
                for (int o = 0; o < OUT; o++) to[o].at[i] = from_acc<T>(y[o]);
            }
#pragma unroll
            for (int o = 0; o < OUT; o++)
                if (OUT == 1 || out[o]) store_once(out[o] + first + ((u64)u * blockDim.x + threadIdx.x) * N, to[o]);
        }
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
DEVICE float exp_in(float x) { return SHORT ? __expf(x) : expf(x); }
DEVICE double exp_in(double x) { return exp(x); }
DEVICE float divide(float a, float b) { return SHORT ? __fdividef(a, b) : a / b; }
DEVICE double divide(double a, double b) { return a / b; }
// 1 + erf(x), without the cancellation below 0 where there is time for that.
DEVICE float one_plus_erf(float x) { return SHORT ? 1.0f + erff(x) : erfcf(-x); }
DEVICE double one_plus_erf(double x) { return erfc(-x); }

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
DEVICE Acc gelu_of_tanh(Acc x) { return divide(x, Acc(1) + exp_in(-gelu_arg(x))); }
DEVICE Acc gelu_tanh_slope(Acc x) {
    constexpr Acc c = Acc(1.5957691216057308);
    const Logistic s = logistic(gelu_arg(x));
    const Acc inner = c * fma_of(Acc(3 * 0.044715) * x, x, Acc(1));
    return fma_of(x * s.slope, inner, s.value);
}

constexpr double SQRT_HALF = 0.7071067811865475244;
DEVICE Acc gelu_of_erf(Acc x) { return Acc(0.5) * x * one_plus_erf(x * Acc(SQRT_HALF)); }
DEVICE Acc gelu_erf_slope(Acc x) {
    const Acc density = Acc(0.39894228040143267794) * exp_in(Acc(-0.5) * x * x);  // 1 / √(2π)
    return fma_of(x, density, Acc(0.5) * one_plus_erf(x * Acc(SQRT_HALF)));
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
UNARY(gelu_tanh, gelu_of_tanh(x))
UNARY(gelu_erf, gelu_of_erf(x))
UNARY(square, x * x)
BINARY(add, a + b)
BINARY(mul, a * b)
BINARY(swiglu, silu(a) * b)
// a is d_y, b is x
BINARY(silu_bwd, a * silu_slope(b))
BINARY(gelu_tanh_bwd, a * gelu_tanh_slope(b))
BINARY(gelu_erf_bwd, a * gelu_erf_slope(b))
BINARY(square_bwd, a * (b + b))

// d_gate = d_y up silu'(gate), d_up = d_y silu(gate); either may be null
KERNEL swiglu_bwd(T* d_gate, T* d_up, const T* d_y, const T* gate, const T* up, u64 n, u32 aligned) {
    T* const out[2] = {d_gate, d_up};
    const T* const in[3] = {d_y, gate, up};
    map<3, 2>(out, in, n, aligned, [=](const Acc(&v)[3], Acc(&to)[2]) {
        to[0] = v[0] * v[2] * silu_slope(v[1]);
        to[1] = v[0] * silu(v[1]);
    });
}
