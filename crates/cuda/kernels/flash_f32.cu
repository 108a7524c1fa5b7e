// flash_f32: causal attention in f32 without tensor cores, forward and backward, for heads of up to HDP channels
//
//   fwd:  s = scale*q.k, out = softmax(s).v with a running maximum, lse = log(sum(exp(s)))
//   bwd:  p = exp(s - lse), ds = p*(d_out.v - delta), d_q = scale*ds.k, d_k = scale*ds^T.q, d_v = p^T.d_out
//
// bound  FMA: 4 operations per visible pair and channel forward, 14 backward (d_q and d_k, d_v each make s and ds anew)
// grid   one block of 256 threads per head (d_k and d_v: head of keys) and tile of TILE positions; any T, any HD <= HDP
// order  each sum runs over positions in order by one thread, d_k and d_v over the heads of queries in order before; no
//        atomics: bitwise repeatable
//
// ELEM is the type in memory (float or bf16), HDP is 64, 128 or 256. Channels from HD to HDP are zeros in shared memory.
#include "flash.cuh"

constexpr int TILE = 4096 / HDP;  // positions per tile
constexpr int R = TILE / 16;      // rows and columns of a tile of scores per thread
constexpr int COLS = HDP / 16;    // channels per thread
constexpr int LD = HDP + 4;       // a pitch of an odd number of 16-byte words: 8 rows touch 8 different groups of banks
constexpr int LP = TILE + 4;
constexpr int THREADS = 256;
constexpr int TILE_FLOATS = TILE * LD;
// Where a multiprocessor's shared memory has room for two blocks of the backward, registers are kept to a half.
constexpr int BWD_BLOCKS = __CUDA_ARCH__ / 100 == 9 || __CUDA_ARCH__ / 100 == 10 ? 2 : 1;
// Loads of a tile in flight per thread: vectors of bf16 take twice the registers, and a half has no room for more.
constexpr int AT_ONCE = sizeof(ELEM) == 4 ? 4 : 1;

extern __shared__ uint4 shared[];

// Thread (ty, tx) of 16x16 owns rows ty*R.. of scores and results; columns tx + 16c of scores, column(c) of results.
DEVICE int tx() { return threadIdx.x % 16; }
DEVICE int ty() { return threadIdx.x / 16; }
DEVICE int column(int c) { return c / 4 * 64 + tx() * 4 + c % 4; }

template <int N> DEVICE void read(float (&to)[N], const float* from) {
    if constexpr (N == 4) {
        float4 v = *reinterpret_cast<const float4*>(from);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = from[i];
    }
}

// Positions first.. of one of q, k, v, out into shared memory; zeros beyond T and HD.
DEVICE void load_tile(float* to, const ELEM* from, size_t stride, u32 first, u32 seq, u32 hd) {
    constexpr int N = Vec<ELEM>::N;
    if (hd % N == 0) {
#pragma unroll AT_ONCE
        for (int i = threadIdx.x; i < TILE * HDP / N; i += THREADS) {
            u32 row = i / (HDP / N), col = i % (HDP / N) * N;
            bool inside = first + row < seq && col < hd;
            Vec<ELEM> v;
            if (inside) v = load(from + (first + row) * stride + col);
#pragma unroll
            for (int n = 0; n < N; ++n) to[row * LD + col + n] = inside ? to_float(v.at[n]) : 0.0f;
        }
    } else {
#pragma unroll 2
        for (int i = threadIdx.x; i < TILE * HDP; i += THREADS) {
            u32 row = i / HDP, col = i % HDP;
            bool inside = first + row < seq && col < hd;
            to[row * LD + col] = inside ? to_float(from[(first + row) * stride + col]) : 0.0f;
        }
    }
}

// s = rows of a . rows of b, over the channels
DEVICE void scores(float (&s)[R][R], const float* a, const float* b, u32 hd) {
#pragma unroll
    for (int i = 0; i < R * R; ++i) s[i / R][i % R] = 0.0f;
#pragma unroll 2
    for (u32 d = 0; d < hd; d += 4) {
        float x[R][4], y[R][4];
#pragma unroll
        for (int r = 0; r < R; ++r) read(x[r], a + (ty() * R + r) * LD + d);
#pragma unroll
        for (int c = 0; c < R; ++c) read(y[c], b + (tx() + 16 * c) * LD + d);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int c = 0; c < R; ++c) s[r][c] = fmaf(x[r][e], y[c][e], s[r][c]);
    }
}

// Scores to shared memory, transposed: w[column][row].
DEVICE void put(float* w, const float (&s)[R][R]) {
#pragma unroll
    for (int c = 0; c < R; ++c)
#pragma unroll
        for (int r = 0; r < R; ++r) w[(tx() + 16 * c) * LP + ty() * R + r] = s[r][c];
}

// acc += w^T . rows of b
DEVICE void weighted(float (&acc)[R][COLS], const float* w, const float* b) {
#pragma unroll 4
    for (int k = 0; k < TILE; ++k) {
        float x[R];
        read(x, w + k * LP + ty() * R);
#pragma unroll
        for (int c = 0; c < COLS; c += 4) {
            float y[4];
            read(y, b + k * LD + column(c));
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[r][c + e] = fmaf(x[r], y[e], acc[r][c + e]);
        }
    }
}

// Row r of the thread's results, times a factor, to a row of memory.
DEVICE void write_row(ELEM* to, const float (&acc)[COLS], float factor, u32 hd) {
    struct alignas(4 * sizeof(ELEM)) Four {
        ELEM at[4];
    };
#pragma unroll
    for (int c = 0; c < COLS; c += 4) {
        u32 col = column(c);
        Four v;
#pragma unroll
        for (int e = 0; e < 4; ++e) v.at[e] = from_float<ELEM>(acc[c + e] * factor);
        if (hd % 4 == 0) {
            if (col < hd) *reinterpret_cast<Four*>(to + col) = v;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (col + e < hd) to[col + e] = v.at[e];
        }
    }
}

// Sum or maximum over the 16 threads that share rows, in every one of them.
DEVICE float row_max(float x) {
#pragma unroll
    for (int d = 8; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
DEVICE float row_sum(float x) {
#pragma unroll
    for (int d = 8; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

// s becomes exp(s*scale - maximum); the running maximum, sum and results follow.
DEVICE void softmax(float (&s)[R][R], float (&acc)[R][COLS], float (&maximum)[R], float (&sum)[R], float scale) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float m = s[r][0];
#pragma unroll
        for (int c = 1; c < R; ++c) m = fmaxf(m, s[r][c]);
        m = fmaxf(maximum[r], row_max(m) * scale);
        float shrink = expf(maximum[r] - m);  // 0 at the first tile, where the maximum was -inf
        maximum[r] = m;
        sum[r] *= shrink;
#pragma unroll
        for (int c = 0; c < R; ++c) {
            s[r][c] = expf(fmaf(s[r][c], scale, -m));
            sum[r] += s[r][c];
        }
#pragma unroll
        for (int c = 0; c < COLS; ++c) acc[r][c] *= shrink;
    }
}

KERNEL __launch_bounds__(THREADS, 2) flash_f32_fwd(ELEM* out, float* lse, const ELEM* qkv, u32 seq, u32 heads,
                                                   u32 kv_heads, u32 hd, u32 total, u32 group, float scale) {
    float* q = reinterpret_cast<float*>(shared);
    float *k = q + TILE_FLOATS, *v = k + TILE_FLOATS, *w = v + TILE_FLOATS;
    u32 tiles = (seq + TILE - 1) / TILE;
    Work work = work_of(blockIdx.x, tiles, total, group);
    Head at = head_at(work.head, seq, heads, kv_heads, hd);
    u32 tile = tiles - 1 - work.tile, first = tile * TILE;
    load_tile(q, qkv + at.in, at.stride, first, seq, hd);

    float acc[R][COLS] = {}, maximum[R], sum[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) maximum[r] = -__int_as_float(0x7f800000);
    for (u32 j = 0; j <= tile; ++j) {
        __syncthreads();  // all are done with the tile before
        load_tile(k, qkv + at.key, at.stride, j * TILE, seq, hd);
        load_tile(v, qkv + at.value, at.stride, j * TILE, seq, hd);
        __syncthreads();
        float s[R][R];
        scores(s, q, k, hd);
        if (j == tile) {
#pragma unroll
            for (int i = 0; i < R * R; ++i)
                if (tx() + 16 * (i % R) > ty() * R + i / R) s[i / R][i % R] = -__int_as_float(0x7f800000);
        }
        softmax(s, acc, maximum, sum, scale);
        put(w, s);
        __syncthreads();
        weighted(acc, w, v);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        u32 row = first + ty() * R + r;
        float whole = row_sum(sum[r]);
        if (row >= seq) continue;
        write_row(out + at.out + row * at.out_stride, acc[r], 1.0f / whole, hd);
        if (tx() == 0) lse[at.row + row] = maximum[r] + logf(whole);
    }
}

struct Bwd {
    ELEM* d_qkv;
    const ELEM* d_out;
    const ELEM* qkv;
    const float* lse;
    const float* delta;
    u32 seq, heads, kv_heads, hd, total, group;
    float scale;
};

// KEYS: the block owns a tile of keys, passes over the queries of all heads that see it, and makes d_k and d_v; `total`
// is B*NKV then.
// Else it owns a tile of queries, passes over the keys they see, and makes d_q.
template <bool KEYS> DEVICE void backward(const Bwd& op) {
    float *a1 = reinterpret_cast<float*>(shared), *a2 = a1 + TILE_FLOATS;
    float *b1 = a2 + TILE_FLOATS, *b2 = b1 + TILE_FLOATS, *w = b2 + TILE_FLOATS;
    u32 seq = op.seq, hd = op.hd, tiles = (seq + TILE - 1) / TILE;
    Work work = work_of(blockIdx.x, tiles, op.total, op.group);
    u32 share = KEYS ? op.heads / op.kv_heads : 1;  // heads of queries to pass over
    Head at = head_at(work.head * share, seq, op.heads, op.kv_heads, hd);
    u32 tile = KEYS ? work.tile : tiles - 1 - work.tile, first = tile * TILE;
    const ELEM *q = op.qkv + at.in, *k = op.qkv + at.key, *v = op.qkv + at.value, *d_out = op.d_out + at.out;
    load_tile(a1, KEYS ? k : q, at.stride, first, seq, hd);
    load_tile(a2, KEYS ? v : d_out, KEYS ? at.stride : at.out_stride, first, seq, hd);

    float acc1[R][COLS] = {}, acc2[KEYS ? R : 1][COLS] = {};
    u32 start = KEYS ? tile : 0, end = KEYS ? tiles : tile + 1;
    for (u32 j = start; j < end;) {
        __syncthreads();  // all are done with the tile before
        load_tile(b1, KEYS ? q : k, at.stride, j * TILE, seq, hd);
        load_tile(b2, KEYS ? d_out : v, KEYS ? at.out_stride : at.stride, j * TILE, seq, hd);
        __syncthreads();
        float p[R][R], ds[R][R];
        scores(p, a1, b1, hd);
#pragma unroll
        for (int i = 0; i < R * R; ++i) {
            u32 row = first + ty() * R + i / R, col = j * TILE + tx() + 16 * (i % R);
            u32 query = KEYS ? col : row, key = KEYS ? row : col;
            // Beyond T q and d_out are 0, and so is what they add.
            float lse = query < seq ? op.lse[at.row + query] : 0.0f;
            p[i / R][i % R] = key <= query ? expf(fmaf(p[i / R][i % R], op.scale, -lse)) : 0.0f;
        }
        if constexpr (KEYS) {
            put(w, p);
            __syncthreads();
            weighted(acc2, w, b2);
            __syncthreads();
        }
        scores(ds, a2, b2, hd);
#pragma unroll
        for (int i = 0; i < R * R; ++i) {
            u32 query = KEYS ? j * TILE + tx() + 16 * (i % R) : first + ty() * R + i / R;
            float delta = query < seq ? op.delta[at.row + query] : 0.0f;
            // The first position sees one key: its softmax is constant, its gradient exactly 0.
            ds[i / R][i % R] = query == 0 ? 0.0f : p[i / R][i % R] * (ds[i / R][i % R] - delta);
        }
        put(w, ds);
        __syncthreads();
        weighted(acc1, w, b1);
        if (++j == end && KEYS && --share > 0) {  // the next head of queries
            j = start;
            q += hd, d_out += hd, at.row += seq;
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        u32 row = first + ty() * R + r;
        if (row >= seq) continue;
        ELEM* to = op.d_qkv + row * at.stride;
        write_row(to + (KEYS ? at.key : at.in), acc1[r], op.scale, hd);
        if constexpr (KEYS) write_row(to + at.value, acc2[r], 1.0f, hd);
    }
}

KERNEL __launch_bounds__(THREADS, BWD_BLOCKS)
    flash_f32_bwd_kv(ELEM* d_qkv, const ELEM* d_out, const ELEM* qkv, const float* lse, const float* delta, u32 seq,
                     u32 heads, u32 kv_heads, u32 hd, u32 total, u32 group, float scale) {
    backward<true>({d_qkv, d_out, qkv, lse, delta, seq, heads, kv_heads, hd, total, group, scale});
}

KERNEL __launch_bounds__(THREADS, BWD_BLOCKS)
    flash_f32_bwd_q(ELEM* d_qkv, const ELEM* d_out, const ELEM* qkv, const float* lse, const float* delta, u32 seq,
                    u32 heads, u32 kv_heads, u32 hd, u32 total, u32 group, float scale) {
    backward<false>({d_qkv, d_out, qkv, lse, delta, seq, heads, kv_heads, hd, total, group, scale});
}
