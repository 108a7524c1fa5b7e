// bias_relu2: y = relu(x + bias)^2 by rows, and its gradient
//
// moves  bias_relu2 2 arrays, bias_relu2_bwd 3, bias_relu2_bwd_bias 2; bound: memory
// grid   a block per row; for the bias a block per 32 columns
// order  fixed, no atomics: bitwise repeatable
#include "ironhorse.cuh"

// relu(x + bias); NaN stays NaN.
template <class T> DEVICE typename AccOf<T>::type positive(T x, T bias) {
    const auto a = to_acc(x) + to_acc(bias);
    return a < 0 ? 0 : a;
}

template <class T> __global__ void bias_relu2(const T* x, const T* bias, T* y, int cols) {
    const u64 row = (u64)blockIdx.x * cols;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
        const auto a = positive(x[row + c], bias[c]);
        y[row + c] = from_acc<T>(a * a);
    }
}

template <class T> __global__ void bias_relu2_bwd(const T* d_y, const T* x, const T* bias, T* d_x, int cols) {
    const u64 row = (u64)blockIdx.x * cols;
    for (int c = threadIdx.x; c < cols; c += blockDim.x)
        d_x[row + c] = from_acc<T>(2 * positive(x[row + c], bias[c]) * to_acc(d_y[row + c]));
}

// Lanes handle neighbouring columns, warps every 32nd row.
template <class T> __global__ void bias_relu2_bwd_bias(const T* d_y, const T* x, const T* bias, T* d_bias, int rows, int cols) {
    using A = typename AccOf<T>::type;
    __shared__ A part[32][33];
    const int c = blockIdx.x * 32 + threadIdx.x;
    A sum = 0;
    if (c < cols)
        for (u64 r = threadIdx.y; r < rows; r += 32) sum += 2 * positive(x[r * cols + c], bias[c]) * to_acc(d_y[r * cols + c]);
    part[threadIdx.x][threadIdx.y] = sum;
    __syncthreads();
    const A total = warp_sum(part[threadIdx.y][threadIdx.x]);  // a warp per column now
    const int column = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && column < cols) d_bias[column] = from_acc<T>(total);
}
