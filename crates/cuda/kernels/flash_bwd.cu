// flash_bwd: gradients of flash_fwd from q, k, v, d_out, lse and delta = sum(d_out*out), bf16 on tensor cores
//
//   p = exp(scale*q.k - lse), ds = p*(d_out.v - delta), d_q = scale*ds.k, d_k = scale*ds^T.q, d_v = p^T.d_out
//
// moves  2*B*T*(2*W + C) + 8*B*NH*T bytes at least, passing tiles again per block (mostly from L2); bound: tensor cores
// grid   flash_bwd_kv: one block of 4 warps per head of keys and BM keys, passing over the queries of all heads that see
//        them;
//        flash_bwd_q: the same per BM queries over the keys they see. Each makes p and ds anew: 7 products where 5 would
//        do, but every sum stays in the registers of one warp. Needs HD % 16 == 0, HD <= 128, any T
// order  passing positions ascending in f32, head of queries by head; p and ds rounded to bf16; no atomics: bitwise
//        repeatable
//
// Positions beyond T are zeros in shared memory, lse and delta too: queries beyond T then add nothing, and keys beyond T
// are later than every query.
#include "flash_tile.cuh"

constexpr int BM = 16 * MT * WARPS;
constexpr int BN = 64;  // passing positions per stage
constexpr int CN = 32;  // of them worked on at a time, as many as registers hold

extern __shared__ uint4 shared[];

struct Bwd {
    bf16* d_qkv;
    const bf16* d_out;
    const bf16* qkv;
    const float* lse;
    const float* delta;
    u32 seq, heads, kv_heads, total, group;
    float scale;
};

// lse times log2(e) and delta of the queries: per row where rows are queries, per column of a stage where columns are.
template <bool KEYS> struct Stats {
    float lse[MT][2], delta[MT][2];
    const float* stage;  // lse of the BN passing queries, then delta

    DEVICE float lse_of(int m, int h, int column) const { return KEYS ? stage[column] * LOG2E : lse[m][h]; }
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

// p = 2^(s*scale2 - lse), in the place of s; 0 for keys later than the query. `c` is the first column in its stage.
template <bool KEYS>
DEVICE void weights(float (&s)[MT][CN / 8][4], const Stats<KEYS>& stats, int c, float scale2, int row, int column) {
    each(row, c, [&](int m, int n, int e, int, int at) {
        s[m][n][e] = exp2_flush(fmaf(s[m][n][e], scale2, -stats.lse_of(m, e / 2, at)));
    });
    if (KEYS ? column + 1 >= row + 16 * MT : row + 1 >= column + CN) return;  // every query sees every key
    each(row, column, [&](int m, int n, int e, int r, int col) {
        if (KEYS ? r > col : col > r) s[m][n][e] = 0.0f;
    });
}

// ds = p*(dp - delta), in the place of dp.
template <bool KEYS>
DEVICE void slopes(float (&dp)[MT][CN / 8][4], const float (&p)[MT][CN / 8][4], const Stats<KEYS>& stats, int c, int row,
                   int column) {
    each(row, c, [&](int m, int n, int e, int, int at) {
        dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - stats.delta_of(m, e / 2, at));
    });
    if ((KEYS ? column : row) != 0) return;
    // The first position sees one key: its softmax is constant, its gradient exactly 0.
    each(row, column, [&](int m, int n, int e, int r, int col) {
        if ((KEYS ? col : r) == 0) dp[m][n][e] = 0.0f;
    });
}

// Rows are keys (KEYS) or queries, resident as tiles a1 (k or q) and a2 (v or d_out); columns are the other, passing as
// b1 (q or k) and b2 (d_out or v).
template <bool KEYS> DEVICE void backward(const Bwd& op) {
    constexpr u32 STAGE = 2 * BN * PITCH;  // b1, then b2
    u8* tile = reinterpret_cast<u8*>(shared);
    u32 a1 = shared_address(tile), a2 = a1 + BM * PITCH, b = a2 + BM * PITCH, seq = op.seq;
    float* columns = reinterpret_cast<float*>(tile + 2 * BM * PITCH + 2 * STAGE);  // lse and delta, two stages
    u32 tiles = (seq + BM - 1) / BM;
    Work work = work_of(blockIdx.x, tiles, op.total, op.group);
    u32 share = KEYS ? op.heads / op.kv_heads : 1;  // heads of queries to pass over
    Head at = head_at(work.head * share, seq, op.heads, op.kv_heads, HD);
    u32 first = (KEYS ? work.tile : tiles - 1 - work.tile) * BM, row = threadIdx.x / WARP * 16 * MT;
    __shared__ Head place;  // what the passes need of `at`: the sums leave no registers for it
    if (threadIdx.x == 0) place = at;
    // Stage i of the passing positions: tile i % length of them, of head i / length among those that share keys.
    u32 start = KEYS ? first / BN : 0, end = ((KEYS ? seq : min(first + BM, seq)) + BN - 1) / BN, length = end - start;
    auto pass = [&](const Head& at, u32 i) {
        u32 to = b + i % 2 * STAGE, head = KEYS ? i / length : 0, j = start + i - head * length;
        const bf16 *q = op.qkv + at.in + head * HD, *k = op.qkv + at.key, *v = op.qkv + at.value;
        const bf16* d_out = op.d_out + at.out + head * HD;
        load_tile<BN>(to, KEYS ? q : k, at.stride, j * BN, seq);
        load_tile<BN>(to + BN * PITCH, KEYS ? d_out : v, KEYS ? at.out_stride : at.stride, j * BN, seq);
        if constexpr (KEYS) {
            static_assert(THREADS == 2 * BN, "one thread per lse and delta");
            u32 query = j * BN + threadIdx.x % BN;
            const float* from = (threadIdx.x < BN ? op.lse : op.delta) + at.row + (size_t)head * seq;
            cp_async4(shared_address(columns + i % 2 * 2 * BN + threadIdx.x), from + (query < seq ? query : 0), query < seq);
        }
        cp_commit();
    };
    load_tile<BM>(a1, op.qkv + (KEYS ? at.key : at.in), at.stride, first, seq);
    load_tile<BM>(a2, KEYS ? op.qkv + at.value : op.d_out + at.out, KEYS ? at.stride : at.out_stride, first, seq);
    pass(at, 0);

    Stats<KEYS> stats;
    if constexpr (!KEYS) {
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) {
            u32 query = first + row + 16 * (i / 2) + row_of(i % 2 * 2);
            stats.lse[i / 2][i % 2] = query < seq ? op.lse[at.row + query] * LOG2E : 0.0f;
            stats.delta[i / 2][i % 2] = query < seq ? op.delta[at.row + query] : 0.0f;
        }
    }
    // With two results to keep, d_k and d_v, there are no registers left to hold rows in.
    Rows<!KEYS> rows1{a1, row}, rows2{a2, row};
    rows1.hold();
    rows2.hold();
    float acc1[MT][HD / 8][4] = {}, acc2[MT][HD / 8][4] = {};
    int r = first + row;
    for (u32 i = 0; i < length * share; ++i) {
        cp_wait<0>();
        __syncthreads();  // this stage is here, and all are done with the other, whose place the next copies take
        if (i + 1 < length * share) pass(place, i + 1);
        u32 now = (start + (KEYS ? i % length : i)) * BN;  // the first of the passing positions
        u32 b1 = b + i % 2 * STAGE, b2 = b1 + BN * PITCH;
        stats.stage = columns + i % 2 * 2 * BN;
#pragma unroll 1
        for (int c = 0; c < BN; c += CN) {
            int column = now + c;
            if (KEYS ? column + CN <= r : column >= r + 16 * MT) continue;  // no key of these is seen by these queries
            float p[MT][CN / 8][4] = {}, ds[MT][CN / 8][4] = {};
            scores<CN>(p, rows1, b1, c);
            weights<KEYS>(p, stats, c, op.scale * LOG2E, r, column);
            if constexpr (KEYS) weighted<CN>(acc2, p, b2, c);
            scores<CN>(ds, rows2, b2, c);
            slopes<KEYS>(ds, p, stats, c, r, column);
            weighted<CN>(acc1, ds, b1, c);
        }
    }

    float factor[MT][2];
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) factor[i / 2][i % 2] = op.scale;
    store_tile(op.d_qkv + (KEYS ? place.key : place.in), place.stride, first, seq, acc1, factor, tile, row);
    if constexpr (KEYS) {
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) factor[i / 2][i % 2] = 1.0f;
        store_tile(op.d_qkv + place.value, place.stride, first, seq, acc2, factor, tile + BM * PITCH, row);
    }
}

KERNEL __launch_bounds__(THREADS, 2) flash_bwd_kv(bf16* d_qkv, const bf16* d_out, const bf16* qkv, const float* lse,
                                                  const float* delta, u32 seq, u32 heads, u32 kv_heads, u32,
                                                  u32 total, u32 group, float scale) {
    backward<true>({d_qkv, d_out, qkv, lse, delta, seq, heads, kv_heads, total, group, scale});
}

KERNEL __launch_bounds__(THREADS, 2) flash_bwd_q(bf16* d_qkv, const bf16* d_out, const bf16* qkv, const float* lse,
                                                 const float* delta, u32 seq, u32 heads, u32 kv_heads, u32,
                                                 u32 total, u32 group, float scale) {
    backward<false>({d_qkv, d_out, qkv, lse, delta, seq, heads, kv_heads, total, group, scale});
}
