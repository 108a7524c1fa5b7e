// direct/map: y = f(x) and y = f(a, b), element by element, and the gradients
//
// moves  each array once; bound: memory
// grid   a thread per UNROLL vectors of 16 bytes that lie a block apart; where an array is not aligned to 16 bytes, or at
//        the end, single elements; any n
// order  elementwise; in place is fine
#include "direct.cuh"

constexpr int N = Vec<T>::N;
constexpr int UNROLL = 2;

// Calls f with the index of each element of this thread, vectors first loaded together.
template <int ARRAYS, class F> DEVICE void map(T* out, const T* const (&in)[ARRAYS], u64 n, u32 aligned, F f) {
    const u64 tile = (u64)blockDim.x * N * UNROLL, first = blockIdx.x * tile;
    if (aligned && first + tile <= n) {
        Vec<T> v[UNROLL][ARRAYS];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int a = 0; a < ARRAYS; a++) v[u][a] = load_once(in[a] + first + ((u64)u * blockDim.x + threadIdx.x) * N);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            Vec<T> y;
#pragma unroll
            for (int i = 0; i < N; i++) {
                Acc x[ARRAYS];
#pragma unroll
                for (int a = 0; a < ARRAYS; a++) x[a] = to_acc(v[u][a].at[i]);
                y.at[i] = from_acc<T>(f(x));
            }
            store_once(out + first + ((u64)u * blockDim.x + threadIdx.x) * N, y);
        }
        return;
    }
    const u64 end = min(n, first + tile);
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
        Acc x[ARRAYS];
#pragma unroll
        for (int a = 0; a < ARRAYS; a++) x[a] = to_acc(in[a][i]);
        out[i] = from_acc<T>(f(x));
    }
}

// 1/(1 + e^-x), and e^-|x|/(1 + e^-|x|)², which loses no digits where the first is near 1.
DEVICE Acc logistic(Acc x) { return Acc(1) / (Acc(1) + exp_of(-x)); }
DEVICE Acc logistic_grad(Acc x) {
    const Acc t = exp_of(-(x < 0 ? -x : x)), p = Acc(1) / (Acc(1) + t);
    return t * p * p;
}

DEVICE Acc silu(Acc x) { return x * logistic(x); }

#define UNARY(NAME, EXPR)                                                                       \
    KERNEL NAME(T* y, const T* x, u64 n, u32 aligned, double a) {                               \
        const T* const in[1] = {x};                                                             \
        const Acc k = (Acc)a;                                                                   \
        (void)k;                                                                                \
        map<1>(y, in, n, aligned, [=](const Acc(&v)[1]) { const Acc x = v[0]; return EXPR; });  \
    }
#define BINARY(NAME, EXPR)                                                                                         \
    KERNEL NAME(T* y, const T* a, const T* b, u64 n, u32 aligned) {                                                \
        const T* const in[2] = {a, b};                                                                             \
        map<2>(y, in, n, aligned, [=](const Acc(&v)[2]) { const Acc a = v[0], b = v[1]; return EXPR; });           \
    }

UNARY(scale, k * x)
UNARY(silu_fwd, silu(x))
UNARY(square, x * x)
BINARY(add, a + b)
BINARY(mul, a * b)
BINARY(swiglu, silu(a) * b)
