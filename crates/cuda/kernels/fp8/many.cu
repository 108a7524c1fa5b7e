// amax_clear, amax_many: the largest |x| of each of several tensors, as `amax` of fp8/quantize.cu after a zero: the same bits
// quantize_many:         `quantize` of fp8/quantize.cu of each of several tensors, without `seen` and sums: the same bits
// moves  n·sizeof(ACT) bytes for each tensor, rows·cols·(sizeof(ACT) + 2); bound: memory
// grid   amax_clear ceil(count / 256) blocks of 256 threads; amax_many a block of 256 threads for every 256·DEEP vectors of a tensor, quantize_many
//        one for every tile of 128 by 128; needs n % 8 == 0, rows % 16 == 0 and cols % 16 == 0, and no tensor is empty
// order  elementwise; the maximum has no order
#include "fp8/tile.cuh"
#include "fp8/amax.cuh"

// A tensor whose largest element is wanted, and the first of its blocks. Written by `amax` of op/fp8_many.rs.
struct Largest {
    u32* most;
    const ACT* inp;
    u64 n, first;
};

// A tensor to round, the first of its blocks and how many of them are side by side. Written by `quantize` of op/fp8_many.rs.
struct Tensor {
    u8* q;
    u8* q_t;
    float* inverse;
    const u32* amax;
    const ACT* inp;
    u32 rows, cols;
    u32 first, across;
    int margin, unknown;
};

// Vectors of a thread of amax_many.
constexpr int DEEP = 8;

// The tensor that this block belongs to.
template <class Item> DEVICE Item mine(const Item* items, u32 count) {
    u32 from = 0;
    while (count > 1) {
        const u32 half = count / 2;
        if (items[from + half].first <= blockIdx.x) {
            from += half;
            count -= half;
        } else {
            count = half;
        }
    }
    return items[from];
}

KERNEL __launch_bounds__(256) amax_clear(const Largest* items, u32 count) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i < count) *items[i].most = 0;
}

KERNEL __launch_bounds__(256) amax_many(const Largest* items, u32 count) {
    constexpr int N = Vec<ACT>::N;
    const Largest item = mine(items, count);
    const u64 start = ((blockIdx.x - item.first) * DEEP * 256 + threadIdx.x) * N;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < DEEP; i++) {
        const u64 at = start + i * 256 * N;
        if (at < item.n) most = largest_of(load(item.inp + at), most);
    }
    count_largest(most, item.most);
}

KERNEL __launch_bounds__(2 * TILE) quantize_many(const Tensor* items, u32 count) {
    const Tensor t = mine(items, count);
    const u32 block = blockIdx.x - t.first;
    quantize_tile<false>({t.q, t.q_t, t.inverse, nullptr, nullptr, t.amax, t.rows, t.cols, t.margin, t.unknown}, Of<Same>{t.inp, t.cols},
                         make_uint2(block % t.across, block / t.across));
}
