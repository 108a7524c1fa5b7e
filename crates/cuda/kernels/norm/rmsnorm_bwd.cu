// rmsnorm_bwd: with x̂ = x·rstd and g = d_out·w, per row d_inp (+)= rstd·(g - x̂·mean(g·x̂)); over rows d_weight (+)= Σ d_out·x̂
// With WIDTH rmsnorm_bwd, without rmsnorm_bwd_rows and rmsnorm_bwd_columns; then rmsnorm_bwd_sums: see norm/rows_bwd.cuh
constexpr bool CENTRED = false;
#include "norm/rows_bwd.cuh"

KERNEL __launch_bounds__(1024) rmsnorm_bwd_sums(GRAD* d_weight, const float* partials, u32 count, u32 width, u32 adds) {
    add_partials(d_weight, nullptr, partials, count, width, adds);
}

#ifdef WIDTH
KERNEL __launch_bounds__(WARPS* WARP, 3)
    rmsnorm_bwd(ACT* d_inp, float* partials, const ACT* d_out, const ACT* inp, const float* rstd, const WEIGHT* weight, u32 rows,
                u32 adds) {
    differentiate({d_inp, partials, d_out, inp, nullptr, rstd, weight, rows, WIDTH, adds});
}
#else
KERNEL rmsnorm_bwd_rows(ACT* d_inp, const ACT* d_out, const ACT* inp, const float* rstd, const WEIGHT* weight, u32 rows, u32 width,
                        u32 adds) {
    differentiate_rows({d_inp, nullptr, d_out, inp, nullptr, rstd, weight, rows, width, adds});
}

KERNEL __launch_bounds__(256)
    rmsnorm_bwd_columns(float* partials, const ACT* d_out, const ACT* inp, const float* rstd, u32 rows, u32 width, u32 chunk) {
    sum_columns({nullptr, partials, d_out, inp, nullptr, rstd, nullptr, rows, width, 0}, chunk);
}
#endif
