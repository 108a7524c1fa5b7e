// The activations that models use, one line each: the engine's kernels (activation.cu, product/gemv.cu) and the eager ones (eager.cu)
// are made from this list. An activation is a struct with `value` and `slope`; GELU has two (gelu.cuh, eager.cu), because they use
// different fast forms of the exponential.
#define ACTIVATIONS(MAKE) MAKE(gelu, Gelu) MAKE(relu2, Relu2)

// max(x, 0)²; NaN stays NaN.
struct Relu2 {
    template <class A> static DEVICE A value(A x) { return x <= A(0) ? A(0) : x * x; }
    template <class A> static DEVICE A slope(A x) { return x <= A(0) ? A(0) : x + x; }
};
