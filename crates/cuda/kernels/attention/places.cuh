// Where the tokens of a step belong in a cache of several sequences.
#pragma once

#include "common/positions.cuh"

// Tokens that follow each other at consecutive positions of one sequence.
struct Run {
    u32 first, count;

    // Whether tensor cores take it (attention/flash_fwd.cu with CACHED): for fewer tokens they would mostly multiply zeros.
    DEVICE bool wide() const { return count >= 8; }
};

// The tokens of a step, and the size of the cache.
struct Places {
    static constexpr u32 GROUP = 64;  // tokens that a block takes at most where tensor cores do: a run ends with them
    const i32 *rows, *positions;  // of each token
    u32 sequences, context;

    // Whether a token is used: those at position -1 are not, and wrong ones, which `cache_append` reports, must not be.
    DEVICE bool has(u32 token) const {
        return (u32)rows[token] < sequences && (u32)positions[token] < context;
    }

    // Whether a token follows the one before it, both used.
    DEVICE bool follows(u32 token) const {
        return token > 0 && has(token) && rows[token] == rows[token - 1] && positions[token] > 0 &&
               positions[token] == positions[token - 1] + 1;
    }

    // The run of a token, one of `tokens`, inside its group; a token that is not used is alone. All lanes of a warp call this with the
    // same token.
    DEVICE Run run_of(u32 token, u32 tokens) const {
        const u32 group = token / GROUP * GROUP, at = token % GROUP;
        u64 starts = 1;  // bit i: a run begins with token group + i
#pragma unroll
        for (u32 i = 0; i < GROUP; i += WARP) {
            const u32 t = group + i + threadIdx.x % WARP;
            starts |= (u64)__ballot_sync(0xffffffffu, t >= tokens || !follows(t)) << i;
        }
        const u64 later = starts >> at >> 1;
        const u32 first = 63 - __clzll(starts << (63 - at) >> (63 - at)), end = later ? at + __ffsll(later) : GROUP;
        return {group + first, end - first};
    }

    // Reports a token that the cache has no place for, or that does not follow the one before it by row and position: two
    // tokens in one place would race. Tokens that are not used come last.
    DEVICE void check(u32 token, Fault* fault) const {
        const i32 row = rows[token], position = positions[token];
        if (position < -1 || position >= (i32)context) {
            report(fault, 9, position, (i32)token, (i32)context);
        } else if (position >= 0) {
            bool follows = token == 0;
            if (token > 0) {
                const i32 last = rows[token - 1], at = positions[token - 1];
                follows = at >= 0 && (last < row || (last == row && at < position));
            }
            if (!follows || (u32)row >= sequences) report(fault, 10, row, (i32)token, (i32)sequences);
        }
    }
};
