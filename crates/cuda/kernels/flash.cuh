// What all attention kernels share: where a head lies, and which block does which tile.
//
// qkv is (B,T,3C) with q, k, v of a position one after the other, out is (B,T,C); C = NH*HD, heads side by side.
// A "head" below is one of the B*NH pairs of sequence and head; T is `seq`.
#pragma once

#include "prelude.cuh"

struct Head {
    size_t in;      // first element of q of position 0 in (B,T,3C); k is C further, v is 2C
    size_t out;     // first element of position 0 in (B,T,C)
    size_t row;     // first element in (B,NH,T)
    size_t stride;  // C; positions are 3C apart in qkv
};

DEVICE Head head_at(u32 head, u32 seq, u32 heads, u32 hd) {
    size_t width = (size_t)heads * hd, token = (size_t)(head / heads) * seq, first = (size_t)(head % heads) * hd;
    return {token * 3 * width + first, token * width + first, (size_t)head * seq, width};
}

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
