// Kernels that start before the one ahead of them has ended: programmatic dependent launch, sm_90 and newer. Without such a launch
// both functions do nothing.
//
// Before it waits, a chained kernel may read only what no kernel of its program writes: weights, earlier keys and values. Every
// block that does anything waits before it reads or writes anything else. The end of a chained kernel then implies the end of
// all kernels ahead of it, so that the next one has to wait for this one only. The kernel ahead needs to do nothing.
#pragma once

#include "common/prelude.cuh"

// Once every block has called this, the next kernel may start where multiprocessors have room for it.
DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the kernel ahead; what it wrote is visible then.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
