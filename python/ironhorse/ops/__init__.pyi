"""The types of ironhorse.ops. What follows "# ops" is made by `cargo xtask generate`: do not edit it."""

from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from .._native import cuda_available as cuda_available
from ..errors import Code as Code
from ..errors import InvalidValueError as InvalidValueError
from ..errors import IronhorseError as IronhorseError
from ..errors import LaunchFailedError as LaunchFailedError
from ..errors import NotAvailableError as NotAvailableError
from ..errors import OutOfMemoryError as OutOfMemoryError

F32: TypeAlias = NDArray[np.float32]
I32: TypeAlias = NDArray[np.int32]
U64: TypeAlias = NDArray[np.uint64]

CudaError = IronhorseError
CudaErrorCode = Code

# ops

def silu(x: F32, out: F32 | None = None, *, device: str = "auto") -> F32: ...
def add(a: F32, b: F32, out: F32 | None = None, *, device: str = "auto") -> F32: ...
def mul(a: F32, b: F32, out: F32 | None = None, *, device: str = "auto") -> F32: ...
@overload
def scale(x: F32, scale: float, /, *, device: str = "auto") -> F32: ...
@overload
def scale(x: F32, out: F32 | None = None, scale: float | None = None, *, device: str = "auto") -> F32: ...
def gelu(x: F32, out: F32 | None = None, *, device: str = "auto") -> F32: ...
def relu2(x: F32, out: F32 | None = None, *, device: str = "auto") -> F32: ...
def swiglu(gate: F32, up: F32, out: F32 | None = None, *, device: str = "auto") -> F32: ...
def softmax(
    x: F32,
    out: F32 | None = None,
    rows: int | None = None,
    cols: int | None = None,
    *,
    device: str = "auto",
) -> F32: ...
@overload
def softmax_topk(x: F32, k: int, /, *, device: str = "auto") -> tuple[F32, I32]: ...
@overload
def softmax_topk(
    x: F32,
    weights: F32 | None = None,
    idx: I32 | None = None,
    rows: int | None = None,
    cols: int | None = None,
    k: int | None = None,
    *,
    device: str = "auto",
) -> tuple[F32, I32]: ...
def rmsnorm(
    x: F32,
    weight: F32,
    out: F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-6,
    *,
    device: str = "auto",
) -> F32: ...
def rmsnorm_residual(
    x: F32,
    residual: F32,
    weight: F32,
    out: F32 | None = None,
    residual_out: F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-6,
    *,
    device: str = "auto",
) -> tuple[F32, F32]: ...
def layernorm(
    x: F32,
    weight: F32,
    bias: F32,
    out: F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-5,
    *,
    device: str = "auto",
) -> F32: ...
def gemm(
    a: F32,
    b: F32,
    c: F32 | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    device: str = "auto",
) -> F32: ...
def gemm_batched(
    a: F32,
    b: F32,
    c: F32 | None = None,
    batch: int | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    device: str = "auto",
) -> F32: ...
@overload
def rope_freqs(
    max_seq: int,
    head_dim: int,
    /,
    *,
    base: float = 10000.0,
    alpha: float = 1.0,
    device: str = "auto",
) -> F32: ...
@overload
def rope_freqs(
    freqs: F32 | None = None,
    max_seq: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    alpha: float = 1.0,
    *,
    device: str = "auto",
) -> F32: ...
def rope_forward(
    x: F32,
    freqs: F32,
    out: F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    offset: int = 0,
    *,
    half: bool = False,
    device: str = "auto",
) -> F32: ...
def rope_qk(
    q: F32,
    k: F32,
    freqs: F32,
    q_out: F32 | None = None,
    k_out: F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    q_heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    offset: int = 0,
    *,
    half: bool = False,
    device: str = "auto",
) -> tuple[F32, F32]: ...
def attention(
    q: F32,
    k: F32,
    v: F32,
    out: F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    *,
    device: str = "auto",
) -> F32: ...

flash_attention = attention

def cross_entropy_forward(
    logits: F32,
    targets: I32,
    loss: F32 | None = None,
    log_probs: F32 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    *,
    device: str = "auto",
) -> tuple[F32, F32]: ...
def cross_entropy_backward(
    log_probs: F32,
    targets: I32,
    d_logits: F32 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    scale: float | None = None,
    *,
    device: str = "auto",
) -> F32: ...
def aux_loss_forward(
    probs: F32,
    idx: I32,
    aux: F32 | None = None,
    f_counts: F32 | None = None,
    p_means: F32 | None = None,
    rows: int | None = None,
    experts: int | None = None,
    k: int | None = None,
    alpha: float = 0.01,
    *,
    device: str = "auto",
) -> tuple[F32, F32, F32]: ...

aux_loss = aux_loss_forward

def adamw_step(
    param: F32,
    grad: F32,
    m: F32,
    v: F32,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int = 1,
    n: int | None = None,
    *,
    device: str = "auto",
) -> F32: ...
def zero_grad(grad: F32, n: int | None = None, *, device: str = "auto") -> F32: ...
def grad_clip(
    grad: F32,
    partial: F32 | None = None,
    total_norm: F32 | None = None,
    clip: float = 1.0,
    n: int | None = None,
    *,
    device: str = "auto",
) -> F32: ...
def scatter_add(
    grad_out: F32,
    idx: I32,
    grad_weight: F32,
    n_idx: int | None = None,
    dim: int | None = None,
    *,
    device: str = "auto",
) -> F32: ...
def argmax(
    logits: F32,
    out: I32 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    *,
    device: str = "auto",
) -> I32: ...
def sample(
    logits: F32,
    out: I32 | None = None,
    seeds: U64 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    temperature: float = 1.0,
    *,
    device: str = "auto",
) -> I32: ...
def topk_sample(
    logits: F32,
    out: I32 | None = None,
    seeds: U64 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    k: int = 50,
    temperature: float = 1.0,
    *,
    device: str = "auto",
) -> I32: ...
def topp_sample(
    logits: F32,
    out: I32 | None = None,
    seeds: U64 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    p: float = 0.9,
    temperature: float = 1.0,
    *,
    top_p: float | None = None,
    device: str = "auto",
) -> I32: ...
