// What an RMS norm multiplies its normalised rows by: the weight, or with PLUS_ONE 1 + weight.
#pragma once

#include "common/prelude.cuh"

DEVICE float gain(float w) {
#ifdef PLUS_ONE
    return 1.0f + w;
#else
    return w;
#endif
}
