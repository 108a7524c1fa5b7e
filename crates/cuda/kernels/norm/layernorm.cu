// layernorm_fwd:          out = (x - mean)·rstd·w + b per row of the width; mean and rstd kept
// residual_layernorm_fwd: x = a + b, rounded and stored first, then the same: equal to add followed by layernorm_fwd
// layernorm_apply:        out again from mean and rstd: the same bits
// moves  2·rows·width·sizeof(ACT) + 8·rows bytes, the residual form twice that; bound: memory
constexpr bool CENTRED = true;
#include "norm/rows_fwd.cuh"

KERNEL __launch_bounds__(WARPS* WARP) layernorm_fwd(ACT* out, float* mean, float* rstd, const ACT* inp,
                                                    const WEIGHT* weight, const WEIGHT* bias, float eps, u32 rows,
                                                    u32 width) {
    normalise<FWD>({out, mean, rstd, inp, nullptr, nullptr, weight, bias, eps, rows, width});
}

KERNEL __launch_bounds__(WARPS* WARP) residual_layernorm_fwd(ACT* residual, ACT* out, float* mean, float* rstd,
                                                             const ACT* a, const ACT* b, const WEIGHT* weight,
                                                             const WEIGHT* bias, float eps, u32 rows, u32 width) {
    normalise<RESIDUAL>({out, mean, rstd, a, b, residual, weight, bias, eps, rows, width});
}

KERNEL __launch_bounds__(WARPS* WARP) layernorm_apply(ACT* out, const ACT* inp, float* mean, float* rstd,
                                                      const WEIGHT* weight, const WEIGHT* bias, u32 rows, u32 width) {
    normalise<APPLY>({out, mean, rstd, inp, nullptr, nullptr, weight, bias, 0.0f, rows, width});
}
