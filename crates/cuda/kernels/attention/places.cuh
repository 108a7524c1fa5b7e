// Where the tokens of a step belong in a cache of several sequences.
#pragma once

#include "common/positions.cuh"

// The tokens of a step, and the size of the cache.
struct Places {
    const i32 *rows, *positions;  // of each token
    u32 sequences, context;

    // Whether a token is used: those at position -1 are not, and wrong ones, which `cache_append` reports, must not be.
    DEVICE bool has(u32 token) const {
        return (u32)rows[token] < sequences && (u32)positions[token] < context;
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
