// Attention of eager ops: q, k, v and out each with their own strides, any number of keys.
//
// Arrays are (batch, heads, length, head_dim) with the strides of `Shape`, gradients with those of their tensors; lse and
// delta are (batch, heads, q_len). Query i sees the keys below min(kv_len, i + shift + 1), which may be none: shift is
// kv_len - q_len where that is causal, and kv_len where every query sees all. Lengths are below 2^30.
#pragma once

#include "attention/starts.cuh"
#include "common/unaligned.cuh"

constexpr bool STRIDED = true;

struct Strides {
    u64 batch, head, position;  // in elements
};

// First elements of position 0.
struct Head {
    size_t q, k, v, out, row;
};

// q, k and v, or their gradients; a gradient that is not wanted is null.
template <class E> struct Qkv {
    E *at_q, *at_k, *at_v;

    DEVICE E* q(const Head& head) const { return at_q + head.q; }
    DEVICE E* k(const Head& head) const { return at_k + head.k; }
    DEVICE E* v(const Head& head) const { return at_v + head.v; }
    DEVICE bool wants_k() const { return at_k != nullptr; }
    DEVICE bool wants_v() const { return at_v != nullptr; }
};

// The order is that of `Shape` in src/eager/attention.rs.
struct Shape {
    Strides q, k, v, out;
    double scale64;
    float scale;
    float steep;  // |scale|, or something tiny where that is 0: what hidden scores, -inf, are multiplied with
    u32 lengths[2];
    int shift;
    u32 heads, kv_heads, hd, total, group;
    u32 aligned;  // whether head_dim, all strides and all addresses allow vectors of 16 bytes
    u32 unused;
#ifdef MASKED
    Mask mask;
#endif

    DEVICE u32 q_len() const { return lengths[0]; }
    DEVICE u32 kv_len() const { return lengths[1]; }
    // The keys below this number; may be negative.
    DEVICE int sees(int query) const { return min((int)lengths[1], query + shift + 1); }
    // Whether a query, and those after it, see every key below `keys`.
    DEVICE bool sees_all(u32 keys, u32 query) const { return (int)keys <= sees((int)query); }
    // Whether no query below `queries` sees a key from `key` on.
    template <class I> DEVICE bool sees_none(I key, I queries) const { return (int)key >= sees((int)queries - 1); }
    // Whether a query sees a key, and whether it does not see key + column.
    DEVICE bool shows(u32 key, u32 query) const { return (int)key < sees((int)query); }
    DEVICE bool hides(int key, int column, int query) const { return column >= sees(query) - key; }
    // Whether a query sees a single key.
    DEVICE bool sees_one(int query) const { return sees(query) == 1; }
    // Tiles of keys to pass over until a query and those before it have seen all.
    DEVICE u32 passes(u32 query, u32 tile) const { return ((u32)max(sees((int)query), 0) + tile - 1) / tile; }
    // The first query that sees a key; may be beyond q_len.
    DEVICE u32 first_for(u32 key) const { return (u32)max((int)key - shift, 0); }
    DEVICE float steepness() const { return steep; }
    DEVICE Acc exact_scale() const { return (Acc)scale64; }
    DEVICE bool wide(u32) const { return aligned; }

    // From position to position; hidden from the compiler each time, which would otherwise keep products with it in registers.
    static DEVICE size_t fresh(size_t x) {
        asm volatile("" : "+l"(x));
        return x;
    }
    DEVICE size_t q_stride(const Head&) const { return q.position; }
    DEVICE size_t k_stride(const Head&) const { return fresh(k.position); }
    DEVICE size_t v_stride(const Head&) const { return fresh(v.position); }
    DEVICE size_t out_stride(const Head&) const { return out.position; }
    // From head to head.
    DEVICE size_t q_head(u32) const { return q.head; }
    DEVICE size_t out_head(u32) const { return out.head; }

    DEVICE Head head(u32 index, u32) const {
        u64 b = index / heads, h = index % heads, kv = h / (heads / kv_heads);
        return {b * q.batch + h * q.head, b * k.batch + kv * k.head, b * v.batch + kv * v.head,
                b * out.batch + h * out.head, (size_t)index * lengths[0]};
    }
};

// The parameters of kernels, and what is derived from them.
#define QKV_PARAMETERS const ELEM *q, const ELEM *k, const ELEM *v
#define QKV Qkv<const ELEM>{q, k, v}
#define D_QKV_PARAMETERS ELEM *d_q, ELEM *d_k, ELEM *d_v
#define D_QKV Qkv<ELEM>{d_q, d_k, d_v}
#define SHAPE_PARAMETERS Shape shape
#define SHAPE shape
