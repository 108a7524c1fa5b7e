// grouped_fp8_swiglu: out[r] = (a[r]·b[e]ᵀ)·inverses for the rows r of each expert e, in 8 bits, b (E,2F,K); and q = fp8(act·s) of
//                     act = silu(gate)·up, where a row of out is [gate | up]; s is a power of two from `amax`, `inverse` = 1/s, and `seen`
//                     becomes the largest |act| if that is larger; Hopper only
//                     a is of the format LEFT, b and q are e4m3
// moves  each operand once per tile, mostly from L2; bound: tensor cores
// grid   a persistent block on each multiprocessor: a producer warp starts TMA copies, three stages of 128 terms ahead; two consumer
//        warpgroups multiply, 64x256 of a tile of 128x256 each; seven warps compute the epilogue while the next tile is multiplied.
//        Needs K % 16 == 0, F % 64 == 0, arrays at multiples of 16 bytes
// order  that of experts/grouped_fp8.cu, then elementwise/swiglu.cu, then fp8/quantize.cu: the same bits
constexpr int EPILOGUE_GROUPS = 2, BYTES = 1;
#include "experts/grouped_swiglu.cuh"
#include "experts/grouped_fp8.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// act in 8 bits.
struct Narrowed {
    u8* at;
    float up;
    u32* seen;
    u32 most = 0;

    DEVICE float scaled(u32 bits) {
        const u32 size = bits & 0x7fffffffu;
        most = size > most ? size : most;
        const float x = __uint_as_float(bits);
        return fmaf(x, 0.0f, x * up);  // infinity becomes NaN
    }
    DEVICE u32 pair(u32 two) {
        const float low = scaled(two << 16), high = scaled(two & 0xffff0000u);
        return pack_fp8<E4M3>(low, high);
    }
    DEVICE void put(u64 place, const uint4& eight) {
        const u32 low = pair(eight.x) | pair(eight.y) << 16, high = pair(eight.z) | pair(eight.w) << 16;
        *reinterpret_cast<uint2*>(at + place) = make_uint2(low, high);
    }
    // All lanes of an epilogue warp, when all is written.
    DEVICE void finish() {
        const u32 all = __reduce_max_sync(0xffffffffu, most);
        if (threadIdx.x % WARP == 0 && all > *reinterpret_cast<volatile u32*>(seen)) atomicMax(seen, all);
    }
};
#endif

KERNEL __launch_bounds__(THREADS, 1)
    grouped_fp8_swiglu(bf16* out, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap a,
                       const __grid_constant__ TensorMap b, const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 k, u32 n,
                       const float* a_inverse, const float* b_inverse, u8* q, float* inverse, u32* seen, const u32* amax, int margin,
                       int unknown) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const Scale scale = scale_of<E4M3>(*amax, margin, unknown);
    if (blockIdx.x == 0 && threadIdx.x == 0) *inverse = scale.down;
    const float both = *a_inverse * *b_inverse;
    swiglu_product({result, out, n}, Narrowed{q, scale.up, seen}, a, b, offsets, fault, rows, experts, n / 2, k,
                   [=](float(&acc)[128], const Space& space, Turn& turn, auto meanwhile) {
                       multiply_fast(acc, space, turn, k, meanwhile);
                       scale_all(acc, both);
                   });
#endif
}
