// rope: rotates each head of queries and keys of qkv (B,T,W) in place: of a head's channels the pair (i, i + HD/2) becomes
//       (a·cos - b·sin, a·sin + b·cos), with `sign` -1 the other way; row p of the tables (P,HD/2) is that of position p
// moves  2·B·T·(NH + NKV)·HD·sizeof(ACT) bytes; the tables come from L2. Bound: memory
// grid   a thread per vector of pairs with VECTORS (needs HD/2 % (16 / sizeof(ACT)) == 0), else per pair; any shape
// order  elementwise
#include "common/positions.cuh"

constexpr int N = VECTORS ? Vec<ACT>::N : 1;

// `count` vectors of pairs, `per_token` of them for a token. `scalars` is null where sequences start at position 0, `places` (B,T)
// where they are one document. With both, tokens continue sequences in a cache of `context` positions.
KERNEL __launch_bounds__(256) rope(ACT* qkv, const float* cosines, const float* sines, const Scalars* scalars,
                                   const i32* places, Fault* fault, u64 count, u32 per_token, u32 half, u64 width, u64 seq, float sign,
                                   u32 context) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const u64 token = count >> 32 ? i / per_token : (u32)i / per_token;  // the first is slow
    const u32 inside = (u32)(i - token * per_token), per_head = half / N;
    const u32 head = inside / per_head, pair = (inside - head * per_head) * N;
    u64 position = (count >> 32 ? token % seq : (u32)token % (u32)seq) + (scalars ? scalars->position : 0);
    if (places && scalars) {
        position = at_position(places[token], token, context, inside == 0, fault);
    } else if (places) {
        if (inside == 0) check_position(places + (token - position), (u32)position, token - position, fault);
        position = min((u64)(u32)places[token], seq - 1);  // a wrong one only stays inside
    }
    ACT* const first = qkv + token * width + (u64)head * 2 * half + pair;
    float a[N], b[N], c[N], s[N];
    load_floats(a, first);
    load_floats(b, first + half);
    load_floats(c, cosines + position * half + pair);
    load_floats(s, sines + position * half + pair);
#pragma unroll
    for (int k = 0; k < N; k++) {
        const float turn = s[k] * sign, x = a[k];
        a[k] = x * c[k] - b[k] * turn;
        b[k] = x * turn + b[k] * c[k];
    }
    store_floats(first, a);
    store_floats(first + half, b);
}
