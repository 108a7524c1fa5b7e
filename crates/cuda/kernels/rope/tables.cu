// The tables of rotary embedding in f32
//
// rope_freqs: freqs (P,H) = p / base^(i / H), H = head_dim / 2, in f64, rounded once
// moves  4·P·H; bound: memory, and one power for each thread
// grid   a thread owns a column and walks down ROWS rows; tiles of columns side by side; any P and H
//
// rope_turns: cos and sin (n) of angles (n), to 2 units in the last place for every angle
// moves  12·n; bound: the range reduction
// grid   a thread an angle; any n
// order  both elementwise
#include "common/prelude.cuh"

constexpr int ROWS = 64;  // also in src/eager/rope.rs

KERNEL __launch_bounds__(256) rope_freqs(float* freqs, u64 positions, u32 half, double base, u32 tiles) {
    const u32 i = blockIdx.x % tiles * blockDim.x + threadIdx.x;
    if (i >= half) return;
    // 2i / head_dim as the host's table has it
    const double step = 1.0 / pow(base, 2.0 * i / (2.0 * half));
    const u64 begin = (u64)(blockIdx.x / tiles) * (ROWS * blockDim.y), end = min(begin + ROWS * blockDim.y, positions);
    for (u64 p = begin + threadIdx.y; p < end; p += blockDim.y) freqs[p * half + i] = (float)((double)p * step);
}

KERNEL __launch_bounds__(256) rope_turns(float* cos, float* sin, const float* angles, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s, c;
    sincosf(angles[i], &s, &c);
    cos[i] = c;
    sin[i] = s;
}
