"""Your own CUDA source as an op for numpy and torch, compiled in the process by NVRTC: no nvcc, no C++ compiler.

    from ironhorse import jit

    square = jit.op(r'''
        template <class T> __global__ void square(const T* x, T* y, long n) {
            long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
            if (i < n) y[i] = x[i] * x[i];
        }
        template <class T> __global__ void square_bwd(const T* d_y, const T* x, T* d_x, long n) {
            long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
            if (i < n) d_x[i] = 2 * x[i] * d_y[i];
        }
    ''', forward="square", backward="square_bwd", cpu=lambda x: x * x)

    square(x)             # a numpy array, or a tensor: with its gradient, and in torch.compile
    jit.check(square, x)  # opcheck, gradcheck, odd shapes

The first call compiles, the result is kept on disk (IRONHORSE_CACHE). docs/jit.md walks through it.
"""

from __future__ import annotations

from ._check import Check, Report, check
from ._errors import CompileError, Diagnostic
from ._module import Kernel, Module, compile, load, source
from ._op import Op, like, op
from ._types import Param, Signature

__all__ = [
    "Check", "CompileError", "Diagnostic", "Kernel", "Module", "Op", "Param", "Report", "Signature",
    "check", "compile", "like", "load", "op", "source",
]  # fmt: skip
