// argmax: the index of the largest of each row, the lowest among equals, the first NaN if there is one
// choose: an index of each row drawn from softmax(logits / temperature), from the top_k largest or those that together have the
//         share top_p; -1 where a logit is NaN or +∞ or none is above -∞
// moves  argmax rows·vocab·4 bytes; choose up to 14 times that, all but the first time from L2; bound: latency
// grid   argmax: a team of `lanes` threads per row; choose: a block per row. Any vocabulary
// order  choose: weights e^((x - max) / temperature), computed in f64, are whole multiples of 1 / scale: every sum is exact and
//        its order does not matter. Ties and draws as on the host
#include "common/rows.cuh"
#include "sampling/search.cuh"

KERNEL __launch_bounds__(512, 2) argmax(i32* out, const T* logits, u64 rows, u64 vocab, u32 lanes) {
    __shared__ u64 shared[WARP];
    const Team team(lanes);
    const i64 cols = team.row < rows ? (i64)vocab : 0;
    const T* row = logits + team.row * vocab;
    u64 best = 0;
    stream(row, cols, team, 1, [&](auto batch) {
        Slots<decltype(batch)> s;
        batch.load(s, row, from_acc<T>(-infinity()));
#pragma unroll
        for (int u = 0; u < batch.COUNT; u++) {
            if (!batch.has(u)) continue;
#pragma unroll
            for (int k = 0; k < batch.WIDTH; k++) best = max(best, rank(to_float(s[u].at[k]), batch.column(u) + k));
        }
    });
    best = reduce(best, lanes, 0ull, shared, [](u64 a, u64 b) { return max(a, b); });
    if (team.at == 0 && cols > 0) out[team.row] = (i32)~(u32)best;
}

struct Row {
    const T* logits;
    u32 vocab;
    double max, inverse, scale;
    u32 least;
    DEVICE float at(u32 i) const { return to_float(logits[i]); }
    DEVICE u64 weight(float x) const { return (u64)(exp(((double)x - max) * inverse) * scale); }
};

// The first output of SplitMix64 in this state, its upper 53 bits.
DEVICE double uniform_of(u64 seed) {
    u64 z = seed + 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}

// scale·vocab is below 2^63.
KERNEL __launch_bounds__(THREADS, 1) choose(i32* out, const T* logits, const u64* seeds, u32 vocab, double temperature,
                                            double scale, u32 top_k, float top_p) {
    __shared__ Space s;
    const T* line = logits + (u64)blockIdx.x * vocab;
    u32 best;
    const u32 top = largest(line, vocab, best, s);
    if (top == 0 || temperature == 0) {
        if (threadIdx.x == 0) out[blockIdx.x] = top == 0 ? -1 : (i32)best;
        return;
    }
    Row row = {line, vocab, logit_of(top), 1 / temperature, scale, 0};
    const u32 chosen = draw(row, uniform_of(seeds[blockIdx.x]), top_k, top_p, s);
    if (threadIdx.x == 0) out[blockIdx.x] = (i32)(chosen == ABSENT ? best : chosen);
}
