// permute:     out[s] = inp[order[s] / K]
// permute_bwd: d_inp[n] (+)= Σ_j d_out[places[n,j]]
// combine:     out[n] = Σ_j weights[n,j]·rows[places[n,j]]
// combine_bwd: d_rows[places[n,j]] = weights[n,j]·d_out[n], d_weights[n,j] = d_out[n]·rows[places[n,j]]
// moves  (1 + K), (1 + K), (1 + K), (1 + 2K) times N·C·sizeof(ACT) bytes; bound: memory
// grid   a warp per row of the result; for combine_bwd, per token. With VECTORS in steps of 16 bytes (needs
//        C % (16 / sizeof(ACT)) == 0), else element by element; any shape
// order  j ascending in f32, rounded once; dot products lanes in order, then a butterfly: repeatable. A row of the result
//        that does not exist is a fault and counts as row 0 where it is read
#include "common/prelude.cuh"

constexpr int N = VECTORS ? Vec<ACT>::N : 1;
constexpr int WARPS = 8;
constexpr int AHEAD = 4;  // loads of a lane that are under way at once

DEVICE u32 lane() { return threadIdx.x % WARP; }
DEVICE u64 warp_index() { return (u64)blockIdx.x * WARPS + threadIdx.x / WARP; }

// places[at], checked.
DEVICE u64 row_at(const i32* places, u64 at, u32 routes, Fault* fault) {
    const i32 row = places[at];
    if ((u32)row < routes) return (u64)row;
    if (lane() == 0) report(fault, 5, row, (i32)at, (i32)routes);
    return 0;
}

DEVICE void load_piece(Vec<ACT>& to, const ACT* from) {
    if constexpr (N == 1) to.at[0] = from[0];
    else to = load(from);
}
DEVICE void store_piece(ACT* to, const Vec<ACT>& x) {
    if constexpr (N == 1) to[0] = x.at[0];
    else store(to, x);
}

KERNEL __launch_bounds__(WARPS* WARP)
    permute(ACT* out, const ACT* inp, const i32* order, Fault* fault, u32 routes, u32 k, u64 width) {
    const u64 row = warp_index();
    if (row >= routes) return;
    const u64 token = row_at(order, row, routes, fault) / k;
    const ACT* const from = inp + token * width;
    ACT* const to = out + row * width;
    constexpr u64 STEP = WARP * N;
    u64 c = lane() * N;
    for (; c + (AHEAD - 1) * STEP < width; c += AHEAD * STEP) {
        Vec<ACT> x[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) load_piece(x[a], from + c + a * STEP);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) store_piece(to + c + a * STEP, x[a]);
    }
    Vec<ACT> x[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD - 1; a++)
        if (c + a * STEP < width) load_piece(x[a], from + c + a * STEP);
#pragma unroll
    for (int a = 0; a < AHEAD - 1; a++)
        if (c + a * STEP < width) store_piece(to + c + a * STEP, x[a]);
}

// sum += Σ_j factor_j·rows[places_j] at columns c..c+N; a null `weights` is ones.
DEVICE void gather(float (&sum)[N], const ACT* rows, const i32* places, const float* weights, u64 first, u32 k, u32 routes,
                   u64 width, u64 c, Fault* fault) {
    for (u32 j = 0; j < k; j += AHEAD) {
        Vec<ACT> x[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (j + a < k) load_piece(x[a], rows + row_at(places, first + j + a, routes, fault) * width + c);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (j + a >= k) break;
            const float factor = weights ? weights[first + j + a] : 1.0f;
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] = __fmaf_rn(factor, to_float(x[a].at[i]), sum[i]);
        }
    }
}

KERNEL __launch_bounds__(WARPS* WARP, 4) permute_bwd(ACT* d_inp, const ACT* d_out, const i32* places, Fault* fault, u32 tokens,
                                                  u32 k, u64 width, u32 adds) {
    const u64 token = warp_index();
    if (token >= tokens) return;
    for (u64 c = lane() * N; c < width; c += WARP * N) {
        float sum[N] = {};
        if (adds) load_floats(sum, d_inp + token * width + c);
        gather(sum, d_out, places, nullptr, token * k, k, tokens * k, width, c, fault);
        store_floats(d_inp + token * width + c, sum);
    }
}

KERNEL __launch_bounds__(WARPS* WARP, 4) combine(ACT* out, const ACT* rows, const i32* places, const float* weights,
                                              Fault* fault, u32 tokens, u32 k, u64 width) {
    const u64 token = warp_index();
    if (token >= tokens) return;
    for (u64 c = lane() * N; c < width; c += WARP * N) {
        float sum[N] = {};
        gather(sum, rows, places, weights, token * k, k, tokens * k, width, c, fault);
        store_floats(out + token * width + c, sum);
    }
}

// `d_rows` may be `rows`: a lane reads what it then overwrites.
KERNEL __launch_bounds__(WARPS* WARP)
    combine_bwd(ACT* d_rows, float* d_weights, const ACT* d_out, const ACT* rows, const i32* places, const float* weights,
                Fault* fault, u32 tokens, u32 k, u64 width) {
    const u64 token = warp_index();
    if (token >= tokens) return;
    const ACT* const d = d_out + token * width;
    for (u32 j = 0; j < k; j += AHEAD) {
        float dot[AHEAD] = {}, weight[AHEAD];
        u64 start[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (j + a >= k) continue;
            start[a] = row_at(places, (u64)token * k + j + a, tokens * k, fault) * width;
            weight[a] = weights[(u64)token * k + j + a];
        }
        for (u64 c = lane() * N; c < width; c += WARP * N) {
            float x[N];
            load_floats(x, d + c);
            Vec<ACT> row[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (j + a < k) load_piece(row[a], rows + start[a] + c);
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (j + a >= k) continue;
                float y[N];
#pragma unroll
                for (int i = 0; i < N; i++) {
                    dot[a] = __fmaf_rn(x[i], to_float(row[a].at[i]), dot[a]);
                    y[i] = weight[a] * x[i];
                }
                store_floats(d_rows + start[a] + c, y);
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (j + a >= k) continue;
            const float sum = warp_sum(dot[a]);
            if (lane() == 0) d_weights[(u64)token * k + j + a] = sum;
        }
    }
}
