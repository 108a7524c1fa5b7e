// sample: the next token from one row of logits: temperature, then top-k, then top-p, then one draw; -1 where a logit is NaN
//         or +∞ or none is above -∞
// moves  up to 14·vocab·sizeof(ACT) bytes, all but the first time from L2; bound: latency
// grid   one block; any vocabulary
// order  weights exp((x - max)/temperature) are whole multiples of 2^-40, so every sum is exact and its order does not
//        matter. Ties as on the host: top-k keeps all that equal the k-th, top-p and the draw after it go by falling
//        logit, then by index; a draw without top-p goes by index
#include "sampling/search.cuh"

// What every pass needs to see the candidates.
struct Row {
    const ACT* logits;
    u32 vocab;
    float max, temperature;
    u32 least;  // smaller keys are out
    DEVICE float at(u32 i) const { return to_float(logits[i]); }
    DEVICE u64 weight(float x) const {
        return (u64)(expf((x - max) / temperature) * 1099511627776.0f);  // 2^40
    }
};

// `u` in [0, 1) decides the draw. top_k = 0 and top_p = 0 mean that all stay. There is only one block: it may have
// all registers.
KERNEL __launch_bounds__(THREADS, 1) sample(i32* out, const ACT* logits, double u, u32 vocab, float temperature,
                                            u32 top_k, float top_p) {
    __shared__ Space s;
    u32 best;
    const u32 top = largest(logits, vocab, best, s);
    if (top == 0 || temperature == 0.0f) {
        if (threadIdx.x == 0) *out = top == 0 ? -1 : (i32)best;
        return;
    }
    Row row = {logits, vocab, logit_of(top), temperature, 0};
    const u32 chosen = draw(row, u, top_k, top_p, s);
    if (threadIdx.x == 0) *out = (i32)(chosen == ABSENT ? best : chosen);
}
