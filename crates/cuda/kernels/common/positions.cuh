// The positions of tokens inside documents that share a sequence.
#pragma once

#include "common/prelude.cuh"

// Reports the position of token t of a sequence if it is neither 0 nor one more than that of the token before. `at` are the
// positions of the sequence, `first` is its first token's index in the batch.
DEVICE void check_position(const i32* at, u32 t, u64 first, Fault* fault) {
    const i32 position = at[t];
    if (position != 0 && (t == 0 || (u32)position != (u32)at[t - 1] + 1)) report(fault, 7, position, (i32)(first + t), 0);
}
