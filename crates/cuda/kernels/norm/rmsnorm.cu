// rmsnorm_fwd:          out = x·rstd·w per row of the width, rstd = 1/√(mean(x²) + eps), kept
// residual_rmsnorm_fwd: x = a + b, rounded and stored first, then the same: equal to add followed by rmsnorm_fwd
// rmsnorm_apply:        out again from rstd: the same bits
// moves  2·rows·width·sizeof(ACT) + 4·rows bytes, the residual form twice that; bound: memory
constexpr bool CENTRED = false;
#include "norm/rows_fwd.cuh"

KERNEL __launch_bounds__(WARPS* WARP, 2)
    rmsnorm_fwd(ACT* out, float* rstd, const ACT* inp, const WEIGHT* weight, float eps, u32 rows, u32 width) {
    normalise<FWD>({out, nullptr, rstd, inp, nullptr, nullptr, weight, nullptr, eps, rows, width});
}

KERNEL __launch_bounds__(WARPS* WARP, 2)
    residual_rmsnorm_fwd(ACT* residual, ACT* out, float* rstd, const ACT* a, const ACT* b, const WEIGHT* weight, float eps,
                         u32 rows, u32 width) {
    normalise<RESIDUAL>({out, nullptr, rstd, a, b, residual, weight, nullptr, eps, rows, width});
}

KERNEL __launch_bounds__(WARPS* WARP, 2)
    rmsnorm_apply(ACT* out, const ACT* inp, float* rstd, const WEIGHT* weight, u32 rows, u32 width) {
    normalise<APPLY>({out, nullptr, rstd, inp, nullptr, nullptr, weight, nullptr, 0.0f, rows, width});
}
