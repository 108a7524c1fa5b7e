// flash_f32: attention in f32 without tensor cores, forward and backward, for heads of up to HDP channels
//
//   fwd:  s = scale*q.k, out = softmax(s).v with a running maximum, lse = log(sum(exp(s)))
//   bwd:  p = exp(s - lse), ds = p*(d_out.v - delta), d_q = scale*ds.k, d_k = scale*ds^T.q, d_v = p^T.d_out; with DROPOUT as in attention/flash_bwd.cu
//
// bound  FMA: 4 operations per visible pair and channel forward, 14 backward (d_q and d_k, d_v each make s and ds anew)
// grid   one block of 256 threads per head (d_k and d_v: head of keys) and tile of TILE positions; any lengths, any HD <= HDP
// order  each sum runs over positions in order by one thread, d_k and d_v over the heads of queries in order before; no
//        atomics: bitwise repeatable
//
// ELEM is the type in memory (float, bf16 or f16), HDP is 64, 128 or 256. Channels from HD to HDP are zeros in shared memory.
#include "attention/flash.cuh"

constexpr int TILE = 4096 / HDP;  // positions per tile
constexpr int R = TILE / 16;      // rows and columns of a tile of scores per thread
constexpr int COLS = HDP / 16;    // channels per thread
constexpr int LD = HDP + 4;       // a pitch of an odd number of 16-byte words: 8 rows touch 8 different groups of banks
constexpr int LP = TILE + 4;
constexpr int THREADS = 256;
constexpr int TILE_FLOATS = TILE * LD;
// Where a multiprocessor's shared memory has room for two blocks of the backward, registers are kept to a half.
constexpr int BWD_BLOCKS = LARGE ? 2 : 1;
// Steps of four channels of scores at a time: the compiler for sm_100 has no room for two where masks of dropout take registers too.
constexpr int STEPS = DROPS && HDP == 64 && MAJOR == 10 ? 1 : 2;
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

// Positions first.. of one of q, k, v, out into shared memory; zeros beyond `seq` and HD.
DEVICE void load_tile(float* to, const ELEM* from, size_t stride, u32 first, u32 seq, const Shape& shape) {
    constexpr int N = Vec<ELEM>::N;
    u32 hd = shape.hd;
    if (shape.wide(N)) {
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
#pragma unroll STEPS
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
DEVICE void write_row(ELEM* to, const float (&acc)[COLS], float factor, const Shape& shape) {
    struct alignas(4 * sizeof(ELEM)) Four {
        ELEM at[4];
    };
#pragma unroll
    for (int c = 0; c < COLS; c += 4) {
        u32 col = column(c);
        Four v;
#pragma unroll
        for (int e = 0; e < 4; ++e) v.at[e] = from_float<ELEM>(acc[c + e] * factor);
        if (shape.wide(4)) {
            if (col < shape.hd) *reinterpret_cast<Four*>(to + col) = v;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (col + e < shape.hd) to[col + e] = v.at[e];
        }
    }
}

// Tiles of keys that the queries of a tile see.
DEVICE u32 tiles_seen(const Shape& shape, u32 tile) {
    return STRIDED ? shape.passes(min((tile + 1) * TILE, shape.q_len()) - 1, TILE) : tile + 1;
}

// s becomes exp(s*scale - maximum); the running maximum, sum and results follow. 16 threads share rows.
DEVICE void softmax(float (&s)[R][R], float (&acc)[R][COLS], float (&maximum)[R], float (&sum)[R], float scale) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float m = s[r][0];
#pragma unroll
        for (int c = 1; c < R; ++c) m = fmaxf(m, s[r][c]);
        m = fmaxf(maximum[r], warp_max<16>(m) * scale);
        // In the engine without masks every query sees a key of the first tile; else 0 takes the place of -inf.
        float shift = (STRIDED || MASKS) && m == hidden() ? 0.0f : m;
        float shrink = expf(maximum[r] - shift);  // 0 as long as the maximum was -inf
        maximum[r] = m;
        sum[r] *= shrink;
#pragma unroll
        for (int c = 0; c < R; ++c) {
            s[r][c] = expf(fmaf(s[r][c], scale, -shift));
            sum[r] += s[r][c];
        }
#pragma unroll
        for (int c = 0; c < COLS; ++c) acc[r][c] *= shrink;
    }
}

DEVICE void forward(ELEM* out, float* lse, const Qkv<const ELEM>& in, const Shape& shape) {
    float* q = reinterpret_cast<float*>(shared);
    float *k = q + TILE_FLOATS, *v = k + TILE_FLOATS, *w = v + TILE_FLOATS;
    u32 q_len = shape.q_len(), kv_len = shape.kv_len(), tiles = (q_len + TILE - 1) / TILE;
    Work work = work_of(blockIdx.x, tiles, shape.total, shape.group);
    Head at = shape.head(work.head, shape.hd);
    u32 tile = tiles - 1 - work.tile, first = tile * TILE, passes = STRIDED ? tiles_seen(shape, tile) : 0;
    load_tile(q, in.q(at), shape.q_stride(at), first, q_len, shape);
    u32 begin = 0, from[R] = {}, most = 0;  // first tile of keys, first keys of the thread's rows, of the last row
    if constexpr (MASKS) {
        Starts starts = starts_of(shape, work.head);
        begin = starts.of(first) / TILE, most = starts.of(first + TILE - 1);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            from[r] = starts.of(first + ty() * R + r);
            if (tx() == 0) check_query(shape, starts, work.head, first + ty() * R + r);
        }
    }

    float acc[R][COLS] = {}, maximum[R], sum[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) maximum[r] = hidden();
    for (u32 j = begin; STRIDED ? j < passes : j <= tile; ++j) {
        __syncthreads();  // no thread still reads the previous tile
        load_tile(k, in.k(at), shape.k_stride(at), j * TILE, kv_len, shape);
        load_tile(v, in.v(at), shape.v_stride(at), j * TILE, kv_len, shape);
        __syncthreads();
        float s[R][R];
        scores(s, q, k, shape.hd);
        if (STRIDED && shape.scale < 0.0f) {  // the running maximum is that of scores times a positive factor
#pragma unroll
            for (int i = 0; i < R * R; ++i) s[i / R][i % R] *= -1.0f;
        }
        if (STRIDED ? !shape.sees_all((j + 1) * TILE, first) : j == tile) {
            int key = STRIDED ? j * TILE : 0, query = STRIDED ? first : 0;
#pragma unroll
            for (int i = 0; i < R * R; ++i)
                if (shape.hides(key, tx() + 16 * (i % R), query + ty() * R + i / R)) s[i / R][i % R] = hidden();
        }
        if (MASKS && j * TILE < most) {
#pragma unroll
            for (int i = 0; i < R * R; ++i)
                if (j * TILE + tx() + 16 * (i % R) < from[i / R]) s[i / R][i % R] = hidden();
        }
        softmax(s, acc, maximum, sum, shape.steepness());
        if constexpr (DROPS) {
#pragma unroll
            for (int i = 0; i < R * R; ++i)
                if (!drops_of(shape).keeps(at.row + first + ty() * R + i / R, j * TILE + tx() + 16 * (i % R))) s[i / R][i % R] = 0.0f;
        }
        put(w, s);
        __syncthreads();
        weighted(acc, w, v);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        u32 row = first + ty() * R + r;
        float whole = warp_sum<16>(sum[r]);
        if (row >= q_len) continue;
        float factor = STRIDED && whole == 0.0f ? 0.0f : (DROPS ? drops_of(shape).keep : 1.0f) / whole;
        write_row(out + at.out + row * shape.out_stride(at), acc[r], factor, shape);
        if (tx() == 0 && (!STRIDED || lse != nullptr)) lse[at.row + row] = maximum[r] + logf(whole);
    }
}

KERNEL __launch_bounds__(THREADS, 2) flash_f32_fwd(ELEM* out, float* lse, QKV_PARAMETERS, SHAPE_PARAMETERS) {
    forward(out, lse, QKV, SHAPE);
}

// KEYS: the block owns a tile of keys, passes over the queries of all heads that see it, and makes d_k and d_v; `total`
// is B*NKV then.
// Else it owns a tile of queries, passes over the keys they see, and makes d_q.
template <bool KEYS> DEVICE void backward(const Backward<float>& op) {
    float *a1 = reinterpret_cast<float*>(shared), *a2 = a1 + TILE_FLOATS;
    float *b1 = a2 + TILE_FLOATS, *b2 = b1 + TILE_FLOATS, *w = b2 + TILE_FLOATS;
    const Shape& shape = op.shape;
    u32 q_len = shape.q_len(), kv_len = shape.kv_len(), own = KEYS ? kv_len : q_len, other = KEYS ? q_len : kv_len;
    u32 hd = shape.hd, tiles = (own + TILE - 1) / TILE;
    Work work = work_of(blockIdx.x, tiles, shape.total, shape.group);
    u32 share = KEYS ? shape.heads / shape.kv_heads : 1;  // heads of queries to pass over
    Head at = shape.head(work.head * share, hd);
    u32 tile = KEYS ? work.tile : tiles - 1 - work.tile, first = tile * TILE;
    const ELEM *q = op.in.q(at), *k = op.in.k(at), *v = op.in.v(at), *d_out = op.d_out + at.out;
    load_tile(a1, KEYS ? k : q, KEYS ? shape.k_stride(at) : shape.q_stride(at), first, own, shape);
    load_tile(a2, KEYS ? v : d_out, KEYS ? shape.v_stride(at) : shape.out_stride(at), first, own, shape);

    float acc1[R][COLS] = {}, acc2[KEYS ? R : 1][COLS] = {};
    u32 start = KEYS ? (STRIDED ? shape.first_for(first) / TILE : tile) : 0;
    u32 end = KEYS ? (q_len + TILE - 1) / TILE : tiles_seen(shape, tile);
    Starts starts = starts_of(shape, work.head * share);
    if constexpr (MASKS && KEYS) end = start + tiles_until<THREADS>(starts, start, end, TILE, first + TILE);
    if constexpr (MASKS && !KEYS) start = starts.of(first) / TILE;
    for (u32 j = start; j < end;) {
        __syncthreads();  // no thread still reads the previous tile
        load_tile(b1, KEYS ? q : k, KEYS ? shape.q_stride(at) : shape.k_stride(at), j * TILE, other, shape);
        load_tile(b2, KEYS ? d_out : v, KEYS ? shape.out_stride(at) : shape.v_stride(at), j * TILE, other, shape);
        __syncthreads();
        float p[R][R], ds[R][R];
        u32 mask = ~0u;  // a bit for each of p that is kept
        scores(p, a1, b1, hd);
#pragma unroll
        for (int i = 0; i < R * R; ++i) {
            u32 row = first + ty() * R + i / R, col = j * TILE + tx() + 16 * (i % R);
            u32 query = KEYS ? col : row, key = KEYS ? row : col;
            // Beyond the last query q and d_out are 0, and so is what they add.
            float lse = query < q_len ? op.lse[at.row + query] : 0.0f;
            p[i / R][i % R] = shape.shows(key, query) && (!MASKS || key >= starts.of(query)) ? expf(fmaf(p[i / R][i % R], shape.scale, -lse)) : 0.0f;
            if (DROPS && !drops_of(shape).keeps(at.row + query, key)) mask &= ~(1u << i);
        }
        if constexpr (KEYS) {
            if constexpr (DROPS) {
#pragma unroll
                for (int i = 0; i < R * R; ++i) ds[i / R][i % R] = mask >> i & 1 ? p[i / R][i % R] : 0.0f;
                put(w, ds);
            } else {
                put(w, p);
            }
            __syncthreads();
            weighted(acc2, w, b2);
            __syncthreads();
        }
        scores(ds, a2, b2, hd);
#pragma unroll
        for (int i = 0; i < R * R; ++i) {
            u32 query = KEYS ? j * TILE + tx() + 16 * (i % R) : first + ty() * R + i / R;
            float delta = query < q_len ? op.delta[at.row + query] : 0.0f;
            // The softmax of one key is constant, its gradient exactly 0.
            if (DROPS) ds[i / R][i % R] = mask >> i & 1 ? ds[i / R][i % R] * drops_of(shape).keep : 0.0f;
            ds[i / R][i % R] = (MASKS ? starts.alone(query) : shape.sees_one(query)) ? 0.0f : p[i / R][i % R] * (ds[i / R][i % R] - delta);
        }
        put(w, ds);
        __syncthreads();
        weighted(acc1, w, b1);
        if (++j == end && KEYS && --share > 0) {  // the next head of queries
            j = start;
            q += shape.q_head(hd), d_out += shape.out_head(hd), at.row += q_len;
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        u32 row = first + ty() * R + r;
        if (row >= own) continue;
        ELEM* to = KEYS ? op.d.k(at) + row * shape.k_stride(at) : op.d.q(at) + row * shape.q_stride(at);
        if (!KEYS || op.d.wants_k()) write_row(to, acc1[r], shape.scale, shape);
        if constexpr (KEYS)
            if (op.d.wants_v())
                write_row(op.d.v(at) + row * shape.v_stride(at), acc2[r], DROPS ? drops_of(shape).keep : 1.0f, shape);
    }
}

KERNEL __launch_bounds__(THREADS, BWD_BLOCKS) flash_f32_bwd_kv(BACKWARD_PARAMETERS(float)) { backward<true>(BACKWARD); }
KERNEL __launch_bounds__(THREADS, BWD_BLOCKS) flash_f32_bwd_q(BACKWARD_PARAMETERS(float)) { backward<false>(BACKWARD); }
