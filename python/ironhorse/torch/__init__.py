"""Operators for PyTorch, written in Rust and CUDA: with gradients, on CPU and CUDA, under torch.compile and autocast.

    import ironhorse.torch as custom_ops

    y = custom_ops.fused_scale_bias_relu(x, bias, scale=2.0)
    y.sum().backward()

The functions are used like those of torch.nn.functional. The operators behind them are `torch.ops.ironhorse.*`.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    what = "ironhorse.torch needs PyTorch 2.4 or newer: pip install 'ironhorse[torch]', or see pytorch.org"
    raise ImportError(what) from error

from .elementwise import activation as _activation
from .elementwise import gelu, silu, square, square_forward, swiglu
from .heads import attention, causal_attention, rope, rope_tables
from .loss import cross_entropy
from .norms import layernorm, rmsnorm
from .rows import fused_op_forward, fused_scale_bias_relu, softmax

relu2 = _activation("relu2")

__all__ = [
    "attention",
    "causal_attention",
    "cross_entropy",
    "fused_op_forward",
    "fused_scale_bias_relu",
    "gelu",
    "layernorm",
    "relu2",
    "rmsnorm",
    "rope",
    "rope_tables",
    "silu",
    "softmax",
    "square",
    "square_forward",
    "swiglu",
]
