// cross_entropy: per row losses = log Σ exp(x) - x[target] over the first `vocab` columns; with a gradient the row becomes
//                (softmax - onehot)·loss_scale, its padding 0. Rows with the target IGNORED get loss 0 and gradient 0
// moves  rows·padded·sizeof(ACT) bytes once, twice with a gradient; bound: memory
// grid   cross_entropy_shared, with a gradient: as many clusters of CLUSTER blocks as the device holds, each walks over rows and
//        keeps one in its blocks' shared memory, a stretch of columns in each; needs 16-byte rows that fit, and sm_90 for
//        clusters of more than one block. cross_entropy_sums, without: the same, and leaves in `of_rows`, where it is not null,
//        what loss/fp8.cu makes the same gradient of. cross_entropy_any: a block per row, which it reads for each pass; any shape
// order  each thread its vectors in order, even and odd columns of one apart, then a butterfly over lanes, then over warps, then the
//        blocks in order: repeatable
#include "common/async_copy.cuh"
#include "common/cluster.cuh"
#include "loss/gradient.cuh"

// A row that needs several blocks fills the shared memory of each.
constexpr int MOST_THREADS = CLUSTER > 1 ? 1024 : 768, BLOCKS = CLUSTER > 1 ? 1 : 2;

// Below every finite logit, and finite, so that differences to it are never NaN.
constexpr float LEAST = -3.4e38f;

DEVICE void raise(Sum& s, float max) {
    if (max > s.max) {
        s.sum *= exp2_fast((s.max - max) * LOG2E);
        s.max = max;
    }
}

DEVICE float largest(const Vec<float>& v) { return fmaxf(fmaxf(v.at[0], v.at[1]), fmaxf(v.at[2], v.at[3])); }
DEVICE float largest(const Vec<bf16>& v) {
    const uint4& q = *reinterpret_cast<const uint4*>(&v);
    const u32 pair = max_bf16(max_bf16(q.x, q.y), max_bf16(q.z, q.w));
    return fmaxf(low(pair), high(pair));
}

// What a thread has summed so far.
struct Running {
    Sum total = {LEAST, 0.0f};
    float shift = LEAST;  // max·log2(e): exponents of bf16 numbers take one multiply-add, whose error is the same for all of them

    // The columns of one vector.
    DEVICE void add(const Vec<ACT>& v) {
        const float max = largest(v);
        if (max > total.max) {
            raise(total, max);
            shift = max * LOG2E;
        }
        float x[N], sums[2] = {};
        to_floats(x, v);
#pragma unroll
        for (int k = 0; k < N; k++)
            sums[k % 2] += exp2_flush(sizeof(ACT) == 2 ? __fmaf_rn(x[k], LOG2E, -shift) : (x[k] - total.max) * LOG2E);
        total.sum += sums[0] + sums[1];
    }
};

// One total for the block. `shared` has two turns, so that one barrier a row is enough; `x_target` goes along with it.
struct Shared {
    Sum warps[2][WARP];
    Sum blocks[2][CLUSTER];
    float x_target[2];
};
static_assert(sizeof(Shared) <= 656, "TOTALS of src/op/loss.rs");

DEVICE Sum block_sum(Sum s, float& x_target, Shared& shared, int turn) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float top = warp_max(s.max);
    const float sum = warp_sum(s.sum * exp2_fast((s.max - top) * LOG2E));
    if (lane == 0) shared.warps[turn][warp] = {top, sum};
    if (threadIdx.x == 0) shared.x_target[turn] = x_target;
    __syncthreads();
    Sum mine = {LEAST, 0.0f};
    if (lane < blockDim.x / WARP) mine = shared.warps[turn][lane];
    x_target = shared.x_target[turn];
    const float max = warp_max(mine.max);
    return {max, warp_sum(mine.sum * exp2_fast((mine.max - max) * LOG2E))};
}

#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
// One total for the cluster from those of its blocks, added in their order.
DEVICE Sum cluster_sum(Sum mine, Shared& shared, int turn) {
    if (threadIdx.x < CLUSTER)
        store_there(shared_address_in(threadIdx.x, &shared.blocks[turn][cluster_rank()]), mine.max, mine.sum);
    cluster_barrier();
    float max = LEAST, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) max = fmaxf(max, shared.blocks[turn][i].max);
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
        const Sum one = shared.blocks[turn][i];
        sum += one.sum * exp2_fast((one.max - max) * LOG2E);
    }
    return {max, sum};
}
#else
DEVICE Sum cluster_sum(Sum mine, Shared&, int) { return mine; }
#endif

// The row's target, or -1 if the row is ignored or its target out of range.
DEVICE i32 checked(const i32* targets, u32 row, u32 vocab, Fault* fault) {
    const i32 target = targets[row];
    if ((u32)target < vocab) return target;
    if (target != IGNORED && threadIdx.x == 0) report(fault, 2, target, (i32)row, (i32)vocab);
    return -1;
}

DEVICE void write_loss(float* losses, u32 row, i32 target, float x_target, Sum total) {
    if (threadIdx.x == 0) losses[row] = target < 0 ? 0.0f : logf(total.sum) - (x_target - total.max);
}

// A row arrives in quarters, so that the first can be summed while the last is still being copied.
constexpr int QUARTERS = 4;

struct Rows {
    float* losses;
    Scales* of_rows;
    ACT* logits;
    const i32* targets;
    const Scalars* scalars;
    Fault* fault;
    u32 rows, vocab, padded;
};

// The gradients of one vector, in its place.
DEVICE void leave_gradients(ACT* to, const Vec<ACT>& logits, const Scales& s) {
    float x[N];
    to_floats(x, logits);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = gradient(x[k], s);
    Vec<ACT> out;
    round_to(out, x);
    store_once(to, out);
}

// Each thread copies, sums and overwrites its own vectors only: within a row just the totals need a barrier. Where a vector is
// needed no longer, the copy of the same vector of the next row is started in its place: with GRAD where its gradient is
// written, else where it has been summed. At the clock that products leave, the instructions for an element count as much as its
// bytes: what concerns few of them, the target and columns behind the vocabulary, is done before or behind the loops.
template <bool GRAD> DEVICE void walk(const Rows& p) {
    extern __shared__ uint4 row_space[];
    __shared__ Shared shared;
    ACT* const cell = reinterpret_cast<ACT*>(row_space);
    const u32 cell_address = shared_address(row_space), vocab = p.vocab, padded = p.padded;
    const u32 all = (vocab + N - 1) / N;  // vectors of a row with at least one logit
    const u32 share = (all + CLUSTER - 1) / CLUSTER, rank = cluster_rank();
    const u32 first = min(share * rank, all);  // of this block's vectors
    const u32 used = min(share, all - first);  // and how many they are
    const u32 rounds = (used + blockDim.x - 1) / blockDim.x;
    const float scale = p.scalars->loss_scale;
    const auto quarter = [=](int q) { return rounds * q / QUARTERS * blockDim.x + threadIdx.x; };
    const auto limit = [=](int q) { return min(rounds * (q + 1) / QUARTERS * blockDim.x, used); };
    const bool has_end = used > 0 && first + used == all && threadIdx.x == (used - 1) % blockDim.x;  // of the vocabulary

    const u32 step = gridDim.x / CLUSTER;
    u32 row = blockIdx.x / CLUSTER;
    for (int q = 0; q < QUARTERS; q++) {
        const ACT* const mine = p.logits + (u64)row * padded + first * N;
        for (u32 v = quarter(q); v < limit(q); v += blockDim.x) cp_async16(cell_address + v * 16, mine + v * N);
        cp_commit();
    }
    for (int turn = 0; row < p.rows; row += step, turn ^= 1) {
        ACT* const line = p.logits + (u64)row * padded;
        ACT* const stretch = line + first * N;
        const ACT* const next = stretch + (u64)step * padded;
        const bool more = row + step < p.rows;
        const i32 target = checked(p.targets, row, vocab, p.fault);
        // Read before the barrier: after it the row changes.
        float x_target = threadIdx.x == 0 && target >= 0 ? to_float(line[target]) : 0.0f;
        Running mine;
#pragma unroll
        for (int q = 0; q < QUARTERS; q++) {
            if (!GRAD || q == 0) cp_wait<3>();
            else if (q == 1) cp_wait<2>();
            else if (q == 2) cp_wait<1>();
            else cp_wait<0>();
            if (q == QUARTERS - 1 && has_end)
                for (u32 c = vocab - first * N; c < used * N; c++) cell[c] = from_float<ACT>(-__int_as_float(0x7f800000));
            for (u32 v = quarter(q); v < limit(q); v += blockDim.x) {
                mine.add(load(cell + v * N));
                if (!GRAD && more) cp_async16(cell_address + v * 16, next + v * N);
            }
            if (!GRAD) cp_commit();
        }
        const Sum total = cluster_sum(block_sum(mine.total, x_target, shared, turn), shared, turn);
        if (rank == 0) write_loss(p.losses, row, target, x_target, total);
        if constexpr (GRAD) {
            const Scales s = scales(total, scale);
#pragma unroll 1
            for (int q = 0; q < QUARTERS; q++) {
                const u32 from = quarter(q), to = limit(q);
                if (target >= 0)
                    for (u32 v = from; v < to; v += blockDim.x)
                        leave_gradients(stretch + v * N, load(cell + v * N), s);
                else
                    for (u32 v = from; v < to; v += blockDim.x) store_once(stretch + v * N, Vec<ACT>{});
                if (more)
                    for (u32 v = from; v < to; v += blockDim.x) cp_async16(cell_address + v * 16, next + v * N);
                cp_commit();
            }
            const u32 place = (u32)target / N - first;
            if (target >= 0 && place < used && threadIdx.x == place % blockDim.x)
                line[target] = from_float<ACT>(target_gradient(x_target, s));
            for (u32 v = all + rank * blockDim.x + threadIdx.x; v < padded / N; v += CLUSTER * blockDim.x)
                store_once(line + v * N, Vec<ACT>{});
        } else if (p.of_rows && rank == 0 && threadIdx.x == 0) {
            p.of_rows[row] = scales(total, scale);
        }
    }
    cp_wait<0>();
    cluster_barrier();  // another block may still write its total into this one's memory
}

KERNEL CLUSTERED __launch_bounds__(MOST_THREADS, BLOCKS)
    cross_entropy_shared(float* losses, ACT* logits, const i32* targets, const Scalars* scalars, Fault* fault, u32 rows,
                         u32 vocab, u32 padded) {
    walk<true>({losses, nullptr, logits, targets, scalars, fault, rows, vocab, padded});
}

KERNEL CLUSTERED __launch_bounds__(MOST_THREADS, BLOCKS)
    cross_entropy_sums(float* losses, ACT* logits, const i32* targets, const Scalars* scalars, Fault* fault, u32 rows,
                       u32 vocab, u32 padded, Scales* of_rows) {
    walk<false>({losses, of_rows, logits, targets, scalars, fault, rows, vocab, padded});
}

// With `vectors`, which needs 16-byte rows, threads take N columns at a time.
KERNEL __launch_bounds__(1024) cross_entropy_any(float* losses, ACT* logits, const i32* targets, const Scalars* scalars,
                                                 Fault* fault, u32 rows, u32 vocab, u32 padded, u32 grad,
                                                 u32 vectors) {
    __shared__ Shared shared;
    const u32 whole = vectors ? vocab / N : 0;
    const u32 row = blockIdx.x;
    ACT* const line = logits + (u64)row * padded;
    const i32 target = checked(targets, row, vocab, fault);
    float x_target = threadIdx.x == 0 && target >= 0 ? to_float(line[target]) : 0.0f;
    Running running;
    for (u32 v = threadIdx.x; v < whole; v += blockDim.x) running.add(load(line + v * N));
    Sum mine = running.total;
    for (u32 c = whole * N + threadIdx.x; c < vocab; c += blockDim.x) {
        const float x = to_float(line[c]);
        raise(mine, x);
        mine.sum += exp2_fast((x - mine.max) * LOG2E);
    }
    const Sum total = block_sum(mine, x_target, shared, 0);
    write_loss(losses, row, target, x_target, total);
    if (!grad) return;
    const Scales s = scales(total, scalars->loss_scale);
    for (u32 v = threadIdx.x; v < whole; v += blockDim.x) {
        float x[N], y[N];
        load_floats(x, line + v * N);
        gradients(y, x, v * N, target, vocab, s);
        store_floats(line + v * N, y);
    }
    for (u32 c = whole * N + threadIdx.x; c < padded; c += blockDim.x) {
        float y = 0.0f;
        if (c < vocab && target >= 0) {
            const float x = to_float(line[c]);
            y = c == (u32)target ? target_gradient(x, s) : gradient(x, s);
        }
        line[c] = from_float<ACT>(y);
    }
}
