// flash_any: attention for heads of any width and every type, and the row sums every backward starts from
//
//   flash_delta*     delta = sum over a head's channels of d_out*out, (B,NH,T)
//   flash_any_*      the formulas of attention/flash_f32.cu for heads too wide for its tiles, and for double; slow, one pass over all
//                    positions per 32*PART channels
//
// moves  flash_delta: 2*B*T*C*sizeof(ELEM) + 4*B*NH*T bytes; bound: memory
// grid   one warp per head and position (a query, or for d_k and d_v a key), 8 warps per block; any lengths, any HD
// order  positions in order (d_k and d_v: per head of queries, heads in order), channels by a fixed tree; no atomics:
//        bitwise repeatable
//
// ELEM is the type in memory.
#include "common/unaligned.cuh"
#include "attention/flash.cuh"

constexpr int PART = 8;  // channels per lane and pass

struct Row {
    u32 head, position;
    bool inside;
};

// The head and position of this warp.
DEVICE Row row_of(u32 positions, u32 total) {
    u64 warp = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    return {(u32)(warp / positions), (u32)(warp % positions), warp < (u64)total * positions};
}

DEVICE Acc dot(const ELEM* x, const ELEM* y, u32 hd) {
    Acc sum = 0;
    for (u32 d = threadIdx.x % WARP; d < hd; d += WARP) sum = fma_of(to_acc(x[d]), to_acc(y[d]), sum);
    return warp_sum(sum);
}

// acc += factor * 32*PART channels of x from `from` on
DEVICE void add(Acc (&acc)[PART], Acc factor, const ELEM* x, u32 from, u32 hd) {
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        u32 d = from + i * WARP + threadIdx.x % WARP;
        if (d < hd) acc[i] = fma_of(factor, to_acc(x[d]), acc[i]);
    }
}

DEVICE void write(ELEM* to, const Acc (&acc)[PART], Acc factor, u32 from, u32 hd) {
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        u32 d = from + i * WARP + threadIdx.x % WARP;
        if (d < hd) to[d] = from_acc<ELEM>(acc[i] * factor);
    }
}

DEVICE void row_sum(Acc* delta, const ELEM* d_out, const ELEM* out, const Shape& shape) {
    Row row = row_of(shape.q_len(), shape.total);
    if (!row.inside) return;
    Head at = shape.head(row.head, shape.hd);
    size_t first = at.out + row.position * shape.out_stride(at);
    Acc sum = dot(d_out + first, out + first, shape.hd);
    if (threadIdx.x % WARP == 0) delta[at.row + row.position] = sum;
}

// The same where the 16-byte pieces of a head are a power of two up to 32, `lanes`, and aligned. One thread per piece: in the
// order of out where that is (B,T,C), else of delta.
DEVICE void row_sum_wide(Acc* delta, const ELEM* d_out, const ELEM* out, u32 lanes, const Shape& shape) {
    constexpr int N = Vec<ELEM>::N;
    u32 seq = shape.q_len();
    u64 piece = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = piece / lanes, from = piece * N;
    bool inside = row < (u64)shape.total * seq;
    Acc sum = 0;
    if (inside) {
        if constexpr (STRIDED) {
            Head at = shape.head((u32)(row / seq), shape.hd);
            from = at.out + row % seq * shape.out_stride(at) + piece % lanes * N;
        }
        Vec<ELEM> x = load(d_out + from), y = load(out + from);
#pragma unroll
        for (int i = 0; i < N; ++i) sum = fma_of(to_acc(x.at[i]), to_acc(y.at[i]), sum);
    }
    for (u32 d = lanes / 2; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (!inside || piece % lanes != 0) return;
    if constexpr (!STRIDED) {
        u64 token = row / shape.heads, head = token / seq * shape.heads + row % shape.heads;
        row = head * seq + token % seq;
    }
    delta[row] = sum;
}

DEVICE void forward(ELEM* out, Acc* lse, const Qkv<const ELEM>& in, const Shape& shape) {
    Row row = row_of(shape.q_len(), shape.total);
    if (!row.inside) return;
    u32 hd = shape.hd;
    Head at = shape.head(row.head, hd);
    const ELEM *q = in.q(at) + row.position * shape.q_stride(at), *k = in.k(at), *v = in.v(at);
    int end = shape.sees(row.position), begin = 0;
    if constexpr (MASKS) {
        Starts starts = starts_of(shape, row.head);
        begin = (int)starts.of(row.position);
        if (threadIdx.x % WARP == 0) check_query(shape, starts, row.head, row.position);
    }
    Acc scale = shape.exact_scale(), maximum = -__int_as_float(0x7f800000), sum = 0;
    for (int j = begin; j < end; ++j) {
        Acc s = dot(q, k + j * shape.k_stride(at), hd) * scale, m = max_of(maximum, s);
        sum = sum * exp_of(maximum - m) + exp_of(s - m);
        maximum = m;
    }
    if (threadIdx.x % WARP == 0 && (!STRIDED || lse != nullptr)) lse[at.row + row.position] = maximum + log_of(sum);
    Acc factor = STRIDED && end <= 0 ? Acc(0) : Acc(DROPS ? drops_of(shape).keep : 1.0f) / sum;
    for (u32 from = 0; from < hd; from += WARP * PART) {
        Acc acc[PART] = {};
        for (int j = begin; j < end; ++j) {
            if (DROPS && !drops_of(shape).keeps(at.row + row.position, j)) continue;
            Acc s = dot(q, k + j * shape.k_stride(at), hd) * scale;
            add(acc, exp_of(s - maximum), v + j * shape.v_stride(at), from, hd);
        }
        write(out + at.out + row.position * shape.out_stride(at), acc, factor, from, hd);
    }
}

struct Pair {
    Acc p, ds;
};

// The weight p of query i and key j times `f`, and the gradient ds of their score; f is 0 where dropout drops p.
DEVICE Pair pair(const ELEM* q, const ELEM* d_out, const ELEM* k, const ELEM* v, u32 hd, Acc scale, Acc lse, Acc delta, Acc f) {
    Acc p = exp_of(fma_of(dot(q, k, hd), scale, -lse));
    if constexpr (DROPS) return {p * f, p * (dot(d_out, v, hd) * f - delta)};
    else return {p, p * (dot(d_out, v, hd) - delta)};
}

// What dropout multiplies the probability of a key with.
DEVICE Acc drop_factor(const Shape& shape, u64 row, u32 key) {
    return DROPS ? (drops_of(shape).keeps(row, key) ? Acc(drops_of(shape).keep) : Acc(0)) : Acc(1);
}

DEVICE void backward_q(const Backward<Acc>& op) {
    const Shape& shape = op.shape;
    Row row = row_of(shape.q_len(), shape.total);
    if (!row.inside) return;
    u32 hd = shape.hd;
    Head at = shape.head(row.head, hd);
    size_t t = row.position;
    Acc scale = shape.exact_scale();
    const ELEM *q = op.in.q(at) + t * shape.q_stride(at), *k = op.in.k(at), *v = op.in.v(at);
    // The softmax of one key is constant, its gradient exactly 0.
    int end = shape.sees_one((int)t) ? 0 : shape.sees((int)t), begin = 0;
    if constexpr (MASKS) begin = (int)starts_of(shape, row.head).of((u32)t);
    if (MASKS && begin == (int)t) end = begin;
    for (u32 from = 0; from < hd; from += WARP * PART) {
        Acc acc[PART] = {};
        for (int j = begin; j < end; ++j) {
            const ELEM* key = k + j * shape.k_stride(at);
            Pair x = pair(q, op.d_out + at.out + t * shape.out_stride(at), key, v + j * shape.v_stride(at), hd, scale,
                          op.lse[at.row + t], op.delta[at.row + t], drop_factor(shape, at.row + t, j));
            add(acc, x.ds, key, from, hd);
        }
        write(op.d.q(at) + t * shape.q_stride(at), acc, scale, from, hd);
    }
}

// A warp per head of keys and values; `total` is B*NKV.
DEVICE void backward_kv(const Backward<Acc>& op) {
    const Shape& shape = op.shape;
    Row row = row_of(shape.kv_len(), shape.total);
    if (!row.inside) return;
    u32 share = shape.heads / shape.kv_heads, hd = shape.hd;
    Head at = shape.head(row.head * share, hd);
    size_t t = row.position, q_len = shape.q_len();
    Acc scale = shape.exact_scale();
    const ELEM *k = op.in.k(at) + t * shape.k_stride(at), *v = op.in.v(at) + t * shape.v_stride(at);
    Starts starts = starts_of(shape, row.head * share);
    for (u32 from = 0; from < hd; from += WARP * PART) {
        Acc d_k[PART] = {}, d_v[PART] = {};
        for (u32 h = 0; h < share; ++h) {
            const Acc *lse = op.lse + at.row + h * q_len, *delta = op.delta + at.row + h * q_len;
            for (u32 i = shape.first_for((u32)t); i < q_len; ++i) {
                if (MASKS && starts.of(i) > t) break;  // and so do all queries after it
                const ELEM* q = op.in.q(at) + h * shape.q_head(hd) + i * shape.q_stride(at);
                const ELEM* g = op.d_out + at.out + h * shape.out_head(hd) + i * shape.out_stride(at);
                Acc f = drop_factor(shape, at.row + h * q_len + i, t);
                Pair x = pair(q, g, k, v, hd, scale, lse[i], delta[i], f);
                if (MASKS ? !starts.alone(i) : !shape.sees_one((int)i)) add(d_k, x.ds, q, from, hd);
                add(d_v, x.p, g, from, hd);
            }
        }
        if (op.d.wants_k()) write(op.d.k(at) + t * shape.k_stride(at), d_k, scale, from, hd);
        if (op.d.wants_v()) write(op.d.v(at) + t * shape.v_stride(at), d_v, Acc(1), from, hd);
    }
}

KERNEL flash_any_fwd(ELEM* out, Acc* lse, QKV_PARAMETERS, SHAPE_PARAMETERS) { forward(out, lse, QKV, SHAPE); }
KERNEL flash_any_bwd_q(BACKWARD_PARAMETERS(Acc)) { backward_q(BACKWARD); }
KERNEL flash_any_bwd_kv(BACKWARD_PARAMETERS(Acc)) { backward_kv(BACKWARD); }

#ifdef EAGER
KERNEL flash_delta(Acc* delta, const ELEM* d_out, const ELEM* out, Shape shape) { row_sum(delta, d_out, out, shape); }
KERNEL flash_delta_wide(Acc* delta, const ELEM* d_out, const ELEM* out, u32 lanes, Shape shape) {
    row_sum_wide(delta, d_out, out, lanes, shape);
}
#else
KERNEL flash_delta(Acc* delta, const ELEM* d_out, const ELEM* out, u32 seq, u32 heads, u32 hd, u32 total) {
    row_sum(delta, d_out, out, {seq, heads, heads, hd, total, 0, 0.0f});
}
KERNEL flash_delta_wide(Acc* delta, const ELEM* d_out, const ELEM* out, u32 seq, u32 heads, u32 lanes, u32 total) {
    row_sum_wide(delta, d_out, out, lanes, {seq, heads, heads, 0, total, 0, 0.0f});
}
#endif
