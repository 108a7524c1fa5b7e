// flash_bwd: gradients of flash_fwd from q, k, v, d_out, lse and delta = sum(d_out*out), on tensor cores
//
//   p = exp(scale*q.k - lse), ds = p*(d_out.v - delta), d_q = scale*ds.k, d_k = scale*ds^T.q, d_v = p^T.d_out
//
// With DROPOUT, f is 0 for dropped probabilities and else `keep`: ds = p*(f*d_out.v - delta), d_v = (f*p)^T.d_out.
//
// moves  sizeof(ELEM)*B*T*(2*W + C) + 8*B*NH*T bytes at least, passing tiles again per block (mostly from L2); bound:
//        tensor cores
// grid   flash_bwd_kv: one block per head of keys and BM keys, passing over the queries of all heads that see them;
//        flash_bwd_q: the same per BM queries over the keys they see. Each makes p and ds anew: 7 products where 5 would
//        do, but every sum stays in the registers of one warp. Needs HD % 16 == 0 (f32: 32), HD <= 128, any lengths
// order  passing positions ascending in f32, head of queries by head; p and ds rounded as operands; no atomics: bitwise
//        repeatable
//
// In f32 and tf32 flash_bwd_q runs first and corrects delta. The sum of d_k over the keys, which is the gradient of a bias of the
// keys, is zero because the ds of each query add up to zero; AdamW would turn a rounding error there into full steps. That sum of
// ds is the rounding error of delta (the p of a query add up to 1), so it is added to delta.
//
// Positions beyond the last are zeros in shared memory, lse and delta too: queries there add nothing, and no query sees
// keys there.
//
// TERMS, where given, is the number of products of tf32 for one of f32 (attention/tile_f32.cuh); else ELEM is bf16 or f16.
#ifdef TERMS
#include "attention/tile_f32.cuh"
#else
#include "attention/tile_half.cuh"
#endif

#include "attention/dropout.cuh"

constexpr int BM = 16 * MT * WARPS;
constexpr int BN = BWD_STAGE;  // streamed positions per stage
constexpr int CN = BWD_PART;   // of them computed at a time

extern __shared__ uint4 shared[];

// lse times POWER and delta of the queries: per row where rows are queries, per column of a stage where columns are.
template <bool KEYS> struct Stats {
    float lse[MT][2], delta[MT][2];
    const float* stage;  // lse of the BN streamed queries, then delta

    DEVICE float lse_of(int m, int h, int column) const { return KEYS ? stage[column] * POWER : lse[m][h]; }
    DEVICE float delta_of(int m, int h, int column) const { return KEYS ? stage[BN + column] : delta[m][h]; }
};

// Calls f(m, n, e, row, column) for every score a lane holds; `row` and `column` are positions, the first score's given.
template <class F> DEVICE void each(int row, int column, F f) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < CN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) f(m, n, e, row + 16 * m + row_of(e), column + 8 * n + column_of(e));
}

// p = power(s*scale2 - lse), in the place of s; 0 for keys the query does not see. `c` is the first column in its stage.
template <bool KEYS>
DEVICE void weights(float (&s)[MT][CN / 8][4], const Stats<KEYS>& stats, const Shape& shape, int c, int row, int column) {
    float scale2 = shape.scale * POWER;
    each(row, c, [&](int m, int n, int e, int, int at) {
        s[m][n][e] = power(fmaf(s[m][n][e], scale2, -stats.lse_of(m, e / 2, at)));
    });
    if (KEYS ? shape.sees(column) >= row + 16 * MT : shape.sees(row) >= column + CN) return;
    each(row, column, [&](int m, int n, int e, int r, int col) {
        if (KEYS ? shape.hides(0, r, col) : shape.hides(0, col, r)) s[m][n][e] = 0.0f;
    });
}

// The first keys of the streamed queries, two stages. A place that the compiler knows: an address would take registers.
__shared__ u32 first_keys[2 * BN];

// The first keys of the queries: per row where rows are queries, per column of a stage where columns are. `c` is the first column in
// its stage.
template <bool KEYS> struct Before {
    u32 from[MT][2], least, most;  // of a lane's rows, of the warp's first and last row
    u32 stage;                     // where those of the streamed queries begin

    DEVICE void set(const Starts& starts, u32 row) {
        if constexpr (KEYS) return;
        least = starts.of(row), most = starts.of(row + 16 * MT - 1);
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) from[i / 2][i % 2] = starts.of(row + 16 * (i / 2) + row_of(i % 2 * 2));
    }
    DEVICE u32 start_of(int m, int h, int column) const { return KEYS ? first_keys[stage + column] : from[m][h]; }
    // Whether no query of a part attends to one of its keys.
    DEVICE bool none(u32 row, u32 column, int c) const { return KEYS ? first_keys[stage + c] >= row + 16 * MT : column + CN <= least; }
    // p of keys before those that their query attends to becomes 0.
    DEVICE void hide(float (&p)[MT][CN / 8][4], int row, int column, int c) const {
        if (KEYS ? first_keys[stage + c + CN - 1] <= row : most <= column) return;
        each(0, 0, [&](int m, int n, int e, int r, int col) {
            if ((u32)(KEYS ? row + r : column + col) < start_of(m, e / 2, c + col)) p[m][n][e] = 0.0f;
        });
    }
    // The softmax of one key is constant, its gradient exactly 0.
    DEVICE void single(float (&ds)[MT][CN / 8][4], int row, int column, int c) const {
        if (column >= row + 16 * MT || row >= column + CN) return;  // no query is at its own key
        each(0, 0, [&](int m, int n, int e, int r, int col) {
            if (start_of(m, e / 2, c + col) == (u32)(KEYS ? column + col : row + r)) ds[m][n][e] = 0.0f;
        });
    }
};

// ds = p*(dp - delta), in the place of dp.
template <bool KEYS>
DEVICE void slopes(float (&dp)[MT][CN / 8][4], const float (&p)[MT][CN / 8][4], const Stats<KEYS>& stats, const Shape& shape,
                   int c, int row, int column) {
    each(row, c, [&](int m, int n, int e, int, int at) {
        dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - stats.delta_of(m, e / 2, at));
    });
    if (MASKS) return;  // Before::single follows
    // Only a query that sees a single key goes on. Not a call in the engine: the compiler makes longer code of it.
    if (STRIDED ? shape.sees(KEYS ? column : row) > 1 : (KEYS ? column : row) != 0) return;
    // The softmax of one key is constant, its gradient exactly 0.
    each(row, column, [&](int m, int n, int e, int r, int col) {
        if (shape.sees_one(KEYS ? col : r)) dp[m][n][e] = 0.0f;
    });
}

// The score e of (m, n), or 0 where its bit of `mask` is not set.
DEVICE float masked(const float (&x)[MT][CN / 8][4], u32 mask, int m, int n, int e) {
    return mask >> (4 * (m * (CN / 8) + n) + e) & 1 ? x[m][n][e] : 0.0f;
}

// sum += ds of each row
DEVICE void add_rows(float (&sum)[MT][2], const float (&ds)[MT][CN / 8][4]) {
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < CN / 8; ++n) part += ds[i / 2][n][i % 2 * 2] + ds[i / 2][n][i % 2 * 2 + 1];
        sum[i / 2][i % 2] += part;
    }
}

// Rows are keys (KEYS) or queries, resident as tiles a1 (k or q) and a2 (v or d_out); columns are the others, streamed as
// b1 (q or k) and b2 (d_out or v).
template <bool KEYS> DEVICE void backward(const Backward<float>& op) {
    constexpr u32 STAGE = 2 * BN * PITCH;  // b1, then b2
    u8* tile = reinterpret_cast<u8*>(shared);
    u32 a1 = shared_address(tile), a2 = a1 + BM * PITCH, b = a2 + BM * PITCH;
    const Shape& shape = op.shape;
    u32 q_len = shape.q_len(), kv_len = shape.kv_len(), own = KEYS ? kv_len : q_len;
    float* columns = reinterpret_cast<float*>(tile + 2 * BM * PITCH + 2 * STAGE);  // lse and delta, two stages
    u32 tiles = (own + BM - 1) / BM;
    Work work = work_of(blockIdx.x, tiles, shape.total, shape.group);
    u32 share = KEYS ? shape.heads / shape.kv_heads : 1;  // heads of queries to pass over
    Head at = shape.head(work.head * share, HD);
    u32 first = (KEYS ? work.tile : tiles - 1 - work.tile) * BM, row = threadIdx.x / WARP * 16 * MT;
    __shared__ Head place;  // what the passes need of `at`: the sums leave no registers for it
    if (threadIdx.x == 0) place = at;
    // Stage i of the streamed positions: tile i % length of them, of head i / length among those that share keys.
    u32 start = KEYS ? shape.first_for(first) / BN : 0;
    u32 end = KEYS ? (q_len + BN - 1) / BN : shape.passes(min(first + BM, q_len) - 1, BN), length = end - start;
    __shared__ Starts limits;  // what passes need of them
    Before<KEYS> before;
    if constexpr (MASKS) {
        Starts starts = starts_of(shape, work.head * share);
        if (threadIdx.x == 0) limits = starts;
        before.set(starts, first + row);
        if constexpr (KEYS) {
            end = start + tiles_until<THREADS>(starts, start, end, BN, first + BM);
        } else {
            start = starts.of(first) / BN;
        }
        length = end - start;
    }
    if (STRIDED && KEYS && start > end) length = 0;
    auto pass = [&](const Head& at, u32 i) {
        u32 to = b + i % 2 * STAGE, head = KEYS ? i / length : 0, j = start + i - head * length;
        const ELEM *q = op.in.q(at) + head * shape.q_head(HD), *k = op.in.k(at), *v = op.in.v(at);
        const ELEM* d_out = op.d_out + at.out + head * shape.out_head(HD);
        u32 length = KEYS ? q_len : kv_len;
        load_tile<BN>(to, KEYS ? q : k, KEYS ? shape.q_stride(at) : shape.k_stride(at), j * BN, length);
        load_tile<BN>(to + BN * PITCH, KEYS ? d_out : v, KEYS ? shape.out_stride(at) : shape.v_stride(at), j * BN, length);
        if constexpr (KEYS) {
            static_assert(THREADS >= 2 * BN, "one thread per lse and delta");
            u32 query = j * BN + threadIdx.x % BN;
            const float* from = (threadIdx.x < BN ? op.lse : op.delta) + at.row + (size_t)head * q_len;
            if (THREADS == 2 * BN || threadIdx.x < 2 * BN)
                cp_async4(shared_address(columns + i % 2 * 2 * BN + threadIdx.x), from + (query < q_len ? query : 0),
                          query < q_len);
        }
        // Like the copies into a stage that no thread reads any more, and visible after the next barrier.
        if constexpr (KEYS && MASKS)
            if (threadIdx.x < BN) first_keys[i % 2 * BN + threadIdx.x] = limits.of(j * BN + threadIdx.x);
        cp_commit();
    };
    load_tile<BM>(a1, KEYS ? op.in.k(at) : op.in.q(at), KEYS ? shape.k_stride(at) : shape.q_stride(at), first, own);
    load_tile<BM>(a2, KEYS ? op.in.v(at) : op.d_out + at.out, KEYS ? shape.v_stride(at) : shape.out_stride(at), first, own);
    if (!STRIDED || length > 0) {
        pass(at, 0);
    } else {  // no pass waits for the copies of tiles that results overwrite
        cp_wait<0>();
        __syncthreads();
    }

    Stats<KEYS> stats;
    if constexpr (!KEYS) {
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) {
            u32 query = first + row + 16 * (i / 2) + row_of(i % 2 * 2);
            stats.lse[i / 2][i % 2] = query < q_len ? op.lse[at.row + query] * POWER : 0.0f;
            stats.delta[i / 2][i % 2] = query < q_len ? op.delta[at.row + query] : 0.0f;
        }
    }
    // With two results to keep, d_k and d_v, there are no registers left to hold rows in.
    Rows<!KEYS && BWD_HELD> rows1{a1, row}, rows2{a2, row};
    rows1.hold();
    rows2.hold();
    float acc1[MT][HD / 8][4] = {}, acc2[MT][HD / 8][4] = {};
    constexpr bool CORRECTS = BALANCED && !KEYS;
    float sum[MT][2] = {};  // of a lane's ds
    int r = first + row;
    for (u32 i = 0; i < length * share; ++i) {
        cp_wait<0>();
        __syncthreads();  // this stage has arrived, and no thread reads the other any more: the next copies overwrite it
        if (i + 1 < length * share) pass(place, i + 1);
        u32 now = (start + (KEYS ? i % length : i)) * BN;  // the first of the streamed positions
        u32 b1 = b + i % 2 * STAGE, b2 = b1 + BN * PITCH;
        stats.stage = columns + i % 2 * 2 * BN;
        before.stage = i % 2 * BN;
#pragma unroll 1
        for (int c = 0; c < BN; c += CN) {
            int column = now + c;
            if (KEYS ? shape.sees_none(r, column + CN) : shape.sees_none(column, r + 16 * MT)) continue;
            if (MASKS && before.none(r, column, c)) continue;
            float p[MT][CN / 8][4] = {}, ds[MT][CN / 8][4] = {};
            scores<CN>(p, rows1, b1, c);
            weights<KEYS>(p, stats, shape, c, r, column);
            if constexpr (MASKS) before.hide(p, r, column, c);
            u32 mask = 0;
            if constexpr (DROPS) {
                u64 queries = place.row + (KEYS ? (u64)(i / length) * q_len : 0) + (KEYS ? column : r);
                mask = kept<CN, KEYS>(drops_of(shape), queries, KEYS ? r : column);
            }
            if constexpr (KEYS && DROPS) {
                float w[MT][CN / 8][4];
                each(0, 0, [&](int m, int n, int e, int, int) { w[m][n][e] = masked(p, mask, m, n, e); });
                weighted<CN>(acc2, w, b2, c);
            } else if constexpr (KEYS) {
                weighted<CN>(acc2, p, b2, c);
            }
            scores<CN>(ds, rows2, b2, c);
            if constexpr (DROPS)
                each(0, 0, [&](int m, int n, int e, int, int) {
                    ds[m][n][e] = masked(ds, mask, m, n, e) * drops_of(shape).keep;
                });
            slopes<KEYS>(ds, p, stats, shape, c, r, column);
            if constexpr (MASKS) before.single(ds, r, column, c);
            if constexpr (CORRECTS) add_rows(sum, ds);
            weighted<CN, KEYS>(acc1, ds, b1, c);
        }
    }

    if constexpr (CORRECTS) {
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) {
            float whole = sum[i / 2][i % 2];
            whole += __shfl_xor_sync(0xffffffffu, whole, 1);
            whole += __shfl_xor_sync(0xffffffffu, whole, 2);
            u32 query = first + row + 16 * (i / 2) + row_of(i % 2 * 2);
            if (lane() % 4 == 0 && query < q_len) op.delta[place.row + query] = stats.delta[i / 2][i % 2] + whole;
        }
    }
    float factor[MT][2];
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) factor[i / 2][i % 2] = shape.scale;
    ELEM* to = KEYS ? op.d.k(place) : op.d.q(place);
    if (!KEYS || op.d.wants_k())
        store_tile(to, KEYS ? shape.k_stride(place) : shape.q_stride(place), first, own, acc1, factor, tile, row);
    if constexpr (KEYS) {
        if (!op.d.wants_v()) return;
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) factor[i / 2][i % 2] = DROPS ? drops_of(shape).keep : 1.0f;
        store_tile(op.d.v(place), shape.v_stride(place), first, own, acc2, factor, tile + BM * PITCH, row);
    }
}

KERNEL __launch_bounds__(THREADS, KV_BLOCKS) flash_bwd_kv(BACKWARD_PARAMETERS(float)) { backward<true>(BACKWARD); }
KERNEL __launch_bounds__(THREADS, BLOCKS) flash_bwd_q(BACKWARD_PARAMETERS(float)) { backward<false>(BACKWARD); }
