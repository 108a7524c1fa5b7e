// Sums of squares of gradients in f64, of which a few of bf16 at a time are added in f32 first, where each is exact.
#pragma once

#include "common/prelude.cuh"

// Whether f32 was wide enough for the squares of at most 128 gradients of bf16 with this sum. It rounds squares below 2⁻¹²⁶, which do not
// count in a sum of 2⁻⁸⁰ or more, and makes those beyond 3.4e38 infinite, and with them the sum.
DEVICE bool is_exact(double sum) { return sum >= 8.3e-25 && sum <= 1e300; }
