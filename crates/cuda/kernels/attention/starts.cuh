// The first key that a query attends to: documents that share a sequence, and a window. It never decreases from query to query,
// so the keys of a tile of queries begin with those of its first query, and tiles before them are skipped.
#pragma once

#include "common/positions.cuh"

// What limits the keys of all sequences.
struct Mask {
    const i32* positions;  // (B,T), or null where a sequence is one document
    Fault* fault;
    u32 window;  // at least 1
};

// The first position of the cache that is attended to. Without WINDOWED it is a constant, and costs nothing.
DEVICE u32 first_cached(u32 position, u32 window) {
#ifdef WINDOWED
    return position - min(position, window - 1);
#else
    return 0;
#endif
}

// Of one sequence.
struct Starts {
    const i32* at;  // its positions, or null
    u32 seq, window;

    // Beyond the last query the same as for it. A wrong position is reported elsewhere; here it only stays inside.
    DEVICE u32 of(u32 query) const {
        u32 q = min(query, seq - 1), back = at ? min((u32)at[q], q) : q;
        return q - min(back, window - 1);
    }
    // Whether a query sees a single key.
    DEVICE bool alone(u32 query) const { return of(query) == query; }
};
