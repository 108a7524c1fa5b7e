// tree_sum: out = the sum of `rows` rows of n elements, in the order of a tree: after a row is put on a stack, `merges[row]` times
//        the two sums on top become one
//        ACT the element type; sums are kept in it, as they are where a rank adds what it computed itself
// moves  (rows + 1)·n·sizeof(ACT) bytes; bound: memory
// grid   a thread for each element; any n
// order  that of core/src/ranks/tree.rs, the same for any number of ranks
#include "common/prelude.cuh"

constexpr int THREADS = 256;
// The most sums that are open at a time: enough for 2^16 rows.
constexpr int OPEN = 18;

KERNEL __launch_bounds__(THREADS) tree_sum(ACT* out, const ACT* inp, const u32* merges, u32 rows, u64 n) {
    const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    float open[OPEN];
    // The top is kept apart, so that worlds of powers of two touch the rest rarely.
    float top = 0.0f;
    int count = 0;
    for (u32 row = 0; row < rows; row++) {
        if (row > 0) {
#pragma unroll
            for (int d = 0; d < OPEN; d++) {
                if (d == count) open[d] = top;
            }
            count++;
        }
        top = to_float(inp[row * n + i]);
        for (u32 merge = merges[row]; merge > 0; merge--) {
            count--;
            float below = 0.0f;
#pragma unroll
            for (int d = 0; d < OPEN; d++) {
                if (d == count) below = open[d];
            }
            top = to_float(from_float<ACT>(below + top));
        }
    }
    out[i] = from_float<ACT>(top);
}
