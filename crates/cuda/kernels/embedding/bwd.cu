// embedding_bwd: d_wte[tokens[b,t]] += d_out[b,t]; d_wpe[t] (+)= Σ_b d_out[b,t], rows beyond T become 0 when it overwrites.
//        Where d_wte is overwritten it was filled with 0 before; without d_wpe the positions have no kernel
//        With FACTOR, the bits of a float, there is no d_wpe and what is added to d_wte is multiplied by it
// moves  2·N·C·sizeof(ACT) bytes, each touched row of d_wte twice, and what the sort moves (under 3 %); bound: memory
// grid   embedding_bwd_positions: a thread per vector of d_wpe. For d_wte: positions are sorted by token, stable, 8 bits a
//        pass (sort_count, sort_scan, sort_scatter); embedding_bwd_windows sums 32 sorted positions a block;
//        embedding_bwd_joins adds up the sums of tokens that are in more than one window. Any shape
// order  by position within a window, windows in 8 slices, slices in order: repeatable, also when all tokens are equal
#include "common/scan.cuh"

constexpr int WINDOW = 32;
constexpr int SORT_BLOCK = 1024;
constexpr int DIGITS = 256;
constexpr int SLICES = 8;
constexpr int N = VECTORS ? Vec<ACT>::N : 1;

#ifdef FACTOR
DEVICE float scaled(float x) { return x * __uint_as_float(FACTOR); }
#else
DEVICE float scaled(float x) { return x; }
#endif

DEVICE void add_to(GRAD* to, const float (&sum)[N]) {
    float old[N];
    load_floats(old, to);
#pragma unroll
    for (int k = 0; k < N; k++) old[k] += sum[k];
    store_floats(to, old);
}

KERNEL __launch_bounds__(128) embedding_bwd_positions(GRAD* d_wpe, const ACT* d_out, u32 batch, u32 seq, u32 context,
                                                      u32 width, u32 adds) {
    const u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= (u64)context * width) return;
    float sum[N] = {};
    const u64 plane = (u64)seq * width;
    if (i < plane) {
#pragma unroll 8
        for (u32 b = 0; b < batch; b++) {
            float d[N];
            load_floats(d, d_out + b * plane + i);
#pragma unroll
            for (int k = 0; k < N; k++) sum[k] += d[k];
        }
    }
    if (!adds)
        store_floats(d_wpe + i, sum);
    else if (i < plane)
        add_to(d_wpe + i, sum);
}

// The sort key of a position: its token, or `vocab` for one outside the vocabulary.
DEVICE u32 key_at(const u32* keys, u32 i, u32 vocab) { return min(keys[i], vocab); }

// How often each digit occurs in each block of 1024, digit by digit. Reports tokens that are out of range in the first pass.
KERNEL __launch_bounds__(SORT_BLOCK) sort_count(u32* counts, const u32* keys, u32 n, u32 vocab, u32 shift, Fault* fault) {
    __shared__ u32 seen[DIGITS];
    if (threadIdx.x < DIGITS) seen[threadIdx.x] = 0;
    __syncthreads();
    const u32 i = blockIdx.x * SORT_BLOCK + threadIdx.x;
    if (i < n) {
        atomicAdd(&seen[key_at(keys, i, vocab) >> shift & (DIGITS - 1)], 1u);
        if (shift == 0 && keys[i] >= vocab) report(fault, 1, (i32)keys[i], (i32)i, (i32)vocab);
    }
    __syncthreads();
    if (threadIdx.x < DIGITS) counts[threadIdx.x * gridDim.x + blockIdx.x] = seen[threadIdx.x];
}

KERNEL __launch_bounds__(1024) sort_scan(u32* counts, u32 n) { scan(counts, n); }

// Moves each key and its position behind all with a lower digit and all equal ones before it. `from` is null in the
// first pass: then a key's position is its index.
KERNEL __launch_bounds__(SORT_BLOCK) sort_scatter(u32* keys_to, u32* to, const u32* keys, const u32* from,
                                                  const u32* starts, u32 n, u32 vocab, u32 shift) {
    __shared__ u32 seen[SORT_BLOCK / WARP][DIGITS];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 i = threadIdx.x; i < SORT_BLOCK / WARP * DIGITS; i += SORT_BLOCK) (&seen[0][0])[i] = 0;
    __syncthreads();
    const u32 i = blockIdx.x * SORT_BLOCK + threadIdx.x;
    const u32 key = i < n ? key_at(keys, i, vocab) : 0;
    const u32 digit = i < n ? key >> shift & (DIGITS - 1) : DIGITS;  // lanes past the end match each other only
    const u32 same = __match_any_sync(0xffffffffu, digit);
    const u32 rank = __popc(same & ((1u << lane) - 1));
    if (rank == 0 && i < n) seen[warp][digit] = __popc(same);
    __syncthreads();
    if (threadIdx.x < DIGITS) {
        u32 before = 0;
        for (int w = 0; w < SORT_BLOCK / WARP; w++) {
            const u32 count = seen[w][threadIdx.x];
            seen[w][threadIdx.x] = before;
            before += count;
        }
    }
    __syncthreads();
    if (i >= n) return;
    const u32 at = starts[digit * gridDim.x + blockIdx.x] + seen[warp][digit] + rank;
    keys_to[at] = key;
    to[at] = from ? from[i] : i;
}

// Block (x, y): window x, vectors y·blockDim.x and on. A token's run that is within the window goes to d_wte; one
// that began before goes to edges[x][0], one that only goes on behind to edges[x][1]. Three blocks a multiprocessor are
// asked for because the compiler alone aims at four, and spills registers to get there.
KERNEL __launch_bounds__(256, 3)
    embedding_bwd_windows(GRAD* d_wte, float* edges, const ACT* d_out, const u32* keys, const u32* positions, u32 n,
                          u32 vocab, u32 width) {
    __shared__ u32 key[WINDOW + 2], position[WINDOW];
    const u32 begin = blockIdx.x * WINDOW, count = min(n - begin, (u32)WINDOW);
    // key[0] is the one before the window, key[count + 1] the one behind; no key is ~0.
    for (u32 i = threadIdx.x; i < count + 2; i += blockDim.x) {
        const u32 at = begin + i - 1;
        key[i] = begin + i == 0 || at >= n ? ~0u : keys[at];
        if (i < count) position[i] = positions[begin + i];
    }
    __syncthreads();
    const u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= width) return;
    constexpr int AHEAD = 4;
    float sum[N] = {};
    bool began_before = key[0] == key[1];
    for (u32 i = 0; i < count; i += AHEAD) {
        float d[AHEAD][N];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (i + a < count) load_floats(d[a], d_out + (u64)position[i + a] * width + column);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (i + a >= count) break;
#pragma unroll
            for (int k = 0; k < N; k++) sum[k] += scaled(d[a][k]);
            const u32 mine = key[i + a + 1];
            const bool goes_on = i + a + 1 == count && key[count + 1] == mine;
            if (key[i + a + 2] == mine && !goes_on) continue;
            if (began_before || goes_on)
                store_floats(edges + ((u64)blockIdx.x * 2 + !began_before) * width + column, sum);
            else if (mine < vocab)
                add_to(d_wte + (u64)mine * width + column, sum);
            began_before = false;
#pragma unroll
            for (int k = 0; k < N; k++) sum[k] = 0.0f;
        }
    }
}

// Block (x, y): the token that begins in window x and goes on behind, if there is one; 32 vectors from 32·y on, its
// windows in 8 slices.
KERNEL __launch_bounds__(WARP* SLICES) embedding_bwd_joins(GRAD* d_wte, const float* edges, const u32* keys, u32 n,
                                                           u32 vocab, u32 width) {
    __shared__ float tile[SLICES][WARP][N];
    const u32 begin = blockIdx.x * WINDOW, behind = begin + WINDOW;
    if (behind >= n) return;
    const u32 key = keys[behind - 1];
    if (keys[behind] != key || key >= vocab) return;
    if (begin > 0 && keys[begin - 1] == key) return;  // began earlier: sorted, so the whole window is this token's
    u32 low = behind, high = n;  // the first index with another key is in (low, high]
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (keys[middle] == key)
            low = middle;
        else
            high = middle;
    }
    const u32 last = low / WINDOW, count = last - blockIdx.x;  // windows behind this one
    const u32 lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const u32 column = (blockIdx.y * WARP + lane) * N;
    float sum[N] = {};
    if (column < width) {
        const u32 from = (u64)count * slice / SLICES, to = (u64)count * (slice + 1) / SLICES;
        if (slice == 0) load_floats(sum, edges + ((u64)blockIdx.x * 2 + 1) * width + column);
#pragma unroll 4
        for (u32 w = from; w < to; w++) {
            float part[N];
            load_floats(part, edges + (u64)(blockIdx.x + 1 + w) * 2 * width + column);
#pragma unroll
            for (int k = 0; k < N; k++) sum[k] += part[k];
        }
    }
#pragma unroll
    for (int k = 0; k < N; k++) tile[slice][lane][k] = sum[k];
    __syncthreads();
    if (slice > 0 || column >= width) return;
    for (int s = 1; s < SLICES; s++) {
#pragma unroll
        for (int k = 0; k < N; k++) sum[k] += tile[s][lane][k];
    }
    add_to(d_wte + (u64)key * width + column, sum);
}
