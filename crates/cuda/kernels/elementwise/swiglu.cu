// swiglu_fwd: out (rows,F) = f(gate)·up; a row of inp is [gate | up]. f is silu(x) = x·s(x), s the logistic function; with GELU_GATE
//             it is the tanh form of GELU
// swiglu_bwd: d_gate = d_out·up·f'(gate), d_up = d_out·f(gate); act, if there is one, is the forward's result
// moves  3 and 5, with act 6, times rows·F·sizeof(ACT) bytes; bound: memory
// grid   a thread per vector of F with VECTORS (needs F % (16 / sizeof(ACT)) == 0), else per element; any shape
// order  elementwise; the gradient may be written over inp, act over d_out
#include "elementwise/swiglu.cuh"

#ifdef GELU_GATE
#include "elementwise/gelu.cuh"

DEVICE float gated(float gate, float up) { return Gelu::value(gate) * up; }
DEVICE Gate gate_of(float x) { return {Gelu::value(x), Gelu::slope(x)}; }
#else
DEVICE float gated(float gate, float up) { return swiglu<ACT>(gate, up); }
DEVICE Gate gate_of(float x) { return silu<ACT>(x); }
#endif

constexpr int N = VECTORS ? Vec<ACT>::N : 1;

// Calls f(element of the narrow row, element of its gate) for this thread's vector of `count`.
template <class F> DEVICE void each(u64 count, u64 width, F f) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, per_row = width / N;
    if (i >= count) return;
    const u64 row = count >> 32 ? i / per_row : (u32)i / (u32)per_row;  // the first is slow
    f(i * N, i * N + row * width);
}

KERNEL __launch_bounds__(256) swiglu_fwd(ACT* out, const ACT* inp, u64 count, u64 width) {
    each(count, width, [=](u64 at, u64 wide) {
        float gate[N], up[N], y[N];
        load_floats(gate, inp + wide);
        load_floats(up, inp + wide + width);
#pragma unroll
        for (int k = 0; k < N; k++) y[k] = gated(gate[k], up[k]);
        store_floats(out + at, y);
    });
}

KERNEL __launch_bounds__(256) swiglu_bwd(ACT* d_inp, ACT* act, const ACT* d_out, const ACT* inp, u64 count, u64 width) {
    each(count, width, [=](u64 at, u64 wide) {
        float d[N], gate[N], up[N], y[N];
        load_floats(d, d_out + at);
        load_floats(gate, inp + wide);
        load_floats(up, inp + wide + width);
#pragma unroll
        for (int k = 0; k < N; k++) y[k] = swiglu_back(gate_of(gate[k]), d[k], gate[k], up[k]);
        store_floats(d_inp + wide, gate);
        store_floats(d_inp + wide + width, up);
        if (act) store_floats(act + at, y);
    });
}
