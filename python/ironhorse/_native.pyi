"""What Rust implements (crates/py). Use `ironhorse.ops`, which has the documentation."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_F32 = NDArray[np.float32]
_I32 = NDArray[np.int32]
_U64 = NDArray[np.uint64]

__version__: str

def command(args: list[str], /) -> int: ...
def verify(args: list[str], /) -> str: ...
def model_read(text: str, notation: str, kind: str | None = None, /) -> tuple[str, str]: ...
def model_read_hf(text: str, path: str, /) -> tuple[str, str]: ...
def model_write_hf(kind: str, sizes: str, dtype: str, tokens: str | None = None, /) -> str: ...
def model_tensors(kind: str, sizes: str, /) -> list[tuple[str, list[int], bool]]: ...
def model_params(kind: str, sizes: str, /) -> tuple[int, int]: ...
def model_names() -> list[tuple[list[str], str, str]]: ...
def model_keys(kind: str, /) -> list[list[str]]: ...
def torch_ops() -> list[tuple[str, str]]: ...
def torch_register() -> None: ...
def torch_call(name: str, args: tuple[Any, ...], /) -> list[Any]: ...
def cuda_available() -> bool: ...
def silu(x: _F32, out: _F32 | None = None, device: str = "auto") -> _F32: ...
def gelu(x: _F32, out: _F32 | None = None, device: str = "auto") -> _F32: ...
def add(a: _F32, b: _F32, out: _F32 | None = None, device: str = "auto") -> _F32: ...
def mul(a: _F32, b: _F32, out: _F32 | None = None, device: str = "auto") -> _F32: ...
def swiglu(gate: _F32, up: _F32, out: _F32 | None = None, device: str = "auto") -> _F32: ...
def scale(x: _F32, out: _F32 | None, scale: float, device: str = "auto") -> _F32: ...
def softmax(
    x: _F32, out: _F32 | None = None, rows: int | None = None, cols: int | None = None, device: str = "auto"
) -> _F32: ...
def softmax_topk(
    x: _F32,
    weights: _F32 | None,
    idx: _I32 | None,
    rows: int | None,
    cols: int | None,
    k: int,
    device: str = "auto",
) -> tuple[_F32, _I32]: ...
def rmsnorm(
    x: _F32,
    weight: _F32,
    out: _F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-6,
    device: str = "auto",
) -> _F32: ...
def rmsnorm_residual(
    x: _F32,
    residual: _F32,
    weight: _F32,
    out: _F32 | None = None,
    residual_out: _F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-6,
    device: str = "auto",
) -> tuple[_F32, _F32]: ...
def layernorm(
    x: _F32,
    weight: _F32,
    bias: _F32,
    out: _F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-5,
    device: str = "auto",
) -> _F32: ...
def gemm(
    a: _F32,
    b: _F32,
    c: _F32 | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    device: str = "auto",
) -> _F32: ...
def gemm_batched(
    a: _F32,
    b: _F32,
    c: _F32 | None = None,
    batch: int | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    device: str = "auto",
) -> _F32: ...
def rope_freqs(
    freqs: _F32 | None,
    max_seq: int,
    head_dim: int,
    base: float = 10000.0,
    alpha: float = 1.0,
    device: str = "auto",
) -> _F32: ...
def rope_forward(
    x: _F32,
    freqs: _F32,
    out: _F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    offset: int = 0,
    half: bool = False,
    device: str = "auto",
) -> _F32: ...
def rope_qk(
    q: _F32,
    k: _F32,
    freqs: _F32,
    q_out: _F32 | None = None,
    k_out: _F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    q_heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    offset: int = 0,
    half: bool = False,
    device: str = "auto",
) -> tuple[_F32, _F32]: ...
def flash_attention(
    q: _F32,
    k: _F32,
    v: _F32,
    out: _F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    device: str = "auto",
) -> _F32: ...
def cross_entropy_forward(
    logits: _F32,
    targets: _I32,
    loss: _F32 | None = None,
    log_probs: _F32 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    device: str = "auto",
) -> tuple[_F32, _F32]: ...
def cross_entropy_backward(
    log_probs: _F32,
    targets: _I32,
    d_logits: _F32 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    scale: float | None = None,
    device: str = "auto",
) -> _F32: ...
def aux_loss_forward(
    probs: _F32,
    idx: _I32,
    aux: _F32 | None = None,
    f_counts: _F32 | None = None,
    p_means: _F32 | None = None,
    rows: int | None = None,
    experts: int | None = None,
    k: int | None = None,
    alpha: float = 0.01,
    device: str = "auto",
) -> tuple[_F32, _F32, _F32]: ...
def scatter_add(
    grad_out: _F32,
    idx: _I32,
    grad_weight: _F32,
    n_idx: int | None = None,
    dim: int | None = None,
    device: str = "auto",
) -> _F32: ...
def adamw_step(
    param: _F32,
    grad: _F32,
    m: _F32,
    v: _F32,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    n: int | None = None,
    device: str = "auto",
) -> _F32: ...
def zero_grad(grad: _F32, n: int | None = None, device: str = "auto") -> _F32: ...
def grad_clip(
    grad: _F32,
    partial: _F32 | None,
    total_norm: _F32 | None,
    clip: float,
    n: int | None = None,
    device: str = "auto",
) -> _F32: ...
def argmax(
    logits: _F32, out: _I32 | None = None, rows: int | None = None, vocab: int | None = None, device: str = "auto"
) -> _I32: ...
def sample(
    logits: _F32,
    out: _I32 | None,
    seeds: _U64,
    rows: int | None = None,
    vocab: int | None = None,
    temperature: float = 1.0,
    device: str = "auto",
) -> _I32: ...
def topk_sample(
    logits: _F32,
    out: _I32 | None,
    seeds: _U64,
    rows: int | None,
    vocab: int | None,
    k: int,
    temperature: float = 1.0,
    device: str = "auto",
) -> _I32: ...
def topp_sample(
    logits: _F32,
    out: _I32 | None,
    seeds: _U64,
    rows: int | None,
    vocab: int | None,
    p: float,
    temperature: float = 1.0,
    device: str = "auto",
) -> _I32: ...

# What ironhorse.nn is made of; arguments by position.
def nn_matmul(a: _F32, b: _F32, c: _F32 | None, transpose_a: bool, transpose_b: bool, device: str, /) -> _F32: ...
def nn_grouped(x: _F32, weight: _F32, offsets: _I32, device: str, /) -> _F32: ...
def nn_grouped_input(d_y: _F32, weight: _F32, offsets: _I32, device: str, /) -> _F32: ...
def nn_grouped_weight(d_y: _F32, x: _F32, d_weight: _F32, offsets: _I32, device: str, /) -> _F32: ...
def nn_rmsnorm(x: _F32, weight: _F32, eps: float, device: str, /) -> tuple[_F32, _F32]: ...
def nn_rmsnorm_bwd(d_y: _F32, x: _F32, weight: _F32, rstd: _F32, device: str, /) -> tuple[_F32, _F32]: ...
def nn_swiglu_bwd(d_y: _F32, gate: _F32, up: _F32, device: str, /) -> tuple[_F32, _F32]: ...
def nn_rope(x: _F32, cos: _F32, sin: _F32, offset: int, back: bool, device: str, /) -> _F32: ...
def nn_attention(q: _F32, k: _F32, v: _F32, heads: int, kv_heads: int, device: str, /) -> tuple[_F32, _F32]: ...
def nn_attention_bwd(
    d_out: _F32, kept: tuple[_F32, _F32, _F32, _F32, _F32], heads: int, kv_heads: int, device: str, /
) -> tuple[_F32, _F32, _F32]: ...
def nn_route(logits: _F32, k: int, /) -> tuple[_F32, _F32, _I32, _I32, _I32, _I32]: ...
def nn_route_bwd(d_weights: _F32, probs: _F32, weights: _F32, experts: _I32, load: _F32, scale: float, /) -> _F32: ...
def nn_permute(x: _F32, order: _I32, /) -> _F32: ...
def nn_permute_bwd(d_rows: _F32, places: _I32, /) -> _F32: ...
def nn_combine(rows: _F32, places: _I32, weights: _F32, /) -> _F32: ...
def nn_combine_bwd(d_out: _F32, rows: _F32, places: _I32, weights: _F32, /) -> tuple[_F32, _F32]: ...

class JitSource:
    """A CUDA text to compile; use `ironhorse.jit.source`."""

    def __init__(self, name: str, text: str, folders: list[str], flags: list[str]) -> None: ...
    def signatures(
        self,
    ) -> list[tuple[str, int, bool, list[tuple[str, str, str]], list[tuple[str, str, int, bool]]]]: ...
    def compile(self, names: list[str], arch: str, cache: str | None) -> JitCode: ...
    @staticmethod
    def arch_of(device: int) -> str: ...

class JitCode:
    """Device code: what `ironhorse.jit.compile` returns."""

    @property
    def cubin(self) -> bytes: ...
    @property
    def log(self) -> str: ...
    @property
    def lowered(self) -> dict[str, str]: ...
    @property
    def key(self) -> str: ...
    @property
    def cached(self) -> bool: ...
    @property
    def seconds(self) -> float: ...
    def load(self, device: int, name: str, lowered: str, arguments: list[tuple[str, str]]) -> JitKernel: ...

class JitKernel:
    """A kernel on a GPU; use `ironhorse.jit.Kernel`."""

    @property
    def registers(self) -> int: ...
    @property
    def static_shared(self) -> int: ...
    @property
    def max_threads(self) -> int: ...
    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        stream: int,
        args: tuple[int | float | bool, ...],
    ) -> None: ...
    def launch_host(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        args: tuple[int | float | bool | tuple[int, int, bool, bool], ...],
    ) -> None: ...
