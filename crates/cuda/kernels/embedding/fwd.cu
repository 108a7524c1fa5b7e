// embedding_fwd: out[b,t] = wte[tokens[b,t]] + wpe[first + t], first = 0 or the scalar `position`, or wpe[places[b,t]], with
//        both of tokens that continue sequences in a cache; wpe and places may be absent. With FACTOR, the bits of a float, there is no wpe and rows of wte are multiplied by it
// moves  3·B·T·C·sizeof(ACT) bytes at most; bound: memory
// grid   a warp per token; any width, whole vectors where C allows
// order  elementwise
#include "common/positions.cuh"

#ifdef FACTOR
DEVICE float scaled(float x) { return x * __uint_as_float(FACTOR); }
#else
DEVICE float scaled(float x) { return x; }
#endif

template <int N> DEVICE void add_row(ACT* out, const ACT* a, const ACT* b, u32 width) {
    for (u32 c = threadIdx.x % WARP * N; c < width; c += WARP * N) {
        float x[N], y[N] = {};
        if (b) load_floats(y, b + c);
        if (a) {
            load_floats(x, a + c);
#pragma unroll
            for (int k = 0; k < N; k++) y[k] += scaled(x[k]);
        }
        store_floats(out + c, y);
    }
}

// A token outside the vocabulary is reported; its row is the position's alone, or 0. A position beyond the table is read as
// the last one: the host refuses it; this only keeps reads in bounds.
KERNEL __launch_bounds__(256) embedding_fwd(ACT* out, const i32* tokens, const ACT* wte, const ACT* wpe,
                                            const i32* places, const Scalars* scalars, Fault* fault, u32 rows, u32 seq, u32 width,
                                            u32 vocab, u32 context, u32 at_position) {
    const u32 row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const u32 first = at_position ? scalars->position : 0;
    u32 position = min(min(first, context - 1) + row % seq, context - 1);
    if (places && at_position) {
        position = ::at_position(places[row], row, context, threadIdx.x % WARP == 0, fault);
    } else if (places) {
        const u32 t = row % seq;
        if (threadIdx.x % WARP == 0) check_position(places + (row - t), t, row - t, fault);
        position = min((u32)places[row], context - 1);
    }
    const i32 token = tokens[row];
    const bool known = (u32)token < vocab;
    if (!known && threadIdx.x % WARP == 0) report(fault, 1, token, (i32)row, (i32)vocab);
    const ACT* a = known ? wte + (u64)token * width : nullptr;
    const ACT* b = wpe ? wpe + (u64)position * width : nullptr;
    if (width % Vec<ACT>::N == 0)
        add_row<Vec<ACT>::N>(out + (u64)row * width, a, b, width);
    else
        add_row<1>(out + (u64)row * width, a, b, width);
}
