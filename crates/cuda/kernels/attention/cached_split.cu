// attention_cached_split: attention_cached (attention/cached.cu) with the positions of a head split over blocks
// moves  2·B·(position + 1)·NKV·HD·sizeof(ACT) bytes from memory, for the other heads that share them from L2; bound: memory,
//        or latency at few positions
//        With PLACED as there. With RUNS too, tokens of wide runs are left to flash_cached (attention/flash_fwd.cu)
// grid   `splits` blocks per row and head of queries. A block takes every splits-th span of SPAN positions; one without positions
//        returns at once. 8 lanes share a key. Keys and values of a block's first span are read before the kernel ahead has
//        ended. HEAD_DIM is a multiple of one vector for each of the 8 lanes
//        With CLUSTER, which is `splits` then, the blocks of a head are a cluster and leave their parts in the shared memory of the
//        first one; else they leave them in memory, for the block that ends last
//        With RUNS there may be fewer blocks, each of which takes several of these one after the other: of prompts most have
//        nothing to do, and starting a block for that takes longer
// order  positions in a fixed stride per warp, warps in order, then blocks in order: repeatable, and the same either way
#include "attention/places.cuh"
#include "attention/starts.cuh"
#include "common/arch.cuh"
#include "common/chain.cuh"
#include "common/cluster.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int LANES = 8;                             // that share a key
constexpr int N = Vec<ACT>::N;
constexpr int PARTS = HEAD_DIM / (LANES * N);        // vectors of a lane
constexpr int PASSES = PARTS >= 4 ? 1 : 4 / PARTS;   // keys of a lane
constexpr int KEYS = THREADS / LANES;                // at a time
constexpr int SPAN = KEYS * PASSES;
static_assert(HEAD_DIM % (LANES * N) == 0 && PARTS <= 4 && HEAD_DIM <= THREADS, "whole vectors, a thread per column");
constexpr float LOWEST = -3.4e38f;
#ifdef PLACED
constexpr bool STORES = false;  // attention/append.cu has
#else
constexpr bool STORES = true;
#endif
#ifdef RUNS
constexpr bool AGAIN = true;  // a block takes the work of several
#else
constexpr bool AGAIN = false;
#endif
// Without stores the compiler takes keys and values apart where they are loaded, and keeps every bf16 in a register of its own.
constexpr bool PACKED = !STORES && sizeof(ACT) == 2;

// The softmax over some of the positions: the largest score, the sum of exponentials, and one column of their product with the
// values.
struct Piece {
    float top, sum, value;
    DEVICE void add(float other_top, float other_sum, float other_value) {
        const float larger = fmaxf(top, other_top);
        const float mine = expf(top - larger), theirs = expf(other_top - larger);
        sum = sum * mine + other_sum * theirs;
        value = value * mine + other_value * theirs;
        top = larger;
    }
};

// Takes no instruction: what is known of the words ends here, so that their elements are taken out behind it.
DEVICE void keep_packed(Vec<ACT>& x) {
    uint4& words = reinterpret_cast<uint4&>(x);
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

constexpr u32 PART = HEAD_DIM + 2;  // floats that a block leaves: a value for each column, the largest score, the sum

#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
// All pieces in the first block of the cluster, added in the order of the blocks; whether this is that block. All blocks have called
// cluster_arrive once.
DEVICE bool join(Piece& piece, u32 split, u32 active, u32 c) {
    __shared__ __align__(8) float parts[CLUSTER][PART];
    cluster_wait();  // all blocks have started
    if (split > 0) {
        if (c < HEAD_DIM) store_there(shared_address_in(0, &parts[split][c]), piece.value);
        if (c == 0) store_there(shared_address_in(0, &parts[split][HEAD_DIM]), piece.top, piece.sum);
    }
    cluster_arrive();
    if (split > 0) return false;
    cluster_wait();
    if (c < HEAD_DIM) {
        for (u32 s = 1; s < active; s++) piece.add(parts[s][HEAD_DIM], parts[s][HEAD_DIM + 1], parts[s][c]);
    }
    return true;
}
#else
// All pieces in the block of these that ends last, added in the order of the blocks; whether this is that block.
DEVICE bool join(Piece& piece, u32 split, u32 active, u32 c, float* parts, u32* ended) {
    __shared__ u32 before;
    float* const mine = parts + split * PART;
    if (c < HEAD_DIM) mine[c] = piece.value;
    if (c == 0) {
        mine[HEAD_DIM] = piece.top;
        mine[HEAD_DIM + 1] = piece.sum;
    }
    __threadfence();
    __syncthreads();
    if (c == 0) before = atomicAdd(ended, 1u);
    __syncthreads();
    if (before != active - 1) return false;
    __threadfence();
    if (c == 0) *ended = 0;
    piece = {LOWEST, 0.0f, 0.0f};
    if (c < HEAD_DIM) {
        for (u32 s = 0; s < active; s++) {
            const float* const other = parts + s * PART;
            piece.add(__ldcg(other + HEAD_DIM), __ldcg(other + HEAD_DIM + 1), __ldcg(other + c));
        }
    }
    return true;
}
#endif

// `partials` is (B·NH, splits, PART); `ended` is (B·NH), zero before and after. Neither is used with CLUSTER.
KERNEL CLUSTERED __launch_bounds__(THREADS, PARTS == 1 && (STORES || PACKED) && !(AGAIN && MAJOR >= 10) ? 3 : 2)
    attention_cached_split(ACT* out, ACT* keys, ACT* values, const ACT* qkv, float* partials, u32* ended, const Scalars* scalars,
                           const i32* cache_rows, const i32* positions, u32 heads, u32 kv_heads, u32 context, u32 rows, u32 splits,
                           u32 window, u32 sequences) {
    __shared__ float tops[WARPS], totals[WARPS], columns[WARPS][HEAD_DIM];
    start_next();
    cluster_arrive();
#ifdef PLACED
    wait_for_previous();  // it has stored keys and values of this step
#endif
    u32 item = blockIdx.x;
    do {
        if (AGAIN) __syncthreads();  // no thread reads shared memory any more
        const u32 row = CLUSTER > 1 ? item / splits : item % rows;  // of B·NH
        const u32 split = CLUSTER > 1 ? item % splits : item / rows;  // of its blocks; the first span
        const u32 b = row / heads, h = row % heads, share = heads / kv_heads;
        const u32 width = kv_heads * HEAD_DIM, kv = h / share * HEAD_DIM;  // of the cache, and where this head's part begins
#ifdef PLACED
        const Places places = {cache_rows, positions, sequences, context};
        if (AGAIN && places.run_of(b, rows / heads).wide()) continue;
        if (!places.has(b)) {
            if (split == 0 && threadIdx.x < HEAD_DIM) out[(u64)row * HEAD_DIM + threadIdx.x] = from_float<ACT>(0.0f);
            continue;
        }
        const u32 sequence = cache_rows[b], position = positions[b];
#else
        const u32 sequence = b, position = min(scalars->position, context - 1);  // the host refuses more; this keeps accesses inside
#endif
        const u32 begin = first_cached(position, window);
        const u32 first_span = begin / SPAN, spans = position / SPAN + 1, active = min(splits, spans - first_span);
        if (split >= active) continue;
        ACT* const key = keys + (u64)sequence * context * width + kv;
        ACT* const value = values + (u64)sequence * context * width + kv;
        const u32 sub = threadIdx.x % LANES, group = threadIdx.x / LANES;
        Vec<ACT> k[PASSES][PARTS], v[PASSES][PARTS];
        const auto fetch = [&](u32 span) {
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                const u32 t = span * SPAN + i * KEYS + group;
                if (t >= position || t < begin) continue;
#pragma unroll
                for (int j = 0; j < PARTS; j++) {
                    k[i][j] = load(key + (u64)t * width + (j * LANES + sub) * N);
                    v[i][j] = load(value + (u64)t * width + (j * LANES + sub) * N);
                }
            }
        };
        fetch(first_span + split);

#ifndef PLACED
        wait_for_previous();
#endif
        const ACT* const now = qkv + (u64)b * (heads * HEAD_DIM + 2 * width);
        const ACT* const new_key = now + heads * HEAD_DIM + kv;
        const ACT* const new_value = new_key + width;
        Vec<ACT> q[PARTS];
#pragma unroll
        for (int j = 0; j < PARTS; j++) q[j] = load(now + h * HEAD_DIM + (j * LANES + sub) * N);
        const float scale = 1.0f / sqrtf((float)HEAD_DIM);
        float top = LOWEST, sum = 0.0f, acc[PARTS][N] = {};
        for (u32 span = first_span + split; span < spans; span += splits) {
            if (span != first_span + split) fetch(span);
            if constexpr (PACKED) {
#pragma unroll
                for (int i = 0; i < PASSES * PARTS; i++) {
                    keep_packed(k[i / PARTS][i % PARTS]);
                    keep_packed(v[i / PARTS][i % PARTS]);
                }
            }
            float score[PASSES], largest = top;
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                const u32 t = span * SPAN + i * KEYS + group;
                if (t == position) {  // only one group of one block of a head; of the heads that share the key, the first stores it
#pragma unroll
                    for (int j = 0; j < PARTS; j++) {
                        const u32 c = (j * LANES + sub) * N;
                        k[i][j] = load(new_key + c);
                        v[i][j] = load(new_value + c);
                        if (STORES && h % share == 0) {
                            store(key + (u64)t * width + c, k[i][j]);
                            store(value + (u64)t * width + c, v[i][j]);
                        }
                    }
                }
                float dot = 0.0f;
                const bool reached = t <= position && t >= begin;
                if (reached) {
#pragma unroll
                    for (int j = 0; j < PARTS; j++)
#pragma unroll
                        for (int e = 0; e < N; e++) dot = __fmaf_rn(to_float(q[j].at[e]), to_float(k[i][j].at[e]), dot);
                }
                dot = warp_sum<LANES>(dot);
                score[i] = reached ? dot * scale : LOWEST;
                largest = fmaxf(largest, score[i]);
            }
#pragma unroll
            for (int d = LANES; d < WARP; d <<= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
            const float fade = expf(top - largest);
            top = largest;
            sum *= fade;
#pragma unroll
            for (int j = 0; j < PARTS; j++)
#pragma unroll
                for (int e = 0; e < N; e++) acc[j][e] *= fade;
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                const u32 t = span * SPAN + i * KEYS + group;
                if (t > position || t < begin) continue;
                const float p = expf(score[i] - top);
                sum += p;
#pragma unroll
                for (int j = 0; j < PARTS; j++)
#pragma unroll
                    for (int e = 0; e < N; e++) acc[j][e] = __fmaf_rn(p, to_float(v[i][j].at[e]), acc[j][e]);
            }
        }

        // Add up the groups of each warp, then the warps.
        const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
        for (int d = LANES; d < WARP; d <<= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, d);
#pragma unroll
            for (int j = 0; j < PARTS; j++)
#pragma unroll
                for (int e = 0; e < N; e++) acc[j][e] += __shfl_xor_sync(0xffffffffu, acc[j][e], d);
        }
        if (lane < LANES) {
#pragma unroll
            for (int j = 0; j < PARTS; j++)
#pragma unroll
                for (int e = 0; e < N; e++) columns[warp][(j * LANES + sub) * N + e] = acc[j][e];
        }
        if (lane == 0) {
            tops[warp] = top;
            totals[warp] = sum;
        }
        __syncthreads();
        const u32 c = threadIdx.x;
        Piece piece = {LOWEST, 0.0f, 0.0f};
        if (c < HEAD_DIM) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) piece.add(tops[w], totals[w], columns[w][c]);
        }
#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
        if (active > 1 && !join(piece, split, active, c)) continue;
#else
        if (active > 1 && !join(piece, split, active, c, partials + (u64)row * splits * PART, &ended[row])) continue;
#endif
        if (c < HEAD_DIM) out[(u64)row * HEAD_DIM + c] = from_float<ACT>(piece.value / piece.sum);
    } while (AGAIN && (item += gridDim.x) < rows * splits);
}
