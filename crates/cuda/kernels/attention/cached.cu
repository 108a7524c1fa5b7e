// attention_cached: for each row and head softmax(q·Kᵀ/√HD)·V over the positions 0 to `position` (a scalar), with WINDOWED over
//                   the last `window` of them; the new key and value are stored at `position`
// moves  2·B·(position + 1)·NKV·HD·sizeof(ACT) bytes from memory, for the other heads that share them from L2; bound:
//        memory, or latency for few rows and heads
//        With PLACED rows are tokens of any sequences of the cache, whose keys and values attention/append.cu has stored
// grid   a block per row and head of queries. 8 lanes share a key, columns are split over threads, positions over groups; any head
//        width, whole vectors with VECTORS. Scores go through `scores` (B, NH, context)
// order  positions in a fixed stride per thread, then groups in order: repeatable
#include "attention/places.cuh"
#include "attention/starts.cuh"

constexpr int THREADS = 512;
constexpr int LANES = 8;                // that share a key
constexpr int KEYS = THREADS / LANES;   // at a time
constexpr int N = VECTORS ? Vec<ACT>::N : 1;

// The block's maximum or sum, for all threads.
template <bool MAX> DEVICE float block_all(float x, float* shared) {
    x = MAX ? warp_max(x) : warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int w = 1; w < THREADS / WARP; w++) x = MAX ? fmaxf(x, shared[w]) : x + shared[w];
    return x;
}

// Dynamic shared memory: the query as head_dim floats, rounded up to whole vectors, then THREADS·N floats. Two blocks a
// multiprocessor are asked for because the compiler alone aims at more, and spills registers to get there.
KERNEL __launch_bounds__(THREADS, 2)
    attention_cached(ACT* out, ACT* keys, ACT* values, const ACT* qkv, float* scores, const Scalars* scalars,
                     const i32* rows, const i32* positions, u32 heads, u32 kv_heads, u32 head_dim, u32 context, u32 window,
                     u32 sequences) {
    extern __shared__ float4 space[];
    __shared__ float totals[THREADS / WARP];
    float* const query = reinterpret_cast<float*>(space);
    float* const sums = query + (head_dim + 3) / 4 * 4;
    const u32 b = blockIdx.x / heads, h = blockIdx.x % heads, share = heads / kv_heads;
    const u32 width = kv_heads * head_dim, kv = h / share * head_dim;  // of the cache, and where this head's part begins
#ifdef PLACED
    const Places places = {rows, positions, sequences, context};
    if (!places.has(b)) {
        for (u32 d = threadIdx.x; d < head_dim; d += THREADS) out[(u64)blockIdx.x * head_dim + d] = from_float<ACT>(0.0f);
        return;
    }
    const u32 sequence = rows[b], position = positions[b];
    constexpr bool STORES = false;
#else
    const u32 sequence = b, position = min(scalars->position, context - 1);  // the host refuses more; this keeps accesses inside
    constexpr bool STORES = true;
#endif
    const u32 begin = first_cached(position, window);
    const ACT* const now = qkv + (u64)b * (heads * head_dim + 2 * width);
    const ACT* const q = now + h * head_dim;
    // The new key and value are read where they come from: another block may be storing them.
    const ACT* const new_key = now + heads * head_dim + kv;
    const ACT* const new_value = new_key + width;
    ACT* const key = keys + (u64)sequence * context * width + kv;
    ACT* const value = values + (u64)sequence * context * width + kv;
    float* const score = scores + (u64)blockIdx.x * context;
    for (u32 d = threadIdx.x; d < head_dim; d += THREADS) {
        query[d] = to_float(q[d]);
        if (STORES && h % share == 0) {
            key[(u64)position * width + d] = new_key[d];
            value[(u64)position * width + d] = new_value[d];
        }
    }
    __syncthreads();

    const float scale = 1.0f / sqrtf((float)head_dim);
    const u32 sub = threadIdx.x % LANES;
    float top = -3.4e38f;
    // Rounds are counted for the whole block: every lane takes part in each shuffle.
    for (u32 first = begin; first <= position; first += KEYS) {
        const u32 t = first + threadIdx.x / LANES;
        float dot = 0.0f;
        if (t <= position) {
            const ACT* const k = t == position ? new_key : key + (u64)t * width;
#if __CUDA_ARCH__ >= 1000  // the compiler alone takes more loads at a time than there are registers
#pragma unroll 4
#endif
            for (u32 d = sub * N; d < head_dim; d += LANES * N) {
                float x[N];
                load_floats(x, k + d);
#pragma unroll
                for (int e = 0; e < N; e++) dot = __fmaf_rn(query[d + e], x[e], dot);
            }
        }
        dot = warp_sum<LANES>(dot);
        if (t <= position) {
            dot *= scale;
            top = fmaxf(top, dot);
            if (sub == 0) score[t] = dot;
        }
    }
    top = block_all<true>(top, totals);  // its barriers make the scores visible too
    float sum = 0.0f;
    for (u32 t = begin + threadIdx.x; t <= position; t += THREADS) {
        const float p = expf(score[t] - top);
        score[t] = p;
        sum += p;
    }
    sum = block_all<false>(sum, totals);

    const u32 vectors = head_dim / N, across = min(vectors, (u32)THREADS), groups = THREADS / across;
    const u32 group = threadIdx.x / across;
    for (u32 base = 0; base < vectors; base += across) {
        const u32 v = base + threadIdx.x % across;
        float acc[N] = {};
        if (group < groups && v < vectors) {
#pragma unroll 4
            for (u32 t = begin + group; t <= position; t += groups) {
                float x[N];
                load_floats(x, (t == position ? new_value : value + (u64)t * width) + v * N);
                const float p = score[t];
#pragma unroll
                for (int e = 0; e < N; e++) acc[e] = __fmaf_rn(p, x[e], acc[e]);
            }
        }
#pragma unroll
        for (int e = 0; e < N; e++) sums[threadIdx.x * N + e] = acc[e];
        __syncthreads();
        // Element i of this stretch: vector i / N of it, so sums[(g·across)·N + i] over the groups.
        for (u32 i = threadIdx.x; i < across * N && base * N + i < head_dim; i += THREADS) {
            float total = 0.0f;
            for (u32 g = 0; g < groups; g++) total += sums[g * across * N + i];
            out[(u64)blockIdx.x * head_dim + base * N + i] = from_float<ACT>(total / sum);
        }
        __syncthreads();
    }
}
