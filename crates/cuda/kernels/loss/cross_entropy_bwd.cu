// cross_entropy_bwd: per row logits = (softmax - onehot)·loss_scale·weight from the row's loss; padding, and rows with the target
//                    IGNORED, become 0
// moves  2·rows·padded·sizeof(ACT) bytes; bound: memory
// grid   a block per row; any shape
// order  no sums
#include "common/prelude.cuh"

constexpr int N = Vec<ACT>::N;
// `IGNORED` of core/src/op/loss.rs: the target of a row that does not count.
constexpr i32 IGNORED = -100;

// e^(x - x_target - loss)·scale; one difference after the other, so that logits far from 0 lose no digits.
DEVICE float gradient(float x, float x_target, float loss, float scale) {
    return exp2_fast(((x - x_target) - loss) * LOG2E) * scale;
}

// With `vectors`, which needs 16-byte rows, threads take N columns at a time.
KERNEL __launch_bounds__(512) cross_entropy_bwd(ACT* logits, const i32* targets, const float* losses,
                                                const float* weights, const Scalars* scalars, Fault* fault, u32 vocab,
                                                u32 padded, u32 vectors) {
    const u32 row = blockIdx.x;
    ACT* const line = logits + (u64)row * padded;
    const i32 target = targets[row];
    const bool counts = (u32)target < vocab;
    if (!counts && target != IGNORED && threadIdx.x == 0) report(fault, 2, target, (i32)row, (i32)vocab);
    const float loss = losses[row], scale = scalars->loss_scale * weights[row];
    const float x_target = counts ? to_float(line[target]) : 0.0f;
    const float at_target = expm1f(-loss) * scale;
    __syncthreads();  // every thread has read the target's logit before one writes it
    const u32 whole = vectors ? vocab / N : 0;
    for (u32 v = threadIdx.x; v < whole; v += blockDim.x) {
        float x[N];
        load_floats(x, line + v * N);
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float y = v * N + k == (u32)target ? at_target : gradient(x[k], x_target, loss, scale);
            x[k] = counts ? y : 0.0f;
        }
        store_floats(line + v * N, x);
    }
    for (u32 c = whole * N + threadIdx.x; c < padded; c += blockDim.x) {
        float y = 0.0f;
        if (c < vocab && counts)
            y = c == (u32)target ? at_target : gradient(to_float(line[c]), x_target, loss, scale);
        line[c] = from_float<ACT>(y);
    }
}
