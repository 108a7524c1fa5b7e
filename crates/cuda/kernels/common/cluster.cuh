// Clusters: blocks that run at the same time and reach each other's shared memory, sm_90 and newer. A kernel with CLUSTER defined as
// more than 1 is launched in clusters of so many consecutive blocks.
#pragma once

#include "common/async_copy.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif

#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)

DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// What a block wrote before it arrived, all blocks of the cluster see once they have waited. Blocks that have ended are not waited for.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where `at` is in the shared memory of another block of the cluster, which must have started and not ended.
DEVICE u32 shared_address_in(u32 rank, const void* at) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
    return there;
}
DEVICE void store_there(u32 there, float x) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory"); }
DEVICE void store_there(u32 there, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(x), "f"(y) : "memory");
}
#else
#define CLUSTERED
DEVICE u32 cluster_rank() { return 0; }
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() {}
#endif

DEVICE void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}
