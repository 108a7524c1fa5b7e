// What measurements need: a copy that shows the memory's limit, numbers to multiply, and a kernel that only takes time.
#include "prelude.cuh"

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

// Uniform in [-1, 1), decided by the index: zeros or ones would cost less power, and so give a rate no model sees.
DEVICE float noise(u64 index) {
    u32 x = (u32)index * 0x9e3779b9u + (u32)(index >> 32);
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return (float)(i32)x * (1.0f / 2147483648.0f);
}

template <class T> DEVICE void fill(T* out, u64 n) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) out[i] = from_float<T>(noise(i));
}

// limits_noise: out[i] = noise(i), n elements
// moves  n*sizeof(T) bytes; bound: memory
// grid   any
// order  none
KERNEL limits_noise_f32(float* out, u64 n) { fill(out, n); }
KERNEL limits_noise_bf16(bf16* out, u64 n) { fill(out, n); }

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
