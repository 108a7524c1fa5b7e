// The activations that models use, one line each: the engine's kernels (activation.cu) and the eager ones (eager.cu) are made from
// this list. An activation is a struct with `value` and `slope`; GELU's is in each of the two files, because they use
// different fast forms of the exponential.
#define ACTIVATIONS(MAKE) MAKE(gelu, Gelu)
