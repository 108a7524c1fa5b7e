// What all attention kernels share: where a head lies, and which block does which tile.
//
// qkv is (B,T,W) with q of NH heads, then k and v of NKV heads each, heads side by side: W = (NH + 2*NKV)*HD. out is
// (B,T,C), C = NH*HD. NH/NKV heads of queries share a head of keys and values. A "head" below is one of the B*NH pairs of
// sequence and head of queries; T is `seq`.
#pragma once

#include "prelude.cuh"

struct Head {
    size_t in;          // first element of q of position 0 in (B,T,W)
    size_t key, value;  // of the k and v it uses
    size_t stride;      // W, from position to position
    size_t out;         // first element of position 0 in (B,T,C)
    size_t out_stride;  // C
    size_t row;         // first element in (B,NH,T)
};

DEVICE Head head_at(u32 head, u32 seq, u32 heads, u32 kv_heads, u32 hd) {
    u32 h = head % heads, kv = heads + h / (heads / kv_heads);
    size_t width = (size_t)heads * hd, packed = width + 2 * (size_t)kv_heads * hd, token = (size_t)(head / heads) * seq;
    size_t key = token * packed + (size_t)kv * hd;
    return {token * packed + (size_t)h * hd, key, key + (size_t)kv_heads * hd, packed, token * width + (size_t)h * hd,
            width, (size_t)head * seq};
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
