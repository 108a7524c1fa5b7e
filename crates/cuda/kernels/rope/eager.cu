// rope: y = x (B,S,H,D) with pairs of each head rotated by the angle of their position: (a c - b s, a s + b c), or with
// BACK the other way. INTERLEAVED pairs are 2i and 2i + 1, others i and i + D/2. cos and sin are (S, D/2)
// _qk:  the same for a second tensor, y2 = x2 (B,S,H2,D), in one launch
//
// moves  2·B·S·H·D·sizeof(T); the tables come from L1 and L2. Bound: memory
// grid   a thread owns pairs of a head at AHEAD positions: those of a vector (or of two, D/2 apart), or one pair where D or an
//        address does not allow vectors; threads side by side over the heads of a position; any sizes
// order  elementwise; in place is fine
#include "common/unaligned.cuh"

constexpr int N = Vec<T>::N;
constexpr int AHEAD = 2;  // positions of a thread: also in src/eager/rope.rs

// Up to 16 bytes at once.
template <int COUNT> struct alignas(COUNT * sizeof(Acc) < 16 ? COUNT * sizeof(Acc) : 16) Table {
    Acc at[COUNT];
};

// COUNT pairs: with VECTORS in one vector (interleaved) or in two, else one pair in two elements.
template <bool INTERLEAVED, bool VECTORS> struct Pairs {
    static constexpr int COUNT = !VECTORS ? 1 : INTERLEAVED ? N / 2 : N;
    static constexpr bool ONE = VECTORS && INTERLEAVED;
    Vec<T> v[2];

    // Where the first element of pair `pair` of a head is.
    static DEVICE u32 start(u32 pair) { return INTERLEAVED ? 2 * pair : pair; }
    DEVICE void read(const T* from, u32 apart) {
        if constexpr (VECTORS) {
            v[0] = load(from);
            if constexpr (!ONE) v[1] = load(from + apart);
        } else {
            v[0].at[0] = from[0];
            v[1].at[0] = from[apart];
        }
    }
    DEVICE void turn(const Table<COUNT>& cos, const Table<COUNT>& sin, bool back) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            T& first = ONE ? v[0].at[2 * i] : v[0].at[i];
            T& second = ONE ? v[0].at[2 * i + 1] : v[1].at[i];
            const Acc a = to_acc(first), b = to_acc(second), c = cos.at[i], s = back ? -sin.at[i] : sin.at[i];
            first = from_acc<T>(a * c - b * s);
            second = from_acc<T>(a * s + b * c);
        }
    }
    DEVICE void write(T* to, u32 apart) const {
        if constexpr (VECTORS) {
            put(to, v[0]);
            if constexpr (!ONE) put(to + apart, v[1]);
        } else {
            to[0] = v[0].at[0];
            to[apart] = v[1].at[0];
        }
    }
};

// `tokens` = B·S, `heads` heads of `dim`, then `heads2` of x2; (heads + heads2)·dim is below 2³¹.
template <bool INTERLEAVED, bool VECTORS>
DEVICE void rope(T* y, const T* x, const Acc* cos, const Acc* sin, u64 tokens, u32 seq, u32 heads, u32 dim, u32 back,
                 u32 tiles, T* y2 = nullptr, const T* x2 = nullptr, u32 heads2 = 0) {
    using P = Pairs<INTERLEAVED, VECTORS>;
    const u32 half = dim / 2, each = half / P::COUNT;  // threads of a head
    const u32 unit = blockIdx.x % tiles * blockDim.x + threadIdx.x;
    if (unit >= each * (heads + heads2)) return;
    const u32 pair = unit % each * P::COUNT, apart = INTERLEAVED ? 1 : half;
    u32 head = unit / each;
    if (heads2 && head >= heads) {
        head -= heads;
        x = x2, y = y2, heads = heads2;
    }
    const u64 inside = (u64)head * dim + P::start(pair), width = (u64)heads * dim;
    const u64 first = (u64)(blockIdx.x / tiles) * (AHEAD * blockDim.y) + threadIdx.y;
    P p[AHEAD];
    Table<P::COUNT> c[AHEAD], s[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        const u64 token = first + j * blockDim.y;
        if (token >= tokens) break;
        p[j].read(x + token * width + inside, apart);
        const u32 position = tokens >> 32 ? (u32)(token % seq) : (u32)token % seq;  // the first is slow
        const u64 row = (u64)position * half + pair;
        c[j] = *reinterpret_cast<const Table<P::COUNT>*>(cos + row);
        s[j] = *reinterpret_cast<const Table<P::COUNT>*>(sin + row);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        const u64 token = first + j * blockDim.y;
        if (token >= tokens) break;
        p[j].turn(c[j], s[j], back);
        p[j].write(y + token * width + inside, apart);
    }
}

#define ROPE(NAME, INTERLEAVED, VECTORS)                                                                            \
    KERNEL __launch_bounds__(256) NAME(T* y, const T* x, const Acc* cos, const Acc* sin, u64 tokens, u32 seq,       \
                                       u32 heads, u32 dim, u32 back, u32 tiles) {                                   \
        rope<INTERLEAVED, VECTORS>(y, x, cos, sin, tokens, seq, heads, dim, back, tiles);                           \
    }                                                                                                               \
    KERNEL __launch_bounds__(256) NAME##_qk(T* y, const T* x, const Acc* cos, const Acc* sin, u64 tokens, u32 seq,  \
                                            u32 heads, u32 dim, u32 back, u32 tiles, T* y2, const T* x2,            \
                                            u32 heads2) {                                                           \
        rope<INTERLEAVED, VECTORS>(y, x, cos, sin, tokens, seq, heads, dim, back, tiles, y2, x2, heads2);           \
    }
ROPE(rope_interleaved, true, true)
ROPE(rope_interleaved_any, true, false)
ROPE(rope_halves, false, true)
ROPE(rope_halves_any, false, false)
