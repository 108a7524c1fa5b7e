// What tiles of f32 and of 2-byte elements share: copying one to shared memory. The file that includes this defines THREADS, CHUNKS
// and chunk_at.
#pragma once

// Starts copying positions first.. of q, k, v or d_out; zeros beyond `seq`.
template <int ROWS> DEVICE void load_tile(u32 to, const ELEM* from, size_t stride, u32 first, u32 seq) {
    static_assert(ROWS * CHUNKS % THREADS == 0, "every thread copies the same number of chunks");
#pragma unroll
    for (int n = 0; n < ROWS * CHUNKS / THREADS; ++n) {
        u32 i = n * THREADS + threadIdx.x, row = i / CHUNKS, chunk = i % CHUNKS;
        bool inside = first + row < seq;
        cp_async16(to + chunk_at(row, chunk), from + (inside ? (first + row) * stride : 0) + chunk * Vec<ELEM>::N, inside);
    }
}
