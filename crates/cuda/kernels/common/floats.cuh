// Half precision, and maths by the type of the argument: shared by kernels of eager ops and kernels of users.
#pragma once

// IEEE half precision.
struct f16 {
    u16 bits;
};

DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <> DEVICE f16 from_float<f16>(float x) {
    f16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
}

// What to compute in.
template <class T> struct AccOf {
    using type = float;
};
template <> struct AccOf<double> {
    using type = double;
};

DEVICE float exp_of(float x) { return expf(x); }
DEVICE double exp_of(double x) { return exp(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE double log_of(double x) { return log(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE double tanh_of(double x) { return tanh(x); }
DEVICE float erf_of(float x) { return erff(x); }
DEVICE double erf_of(double x) { return erf(x); }
DEVICE float sqrt_of(float x) { return sqrtf(x); }
DEVICE double sqrt_of(double x) { return sqrt(x); }
DEVICE float rsqrt_of(float x) { return 1.0f / sqrtf(x); }
DEVICE double rsqrt_of(double x) { return 1.0 / sqrt(x); }
DEVICE float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double fma_of(double a, double b, double c) { return fma(a, b, c); }
