// Drawing a token from a row of logits by one block: top-k, top-p and the draw are searches for the key, or the index, at which
// a sum of whole numbers is reached. A Row has `vocab`, `least` (smaller keys are out), `at(i)`, the logit of a token, and
// `weight(logit)`, a whole number.
#pragma once

#include "common/prelude.cuh"

constexpr int THREADS = 1024;
constexpr u32 ABSENT = 0xffffffffu;

struct Space {
    u64 mass[256];
    u64 warps[WARP];
    u64 above;
    u32 found;
    u32 bad;
};

// Order-preserving: a larger logit has a larger key; -0 counts as 0.
DEVICE u32 key_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// Ranks a logit of index i: the larger logit first, the lower index among equals, NaN before all numbers.
DEVICE u64 rank(float x, u64 i) { return (u64)(x != x ? 0xffffffffu : key_of(x)) << 32 | (u32)~(u32)i; }
DEVICE float logit_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Exclusive sum over the threads in order, and the total of all.
DEVICE u64 scan(u64 x, u64& total, Space& s) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 sum = warp_scan(x);
    __syncthreads();
    if (lane == WARP - 1) s.warps[warp] = sum;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (u32 w = 0; w < THREADS / WARP; w++) {
        if (w == warp) before = total;
        total += s.warps[w];
    }
    return before + sum - x;
}

// Adds the lanes' masses to their digits. At the first digit most logits are alike and would queue for one word, so lanes
// with the same digit add up among themselves there.
DEVICE void tally(u64 mass, u32 digit, bool alike, Space& s) {
    if (!alike) {
        if (mass) atomicAdd(&s.mass[digit], mass);
        return;
    }
    u32 left = __ballot_sync(0xffffffffu, mass != 0);
    while (left) {
        const int leader = __ffs(left) - 1;
        const u32 wanted = __shfl_sync(0xffffffffu, digit, leader);  // by all lanes, so outside the condition
        const bool mine = mass != 0 && digit == wanted;
        const u64 sum = warp_sum(mine ? mass : 0);
        if (threadIdx.x % WARP == leader) atomicAdd(&s.mass[digit], sum);
        left &= ~__ballot_sync(0xffffffffu, mine);
    }
}

// One warp: the digit in which the mass, from 255 down and starting with `above`, exceeds `target`, and the mass above it.
// Should `target` be beyond all mass, the lowest digit that has any.
DEVICE void find_digit(u64 target, u64 above, Space& s) {
    const u32 lane = threadIdx.x, first = 255 - 8 * lane;  // this lane's digits: first and the 7 below
    u64 mine = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) mine += s.mass[first - k];
    u64 before = above + warp_scan(mine) - mine;
    const u32 any = __ballot_sync(0xffffffffu, mine != 0);
    const u32 reached = __ballot_sync(0xffffffffu, mine != 0 && before + mine > target);
    const u32 owner = reached ? __ffs(reached) - 1 : 31 - __clz(any);
    if (lane != owner) return;
    u32 digit = first;
    u64 over = before;
    for (u32 k = 0; k < 8; k++) {
        const u64 mass = s.mass[first - k];
        if (mass == 0) continue;
        digit = first - k;
        over = before;
        before += mass;
        if (before > target) break;
    }
    s.found = digit;
    s.above = over;
}

// The key at which, from the largest down, the mass first exceeds `target`; `above` becomes the mass of larger keys.
// Mass is a token's weight, or 1 where COUNT. Eight bits of the key are settled in each of four passes.
template <bool COUNT, class Row> DEVICE u32 select(const Row& row, u64 target, u64& above, Space& s) {
    u32 prefix = 0, mask = 0;
    above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (u32 d = threadIdx.x; d < 256; d += THREADS) s.mass[d] = 0;
        __syncthreads();
        for (u32 base = 0; base < row.vocab; base += THREADS) {
            const u32 i = base + threadIdx.x;
            u64 mass = 0;
            u32 key = 0;
            if (i < row.vocab) {
                const float x = row.at(i);
                key = key_of(x);
                if (key >= row.least && (key & mask) == prefix) mass = COUNT ? 1ull : row.weight(x);
            }
            tally(mass, key >> shift & 255, shift == 24, s);
        }
        __syncthreads();
        if (threadIdx.x < WARP) find_digit(target, above, s);
        __syncthreads();
        prefix |= s.found << shift;
        mask |= 255u << shift;
        above = s.above;
    }
    return prefix;
}

// The index of the candidate in which the mass, in index order, first exceeds `target`. With `key`, candidates are the
// tokens of that key, each with a mass of 1.
template <class Row> DEVICE u32 walk(const Row& row, u64 target, u32 key, bool one_key, Space& s) {
    const u32 each = (row.vocab + THREADS - 1) / THREADS;
    const u32 begin = min(threadIdx.x * each, row.vocab), end = min(begin + each, row.vocab);
    const auto mass = [&](u32 i) {
        const float x = row.at(i);
        const u32 mine = key_of(x);
        if (one_key) return mine == key ? 1ull : 0ull;
        return mine >= row.least ? row.weight(x) : 0ull;
    };
    u64 sum = 0, total;
    for (u32 i = begin; i < end; i++) sum += mass(i);
    u64 before = scan(sum, total, s);
    if (threadIdx.x == 0) s.found = ABSENT;
    __syncthreads();
    if (before <= target && target < before + sum) {
        u32 i = begin;
        for (; i < end; i++) {
            const u64 m = mass(i);
            if (target < before + m) break;
            before += m;
        }
        s.found = i;
    }
    __syncthreads();
    return s.found;
}

// u·total, rounded down and below the total.
DEVICE u64 share(double u, u64 total) {
    const u64 part = (u64)(u * (double)total);
    return part < total ? part : total - 1;
}

// The largest key and, in `first`, the lowest index that has it; 0 where no token can be chosen.
template <class X> DEVICE u32 largest(const X* logits, u32 vocab, u32& first, Space& s) {
    if (threadIdx.x == 0) {
        s.above = 0;
        s.bad = 0;
    }
    __syncthreads();
    u64 best = 0;  // key above the complement of the index: the largest is the one wanted
    for (u32 i = threadIdx.x; i < vocab; i += THREADS) {
        const float x = to_float(logits[i]);
        if (!(x < __int_as_float(0x7f800000))) s.bad = 1;
        const u64 mine = (u64)key_of(x) << 32 | (u32)~i;
        if (x > -__int_as_float(0x7f800000) && mine > best) best = mine;
    }
#pragma unroll
    for (int d = WARP / 2; d > 0; d >>= 1) best = max(best, __shfl_xor_sync(0xffffffffu, best, d));
    if (threadIdx.x % WARP == 0) atomicMax(&s.above, best);
    __syncthreads();
    best = s.above;
    first = ~(u32)best;
    return s.bad ? 0 : (u32)(best >> 32);
}

// The token in whose share of the mass `u` in [0, 1) falls. top_k = 0 and top_p = 0 mean that all stay; ABSENT should never be.
template <class Row> DEVICE u32 draw(Row& row, double u, u32 top_k, float top_p, Space& s) {
    u64 above;
    if (top_k > 0 && top_k < row.vocab) row.least = select<true>(row, top_k - 1, above, s);
    u64 sum = 0, total;
    for (u32 i = threadIdx.x; i < row.vocab; i += THREADS) {
        const float x = row.at(i);
        if (key_of(x) >= row.least) sum += row.weight(x);
    }
    scan(sum, total, s);
    u32 chosen;
    if (top_p > 0.0f) {
        // Tokens are kept while the mass above them is less than enough: up to the one in which it is reached.
        const u64 enough = min(max((u64)((double)top_p * (double)total), 1ull), total);
        const u32 edge = select<false>(row, enough - 1, above, s);
        const u64 each = max(row.weight(logit_of(edge)), 1ull);
        const u64 kept = above + (enough - above + each - 1) / each * each;
        const u64 target = share(u, kept);
        const u32 key = select<false>(row, target, above, s);
        chosen = walk(row, (target - above) / max(row.weight(logit_of(key)), 1ull), key, true, s);
    } else {
        chosen = walk(row, share(u, total), 0, false, s);
    }
    return chosen;
}
