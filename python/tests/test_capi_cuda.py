"""The C library on memory of a GPU: every function gives there what it gives on the host. Needs a GPU, PyTorch and the
library (IRONHORSE_LIB, or libironhorse.so of the release build)."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import numpy as np
import pytest
import torch
from ironhorse.reference.activations import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[2]
NAMES = [os.environ.get("IRONHORSE_LIB", ""), ROOT / "libironhorse.so", ROOT / "target/release/libironhorse.so"]
LIBRARY = next((Path(name) for name in NAMES if name and Path(name).is_file()), None)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(LIBRARY is None, reason="libironhorse.so is not built: cargo build --release -p ironhorse-capi"),
]


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.ih_last_error.restype = ctypes.c_char_p
    return library


class Out:
    """An array that the call writes, or reads and writes."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


def f(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def empty(*shape: int) -> Out:
    return Out(np.full(shape, np.nan, np.float32))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def long(n: int) -> c_int64:
    return c_int64(n)


SEEDS = np.arange(3, 7, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
TARGETS = np.random.default_rng(5).integers(0, 333, 37).astype(np.int32)
CASES = {
    "cuda_silu": lambda: [f(1003), empty(1003), long(1003)],
    "cuda_add": lambda: [f(1003), f(1003, seed=1), empty(1003), long(1003)],
    "cuda_mul": lambda: [f(1003), f(1003, seed=1), empty(1003), long(1003)],
    "cuda_scale": lambda: [f(1003), empty(1003), 0.37, long(1003)],
    **{f"cuda_{name}": lambda: [f(1003), empty(1003), long(1003)] for name in ACTIVATIONS},
    "cuda_swiglu": lambda: [f(1003), f(1003, seed=1), empty(1003), long(1003)],
    "cuda_softmax": lambda: [f(37, 333), empty(37, 333), 37, 333],
    "cuda_softmax_topk": lambda: [f(37, 16), empty(37, 4), Out(np.zeros((37, 4), np.int32)), 37, 16, 4],
    "cuda_rmsnorm": lambda: [f(37, 333), f(333, seed=1), empty(37, 333), 37, 333, 1e-5],
    "cuda_rmsnorm_residual": lambda: [
        f(37, 333), f(37, 333, seed=1), f(333, seed=2), empty(37, 333), empty(37, 333), 37, 333, 1e-5,
    ],
    "cuda_layernorm": lambda: [f(37, 333), f(333, seed=1), f(333, seed=2), empty(37, 333), 37, 333, 1e-5],
    "cuda_gemm": lambda: [f(37, 65), f(65, 33, seed=1), Out(f(37, 33, seed=2)), 37, 33, 65, 0.5, 0.25],
    "cuda_gemm_batched": lambda: [f(3, 7, 5), f(3, 5, 9, seed=1), empty(3, 7, 9), 3, 7, 9, 5, 1.0, 0.0],
    "cuda_rope_freqs": lambda: [empty(64, 16), 64, 32, 10000.0, 8.0],
    "cuda_rope_forward": lambda: [f(2, 9, 3, 32), f(64, 16, high=60.0), empty(2, 9, 3, 32), 2, 9, 3, 32, 5],
    "cuda_rope_forward_half": lambda: [f(2, 9, 3, 32), f(64, 16, high=60.0), empty(2, 9, 3, 32), 2, 9, 3, 32, 5],
    "cuda_rope_qk": lambda: [
        f(2, 9, 4, 8), f(2, 9, 2, 8, seed=1), f(64, 4), empty(2, 9, 4, 8), empty(2, 9, 2, 8), 2, 9, 4, 2, 8, 3,
    ],
    "cuda_rope_qk_half": lambda: [
        f(2, 9, 4, 8), f(2, 9, 2, 8, seed=1), f(64, 4), empty(2, 9, 4, 8), empty(2, 9, 2, 8), 2, 9, 4, 2, 8, 3,
    ],
    "cuda_flash_attention": lambda: [
        f(2, 67, 3, 48), f(2, 67, 3, 48, seed=1), f(2, 67, 3, 48, seed=2), empty(2, 67, 3, 48), 2, 67, 3, 48, 0.2, 1,
    ],
    "cuda_attention": lambda: [
        f(2, 7, 4, 24), f(2, 67, 2, 24, seed=1), f(2, 67, 2, 24, seed=2), empty(2, 7, 4, 24),
        2, 7, 67, 4, 2, 24, 0.2, 1,
    ],
    "cuda_cross_entropy_forward": lambda: [f(37, 333), TARGETS, empty(1), empty(37, 333), 37, 333],
    "cuda_cross_entropy_backward": lambda: [f(37, 333, low=-9.0, high=0.0), TARGETS, empty(37, 333), 37, 333, 0.1],
    "cuda_aux_loss_forward": lambda: [
        f(37, 8, low=0.0, high=0.3), (TARGETS % 8).repeat(2), empty(1), empty(8), empty(8), 37, 8, 2, 0.01,
    ],
    "cuda_adamw_step": lambda: [
        Out(f(1003)), f(1003, seed=1), Out(f(1003, seed=2)), Out(f(1003, seed=3, low=0.0)),
        1e-2, 0.9, 0.95, 1e-8, 0.1, 7, long(1003),
    ],
    "cuda_zero_grad": lambda: [empty(1003), long(1003)],
    "cuda_grad_clip": lambda: [Out(f(100003)), Out(np.zeros(391, np.float32)), empty(1), 1.5, long(100003)],
    "cuda_scatter_add": lambda: [f(9, 33), ints(4, 0, 4, 4, 2, 0, 6, 1, 4), Out(f(7, 33, seed=1)), 9, 33],
    "cuda_scatter_add_rows": lambda: [f(9, 33), ints(4, 0, 4, 4, 2, 0, 6, 1, 4), Out(f(7, 33, seed=1)), 9, 33, 7],
    "cuda_argmax": lambda: [f(4, 50257), Out(np.zeros(4, np.int32)), 4, 50257],
    "cuda_sample": lambda: [f(4, 1003), Out(np.zeros(4, np.int32)), SEEDS, 4, 1003, 0.8],
    "cuda_topk_sample": lambda: [f(4, 1003), Out(np.zeros(4, np.int32)), SEEDS, 4, 1003, 50, 0.8],
    "cuda_topp_sample": lambda: [f(4, 1003), Out(np.zeros(4, np.int32)), SEEDS, 4, 1003, 0.9, 0.8],
}  # fmt: skip


def pointer(array: np.ndarray | torch.Tensor) -> c_void_p:
    return c_void_p(array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data)


def to_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array).cuda()


def number(value: object) -> object:
    return c_float(value) if isinstance(value, float) else c_int(value) if isinstance(value, int) else value


def call(lib: ctypes.CDLL, name: str, arguments: list, on_gpu: bool, stream: int = 0) -> list[np.ndarray]:
    """Runs a case; returns what it wrote."""
    passed, written = [], []
    for argument in arguments:
        if isinstance(argument, (Out, np.ndarray)):
            array = argument.array.copy() if isinstance(argument, Out) else argument
            array = to_gpu(array) if on_gpu else array
            passed.append(array)
            if isinstance(argument, Out):
                written.append(array)
        else:
            passed.append(number(argument))
    if on_gpu:
        torch.cuda.synchronize()
    raw = [pointer(a) if isinstance(a, (np.ndarray, torch.Tensor)) else a for a in passed]
    code = getattr(lib, name)(*raw, c_void_p(stream))
    assert code == 0, lib.ih_last_error().decode()
    if on_gpu:
        torch.cuda.synchronize()
    return [a.cpu().numpy() if isinstance(a, torch.Tensor) else a for a in written]


def same(name: str, got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if name == "cuda_grad_clip" and i == 1:
            continue  # room for partial sums
        if g.dtype == np.int32:
            assert (g == w).all(), (name, i)
        else:
            assert np.isfinite(w).all(), (name, i)
            error = np.linalg.norm(g.astype(np.float64) - w) / max(np.linalg.norm(w.astype(np.float64)), 1e-30)
            assert error < 1e-5, (name, i, error)


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_gives_what_the_host_gives(lib: ctypes.CDLL, name: str) -> None:
    same(name, call(lib, name, CASES[name](), True), call(lib, name, CASES[name](), False))


def test_work_goes_to_the_stream_given(lib: ctypes.CDLL) -> None:
    stream = torch.cuda.Stream()
    x, y = torch.randn(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # captured only if it is on that stream
        assert lib.cuda_silu(pointer(x), pointer(y), long(1 << 20), c_void_p(stream.cuda_stream)) == 0
    assert float(y.abs().sum()) == 0.0
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, torch.nn.functional.silu(x))


def test_a_mix_of_places_is_refused(lib: ctypes.CDLL) -> None:
    host, device = np.zeros(4, np.float32), torch.zeros(4, device="cuda")
    assert lib.cuda_silu(pointer(host), pointer(device), long(4), None) == -2
    assert b"Host" in lib.ih_last_error() and b"Device" in lib.ih_last_error()


def test_bad_sizes_and_null_on_the_gpu(lib: ctypes.CDLL) -> None:
    x = torch.zeros(4, device="cuda")
    assert lib.cuda_silu(pointer(x), None, long(4), None) == -2
    assert lib.cuda_silu(pointer(x), pointer(x), long(-1), None) == -2
    assert lib.cuda_softmax(pointer(x), pointer(x), c_int(-2), c_int(2), None) == -2
    assert lib.cuda_silu(pointer(x), pointer(x), long(0), None) == 0


def test_targets_out_of_range_touch_nothing_else(lib: ctypes.CDLL) -> None:
    logits, log_probs = torch.randn(4, 7, device="cuda"), torch.zeros(4, 7, device="cuda")
    targets, loss = torch.tensor([1, 7, -1, 3], dtype=torch.int32, device="cuda"), torch.zeros(1, device="cuda")
    args = [pointer(t) for t in (logits, targets, loss, log_probs)]
    assert lib.cuda_cross_entropy_forward(*args, c_int(4), c_int(7), None) == 0
    torch.cuda.synchronize()
    assert bool(loss.isnan().all())
    torch.testing.assert_close(log_probs, logits.log_softmax(-1))


def test_threads_at_once(lib: ctypes.CDLL) -> None:
    want, failures = call(lib, "cuda_rmsnorm", CASES["cuda_rmsnorm"](), False), []

    def work() -> None:
        stream = torch.cuda.Stream()
        for _ in range(20):
            try:
                same("cuda_rmsnorm", call(lib, "cuda_rmsnorm", CASES["cuda_rmsnorm"](), True, stream.cuda_stream), want)
            except AssertionError as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures
