// grouped_swiglu_fwd: out[r] = weight[e]·inp[r] for the rows r of each expert e, weight (E,2F,C); act = silu(gate)·up, where a row of
//                     out is [gate | up]; bf16, Hopper only
// moves  each operand once per tile, mostly from L2; bound: tensor cores
// grid   a persistent block on each multiprocessor: a producer warp starts TMA copies, three stages of 64 terms ahead; two consumer
//        warpgroups multiply, 64x256 of a tile of 128x256 each; three warps compute the epilogue while the next tile is multiplied.
//        Needs C % 64 == 0, F % 64 == 0, arrays at multiples of 16 bytes
// order  a product's terms in order, 16 at a time, in f32; the rest elementwise: the bits of experts/grouped_wgmma.cu and then elementwise/swiglu.cu
// grouped_swiglu_fwd_pair is the same for pairs of blocks.
#define CLUSTER 2
constexpr int EPILOGUE_GROUPS = 1, BYTES = 2;
#include "experts/grouped_swiglu.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// act in bf16.
struct Rounded {
    bf16* at;

    DEVICE void put(u64 place, const uint4& eight) { *reinterpret_cast<uint4*>(at + place) = eight; }
    DEVICE void finish() {}
};
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SWIGLU_PRODUCT(PAIR)                                                                                                      \
    swiglu_product<PAIR>({result, out, oc}, Rounded{act}, inp, weight, offsets, fault, rows, experts, oc / 2, ic,                 \
                         [=](float(&acc)[128], const Space& space, Turn& turn, auto meanwhile) {                                  \
                             multiply<true, true, PAIR>(acc, space, turn, ic, meanwhile);                                         \
                         });
#else
#define SWIGLU_PRODUCT(PAIR)
#endif

#define SWIGLU_KERNEL(NAME, PAIR)                                                                                                 \
    NAME(bf16* out, const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap inp,                              \
         const __grid_constant__ TensorMap weight, const i32* offsets, Fault* fault, u32 rows, u32 experts, u32 ic, u32 oc,       \
         bf16* act) {                                                                                                             \
        SWIGLU_PRODUCT(PAIR)                                                                                                      \
    }
KERNEL __launch_bounds__(THREADS, 1) SWIGLU_KERNEL(grouped_swiglu_fwd, false)
KERNEL CLUSTERED __launch_bounds__(THREADS, 1) SWIGLU_KERNEL(grouped_swiglu_fwd_pair, true)
