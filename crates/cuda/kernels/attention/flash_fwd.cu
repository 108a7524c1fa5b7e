// flash_fwd: out = softmax(scale*q.k^T).v and lse = log(sum(exp(scale*q.k^T))) on tensor cores: bf16, f16, or f32 as tf32
//
// moves  sizeof(ELEM)*B*T*(W + C) + 4*B*NH*T bytes at least, keys and values again per tile of queries (mostly from L2);
//        bound: tensor cores
// grid   one block per head and BM queries, 16*MT of them per warp, passing over tiles of BN keys that are copied while
//        the tile before is worked on; needs HD % 16 == 0 (f32: 32), HD <= 128, any lengths
// order  keys ascending in f32, weights rounded to the operands' type; no atomics: bitwise repeatable
//
// TERMS, where given, is the number of products of tf32 for one of f32 (attention/tile_f32.cuh); else ELEM is bf16 or f16.
//
// Positions beyond the last are zeros in shared memory, and no query sees keys there.
//
// With CACHED (and EAGER) queries are tokens of a step over a cache that has their keys and values already (attention/append.cu). A
// block per head and group of tokens takes the wide runs of the group one after the other (attention/places.cuh); the other tokens
// are left to attention/cached_split.cu.
#if defined(CACHED) && defined(WINDOWED)
#define MASKED
#endif
#ifdef TERMS
#include "attention/tile_f32.cuh"
#else
#include "attention/tile_half.cuh"
#endif

#include "attention/dropout.cuh"

constexpr int BM = 16 * MT * WARPS;
constexpr int BN = FWD_STAGE;

extern __shared__ uint4 shared[];

// s becomes power(scale2*(s - maximum)); the running maximum, sum and results follow. A lane's sum is of its own columns.
DEVICE void softmax(float (&s)[MT][BN / 8][4], float (&acc)[MT][HD / 8][4], float (&maximum)[MT][2],
                    float (&sum)[MT][2], float scale2) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = maximum[m][h];
#pragma unroll
            for (int n = 0; n < BN / 8; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            // In the engine without masks every query sees key 0, which is in the first tile; else 0 takes the place of -inf.
            float shift = (STRIDED || MASKS) && top == hidden() ? 0.0f : top * scale2;
            float shrink = power(fmaf(maximum[m][h], scale2, -shift));  // 0 as long as the maximum was -inf
            maximum[m][h] = top;
            float part = 0.0f;
#pragma unroll
            for (int n = 0; n < BN / 8; ++n)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) {
                    s[m][n][e] = power(fmaf(s[m][n][e], scale2, -shift));
                    part += s[m][n][e];
                }
            sum[m][h] = fmaf(sum[m][h], shrink, part);
#pragma unroll
            for (int n = 0; n < HD / 8; ++n) {
                acc[m][n][2 * h] *= shrink;
                acc[m][n][2 * h + 1] *= shrink;
            }
        }
}

// The running maximum is that of scores times a positive factor.
DEVICE void negate(float (&s)[MT][BN / 8][4]) {
#pragma unroll
    for (int i = 0; i < MT * BN / 2; ++i) s[i / (BN / 2)][i / 4 % (BN / 8)][i % 4] *= -1.0f;
}

// Hides keys that queries do not see; `query` is the first of the warp, `key` that of the tile.
DEVICE void mask(float (&s)[MT][BN / 8][4], const Shape& shape, int query, int key) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (shape.hides(key, 8 * n + column_of(e), query + 16 * m + row_of(e))) s[m][n][e] = hidden();
}

// Hides keys before those that queries attend to; `query` is the first of the warp, `key` that of the tile.
DEVICE void mask_before(float (&s)[MT][BN / 8][4], const Starts& starts, u32 query, u32 key) {
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
        u32 start = starts.of(query + 16 * (i / 2) + row_of(i % 2 * 2));
#pragma unroll
        for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int e = i % 2 * 2; e < i % 2 * 2 + 2; ++e)
                if (key + 8 * n + column_of(e) < start) s[i / 2][n][e] = hidden();
    }
}

DEVICE void forward(ELEM* out, float* lse, const Qkv<const ELEM>& in, const Shape& shape) {
    u8* tile_q = reinterpret_cast<u8*>(shared);
    u32 q = shared_address(tile_q), k = q + BM * PITCH, v = k + 2 * BN * PITCH;  // k and v: two stages each
    u32 q_len = shape.q_len(), kv_len = shape.kv_len(), tiles = (q_len + BM - 1) / BM;
    Work work = work_of(blockIdx.x, tiles, shape.total, shape.group);
    Head at = shape.head(work.head, HD);
    u32 first = (tiles - 1 - work.tile) * BM, row = threadIdx.x / WARP * 16 * MT;
    u32 passes = shape.passes(min(first + BM, q_len) - 1, BN);
    u32 begin = 0, least = 0, most = 0;  // the first tile of keys, the first keys of the warp's first and last query
    __shared__ Starts limits;  // for the passes, which have no registers left for it
    if constexpr (MASKS) {
        Starts starts = starts_of(shape, work.head);
        if (threadIdx.x == 0) limits = starts;
        begin = starts.of(first) / BN, least = starts.of(first + row), most = starts.of(first + row + 16 * MT - 1);
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) {
            u32 query = first + row + 16 * (i / 2) + row_of(i % 2 * 2);
            if (lane() % 4 == 0) check_query(shape, starts, work.head, query);
        }
    }
    load_tile<BM>(q, in.q(at), shape.q_stride(at), first, q_len);
    load_tile<BN>(k + begin % 2 * BN * PITCH, in.k(at), shape.k_stride(at), begin * BN, kv_len);
    load_tile<BN>(v + begin % 2 * BN * PITCH, in.v(at), shape.v_stride(at), begin * BN, kv_len);
    cp_commit();

    Rows<FWD_HELD> queries{q, row};
    queries.hold();
    float acc[MT][HD / 8][4] = {}, maximum[MT][2], sum[MT][2] = {};
#pragma unroll
    for (int m = 0; m < MT; ++m) maximum[m][0] = maximum[m][1] = hidden();
    for (u32 j = begin; j < passes; ++j) {
        cp_wait<0>();
        __syncthreads();  // tile j has arrived, and no thread reads tile j-1 any more: the next copies overwrite it
        u32 stage = j % 2 * BN * PITCH, other = BN * PITCH - stage, key = j * BN;
        if (j + 1 < passes) {
            load_tile<BN>(k + other, in.k(at), shape.k_stride(at), key + BN, kv_len);
            load_tile<BN>(v + other, in.v(at), shape.v_stride(at), key + BN, kv_len);
            cp_commit();
        }
        if (shape.sees_none(key, first + row + 16 * MT)) continue;  // no query of this warp sees these
        if (MASKS && key + BN <= least) continue;
        float s[MT][BN / 8][4] = {};
        scores<BN>(s, queries, k + stage, 0);
        if (STRIDED && shape.scale < 0.0f) negate(s);
        if (!shape.sees_all(key + BN, first + row)) mask(s, shape, first + row, key);
        if (MASKS && key < most) mask_before(s, limits, first + row, key);
        softmax(s, acc, maximum, sum, shape.steepness() * POWER);
        if constexpr (DROPS) drop<BN>(s, drops_of(shape), at.row + first + row, key);
        weighted<BN>(acc, s, v + stage, 0);
    }

    if constexpr (SHORT) {
        u32 block = blockIdx.x;
        asm volatile("" : "+r"(block));  // hidden from the compiler, which would otherwise keep derived values in registers
        at = shape.head(work_of(block, tiles, shape.total, shape.group).head, HD);
    }
    float factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float whole = sum[m][h] + __shfl_xor_sync(0xffffffffu, sum[m][h], 1);
            whole += __shfl_xor_sync(0xffffffffu, whole, 2);
            factor[m][h] = STRIDED && whole == 0.0f ? 0.0f : (DROPS ? drops_of(shape).keep : 1.0f) / whole;
            u32 query = first + row + 16 * m + row_of(2 * h);
            if (lane() % 4 != 0 || query >= q_len || (STRIDED && lse == nullptr)) continue;
            lse[at.row + query] = log_of_sum(whole, maximum[m][h], shape.steepness());
        }
    store_tile(out + at.out, shape.out_stride(at), first, q_len, acc, factor, tile_q, row);
}

#ifdef CACHED
#include "attention/places.cuh"

static_assert(BM == Places::GROUP, "a run has a row for each of its tokens");

// Grid: a block per head for each group of tokens, the last group, which sees the most keys, first.
KERNEL __launch_bounds__(THREADS, BLOCKS)
    flash_cached(ELEM* out, const ELEM* keys, const ELEM* values, const ELEM* qkv, const i32* rows, const i32* positions, u32 tokens,
                 u32 heads, u32 kv_heads, u32 context, u32 window, u32 sequences) {
    const Places places = {rows, positions, sequences, context};
    const u32 group = (gridDim.x - 1 - blockIdx.x) / heads * BM, end = min(group + BM, tokens);
    const u32 all = heads * HD, width = kv_heads * HD, packed = all + 2 * width;
    for (u32 token = group; token < end;) {
        const Run run = places.run_of(token, tokens);
        token = run.first + run.count;
        if (!run.wide()) continue;
        // Keys are counted from the first one that the first token attends to: what lies before it is not read.
        const u32 position = positions[run.first], begin = first_cached(position, window), before = position - begin;
        const u64 key = ((u64)rows[run.first] * context + begin) * width;
        Shape shape = {{0, HD, packed}, {0, HD, width}, {0, HD, width}, {0, HD, all}};
        shape.scale = shape.steep = 1.0f / sqrtf((float)HD);
        shape.lengths[0] = run.count;
        shape.lengths[1] = before + run.count;
        shape.shift = (int)before;
        shape.heads = heads;
        shape.kv_heads = kv_heads;
        shape.total = shape.group = gridDim.x;
#ifdef MASKED
        shape.mask.window = window - min(position, window - 1);  // how many of the run attend to that first key
#endif
        forward(out + (u64)run.first * all, nullptr, {qkv + (u64)run.first * packed, keys + key, values + key}, shape);
        __syncthreads();  // the next run's tiles take the place of this one's
    }
}
#else
KERNEL __launch_bounds__(THREADS, BLOCKS) flash_fwd(ELEM* out, float* lse, QKV_PARAMETERS, SHAPE_PARAMETERS) {
    forward(out, lse, QKV, SHAPE);
}
#endif
