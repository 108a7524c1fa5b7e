// NAME_fwd: out = f(inp) for each activation f of activation.cuh
// NAME_bwd: d_inp = d_out·f'(inp)
// add:      out = a + b
// moves  2, 3, 3 times n·sizeof(ACT) bytes; bound: memory
// grid   a thread per 16 bytes, the last one takes the rest; any n; in place is fine
// order  elementwise
#include "common/prelude.cuh"
#include "elementwise/activation.cuh"

constexpr int N = Vec<ACT>::N;
constexpr float ROOT = 0.7978845608028654f;
constexpr float CUBE = 0.044715f;

// 1/(1 + e^-z). The fast forms are accurate enough for bf16 results, not for f32.
DEVICE float logistic(float z) {
    if constexpr (sizeof(ACT) == 2) return __fdividef(1.0f, 1.0f + __expf(-z));
    return 1.0f / (1.0f + expf(-z));
}

// x·s(2u), u = √(2/π)·(x + 0.044715·x³), s the logistic function: the tanh form of GELU. Its slope is s + x·s·(1 - s)·2u'.
struct Gelu {
    static DEVICE float value(float x) { return x * logistic(2.0f * ROOT * (x + CUBE * x * x * x)); }

    static DEVICE float slope(float x) {
        const float z = 2.0f * ROOT * (x + CUBE * x * x * x);
        // From e^-|z|, so that s·(1 - s) loses no digits where s is near 1.
        const float t = sizeof(ACT) == 2 ? __expf(-fabsf(z)) : expf(-fabsf(z));
        const float p = sizeof(ACT) == 2 ? __fdividef(1.0f, 1.0f + t) : 1.0f / (1.0f + t);
        // Beyond 30 s·(1 - s) is 0; the bound keeps 0·∞ away.
        const float y = fminf(fmaxf(x, -30.0f), 30.0f);
        return (z < 0.0f ? t * p : p) + t * p * p * y * (2.0f * ROOT * (1.0f + 3.0f * CUBE * y * y));
    }
};

// Calls f(i, count) for this thread's stretch: count is N or, at the end, fewer.
template <class F> DEVICE void stretch(u64 n, F f) {
    const u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i < n) f(i, n - i < N ? (int)(n - i) : N);
}

template <class F> DEVICE void act_fwd(ACT* out, const ACT* inp, u64 n) {
    stretch(n, [=](u64 i, int count) {
        if (count == N) {
            float x[N];
            load_floats(x, inp + i);
#pragma unroll
            for (int k = 0; k < N; k++) x[k] = F::value(x[k]);
            store_floats(out + i, x);
        } else {
            for (int k = 0; k < count; k++) out[i + k] = from_float<ACT>(F::value(to_float(inp[i + k])));
        }
    });
}

template <class F> DEVICE void act_bwd(ACT* d_inp, const ACT* d_out, const ACT* inp, u64 n) {
    stretch(n, [=](u64 i, int count) {
        if (count == N) {
            float d[N], x[N];
            load_floats(d, d_out + i);
            load_floats(x, inp + i);
#pragma unroll
            for (int k = 0; k < N; k++) d[k] *= F::slope(x[k]);
            store_floats(d_inp + i, d);
        } else {
            for (int k = 0; k < count; k++)
                d_inp[i + k] = from_float<ACT>(to_float(d_out[i + k]) * F::slope(to_float(inp[i + k])));
        }
    });
}

#define ACTIVATION(NAME, F)                                                                     \
    KERNEL NAME##_fwd(ACT* out, const ACT* inp, u64 n) { act_fwd<F>(out, inp, n); }              \
    KERNEL NAME##_bwd(ACT* d_inp, const ACT* d_out, const ACT* inp, u64 n) { act_bwd<F>(d_inp, d_out, inp, n); }
ACTIVATIONS(ACTIVATION)

KERNEL add(ACT* out, const ACT* a, const ACT* b, u64 n) {
    stretch(n, [=](u64 i, int count) {
        if (count == N) {
            float x[N], y[N];
            load_floats(x, a + i);
            load_floats(y, b + i);
#pragma unroll
            for (int k = 0; k < N; k++) x[k] += y[k];
            store_floats(out + i, x);
        } else {
            for (int k = 0; k < count; k++) out[i + k] = from_float<ACT>(to_float(a[i + k]) + to_float(b[i + k]));
        }
    });
}
