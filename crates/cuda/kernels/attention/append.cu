// cache_append: stores the new keys and values of tokens at their places in a cache: keys[rows[i], positions[i]] is the key of
//               token i in qkv, and the same for values; tokens at position -1 are not used
// moves  4·B·NKV·HD·sizeof(ACT) bytes; bound: launch
// grid   a block per token; any width
// order  copies
#include "attention/places.cuh"

KERNEL __launch_bounds__(256)
    cache_append(ACT* keys, ACT* values, const ACT* qkv, const i32* rows, const i32* positions, Fault* fault, u32 sequences,
                 u32 context, u32 width, u32 before) {
    const Places places = {rows, positions, sequences, context};
    const u32 token = blockIdx.x;
    if (threadIdx.x == 0) places.check(token, fault);
    if (!places.has(token)) return;
    const u64 to = ((u64)rows[token] * context + positions[token]) * width;
    const ACT* const from = qkv + (u64)token * (before + 2 * width) + before;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        keys[to + i] = from[i];
        values[to + i] = from[width + i];
    }
}
