// The engine's attention: q, k and v in one tensor, causal.
//
// qkv is (B,T,W) with q of NH heads, then k and v of NKV heads each, heads side by side: W = (NH + 2*NKV)*HD. out is
// (B,T,C), C = NH*HD. T is `seq`. The interface is that of attention/strided.cuh. With DROPOUT probabilities are dropped, with
// MASKED keys before a query's document or window are not attended to.
#pragma once

#include "common/prelude.cuh"
#ifdef DROPOUT
#include "common/dropout.cuh"
#endif

#include "attention/starts.cuh"

constexpr bool STRIDED = false;

struct Head {
    size_t in;          // first element of q of position 0 in (B,T,W)
    size_t key, value;  // of the k and v it uses
    size_t stride;      // W, from position to position
    size_t out;         // first element of position 0 in (B,T,C)
    size_t out_stride;  // C
    size_t row;         // first element in (B,NH,T)
};

template <class E> struct Qkv {
    E* at;

    DEVICE E* q(const Head& head) const { return at + head.in; }
    DEVICE E* k(const Head& head) const { return at + head.key; }
    DEVICE E* v(const Head& head) const { return at + head.value; }
    DEVICE bool wants_k() const { return true; }
    DEVICE bool wants_v() const { return true; }
};

struct Shape {
    u32 seq, heads, kv_heads, hd, total, group;
    float scale;
#ifdef MASKED
    Mask mask;
#endif
#ifdef DROPOUT
    Drops drops;  // of the probabilities
#endif

    DEVICE u32 q_len() const { return seq; }
    DEVICE u32 kv_len() const { return seq; }
    DEVICE int sees(int query) const { return query + 1; }
    DEVICE bool sees_all(u32 keys, u32 query) const { return keys <= query + 1; }
    template <class I> DEVICE bool sees_none(I key, I queries) const { return key >= queries; }
    DEVICE bool shows(u32 key, u32 query) const { return key <= query; }
    DEVICE bool hides(int key, int column, int query) const { return column > query - key; }
    DEVICE bool sees_one(int query) const { return query == 0; }
    DEVICE u32 passes(u32 query, u32 tile) const { return query / tile + 1; }
    DEVICE u32 first_for(u32 key) const { return key; }
    DEVICE float steepness() const { return scale; }
    DEVICE float exact_scale() const { return scale; }
    DEVICE bool wide(u32 n) const { return hd % n == 0; }

    DEVICE size_t q_stride(const Head& at) const { return at.stride; }
    DEVICE size_t k_stride(const Head& at) const { return at.stride; }
    DEVICE size_t v_stride(const Head& at) const { return at.stride; }
    DEVICE size_t out_stride(const Head& at) const { return at.out_stride; }
    DEVICE size_t q_head(u32 width) const { return width; }
    DEVICE size_t out_head(u32 width) const { return width; }

    DEVICE Head head(u32 index, u32 width) const {
        u32 h = index % heads, kv = heads + h / (heads / kv_heads);
        size_t all = (size_t)heads * width, packed = all + 2 * (size_t)kv_heads * width, token = (size_t)(index / heads) * seq;
        size_t key = token * packed + (size_t)kv * width;
        return {token * packed + (size_t)h * width, key, key + (size_t)kv_heads * width, packed, token * all + (size_t)h * width,
                all, (size_t)index * seq};
    }
};

// The parameters of kernels, and what is derived from them.
#define QKV_PARAMETERS const ELEM* qkv
#define QKV Qkv<const ELEM>{qkv}
#define D_QKV_PARAMETERS ELEM* d_qkv
#define D_QKV Qkv<ELEM>{d_qkv}
#ifdef MASKED
#define MASK_PARAMETERS , const i32 *positions, Fault *fault, u32 window
#define MASK_OF , Mask{positions, fault, window}
#else
#define MASK_PARAMETERS
#define MASK_OF
#endif
#ifdef DROPOUT
#define DROP_PARAMETERS , const Scalars *scalars, u32 site, u32 threshold, float keep
#define DROPS_OF , make_drops(scalars, site, threshold, keep, seq)
#else
#define DROP_PARAMETERS
#define DROPS_OF
#endif
#define SHAPE_PARAMETERS \
    u32 seq, u32 heads, u32 kv_heads, u32 hd, u32 total, u32 group, float scale MASK_PARAMETERS DROP_PARAMETERS
#define SHAPE \
    Shape { seq, heads, kv_heads, hd, total, group, scale MASK_OF DROPS_OF }
