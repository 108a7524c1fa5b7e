// flash_bwd: gradients of flash_fwd from q, k, v, d_out, lse and delta = sum(d_out*out), bf16 on tensor cores
//
//   p = exp(scale*q.k - lse), ds = p*(d_out.v - delta), d_q = scale*ds.k, d_k = scale*ds^T.q, d_v = p^T.d_out
//
// moves  14*B*T*C + 8*B*NH*T bytes at least, passing tiles again per block (mostly from L2); bound: tensor cores
// grid   flash_bwd_kv: one block of 4 warps per head and BM keys, passing over the queries that see them;
//        flash_bwd_q: the same per BM queries over the keys they see. Each makes p and ds anew: 7 products where 5 would
//        do, but every sum stays in the registers of one warp. Needs HD % 16 == 0, HD <= 128, any T
// order  passing positions ascending in f32, p and ds rounded to bf16; no atomics: bitwise repeatable
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
    u32 seq, heads, total, group;
    float scale;
};

// lse times log2(e) and delta of the queries: per row where rows are queries, per column of a stage where columns are.
template <bool KEYS> struct Stats {
    float lse[MT][2], delta[MT][2];
    const float* stage;  // lse of the BN passing queries, then delta

    DEVICE float lse_of(int m, int h, int column) const { return KEYS ? stage[column] * LOG2E : lse[m][h]; }
    DEVICE float delta_of(int m, int h, int column) const { return KEYS ? stage[BN + column] : delta[m][h]; }
};

// p = 2^(s*scale2 - lse); `row` and `column` are the positions of the first score. Hides keys later than the query.
template <bool KEYS>
DEVICE void weights(float (&s)[MT][CN / 8][4], const Stats<KEYS>& stats, int c, float scale2, int row, int column) {
    bool all = KEYS ? column + 1 >= row + 16 * MT : row + 1 >= column + CN;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < CN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float p = exp2_fast(fmaf(s[m][n][e], scale2, -stats.lse_of(m, e / 2, c + 8 * n + column_of(e))));
                int r = row + 16 * m + row_of(e), col = column + 8 * n + column_of(e);
                bool seen = all || (KEYS ? r <= col : col <= r);
                s[m][n][e] = seen ? p : 0.0f;
            }
}

// ds = p*(dp - delta), in the place of dp.
template <bool KEYS>
DEVICE void slopes(float (&dp)[MT][CN / 8][4], const float (&p)[MT][CN / 8][4], const Stats<KEYS>& stats, int c, int row,
                   int column) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < CN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float delta = stats.delta_of(m, e / 2, c + 8 * n + column_of(e));
                dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - delta);
                // The first position sees one key: its softmax is constant, its gradient exactly 0.
                int query = KEYS ? column + 8 * n + column_of(e) : row + 16 * m + row_of(e);
                if (query == 0) dp[m][n][e] = 0.0f;
            }
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
    Head at = head_at(work.head, seq, op.heads, HD);
    u32 first = (KEYS ? work.tile : tiles - 1 - work.tile) * BM, row = threadIdx.x / WARP * 16 * MT;
    const bf16 *q = op.qkv + at.in, *k = q + at.stride, *v = k + at.stride, *d_out = op.d_out + at.out;
    size_t in = 3 * at.stride;
    auto pass = [&](u32 j) {
        u32 to = b + j % 2 * STAGE;
        load_tile<BN>(to, KEYS ? q : k, in, j * BN, seq);
        load_tile<BN>(to + BN * PITCH, KEYS ? d_out : v, KEYS ? at.stride : in, j * BN, seq);
        if constexpr (KEYS) {
            static_assert(THREADS == 2 * BN, "one thread per lse and delta");
            u32 query = j * BN + threadIdx.x % BN;
            const float* from = (threadIdx.x < BN ? op.lse : op.delta) + at.row;
            cp_async4(shared_address(columns + j % 2 * 2 * BN + threadIdx.x), from + (query < seq ? query : 0), query < seq);
        }
        cp_commit();
    };
    load_tile<BM>(a1, KEYS ? k : q, in, first, seq);
    load_tile<BM>(a2, KEYS ? v : d_out, KEYS ? in : at.stride, first, seq);
    u32 j = KEYS ? first / BN : 0, end = ((KEYS ? seq : min(first + BM, seq)) + BN - 1) / BN;
    pass(j);

    Stats<KEYS> stats;
    if constexpr (!KEYS) {
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) {
            u32 query = first + row + 16 * (i / 2) + row_of(i % 2 * 2);
            stats.lse[i / 2][i % 2] = query < seq ? op.lse[at.row + query] * LOG2E : 0.0f;
            stats.delta[i / 2][i % 2] = query < seq ? op.delta[at.row + query] : 0.0f;
        }
    }
    float acc1[MT][HD / 8][4] = {}, acc2[MT][HD / 8][4] = {};
    int r = first + row;
    for (; j < end; ++j) {
        cp_wait<0>();
        __syncthreads();  // stage j is here, and all are done with stage j-1, whose place the next copies take
        if (j + 1 < end) pass(j + 1);
        u32 b1 = b + j % 2 * STAGE, b2 = b1 + BN * PITCH;
        stats.stage = columns + j % 2 * 2 * BN;
#pragma unroll 1
        for (int c = 0; c < BN; c += CN) {
            int column = j * BN + c;
            if (KEYS ? column + CN <= r : column >= r + 16 * MT) continue;  // no key of these is seen by these queries
            float p[MT][CN / 8][4] = {}, ds[MT][CN / 8][4] = {};
            scores<CN>(p, a1, row, b1, c);
            weights<KEYS>(p, stats, c, op.scale * LOG2E, r, column);
            if constexpr (KEYS) weighted<CN>(acc2, p, b2, c);
            scores<CN>(ds, a2, row, b2, c);
            slopes<KEYS>(ds, p, stats, c, r, column);
            weighted<CN>(acc1, ds, b1, c);
        }
    }

    float factor[MT][2];
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) factor[i / 2][i % 2] = op.scale;
    bf16* to = op.d_qkv + at.in + (KEYS ? at.stride : 0);
    store_tile(to, in, first, seq, acc1, factor, tile, row);
    if constexpr (KEYS) {
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) factor[i / 2][i % 2] = 1.0f;
        store_tile(to + at.stride, in, first, seq, acc2, factor, tile + BM * PITCH, row);
    }
}

KERNEL __launch_bounds__(THREADS, 2) flash_bwd_kv(bf16* d_qkv, const bf16* d_out, const bf16* qkv, const float* lse,
                                                  const float* delta, u32 seq, u32 heads, u32, u32 total, u32 group,
                                                  float scale) {
    backward<true>({d_qkv, d_out, qkv, lse, delta, seq, heads, total, group, scale});
}

KERNEL __launch_bounds__(THREADS, 2) flash_bwd_q(bf16* d_qkv, const bf16* d_out, const bf16* qkv, const float* lse,
                                                 const float* delta, u32 seq, u32 heads, u32, u32 total, u32 group,
                                                 float scale) {
    backward<false>({d_qkv, d_out, qkv, lse, delta, seq, heads, total, group, scale});
}
