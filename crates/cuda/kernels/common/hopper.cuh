// Instructions of Hopper alone (sm_90a): TMA copies, mbarriers in shared memory that count their bytes, and matrix products of
// a warpgroup of four warps (wgmma).
//
// Tiles in shared memory have the layout that TMA writes with a swizzle of 128 bytes: rows of 128 bytes (64 elements of bf16),
// whose chunks of 16 bytes are permuted by the row number modulo 8. A tile starts at a multiple of 1024 bytes.
#pragma once

#include "common/async_copy.cuh"

// A tensor map (`CUtensorMap`), which the driver encodes; passed to a kernel by value.
struct alignas(64) TensorMap {
    u64 words[16];
};

// A barrier of `count` arrivals, and of the bytes it is told to expect.
DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers visible to TMA and, after the next __syncthreads, to all threads.
DEVICE void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier with this address in a block of the cluster. It orders nothing but what TMA and wgmma have read before:
// `.release.cluster` would be a fence of the whole GPU.
DEVICE void barrier_arrive_in(u32 block, u32 barrier) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(block)
        : "memory");
}
// Arrives when the copies that this thread started with cp_async are complete.
DEVICE void barrier_arrive_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase of this parity; the first phase of a barrier has parity 0.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Starts the TMA copy of a box at column x, row y to shared memory; its bytes count for the barrier. Elements outside the tensor
// become zeros.
DEVICE void tma_load(u32 to, const TensorMap& map, i32 x, i32 y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}

// The same to the blocks of the cluster whose bits are set, at the same address in the shared memory of each; the bytes count for the
// barrier of each.
DEVICE void tma_load_to(u16 blocks, u32 to, const TensorMap& map, i32 x, i32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], "
        "%5;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
        : "memory");
}

// Starts fetching a box into L2.
DEVICE void tma_prefetch(const TensorMap& map, i32 x, i32 y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}

// Starts the copy of contiguous bytes to shared memory; they count for the barrier. Both addresses and the size are multiples of 16.
DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// Starts the TMA copy of a box from shared memory to column x, row y; elements outside the tensor are not written.
DEVICE void tma_store(const TensorMap& map, i32 x, i32 y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x), "r"(y), "r"(from)
                 : "memory");
}
// Ends a group of such copies of this thread; tma_store_wait<N> waits until at most the last N groups still read shared memory.
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }

// Stores four 8x8 matrices of 2-byte elements from registers, in the layout of mma results, to shared memory: lane i gives the
// address of row i%8 of matrix i/8.
DEVICE void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Stores 16 rows of 64 columns of 2-byte elements of a warp, 8 columns at a time, to a tile in shared memory: pairs[n][0] is of the rows
// lane/4, pairs[n][1] of those 8 further down.
DEVICE void store_rows(u32 tile, const u32 (&pairs)[8][2]) {
    const u32 lane = threadIdx.x % WARP, row = lane % 16;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        const u32 chunk = (n + lane / 16) ^ row % 8;
        store_matrices(tile + row * 128 + chunk * 16, pairs[n][0], pairs[n][1], pairs[n + 1][0], pairs[n + 1][1]);
    }
}

// 16 bytes of shared memory.
DEVICE uint4 load_shared(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}

DEVICE void store_shared(u32 to, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// 8 bytes of it.
DEVICE void load_pair(u32& a, u32& b, u32 from) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}
// 4 bytes of it.
DEVICE u32 load_word(u32 from) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

// Makes ordinary stores to shared memory visible to wgmma and TMA after the next barrier.
DEVICE void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of some of the block's threads.
template <int ID, int COUNT> DEVICE void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

template <int COUNT> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// The descriptor of a wgmma operand in shared memory: its address; `across`, the bytes from 64 elements of a row to the next 64
// where rows are terms of the sums (else ignored); and the bytes from 8 rows to the next, 1024.
DEVICE u64 matrix_descriptor(u32 address, u32 across) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(across >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Keeps the compiler from moving uses of results before this point, and what computes them behind it.
template <int N> DEVICE void hold(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

// Which stage of a ring is next, and the parity of the rounds so far.
template <int STAGES> struct PipelineState {
    u32 stage = 0, round = 0;
    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            round ^= 1;
        }
    }
};

#define ACC8(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define ACC32(i) ACC8(i), ACC8(i + 8), ACC8(i + 16), ACC8(i + 24)

// c (64x256) = a (64x16)·b (16x256), plus c where `adds`. Where A_ALONG rows of a's tile are rows of the result and 64 terms
// wide, else they are terms; the same for b and columns. Thread i of the group has, of 8 columns at a time, in rows
// i/32·16 + i%32/4 (c[0], c[1]) and 8 further down (c[2], c[3]) columns i%4·2 and the next.
template <bool A_ALONG, bool B_ALONG> DEVICE void wgmma_256(float (&c)[128], u64 a, u64 b, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"
        "%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,"
        "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,"
        "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, %131, %132;\n}"
        : ACC32(0), ACC32(32), ACC32(64), ACC32(96)
        : "l"(a), "l"(b), "r"(adds), "n"(A_ALONG ? 0 : 1), "n"(B_ALONG ? 0 : 1));
}

// The same with 128 columns.
template <bool A_ALONG, bool B_ALONG> DEVICE void wgmma_128(float (&c)[64], u64 a, u64 b, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"
        "%61,%62,%63}, %64, %65, p, 1, 1, %67, %68;\n}"
        : ACC32(0), ACC32(32)
        : "l"(a), "l"(b), "r"(adds), "n"(A_ALONG ? 0 : 1), "n"(B_ALONG ? 0 : 1));
}
// The same with 64 columns.
template <bool A_ALONG, bool B_ALONG> DEVICE void wgmma_64(float (&c)[32], u64 a, u64 b, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1, %35, %36;\n}"
        : ACC32(0)
        : "l"(a), "l"(b), "r"(adds), "n"(A_ALONG ? 0 : 1), "n"(B_ALONG ? 0 : 1));
}
// The same with a in registers, from a[AT] on: pairs of terms as in results, of 8 terms at a time in rows i/32·16 + i%32/4 and 8
// further down.
template <bool B_ALONG, int AT, int N> DEVICE void wgmma_64(float (&c)[32], const u32 (&a)[N], u64 b, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
        : ACC32(0)
        : "r"(a[AT]), "r"(a[AT + 1]), "r"(a[AT + 2]), "r"(a[AT + 3]), "l"(b), "r"(adds), "n"(B_ALONG ? 0 : 1));
}

// c (64x128) = a (64x8)·b (8x128) in tf32, plus c where `adds`. Of a, warp i of the group has rows 16i.. in its registers as mma_tf32
// does (common/mma.cuh); rows of b's tile are columns of the result, 32 terms wide. c is as above.
DEVICE void wgmma_tf32(float (&c)[64], const u32 (&a)[4], u64 b, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"
        "%61,%62,%63}, {%64,%65,%66,%67}, %68, p, 1, 1;\n}"
        : ACC32(0), ACC32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}
#define FIRST_64 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NEXT_64 "," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
    "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
    "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_FP8(N, FORMATS, REGISTERS, A, B, ADDS, ...)                                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %" ADDS ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k32.f32." FORMATS " {" REGISTERS \
                 "}, %" A ", %" B ", p, 1, 1;\n}"                                                                              \
                 : __VA_ARGS__                                                                                               \
                 : "l"(a), "l"(b), "r"(adds))

// c (64x256) = a (64x32)·b (32x256) of 8-bit numbers, plus c where `adds`: lines of both tiles are 128 terms wide. a is e5m2 where
// WIDE, else e4m3; b is e4m3. c is as above. Of the sum so far the tensor cores keep 13 bits after the point.
template <bool WIDE> DEVICE void wgmma_fp8(float (&c)[128], u64 a, u64 b, u32 adds) {
    if constexpr (WIDE)
        WGMMA_FP8("256", "e5m2.e4m3", FIRST_64 NEXT_64, "128", "129", "130", ACC32(0), ACC32(32), ACC32(64), ACC32(96));
    else
        WGMMA_FP8("256", "e4m3.e4m3", FIRST_64 NEXT_64, "128", "129", "130", ACC32(0), ACC32(32), ACC32(64), ACC32(96));
}
// The same for 128 columns, from c[AT] on.
template <bool WIDE, int AT, int N> DEVICE void wgmma_fp8_128(float (&c)[N], u64 a, u64 b, u32 adds) {
    if constexpr (WIDE) WGMMA_FP8("128", "e5m2.e4m3", FIRST_64, "64", "65", "66", ACC32(AT), ACC32(AT + 32));
    else WGMMA_FP8("128", "e4m3.e4m3", FIRST_64, "64", "65", "66", ACC32(AT), ACC32(AT + 32));
}
#undef WGMMA_FP8
#undef NEXT_64
#undef FIRST_64
#undef ACC32
#undef ACC8

// Where an operand is read once for each STEP terms, in stages of shared memory: `full` and `empty` of a Space are the addresses of the
// first of as many barriers as there are stages.

// Producer: as soon as a stage is empty, copy(k, stage, full) starts the copies of the terms from k on to it, BYTES together, which
// count for the barrier `full`.
template <u32 STEP, u32 BYTES, class Space, class Turn, class F> DEVICE void fill_stages(const Space& space, Turn& turn, u32 terms, F copy) {
    for (u32 k = 0; k < terms; k += STEP, turn.next()) {
        const u32 full = space.full + 8 * turn.stage;
        barrier_wait(space.empty + 8 * turn.stage, turn.round ^ 1);
        barrier_expect(full, BYTES);
        copy((i32)k, turn.stage, full);
    }
}

// Consumer: this warp has read a stage, which its block's producer may fill again, and with PAIR the one of the other block of the pair too.
template <bool PAIR> DEVICE void release(u32 empty) {
    const u32 lane = threadIdx.x % WARP;
    if constexpr (PAIR) {
        if (lane < 2) barrier_arrive_in(lane, empty);
    } else if (lane == 0) {
        barrier_arrive(empty);
    }
}

// Consumer: as soon as a stage is full, product(k, stage) starts the products (wgmma) of the terms from k on. A stage is given back when
// those behind it run; the last one, after `meanwhile`, when all products are done and `acc` has them. At least one term.
template <u32 STEP, bool PAIR = false, class Space, class Turn, class P, class F, int... N>
DEVICE void multiply_stages(const Space& space, Turn& turn, u32 terms, P product, F meanwhile, float (&... acc)[N]) {
    u32 before = 0;
    for (u32 k = 0; k < terms; k += STEP, turn.next()) {
        barrier_wait(space.full + 8 * turn.stage, turn.round);
        product(k, turn.stage);
        wgmma_commit();
        if (k > 0) {
            wgmma_wait<1>();  // the products of the stage before are done
            release<PAIR>(space.empty + 8 * before);
        }
        before = turn.stage;
    }
    meanwhile();
    wgmma_wait<0>();
    (hold(acc), ...);
    release<PAIR>(space.empty + 8 * before);
}
