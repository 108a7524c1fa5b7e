// preference: of pairs of texts, rows [p][0] to [p][1] chosen and up to [p][2] rejected: reward = beta·Σ (reference - losses),
//             margin = their difference, loss (+)= loss_scale·Σ -ln σ(margin), means (+)= loss_scale·Σ of both rewards and of
//             1 where the chosen's is larger, weights = ±beta·σ(-margin) in the rows of a pair (0 elsewhere, set before)
// moves  12·rows bytes; bound: latency
// grid   preference_pairs: a warp per pair; preference_sums: one block; any count
// order  each lane its rows in order, a butterfly over lanes; threads their pairs in order, then a tree. All in f64: repeatable
#include "common/prelude.cuh"

constexpr int PARTS = 3;  // of a pair: its loss and both rewards

// Whether the three row numbers of a pair go on from those before and lie within the batch; what does not is reported.
DEVICE bool are_bounds(const i32* pairs, u32 pair, u32 rows, Fault* fault) {
    i32 before = pair == 0 ? 0 : pairs[3 * pair - 1];
    for (u32 i = 3 * pair; i < 3 * pair + 3; i++) {
        const i32 row = pairs[i];
        if (row < before || row > (i32)rows || row < 0) {
            if (threadIdx.x % WARP == 0) report(fault, 8, row, (i32)i, (i32)rows);
            return false;
        }
        before = row;
    }
    return true;
}

DEVICE double reward(const float* losses, const float* reference, i32 start, i32 end, float beta) {
    double sum = 0.0;
    for (i32 row = start + (i32)(threadIdx.x % WARP); row < end; row += WARP)
        sum += (double)reference[row] - (double)losses[row];
    return (double)beta * warp_sum(sum);
}

KERNEL __launch_bounds__(256) preference_pairs(float* rewards, float* weights, double* parts, const float* losses,
                                               const float* reference, const i32* pairs, Fault* fault, u32 count,
                                               u32 rows, float beta) {
    const u32 pair = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (pair >= count) return;
    double chosen = 0.0, rejected = 0.0, loss = 0.0;
    const i32 start = pairs[3 * pair], middle = pairs[3 * pair + 1], end = pairs[3 * pair + 2];
    if (are_bounds(pairs, pair, rows, fault) && start < end) {
        chosen = reward(losses, reference, start, middle, beta);
        rejected = reward(losses, reference, middle, end, beta);
        const double margin = chosen - rejected;
        // -ln σ(margin), without overflow on either side; NaN stays NaN
        loss = log1p(exp(-fabs(margin))) + (margin < 0.0 ? -margin : 0.0);
        if (weights != nullptr) {
            const float weight = (float)((double)beta / (1.0 + exp(margin)));
            for (i32 row = start + (i32)lane; row < end; row += WARP) weights[row] = row < middle ? weight : -weight;
        }
    }
    if (lane == 0) {
        rewards[2 * pair] = (float)chosen;
        rewards[2 * pair + 1] = (float)rejected;
        parts[PARTS * pair] = loss;
        parts[PARTS * pair + 1] = chosen;
        parts[PARTS * pair + 2] = rejected;
    }
}

KERNEL __launch_bounds__(1024) preference_sums(float* loss, float* means, const double* parts, const Scalars* scalars,
                                               u32 count, u32 adds) {
    __shared__ double shared[1024];
    double sums[4] = {0.0, 0.0, 0.0, 0.0};  // the loss, both rewards, how often the chosen's is larger
    for (u32 pair = threadIdx.x; pair < count; pair += 1024) {
        const double chosen = parts[PARTS * pair + 1], rejected = parts[PARTS * pair + 2];
        sums[0] += parts[PARTS * pair];
        sums[1] += chosen;
        sums[2] += rejected;
        sums[3] += chosen > rejected ? 1.0 : 0.0;
    }
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        __syncthreads();  // the sum before may still be read
        block_sum_f64<1024>(sums[i], shared);
        if (threadIdx.x == 0) {
            const float mean = (float)(sums[i] * (double)scalars->loss_scale);
            float* const to = i == 0 ? loss : means + i - 1;
            *to = adds ? *to + mean : mean;
        }
    }
}
