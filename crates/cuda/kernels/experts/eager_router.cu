// softmax_topk:  per row the k largest, largest first, the lower index first among equals, NaN before all; weights: their
//                softmax among themselves
// aux_partials, aux_loss: f[e] = share of the rows that name expert e, p[e] = mean of probs[:, e],
//                aux = alpha·experts·Σ f·p. An index that is out of range is not counted
// moves  topk rows·cols·4 bytes k times, all but the first from L1 or L2; aux rows·(experts + k)·4 bytes and, from L2, the
//        indices once per 32 experts; bound: latency
// grid   topk: a team of `lanes` threads per row. aux_partials: 32 experts and a chunk of rows a block; aux_loss: one block
// order  sums are f64 in a fixed order: repeatable
#include "common/rows.cuh"
#include "sampling/search.cuh"

KERNEL __launch_bounds__(256) softmax_topk(float* weights, i32* indices, const float* x, u64 rows, u64 cols, u64 k,
                                           u32 lanes) {
    __shared__ u64 shared[2][WARP];
    const Team team(lanes);
    const bool there = team.row < rows;
    const float* row = x + team.row * cols;
    u64 below = ~0ull;
    double total = 0;
    float max = 0;
    for (u64 j = 0; j < k; j++) {
        u64 best = 0;
        if (there) {
            for (u64 c = team.at; c < cols; c += lanes) {
                const u64 mine = rank(row[c], c);
                if (mine < below && mine > best) best = mine;
            }
        }
        best = reduce(best, lanes, 0ull, shared[j % 2], [](u64 a, u64 b) { return a > b ? a : b; });
        below = best;
        if (!there) continue;
        const u32 c = ~(u32)best;
        const float v = row[c];
        if (j == 0) max = v;
        total += exp((double)(v - max));
        if (team.at == 0) {
            indices[team.row * k + j] = (i32)c;
            weights[team.row * k + j] = v;
        }
    }
    if (lanes <= WARP) __syncwarp();
    else __syncthreads();
    if (!there) return;
    for (u64 j = team.at; j < k; j += lanes) {
        float& w = weights[team.row * k + j];
        w = (float)(exp((double)(w - max)) / total);
    }
}

// partials: [chunk][sums | counts][experts]. A thread sums an expert over every eighth row of the chunk.
KERNEL __launch_bounds__(256) aux_partials(double* partials, const float* probs, const i32* chosen, u64 rows, u64 experts,
                                           u64 k, u64 chunk) {
    __shared__ double sums[2][8][WARP];
    const u32 lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const u64 e = (u64)blockIdx.x * WARP + lane, begin = blockIdx.y * chunk, end = min(begin + chunk, rows);
    double sum = 0, count = 0;
    if (e < experts) {
        for (u64 row = begin + slice; row < end; row += 8) {
            sum += probs[row * experts + e];
            bool named = false;
            for (u64 j = 0; j < k; j++) named |= chosen[row * k + j] == (i64)e;
            count += named;
        }
    }
    sums[0][slice][lane] = sum;
    sums[1][slice][lane] = count;
    __syncthreads();
    if (slice > 1 || e >= experts) return;
    double all = 0;
    for (int s = 0; s < 8; s++) all += sums[slice][s][lane];
    partials[((u64)blockIdx.y * 2 + slice) * experts + e] = all;
}

KERNEL __launch_bounds__(1024) aux_loss(float* aux, float* f, float* p, const double* partials, u64 rows, u64 experts,
                                        u64 chunks, double alpha) {
    __shared__ double shared[1024];
    double total = 0;
    for (u64 e = threadIdx.x; e < experts; e += 1024) {
        double sum = 0, count = 0;
        for (u64 chunk = 0; chunk < chunks; chunk++) {
            sum += partials[chunk * 2 * experts + e];
            count += partials[(chunk * 2 + 1) * experts + e];
        }
        f[e] = (float)(count / rows);
        p[e] = (float)(sum / rows);
        total += count / rows * (sum / rows);
    }
    block_sum_f64<1024>(total, shared);
    if (threadIdx.x == 0) *aux = (float)(alpha * experts * total);
}
