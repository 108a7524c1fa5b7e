// What all attention kernels share: the address of a head, which query sees which keys, and which block computes which tile.
//
// NH/NKV heads of queries share a head of keys and values. A "head" below is one of the B*NH pairs of sequence and head of
// queries. The layout is a constant: EAGER is that of eager ops, else that of the engine.
#pragma once

#ifdef EAGER
#include "attention/strided.cuh"
#else
#include "attention/packed.cuh"
#endif

#include "common/arch.cuh"

// Dropout of the probabilities.
#include "common/dropout.cuh"
#ifdef DROPOUT
constexpr bool DROPS = true;
DEVICE Drops drops_of(const Shape& shape) { return shape.drops; }
#else
constexpr bool DROPS = false;
DEVICE Drops drops_of(const Shape&) { return {}; }
#endif

// Keys before a query's document or window.
#include "attention/starts.cuh"
#ifdef MASKED
constexpr bool MASKS = true;
DEVICE Starts starts_of(const Shape& shape, u32 head) {
    const i32* at = shape.mask.positions;
    return {at ? at + (size_t)(head / shape.heads) * shape.q_len() : at, shape.q_len(), shape.mask.window};
}
// Reports a wrong position of a query, once for all heads.
DEVICE void check_query(const Shape& shape, const Starts& starts, u32 head, u32 query) {
    if (starts.at && head % shape.heads == 0 && query < shape.q_len())
        check_position(starts.at, query, (u64)(head / shape.heads) * shape.q_len(), shape.mask.fault);
}
#else
constexpr bool MASKS = false;
DEVICE Starts starts_of(const Shape&, u32) { return {}; }
DEVICE void check_query(const Shape&, const Starts&, u32, u32) {}
#endif

// How many of the tiles of queries from `begin` to `end` attend to a key below `keys`: all up to the last that does. Called by
// all THREADS of a block.
template <int THREADS> DEVICE u32 tiles_until(const Starts& starts, u32 begin, u32 end, u32 tile, u32 keys) {
    u32 count = 0;
    for (u32 first = begin; first < end; first += THREADS) {
        u32 j = first + threadIdx.x;
        count += __syncthreads_count(j < end && starts.of(j * tile) < keys);
    }
    return count;
}

// What the backward reads and writes; statistics are of type A. `delta` is only written by flash_bwd_q (attention/flash_bwd.cu).
template <class A> struct Backward {
    Qkv<ELEM> d;
    const ELEM* d_out;
    Qkv<const ELEM> in;
    const A* lse;
    A* delta;
    Shape shape;
};
#define BACKWARD_PARAMETERS(A) \
    D_QKV_PARAMETERS, const ELEM *d_out, QKV_PARAMETERS, const A *lse, A *delta, SHAPE_PARAMETERS
#define BACKWARD {D_QKV, d_out, QKV, lse, delta, SHAPE}

// The score of a key that is not seen.
DEVICE float hidden() { return -__int_as_float(0x7f800000); }

struct Work {
    u32 head;
    u32 tile;
};

// Blocks take `group` heads at a time, so that what they read again is still in L2, and within a group all first
// tiles before all second ones, so that with `tile` 0 the longest the short ones fill the gaps at the end.
DEVICE Work work_of(u32 block, u32 tiles, u32 total, u32 group) {
    u32 first = block / (tiles * group) * group, rest = block % (tiles * group);
    u32 size = min(group, total - first);
    return {first + rest % size, rest / size};
}
