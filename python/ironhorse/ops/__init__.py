"""Operations on numpy arrays, computed in Rust.

Each op has two forms: `y = silu(x)` makes its result, `silu(x, out)` writes it into `out`, with the arguments in the
order of the C functions (`cuda_silu(in, out, n, stream)`) without the stream. Sizes may be left out where the arrays
tell them. Inputs are float32 (indices int32, seeds uint64); they are copied when they are not contiguous. Outputs must
be contiguous, writable and of the right type and shape. What is wrong raises `IronhorseError`, whose `code` says the
kind; an invalid argument is a `ValueError` too.

`device` says where to compute. "auto" and "cpu" mean the CPU: numpy arrays are in its memory, and to copy them to a GPU
and back takes longer than computing here. "cuda" (or "cuda:1") copies them all the same, computes on the GPU and waits
for the result; without a usable GPU it raises `NotAvailableError`, which says why.

The interpreter lock is released during long calls and calls on a GPU, and large calls use all cores; results do not
depend on how many.
"""

from __future__ import annotations

from .._native import cuda_available
from ..errors import Code, InvalidValueError, IronhorseError, LaunchFailedError, NotAvailableError, OutOfMemoryError
from .choose import argmax, sample, topk_sample, topp_sample
from .elementwise import add, gelu, mul, scale, silu, swiglu
from .heads import attention, flash_attention, rope_forward, rope_freqs, rope_qk
from .loss import aux_loss, aux_loss_forward, cross_entropy_backward, cross_entropy_forward, scatter_add
from .matmul import gemm, gemm_batched
from .optimizer import adamw_step, grad_clip, zero_grad
from .rows import layernorm, rmsnorm, rmsnorm_residual, softmax, softmax_topk

# What bindings of the same C functions elsewhere call them.
CudaError, CudaErrorCode = IronhorseError, Code

__all__ = [
    "Code",
    "InvalidValueError",
    "IronhorseError",
    "LaunchFailedError",
    "NotAvailableError",
    "OutOfMemoryError",
    "adamw_step",
    "add",
    "argmax",
    "attention",
    "aux_loss",
    "aux_loss_forward",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "cuda_available",
    "flash_attention",
    "gelu",
    "gemm",
    "gemm_batched",
    "grad_clip",
    "layernorm",
    "mul",
    "rmsnorm",
    "rmsnorm_residual",
    "rope_forward",
    "rope_freqs",
    "rope_qk",
    "sample",
    "scale",
    "scatter_add",
    "silu",
    "softmax",
    "softmax_topk",
    "swiglu",
    "topk_sample",
    "topp_sample",
    "zero_grad",
]
