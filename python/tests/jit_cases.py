"""Sources and a stand-in GPU for the tests of ironhorse.jit."""

from __future__ import annotations

import ctypes

import numpy as np

SQUARE = r"""
#include "ironhorse.cuh"
// y = a x^2
template <class T> __global__ void square(const T* x, T* y, long n, float a) {
    long i = index();
    if (i < n) y[i] = from_acc<T>(a * to_acc(x[i]) * to_acc(x[i]));
}
template <class T> __global__ void square_bwd(const T* d_y, const T* x, T* d_x, long n, float a) {
    long i = index();
    if (i < n) d_x[i] = from_acc<T>(2 * a * to_acc(x[i]) * to_acc(d_y[i]));
}
"""

# y = x * w + b by rows, f32 only; the gradient is two kernels, of which one sums over rows.
AFFINE = r"""
extern "C" __global__ void affine(const float* __restrict__ x, const float* w, const float* b, float* y,
                                  int rows, int cols) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < (long)rows * cols) y[i] = x[i] * w[i % cols] + b[i % cols];
}
extern "C" __global__ void affine_bwd_x(const float* d_y, const float* w, float* d_x, int rows, int cols) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < (long)rows * cols) d_x[i] = d_y[i] * w[i % cols];
}
extern "C" __global__ void affine_bwd_w(const float* d_y, const float* x, float* d_w, float* d_b, int rows, int cols) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float sum = 0, bias = 0;
    for (long r = 0; r < rows; r++) sum += d_y[r * cols + c] * x[r * cols + c], bias += d_y[r * cols + c];
    d_w[c] = sum;
    d_b[c] = bias;
}
"""

# Two outputs, another shape, an integer output, numbers of other types.
ROWS = r"""
template <class T, int W>
__global__ void top(const T* x, T* best, int* at, int rows, int cols, bool low, unsigned char skip) {
    int row = blockIdx.x;
    if (threadIdx.x) return;
    T most = 0;
    int where = -1;
    for (int c = skip; c < cols; c++) {
        T v = x[(long)row * cols + c];
        if (where < 0 || (low ? v < most : v > most)) most = v, where = c;
    }
    best[row] = most;
    at[row] = where;
}
"""


class Stand:
    """Runs what the kernels above compute on the host, from the very arguments a GPU would get; counts launches."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def on(self, kernel, device: int = 0):
        return _Launcher(self, kernel)


class _Launcher:
    def __init__(self, stand: Stand, kernel) -> None:
        self.stand, self.kernel = stand, kernel

    def launch_host(self, grid, block, shared, args) -> None:
        kernel = self.kernel
        self.stand.launches.append((kernel.name, grid, block, shared))
        values = {}
        for param, arg in zip(kernel.params, args, strict=True):
            if isinstance(arg, tuple):
                address, size, _, written = arg
                dtype = {"float": "f4", "double": "f8", "int": "i4"}[param.base]
                assert written == param.is_output
                memory = (ctypes.c_char * size).from_address(address) if size else b""
                values[param.name] = np.frombuffer(memory, dtype)
            else:
                values[param.name] = arg
        if 0 not in grid:
            getattr(self, kernel.name.partition("<")[0])(**values)

    def square(self, x, y, n, a):
        y[:n] = a * x * x

    def square_bwd(self, d_y, x, d_x, n, a):
        d_x[:n] = 2 * a * x * d_y

    def affine(self, x, w, b, y, rows, cols):
        y[:] = (x.reshape(rows, cols) * w + b).reshape(-1)

    def affine_bwd_x(self, d_y, w, d_x, rows, cols):
        d_x[:] = (d_y.reshape(rows, cols) * w).reshape(-1)

    def affine_bwd_w(self, d_y, x, d_w, d_b, rows, cols):
        d_w[:] = (d_y.reshape(rows, cols) * x.reshape(rows, cols)).sum(0)
        d_b[:] = d_y.reshape(rows, cols).sum(0)

    def top(self, x, best, at, rows, cols, low, skip):
        x = x.reshape(rows, cols)[:, skip:]
        where = x.argmin(1) if low else x.argmax(1)
        best[:], at[:] = x[np.arange(rows), where], where + skip
