// What measurements need: a copy that shows the memory's limit, numbers to multiply, a sum that tells whether two results
// are the same, and a kernel that only takes time.
#include "common/prelude.cuh"

// limits_copy: out = in, n vectors of 16 bytes
// moves  32*n bytes; bound: memory
// grid   any; each block takes pieces of 4 vectors per thread in turn, so that 4 loads are in flight
// order  none
KERNEL limits_copy(uint4* out, const uint4* in, u64 n) {
    const u64 piece = (u64)blockDim.x * 4;
    for (u64 start = (u64)blockIdx.x * piece; start < n; start += (u64)gridDim.x * piece) {
        const u64 first = start + threadIdx.x;
        if (start + piece <= n) {
            uint4 held[4];
#pragma unroll
            for (int i = 0; i < 4; i++) held[i] = in[first + (u64)i * blockDim.x];
#pragma unroll
            for (int i = 0; i < 4; i++) out[first + (u64)i * blockDim.x] = held[i];
        } else {
            for (u64 i = first; i < n; i += blockDim.x) out[i] = in[i];
        }
    }
}

// Words decided by their place: word(h) of 32 bits that look random.
template <class F> DEVICE void noise(uint4* out, u64 n, F word) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 h = (u32)i * 4u + j;
            h = (h ^ (h >> 16)) * 0x85ebca6bu;
            h = (h ^ (h >> 13)) * 0xc2b2ae35u;
            words[j] = word(h ^ h >> 16);
        }
        out[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// limits_noise: bf16 numbers spread evenly over [-1, 1), which read as f32 are so too; decided by the place. Zeros or ones
//               would cost less power, and so give a rate no model sees.
// moves  16*n bytes; bound: memory
// grid   any
// order  none
KERNEL limits_noise(uint4* out, u64 n) {
    noise(out, n, [](u32 h) {
        const float scale = 1.0f / 32768.0f;
        const bf16 low = from_float<bf16>((short)(h & 0xffff) * scale);
        const bf16 high = from_float<bf16>((short)(h >> 16) * scale);
        return (u32)high.bits << 16 | low.bits;
    });
}

// limits_noise_fp8: 8-bit numbers of both formats, of either sign and of ordinary size; decided by the place
// moves  16*n bytes; bound: memory
// grid   any
// order  none
KERNEL limits_noise_fp8(uint4* out, u64 n) {
    noise(out, n, [](u32 h) { return (h & 0x80808080u) | ((h & 0x1f1f1f1fu) + 0x28282828u); });
}

// limits_checksum: *sum += a number that depends on every word of x (n,4) and on its place
// moves  16*n bytes; bound: memory
// grid   any number of whole warps
// order  integers: any order gives the same sum, so the atomics are harmless
KERNEL limits_checksum(u64* sum, const uint4* x, u64 n) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    u64 mine = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint4 v = x[i];
        const u64 low = (u64)v.y << 32 | v.x, high = (u64)v.w << 32 | v.z;
        mine += (low ^ (low >> 29)) * (4 * i + 1) + (high ^ (high >> 29)) * (4 * i + 3);
    }
    mine = warp_sum(mine);
    if (threadIdx.x % WARP == 0) atomicAdd(sum, mine);
}

// limits_wait: takes `ns` nanoseconds, so that the host can put work on the stream behind it
// moves  nothing
// grid   one thread
// order  none
KERNEL limits_wait(u64 ns) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}
