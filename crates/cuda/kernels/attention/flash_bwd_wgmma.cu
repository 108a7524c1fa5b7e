// flash_bwd_wgmma: gradients of causal attention, heads of 64 channels, bf16, Hopper only
//
//   p = exp(scale*q.k - lse), ds = p*(d_out.v - delta), d_q = scale*ds.k, d_k = scale*ds^T.q, d_v = p^T.d_out
//
// moves  what flash_bwd does; between the products of a head its sums of d_q, 4*T*HD bytes, stay in L2; bound: tensor cores
// grid   a unit is a head of keys, or of the heads of queries that share them one of `parts` equal parts; a strip is a tile of 128 keys of
//        a unit. A persistent block on each multiprocessor takes the strips between two cuts. For each it passes over the tiles of 128
//        queries that see the keys: a producer warp starts TMA copies, two consumer warpgroups multiply, 64 keys each. Needs HD == 64,
//        T % 128 == 0
// order  d_k and d_v over the queries, tile by tile, and over the parts (flash_bwd_join); d_q over the keys, tile by tile: bitwise
//        repeatable, and the same for any cuts. A unit with a cut inside is the first work of the block before the cut, and the
//        last of the block behind it, which goes on with the sums that the first has left: each sum in L2 has one thread that adds
//        to it, or two, one after the other
//
// With RESULT_SUMS it also leaves partial sums of d_qkv over rows, as it is stored, for the gradient of a bias: 8 rows for each sequence,
// one for each warp, which sums the same 16 rows of every tile. Needs parts == 1.
//
// p is rounded to bf16 before it multiplies dp too: with p in f32 a consumer's 240 registers do not suffice. They hold d_k and d_v (64),
// s and then dp (64), p (32), and dq or the packed ds (32). Other orders of the products within a pair were slower (docs/log.md).
#include "attention/flash_bwd_walk.cuh"
#include "common/hopper.cuh"

#ifndef RESULT_SUMS
#define RESULT_SUMS 0
#endif

constexpr int GROUP = 128, THREADS = 3 * GROUP;
constexpr u32 WARPS = 2 * GROUP / WARP;  // that multiply

// flash_bwd_stats: what flash_bwd_wgmma reads per query: -lse*log2(e), and -delta = -sum(d_out*out)
//
// It also clears the words in which blocks of flash_bwd_wgmma say that they have left their sums.
//
// grid   32 queries of a head per block; 8 lanes sum a row
KERNEL __launch_bounds__(256)
    flash_bwd_stats(float* stats, const bf16* d_out, const bf16* out, const float* lse, u32* handed, u32 words, u32 seq, u32 heads) {
    for (u32 word = blockIdx.x * 256 + threadIdx.x; word < words; word += gridDim.x * 256) handed[word] = 0;
    const u32 head = blockIdx.x / (seq / 32), query = blockIdx.x % (seq / 32) * 32 + threadIdx.x / 8;
    const u64 at = ((u64)(head / heads) * seq + query) * heads * HD + head % heads * HD + threadIdx.x % 8 * 8;
    float a[8], b[8], sum = 0.0f;
    load_floats(a, d_out + at);
    load_floats(b, out + at);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(a[i], b[i], sum);
    sum = warp_sum<8>(sum);
    float* const to = stats + ((u64)head * seq + query / TILE * TILE) * 2 + query % TILE;
    if (threadIdx.x % 8 == 0) to[0] = -lse[(u64)head * seq + query] * LOG2E;
    if (threadIdx.x % 8 == 1) to[TILE] = -sum;
}

// flash_bwd_join: d_k and d_v of a head of keys from the sums of its parts, which lie as the threads of flash_bwd_wgmma hold them
//
// grid   64 keys of a tile per block: y counts tiles, d_k and d_v, and halves; x the heads of keys of the batch
KERNEL __launch_bounds__(GROUP) flash_bwd_join(bf16* d_qkv, const float* key_sums, u32 seq, u32 heads, u32 kv_heads, u32 parts, float scale) {
    const u32 half = blockIdx.y % 2, which = blockIdx.y / 2 % 2, tile = blockIdx.y / 4, lane = threadIdx.x % WARP;
    const u64 step = (u64)seq * 2 * HD;  // of a part
    const float* from = key_sums + (u64)blockIdx.x * parts * step + (tile * 2 + which) * TILE * HD + half * 64 * HD + threadIdx.x * 4;
    const u32 columns = (heads + 2 * kv_heads) * HD, row = half * 64 + threadIdx.x / WARP * 16 + lane / 4;
    const u64 line = (u64)(blockIdx.x / kv_heads) * seq + tile * TILE + row;
    bf16* const to = d_qkv + line * columns + (heads + which * kv_heads + blockIdx.x % kv_heads) * HD + lane % 4 * 2;
    const float factor = which ? 1.0f : scale;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float4 sum = *reinterpret_cast<const float4*>(from + n * 4 * GROUP);
        for (u32 part = 1; part < parts; part++) {
            const float4 x = *reinterpret_cast<const float4*>(from + part * step + n * 4 * GROUP);
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        *reinterpret_cast<u32*>(to + n * 8) = pack_bf16(sum.x * factor, sum.y * factor);
        *reinterpret_cast<u32*>(to + 8 * (u64)columns + n * 8) = pack_bf16(sum.z * factor, sum.w * factor);
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr u32 HALF = 64 * HD * 2, BYTES = 2 * HALF;  // of 64 and of 128 rows
constexpr u32 SCORES = 2 * TILE * 64 * 2;            // bytes of a tile of score gradients: 64 queries, then the other 64
constexpr u32 STATS = 2 * TILE * 4;
constexpr int FEW = 24, MANY = 240;

extern __shared__ uint4 shared[];  // from the next multiple of 1024 on

// Addresses in shared memory.
struct Space {
    u32 start;

    DEVICE u32 k(u32 stage) const { return start + stage * BYTES; }
    DEVICE u32 v(u32 stage) const { return start + (2 + stage) * BYTES; }
    DEVICE u32 q(u32 stage) const { return start + (4 + stage) * BYTES; }
    DEVICE u32 d_out(u32 stage) const { return start + (6 + stage) * BYTES; }
    DEVICE u32 ds(u32 stage) const { return start + 8 * BYTES + stage * SCORES; }
    DEVICE u32 results() const { return start + 8 * BYTES + 2 * SCORES; }
    DEVICE u32 stats(u32 stage) const { return start + 9 * BYTES + 2 * SCORES + stage * STATS; }
    DEVICE u32 barriers() const { return start + 9 * BYTES + 2 * SCORES + 2 * STATS; }
    // Of a stage: keys and values are there, may be overwritten; queries, and gradients, are there, may be overwritten; score
    // gradients are there.
    DEVICE u32 kv_full(u32 stage) const { return barriers() + stage * 8; }
    DEVICE u32 kv_empty(u32 stage) const { return barriers() + 16 + stage * 8; }
    DEVICE u32 q_full(u32 stage) const { return barriers() + 32 + stage * 8; }
    DEVICE u32 d_out_full(u32 stage) const { return barriers() + 48 + stage * 8; }
    DEVICE u32 q_empty(u32 stage) const { return barriers() + 64 + stage * 8; }
    DEVICE u32 ds_full(u32 stage) const { return barriers() + 80 + stage * 8; }
};

struct Maps {
    const TensorMap &qkv, &d_out, &d_qkv;
};

DEVICE void produce(const Space& space, const Maps& maps, const float* stats, Pair at, const Work& work, const Shape& shape) {
    for (; at.is_there(); at.next(work)) {
        if (at.begins()) {
            const u32 stage = at.keys % 2, full = space.kv_full(stage);
            barrier_wait(space.kv_empty(stage), at.keys / 2 % 2 ^ 1);
            barrier_expect(full, 2 * BYTES);
            tma_load(space.k(stage), maps.qkv, shape.k_column(at), shape.row(at, at.key), full);
            tma_load(space.v(stage), maps.qkv, shape.v_column(at), shape.row(at, at.key), full);
        }
        const u32 stage = at.count % 2, full = space.q_full(stage), d_full = space.d_out_full(stage);
        const u32 head = shape.sequence(at) * shape.heads + shape.head(at);
        barrier_wait(space.q_empty(stage), at.count / 2 % 2 ^ 1);
        barrier_expect(full, BYTES + STATS);
        tma_load(space.q(stage), maps.qkv, shape.q_column(at), shape.row(at, at.query), full);
        bulk_load(space.stats(stage), stats + ((u64)head * at.tiles + at.query) * 2 * TILE, STATS, full);
        barrier_expect(d_full, BYTES);
        tma_load(space.d_out(stage), maps.d_out, shape.q_column(at), shape.row(at, at.query), d_full);
    }
}

DEVICE float2 load_two(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}
// Sums of d_q: 16 bytes of a thread.
DEVICE float4 load_l2(const float* from) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
    return x;
}
DEVICE void store_l2(float* to, const float (&x)[32], int i) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3]) : "memory");
}
DEVICE void add_l2(float* to, const float (&x)[32], int i) {
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3]) : "memory");
}

// The sum of the two rows of a thread in two 8x8 matrices, of column 0 and of column 1 of its two.
DEVICE float2 two_rows(u32 a, u32 b) {
    return {__uint_as_float(a << 16) + __uint_as_float(b << 16), __uint_as_float(a & 0xffff0000) + __uint_as_float(b & 0xffff0000)};
}
// Adds what another lane has of the one that this lane keeps, and gives it the other.
DEVICE float exchange(float low, float high, int bit) {
    const bool upper = threadIdx.x & bit;
    return (upper ? high : low) + __shfl_xor_sync(0xffffffff, upper ? low : high, bit);
}

struct Consumer {
    Space space;
    const Maps& maps;
    float* sums;      // of this thread: the d_q of tiles of queries, 4 floats in each 4*GROUP; for each block twice
    float* key_sums;  // likewise d_k, then d_v, of tiles of keys, for each unit, where a head of keys has parts
    float* columns;   // partial sums of d_qkv: of this warp in the first sequence, where heads of keys have no parts
    u32* handed;      // of this warp, WARPS for each block: 1 when the sums of the unit that the next block ends are there
    const Work& work;
    Shape shape;
    u32 group, row;  // of this block's two, and this warp's first row of a tile

    // to = a.b over the channels: this group's 64 keys or values from `left`, and all 128 queries or gradients from `right`
    DEVICE void over_channels(float (&to)[64], u32 left, u32 right) const {
        // The next 16 terms are 32 bytes further along a row; descriptors count in units of 16 bytes.
        const u64 a = matrix_descriptor(left + group * HALF, 16), b = matrix_descriptor(right, 16);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < HD / 16; i++)
            wgmma_128<true, true>(to, a + 2 * i, b + 2 * i, i > 0);
        wgmma_commit();
    }
    // to += a.b, with b's rows the terms: the next 16 are 16 rows of 128 bytes further
    DEVICE void add_product(float (&to)[32], const u32 (&a)[32], u32 from, u32 adds) const {
        const u64 b = matrix_descriptor(from, HALF);
        wgmma_fence();
        wgmma_64<false, 0>(to, a, b, adds);
        wgmma_64<false, 4>(to, a, b + 128, 1);
        wgmma_64<false, 8>(to, a, b + 2 * 128, 1);
        wgmma_64<false, 12>(to, a, b + 3 * 128, 1);
        wgmma_64<false, 16>(to, a, b + 4 * 128, 1);
        wgmma_64<false, 20>(to, a, b + 5 * 128, 1);
        wgmma_64<false, 24>(to, a, b + 6 * 128, 1);
        wgmma_64<false, 28>(to, a, b + 7 * 128, 1);
        wgmma_commit();
    }
    // dq = ds.k of this group's 64 queries, over all 128 keys
    DEVICE void query_sums(float (&dq)[32], const Pair& at) const {
        const u64 a = matrix_descriptor(space.ds(at.count % 2) + group * BYTES, HALF), b = matrix_descriptor(space.k(at.keys % 2), HALF);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE / 16; i++)
            wgmma_64<false, false>(dq, a + 128 * i, b + 128 * i, i > 0);
        wgmma_commit();
    }

    // p = exp2(s*scale*log2(e) - lse), packed
    DEVICE void weights(u32 (&p)[32], float (&s)[64], const Pair& at) const {
        const u32 stats = space.stats(at.count % 2) + threadIdx.x % 4 * 8;
        const float steep = shape.scale * LOG2E;
        if (at.meets()) {
            const i32 first = (i32)(row + threadIdx.x % WARP / 4) - (i32)(threadIdx.x % 4 * 2);
#pragma unroll
            for (int i = 0; i < 64; i++)
                if (first + i / 2 % 2 * 8 > i / 4 * 8 + i % 2) s[i] = -__int_as_float(0x7f800000);
        }
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            const float2 lse = load_two(stats + 32 * n);
#pragma unroll
            for (int h = 0; h < 2; h++)
                p[2 * n + h] = pack_bf16(exp2_flush(fmaf(s[4 * n + 2 * h], steep, lse.x)), exp2_flush(fmaf(s[4 * n + 2 * h + 1], steep, lse.y)));
        }
    }
    // ds = p*(dp - delta), packed
    DEVICE void score_slopes(u32 (&ds)[32], const u32 (&p)[32], const float (&dp)[64], const Pair& at) const {
        const u32 stats = space.stats(at.count % 2) + TILE * 4 + threadIdx.x % 4 * 8;
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            const float2 delta = load_two(stats + 32 * n);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = __uint_as_float(p[2 * n + h] << 16) * (dp[4 * n + 2 * h] + delta.x);
                const float y = __uint_as_float(p[2 * n + h] & 0xffff0000) * (dp[4 * n + 2 * h + 1] + delta.y);
                if (n == 0 && at.query == 0 && threadIdx.x % 4 == 0) x = 0.0f;  // the first query's softmax is constant
                ds[2 * n + h] = pack_bf16(x, y);
            }
        }
    }
    // To shared memory: a row for each key, twice 64 queries wide.
    DEVICE void share(const u32 (&ds)[32], const Pair& at) const {
        const u32 lane = threadIdx.x % WARP, to = space.ds(at.count % 2) + (row + lane % 16) * 128;
#pragma unroll
        for (int n = 0; n < TILE / 8; n += 2) {
            const u32 chunk = (n % 8 + lane / 16) ^ lane % 8;
            store_matrices(to + n / 8 * BYTES + chunk * 16, ds[2 * n], ds[2 * n + 1], ds[2 * n + 2], ds[2 * n + 3]);
        }
        shared_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(space.ds_full(at.count % 2));
    }

    // Units that are handed on have the second half.
    DEVICE float* sums_of(const Pair& at) const {
        u32 place = blockIdx.x;
        if (work.begins_only(at.unit)) place += gridDim.x;
        if (work.ends_only(at.unit)) place += gridDim.x - 1;
        return sums + (u64)((place * at.share + at.member) * at.tiles + at.query) * TILE * HD;
    }
    // With the last pair of the beginning of a unit: what this warp has added to is there for the next block.
    DEVICE void hand_on(const Pair& at) const {
        if (!work.begins_only(at.unit) || at.unit * at.tiles + at.key + 1 != work.end) return;
        __threadfence();
        __syncwarp();
        if (threadIdx.x % WARP == 0) asm volatile("st.release.gpu.u32 [%0], 1;" ::"l"(handed + blockIdx.x * WARPS) : "memory");
    }
    // Before the first pair of the end of a unit: what the block before has added to is there.
    DEVICE void take_over(const Pair& at) const {
        if (!work.ends_only(at.unit) || at.unit * at.tiles + at.key != work.begin) return;
        u32 there = threadIdx.x % WARP != 0;
        while (!there) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(there) : "l"(handed + (blockIdx.x - 1) * WARPS) : "memory");
        __syncwarp();
    }
    // This warp's 16 rows of a result, by way of shared memory that only this warp uses.
    DEVICE void send(const float (&x)[32], float factor, u32 tile, i32 column, i32 line, const Pair& at) const {
        const u32 lane = threadIdx.x % WARP, to = tile + lane % 16 * 128;
        [[maybe_unused]] float of_half[2];
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            u32 two[4];
#pragma unroll
            for (int i = 0; i < 4; i++) two[i] = pack_bf16(x[4 * n + 2 * i] * factor, x[4 * n + 2 * i + 1] * factor);
            store_matrices(to + ((n + lane / 16) ^ lane % 8) * 16, two[0], two[1], two[2], two[3]);
            if constexpr (RESULT_SUMS) {
                // Of the rows of 8 lanes and 4 columns, each lane keeps the sum of one column; of 8, when the next 16 have come too.
                const float2 a = two_rows(two[0], two[1]), b = two_rows(two[2], two[3]);
                of_half[n / 2 % 2] = exchange(exchange(a.x, b.x, 16), exchange(a.y, b.y, 16), 8);
                if (n % 4 == 2) add_column(exchange(of_half[0], of_half[1], 4), column + (n - 2) * 8, at);
            }
        }
        shared_fence();
        __syncwarp();
        if (lane == 0) {
            tma_store(maps.d_qkv, column, line + (i32)row, tile);
            tma_store_commit();
        }
    }
    // A sum over this warp's rows: of the column that the lane has of these 32.
    DEVICE void add_column(float sum, i32 first, const Pair& at) const {
        const u32 lane = threadIdx.x % WARP, width = (shape.heads + 2 * shape.kv_heads) * HD;
        const u32 column = first + lane / 4 % 2 * 16 + lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2;
        float* const to = columns + (u64)shape.sequence(at) * WARPS * width + column;
        if (at.key == 0) *to = sum;
        else asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(sum) : "memory");
    }
    // Waits until TMA has read what this warp sent.
    DEVICE void wait_sent() const {
        if (threadIdx.x % WARP == 0) tma_store_wait<0>();
        __syncwarp();
    }
    // Adds to the sums of d_q in L2; with the last keys that the queries see, sends them. Then the keys may be overwritten.
    DEVICE void store_sums(float (&dq)[32], const Pair& at) const {
        float* const to = sums_of(at);
        if (at.meets()) {
            if (at.key > 0) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float4 old = load_l2(to + i * 4 * GROUP);
                    dq[4 * i] += old.x, dq[4 * i + 1] += old.y, dq[4 * i + 2] += old.z, dq[4 * i + 3] += old.w;
                }
            }
            wait_sent();
            send(dq, shape.scale, space.results() + row * 128, shape.q_column(at), shape.row(at, at.query), at);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (at.key == 0) store_l2(to + i * 4 * GROUP, dq, 4 * i);
                else add_l2(to + i * 4 * GROUP, dq, 4 * i);
            }
        }
        if (at.ends()) {
            if (threadIdx.x % WARP == 0) {
                tma_store_wait<0>();
                barrier_arrive(space.kv_empty(at.keys % 2));
            }
            hand_on(at);
        }
    }
    // d_k and d_v of a tile of keys; d_v by way of the place of the values.
    DEVICE void store_keys(const float (&dk)[32], const float (&dv)[32], const Pair& at) const {
        if (shape.parts > 1) {
            float* const to = key_sums + ((u64)at.unit * at.tiles + at.key) * 2 * TILE * HD;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                store_l2(to + i * 4 * GROUP, dk, 4 * i);
                store_l2(to + TILE * HD + i * 4 * GROUP, dv, 4 * i);
            }
            return;
        }
        wait_sent();
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");  // the group has read its values
        send(dk, shape.scale, space.results() + row * 128, shape.k_column(at), shape.row(at, at.key), at);
        send(dv, 1.0f, space.v(at.keys % 2) + row * 128, shape.v_column(at), shape.row(at, at.key), at);
    }

    // Each pair's dq is computed during the next pair's exponentials, when the other group's ds has arrived.
    DEVICE void run(Pair at) const {
        if (!at.is_there()) return;
        Pair before = at;
        bool any = false;  // whether there is a pair before
        before.count--;
        float dk[32], dv[32];
#pragma unroll
        for (int i = 0; i < 32; i++) dk[i] = dv[i] = 0.0f;
        // The first pair has none before it: its dq is that of whatever shared memory holds, and is not stored.
        if (threadIdx.x % WARP == 0) barrier_arrive(space.ds_full(1));
        while (at.is_there()) {
            const u32 stage = at.count % 2, round = at.count / 2 % 2;
            float s[64], dp[64], dq[32];
            u32 p[32], ds[32];
            if (any && before.ends()) {
                wgmma_wait<0>();
                hold(dk);
                hold(dv);
                store_keys(dk, dv, before);
            }
            if (at.begins()) {
                barrier_wait(space.kv_full(at.keys % 2), at.keys / 2 % 2);
                take_over(at);
            }
            barrier_wait(space.q_full(stage), round);
            over_channels(s, space.k(at.keys % 2), space.q(stage));
            wgmma_wait<1>();
            hold(dk);
            hold(dv);
            if (any && threadIdx.x % WARP == 0) barrier_arrive(space.q_empty(stage ^ 1));
            barrier_wait(space.ds_full(stage ^ 1), round);
            query_sums(dq, before);
            wgmma_wait<1>();
            hold(s);
            barrier_wait(space.d_out_full(stage), round);
            weights(p, s, at);
            wgmma_wait<0>();
            hold(dq);
            if (any) store_sums(dq, before);
            over_channels(dp, space.v(at.keys % 2), space.d_out(stage));
            const u32 more = !at.begins();
            add_product(dv, p, space.d_out(stage), more);
            wgmma_wait<1>();
            hold(dp);
            score_slopes(ds, p, dp, at);
            share(ds, at);
            add_product(dk, ds, space.q(stage), more);
            before = at;
            any = true;
            at.next(work);
        }
        barrier_wait(space.ds_full(before.count % 2), (before.count + 1) / 2 % 2);
        float dq[32];
        query_sums(dq, before);
        wgmma_wait<0>();
        hold(dk);
        hold(dv);
        hold(dq);
        store_keys(dk, dv, before);
        store_sums(dq, before);
        wait_sent();
    }
};
#endif

KERNEL __launch_bounds__(THREADS, 1)
    flash_bwd_wgmma(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap d_out, const __grid_constant__ TensorMap d_qkv,
                    const __grid_constant__ Cuts cuts, const float* stats, float* sums, float* key_sums, float* columns, u32* handed, u32 seq,
                    u32 heads, u32 kv_heads, u32 parts, float scale) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const u32 begin = shared_address(shared);
    const Space space{begin + (1024 - begin % 1024) % 1024};
    const Maps maps{qkv, d_out, d_qkv};
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < 2; s++) {
            barrier_init(space.kv_full(s), 1);
            barrier_init(space.kv_empty(s), WARPS);
            barrier_init(space.q_full(s), 1);
            barrier_init(space.d_out_full(s), 1);
            barrier_init(space.q_empty(s), WARPS);
            barrier_init(space.ds_full(s), WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const Shape shape{heads, kv_heads, parts, scale};
    const Work work{seq / TILE, cuts.at[blockIdx.x], cuts.at[blockIdx.x + 1]};
    Pair first{seq / TILE, heads / (kv_heads * parts)};
    first.start(work);
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x == 0) produce(space, maps, stats, first, work, shape);
    } else {
        more_registers<MANY>();
        const u32 group = threadIdx.x / GROUP - 1, thread = threadIdx.x % GROUP;
        const u32 own = group * 64 * HD + thread * 4, warp = group * (GROUP / WARP) + thread / WARP;
        float* const own_columns = columns + warp * (heads + 2 * kv_heads) * HD;
        const Consumer consumer{space, maps, sums + own, key_sums + own, own_columns, handed + warp, work, shape, group, warp * 16};
        consumer.run(first);
    }
#endif
}
