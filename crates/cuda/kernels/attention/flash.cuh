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
