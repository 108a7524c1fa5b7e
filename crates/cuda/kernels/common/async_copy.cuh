// Copies from global to shared memory that run beside the threads (sm_80 and newer).
#pragma once

#include "common/prelude.cuh"

// The address of shared memory as instructions take it.
DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Starts copying 16 or 4 bytes from global to shared memory; zeros arrive where not `inside`, and `from` is not read.
DEVICE void cp_async16(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
DEVICE void cp_async4(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
}
// The same where nothing is left out.
DEVICE void cp_async16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Ends a group of copies; cp_wait<N> waits for this thread's copies of all but the last N groups.
DEVICE void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
