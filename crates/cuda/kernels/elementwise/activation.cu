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

// out = f(in...), element by element: 16 bytes to a thread, and to the last one the rest.
template <int IN, class F> DEVICE void map(ACT* out, const ACT* const (&in)[IN], u64 n, F f) {
    const u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (first >= n) return;
    const int count = n - first < N ? (int)(n - first) : N;
    if (count == N) {
        float x[IN][N], y[N];
#pragma unroll
        for (int a = 0; a < IN; a++) load_floats(x[a], in[a] + first);
#pragma unroll
        for (int k = 0; k < N; k++) y[k] = f([&](int a) { return x[a][k]; });
        store_floats(out + first, y);
    } else {
#pragma unroll 1
        for (int k = 0; k < count; k++) out[first + k] = from_float<ACT>(f([&](int a) { return to_float(in[a][first + k]); }));
    }
}

#define ACTIVATION(NAME, F)                                                                     \
    KERNEL NAME##_fwd(ACT* out, const ACT* inp, u64 n) {                                        \
        map<1>(out, {inp}, n, [](auto x) { return F::value(x(0)); });                           \
    }                                                                                           \
    KERNEL NAME##_bwd(ACT* d_inp, const ACT* d_out, const ACT* inp, u64 n) {                     \
        map<2>(d_inp, {d_out, inp}, n, [](auto x) { return x(0) * F::slope(x(1)); });           \
    }
ACTIVATIONS(ACTIVATION)

KERNEL add(ACT* out, const ACT* a, const ACT* b, u64 n) {
    map<2>(out, {a, b}, n, [](auto x) { return x(0) + x(1); });
}
