// gemv: out (rows, outs) = inp (rows, WIDTH) · weight (outs, WIDTH)ᵀ + bias for at most ROWS rows; with ACTIVATION `pre` gets that
//       and out = ACTIVATION(pre). bias may be null
// gemv_norm: the same for one row, which a norm ahead gives: residual = a + b, inp = norm(residual). With CENTRED
// moves  outs·WIDTH·sizeof(ACT) bytes; bound: memory
// grid   a block per OUTS rows of the weight. It copies them to shared memory before it waits for the kernel ahead, so
//        that memory is busy with as many blocks, of this kernel and the next ones, as fit on a multiprocessor.
//        A thread takes the same columns of each row. WIDTH is a multiple of a vector. With GROUPS, sm_90 and newer, blocks have
//        one more warp, which copies them in so many groups, one after the other
//        Each block computes the norm for itself, which takes less time than another kernel where the weight is large; block 0
//        stores its results
// order  a thread's columns in order, lanes in pairs, then warps in order: repeatable, and the same for any OUTS and ROWS. The
//        norm's is that of norm/row_block.cuh
#include "common/arch.cuh"
#include "common/chain.cuh"
#include "common/hopper.cuh"
#include "common/row_block.cuh"
#include "elementwise/activation.cuh"
#include "elementwise/gelu.cuh"
#ifdef CENTRED
#include "norm/row_block.cuh"
#endif

// Activations by their names.
#define NAMED(NAME, F) using NAME = F;
namespace activation {
ACTIVATIONS(NAMED)
}

#if !defined(GROUPS) || __CUDA_ARCH__ < 900
#undef GROUPS
#define GROUPS 1
#endif

constexpr int SUMS = OUTS * ROWS;
// Steps whose input is read before any is multiplied: all of them, or half of more than five, which do not fit in the registers.
constexpr int AHEAD = STEPS * ROWS > 8 ? 1 : STEPS > 5 ? (STEPS + 1) / 2 : STEPS;
// Rounds of AHEAD steps that are unrolled: the newest compilers load the input of all of them first, and spill more than 16 vectors of
// rounds of one step, or two rounds of several.
constexpr int ROUNDS = MAJOR < 10 ? STEPS : AHEAD > 1 ? 1 : 16 / ROWS;
static_assert(SUMS <= WARP && (SUMS & (SUMS - 1)) == 0, "a power of two, at most one sum per lane");

// The warp's sums: lane l gets that of x[l / (WARP / COUNT)]. Lanes exchange halves, so that each adds few of them. A recursive
// template, because x would not stay in registers in a loop.
template <int COUNT, int D = WARP / 2> DEVICE float exchange(float (&x)[COUNT]) {
    if constexpr (D == 0) {
        return x[0];
    } else if constexpr (COUNT == 1) {
        x[0] += __shfl_xor_sync(0xffffffffu, x[0], D);
        return exchange<1, D / 2>(x);
    } else {
        const bool upper = threadIdx.x & D;
        float half[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            const float keep = upper ? x[i + COUNT / 2] : x[i], give = upper ? x[i] : x[i + COUNT / 2];
            half[i] = keep + __shfl_xor_sync(0xffffffffu, give, D);
        }
        return exchange<COUNT / 2, D / 2>(half);
    }
}

#if __CUDA_ARCH__ >= 900
// Rows of the weight on their way to shared memory, by TMA, in GROUPS of bytes of which the next starts when one has arrived: with more
// under way the queues of memory are so long that what the kernel ahead has left, and the message of its end, wait in them too.
struct Fetch {
    static constexpr u32 ALL = OUTS * WIDTH * sizeof(ACT), GROUP = (ALL / GROUPS + 15) / 16 * 16;
    static_assert(GROUP * (GROUPS - 1) < ALL, "no group without bytes");
    static constexpr int COPIER = GROUPS > 1 ? THREADS : 0;  // the thread that copies: of a warp of its own where it waits for groups
    u32 barriers;

    DEVICE void copy(u32 g, u32 held, const ACT* from, u32 bytes) {
        const u32 at = g * GROUP, some = at < bytes ? min(GROUP, bytes - at) : 0;
        barrier_expect(barriers + 8 * g, some);
        if (some > 0) bulk_load(held + at, reinterpret_cast<const u8*>(from) + at, some, barriers + 8 * g);
    }

    // Whether the thread has nothing else to do.
    DEVICE bool start(uint4* held, const ACT* from, u32 count) {
        __shared__ u64 arrived[GROUPS];
        barriers = shared_address(arrived);
        const u32 to = shared_address(held), bytes = count * WIDTH * sizeof(ACT);
        if (threadIdx.x == COPIER) {
            for (int g = 0; g < GROUPS; g++) barrier_init(barriers + 8 * g, 1);
            barrier_init_fence();
            copy(0, to, from, bytes);
        }
        __syncthreads();  // the barriers are initialised
        if (GROUPS == 1 || threadIdx.x < THREADS) return false;
        if (threadIdx.x == COPIER) {
            for (int g = 1; g < GROUPS; g++) {
                barrier_wait(barriers + 8 * (g - 1), 0);
                copy(g, to, from, bytes);
            }
        }
        return true;
    }

    DEVICE void wait() {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) barrier_wait(barriers + 8 * g, 0);
    }
};
#else
// Rows of the weight on their way to shared memory. A thread copies what it will read itself.
struct Fetch {
    DEVICE bool start(uint4* held, const ACT* from, u32 count) {
#pragma unroll
        for (int o = 0; o < OUTS; o++) {
            if (o >= count) break;
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const int v = threadIdx.x + s * THREADS;
                if (v < VECS) cp_async16(shared_address(held + o * VECS + v), from + o * WIDTH + v * N);
            }
        }
        cp_commit();
        return false;
    }

    DEVICE void wait() { cp_wait<0>(); }
};
#endif

// The input as it is in memory.
struct Stored {
    const ACT* inp;
    u32 rows;

    DEVICE void read_early() {}

    // The vectors of this thread's steps from `start` on.
    DEVICE void read(Vec<ACT> (&x)[AHEAD][ROWS], int start) {
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            const int v = threadIdx.x + (start + s) * THREADS;
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (v < VECS && i < rows) x[s][i] = load(inp + i * WIDTH + v * N);
        }
    }
};

// Dynamic shared memory: OUTS rows of the weight.
template <class Input>
DEVICE void multiply(Input input, ACT* out, ACT* pre, const ACT* weight, const ACT* bias, u32 rows, u32 outs) {
    extern __shared__ __align__(128) uint4 held[];
    __shared__ float sums[WARPS][SUMS];
    const u32 first = blockIdx.x * OUTS, count = min((u32)OUTS, outs - first);
    start_next();
    Fetch fetch;
    if (fetch.start(held, weight + (u64)first * WIDTH, count)) return;
    const u32 o = threadIdx.x / ROWS, r = threadIdx.x % ROWS;  // the result that this thread finishes
    const bool finishes = threadIdx.x < SUMS && o < count && r < rows;
    const float shift = bias && finishes ? to_float(bias[first + o]) : 0.0f;
    input.read_early();

    wait_for_previous();
    float acc[SUMS] = {};
#pragma unroll ROUNDS
    for (int start = 0; start < STEPS; start += AHEAD) {
        Vec<ACT> x[AHEAD][ROWS] = {};
        input.read(x, start);
        if (start == 0) fetch.wait();
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            const int v = threadIdx.x + (start + s) * THREADS;
            if (v >= VECS) continue;
#pragma unroll
            for (int j = 0; j < OUTS; j++) {
                float w[N];
                load_floats(w, reinterpret_cast<const ACT*>(held + j * VECS + v));
#pragma unroll
                for (int i = 0; i < ROWS; i++)
#pragma unroll
                    for (int e = 0; e < N; e++)
                        acc[j * ROWS + i] = __fmaf_rn(w[e], to_float(x[s][i].at[e]), acc[j * ROWS + i]);
            }
        }
    }
    const u32 lane = threadIdx.x % WARP;
    const float sum = exchange<SUMS>(acc);
    if (lane % (WARP / SUMS) == 0) sums[threadIdx.x / WARP][lane / (WARP / SUMS)] = sum;
    __syncthreads();
    if (!finishes) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w][threadIdx.x];
    const u64 at = (u64)r * outs + first + o;
    const ACT y = from_float<ACT>(total + shift);
#ifdef ACTIVATION
    pre[at] = y;
    out[at] = from_float<ACT>(activation::ACTIVATION::value(to_float(y)));
#else
    out[at] = y;
#endif
}

constexpr int RESIDENT = ROWS == 1 ? 4 : 2;  // blocks per multiprocessor
constexpr int LAUNCHED = THREADS + (GROUPS > 1 ? WARP : 0);

#ifdef CENTRED
// The result of a norm of one row.
struct Normalised {
    Rows rows;
    Parameters parameters;

    DEVICE void read_early() { parameters.read(rows); }

    DEVICE void read(Vec<ACT> (&x)[AHEAD][ROWS], int) {
        static_assert(AHEAD == STEPS && ROWS == 1, "all of one row at once");
        Vec<ACT> row[STEPS] = {};
        normalise_row<RESIDUAL>(row, rows, parameters, 0, blockIdx.x == 0);
#pragma unroll
        for (int s = 0; s < STEPS; s++) x[s][0] = row[s];
    }
};

// The norm's arguments are those of residual_layernorm_fwd; mean and norm_bias are null for an RMS norm.
KERNEL __launch_bounds__(LAUNCHED, RESIDENT)
    gemv_norm(ACT* out, ACT* pre, const ACT* weight, const ACT* bias, u32 outs, ACT* residual, ACT* inp, float* mean, float* rstd,
              const ACT* a, const ACT* b, const ACT* norm_weight, const ACT* norm_bias, float eps) {
    const Rows rows = {inp, mean, rstd, a, b, residual, norm_weight, norm_bias, eps, 1, WIDTH};
    multiply(Normalised{rows, {}}, out, pre, weight, bias, 1, outs);
}
#else
KERNEL __launch_bounds__(LAUNCHED, RESIDENT)
    gemv(ACT* out, ACT* pre, const ACT* inp, const ACT* weight, const ACT* bias, u32 rows, u32 outs) {
    multiply(Stored{inp, rows}, out, pre, weight, bias, rows, outs);
}
#endif
