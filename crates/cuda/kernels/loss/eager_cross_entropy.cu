// cross_entropy:      losses = lse - x[target], lse = log Σ e^x, per row of cols; 0 where the target is `ignore`, NaN where it
//                     is out of range
// cross_entropy_mean: the sum of the losses, divided by the number of targets that are not `ignore` where `mean`, and that
//                     factor
// cross_entropy_bwd:  d_logits = (e^(x - lse) - onehot)·factor, factor = scale·d_loss·inv_count; 0 where ignored, NaN where the
//                     target is out of range. Without lse the logits are log-probabilities
// moves  rows·cols·sizeof(T) bytes, backward twice that; bound: memory, though e^x of 2-byte types takes 60 % of that time.
//        8192 x 50304 bf16 on an H200: 0.82 GB, 0.19 ms; backward 1.65 GB, 0.38 ms
// grid   a team of `lanes` threads (up to a warp, or a block) per row; backward blockIdx.y walks over parts of a row. Any shape
//        and address; `vector`: rows of both arrays start at the same offset from a multiple of 16 bytes
// order  each thread its columns in order, then pairs at fixed distances: repeatable
#include "common/rows.cuh"

KERNEL __launch_bounds__(512, sizeof(T) == 8 ? 1 : 2) cross_entropy(Acc* losses, Acc* lse, const T* logits, const void* targets, u64 rows,
                                               u64 width, i64 ignore, u32 wide, u32 lanes, u32 vector) {
    __shared__ Acc shared[2][WARP];
    const Team team(lanes);
    const i64 cols = team.row < rows ? (i64)width : 0;
    const T* row = logits + team.row * width;
    const bool first = team.at == 0 && cols > 0;
    const i64 target = first ? target_of(targets, wide, team.row) : 0;
    const Acc at_target = first && target >= 0 && target < cols ? to_acc(row[target]) : nan();
    const Total total = online(row, cols, team, vector, shared);
    if (!first) return;
    const Acc log_sum = log_of(total.sum);
    if (lse) lse[team.row] = total.max + log_sum;
    if (losses) losses[team.row] = target == ignore ? Acc(0) : log_sum - (at_target - total.max);
}

// A number of any float type: 0 double, 1 float, 2 bf16, 3 f16.
DEVICE double any_at(const void* from, u32 type, u64 i) {
    if (type == 0) return static_cast<const double*>(from)[i];
    if (type == 1) return static_cast<const float*>(from)[i];
    if (type == 2) return to_float(static_cast<const bf16*>(from)[i]);
    return to_float(static_cast<const f16*>(from)[i]);
}
DEVICE void any_put(void* to, u32 type, double x) {
    if (type == 0) *static_cast<double*>(to) = x;
    else if (type == 1) *static_cast<float*>(to) = (float)x;
    else if (type == 2) *static_cast<bf16*>(to) = from_float<bf16>((float)x);
    else *static_cast<f16*>(to) = from_float<f16>((float)x);
}

// One block.
KERNEL __launch_bounds__(1024) cross_entropy_mean(void* loss, Acc* inv_count, const Acc* losses, const void* targets,
                                                  u64 rows, i64 ignore, u32 type, u32 wide, u32 mean) {
    __shared__ double sums[1024];
    double sum = 0, count = 0;
#pragma unroll 4
    for (u64 row = threadIdx.x; row < rows; row += 1024) {
        sum += losses[row];
        if (mean) count += target_of(targets, wide, row) == ignore ? 0 : 1;
    }
    block_sum_f64<1024>(sum, sums);
    __syncthreads();
    block_sum_f64<1024>(count, sums);
    if (threadIdx.x > 0) return;
    // No target at all: 0 / 0, as in PyTorch.
    if (loss) any_put(loss, type, mean ? sum / count : sum);
    if (inv_count) *inv_count = (Acc)(mean ? 1 / count : 1);
}

DEVICE float expm1_of(float x) { return expm1f(x); }
DEVICE double expm1_of(double x) { return expm1(x); }

KERNEL __launch_bounds__(256, sizeof(T) == 8 ? 2 : 3)
    cross_entropy_bwd(T* d_logits, const void* d_loss, const T* logits, const void* targets, const Acc* lse,
                      const Acc* inv_count, u64 rows, u64 width, i64 ignore, double scale, u32 type, u32 per_row,
                      u32 wide, u32 lanes, u32 vector) {
    const Team team(lanes);
    if (team.row >= rows) return;
    const i64 cols = (i64)width;
    const T* row = logits + team.row * width;
    T* out = d_logits + team.row * width;
    const i64 target = target_of(targets, wide, team.row);
    const bool ignored = target == ignore;
    const Acc shift = lse ? lse[team.row] : Acc(0);
    Acc factor = (Acc)scale;
    if (d_loss) factor *= (Acc)any_at(d_loss, type, per_row ? team.row : 0);
    if (inv_count) factor *= *inv_count;
    if (target < 0 || target >= cols) factor = nan();
    // Each part of a row is a row to `stream`; parts begin at whole vectors.
    const i64 part = (cols + gridDim.y - 1) / gridDim.y, each = (part + N - 1) / N * N;
    const i64 head = (i64)((16 - (u64)row % 16) % 16 / sizeof(T));
    const i64 begin = blockIdx.y == 0 ? 0 : blockIdx.y * each + head, end = min((blockIdx.y + 1) * each + head, cols);
    if (begin >= end) return;
    stream(row + begin, end - begin, team, vector, [&](auto batch) {
        if (ignored) {
            batch.store(out + begin, [&](int, int) { return Acc(0); });
            return;
        }
        Slots<decltype(batch)> s;
        batch.load(s, row + begin, from_acc<T>(0));
        // The target, if it is among these.
        const u64 at = (u64)(target - begin - batch.first);
        bool here = false;
        Acc x = 0;
        if (at < (u64)batch.stride * batch.COUNT && target < begin + batch.end) {
#pragma unroll
            for (int u = 0; u < batch.COUNT; u++)
#pragma unroll
                for (int k = 0; k < batch.WIDTH; k++)
                    if ((u32)at == u * (u32)batch.stride + k) {
                        here = true;
                        x = to_acc(s[u].at[k]);
                    }
        }
        batch.store(out + begin, [&](int u, int k) { return weight_of(to_acc(s[u].at[k]) - shift) * factor; });
        // Here e^x - 1 loses no digits when e^x is near 1.
        if (here) out[target] = from_acc<T>(expm1_of(x - shift) * factor);
    });
}
