// NAME_fwd: out = f(inp) for each activation f of activation.cuh
// NAME_bwd: d_inp = d_out·f'(inp)
// add:      out = a + b
// moves  2, 3, 3 times n·sizeof(ACT) bytes; bound: memory
// grid   a thread per 16 bytes, the last one takes the rest; any n; in place is fine
// order  elementwise
#include "common/prelude.cuh"
#include "elementwise/activation.cuh"
#include "elementwise/gelu.cuh"

constexpr int N = Vec<ACT>::N;

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
