// The positions of tokens: inside documents that share a sequence, or of sequences in a cache that they continue.
#pragma once

#include "common/prelude.cuh"

// Reports the position of token t of a sequence if it is neither 0 nor one more than that of the token before. `at` are the
// positions of the sequence, `first` is its first token's index in the batch.
DEVICE void check_position(const i32* at, u32 t, u64 first, Fault* fault) {
    const i32 position = at[t];
    if (position != 0 && (t == 0 || (u32)position != (u32)at[t - 1] + 1)) report(fault, 7, position, (i32)(first + t), 0);
}

// The position of a token that continues a sequence in a cache, for reading a table of `context` rows: 0 for one that is not used
// (-1), and inside for a wrong one, which is reported.
DEVICE u32 at_position(i32 position, u64 token, u32 context, bool reports, Fault* fault) {
    if (reports && (position < -1 || position >= (i32)context)) report(fault, 9, position, (i32)token, (i32)context);
    return (u32)min(max(position, 0), (i32)context - 1);
}
