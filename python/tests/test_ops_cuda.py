"""ironhorse.ops with device="cuda" against device="cpu": every op, awkward shapes, arrays made and arrays given."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ironhorse import ops
from ironhorse.errors import Code, IronhorseError

gpu = pytest.mark.skipif(not ops.cuda_available(), reason="ironhorse.ops.cuda_available() is false: no usable GPU here")

SHAPES = [(1,), (31,), (33, 3), (2, 3, 5), (7, 129), (0,), (3, 0), (1000, 67), (8, 4096)]
ROWS = [(1, 1), (3, 31), (2, 3, 33), (5, 1000), (0, 4), (64, 4099), (300, 768)]
Results = tuple[np.ndarray, ...]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def integers(below: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, below, *shape)).integers(0, below, shape, dtype=np.int32)


def compare(run: Callable[[str], Results | np.ndarray]) -> None:
    """Runs on both; numbers agree to 1e-5 of their norm, indices exactly, and a second run has the same bits."""

    def results(device: str) -> Results:
        found = run(device)
        return found if isinstance(found, tuple) else (found,)

    want, found, again = results("cpu"), results("cuda"), results("cuda")
    assert len(want) == len(found)
    for a, b, c in zip(want, found, again, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert b.tobytes() == c.tobytes(), "not repeatable"
        if a.dtype.kind == "f":
            finite = np.isfinite(a)
            np.testing.assert_array_equal(a[~finite], b[~finite])
            x, y = np.where(finite, a, 0).astype(np.float64), np.where(finite, b, 0).astype(np.float64)
            assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(x) + 1e-30
        else:
            np.testing.assert_array_equal(a, b)


@gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name, arrays", [("silu", 1), ("gelu", 1), ("add", 2), ("mul", 2), ("swiglu", 2)])
def test_elementwise(name: str, arrays: int, shape: tuple[int, ...]):
    op = getattr(ops, name)
    inputs = [normal(*shape, seed=i) for i in range(arrays)]
    compare(lambda device: op(*inputs, device=device))

    def given(device: str) -> np.ndarray:
        out = np.full(shape, 7, np.float32)
        assert op(*inputs, out, device=device) is out
        return out

    def in_place(device: str) -> np.ndarray:
        x = inputs[0].copy()
        return op(x, *inputs[1:], x, device=device)

    compare(given)
    compare(in_place)
    strided = [np.repeat(x, 2, axis=-1)[..., ::2] for x in inputs]
    compare(lambda device: op(*strided, device=device))


@gpu
def test_scale_and_extremes():
    x = np.array([-np.inf, -1e30, -100, -88.5, -0.0, 0, 1e-40, 88.5, 100, 1e30, np.inf, np.nan], np.float32)
    compare(lambda device: ops.scale(x, 2.5, device=device))
    compare(lambda device: ops.silu(x[1:-2], device=device))
    assert np.isnan(ops.silu(x, device="cuda")[[0, -1]]).all()
    assert np.isinf(ops.gelu(x, device="cuda")[-2])


@gpu
@pytest.mark.parametrize("shape", ROWS)
def test_rows(shape: tuple[int, ...]):
    x, other = normal(*shape), normal(*shape, seed=1)
    weight, bias = normal(shape[-1], seed=2), normal(shape[-1], seed=3)
    compare(lambda device: ops.softmax(x, device=device))
    compare(lambda device: ops.rmsnorm(x, weight, device=device))
    compare(lambda device: ops.rmsnorm_residual(x, other, weight, eps=1e-5, device=device))
    compare(lambda device: ops.layernorm(x, weight, bias, device=device))
    compare(lambda device: ops.argmax(x, device=device))
    for k in {1, min(3, shape[-1])}:
        compare(lambda device, k=k: ops.softmax_topk(x, k, device=device))


@gpu
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (3, 5, 7), (33, 31, 129), (0, 3, 2), (3, 4, 0), (128, 96, 200)])
def test_gemm(m: int, n: int, k: int):
    a, b, c = normal(m, k), normal(k, n, seed=1), normal(m, n, seed=2)
    compare(lambda device: ops.gemm(a, b, device=device))
    compare(lambda device: ops.gemm(a, b, c.copy(), alpha=2.0, beta=-0.5, device=device))
    many = normal(3, m, k), normal(3, k, n, seed=1)
    compare(lambda device: ops.gemm_batched(*many, device=device))


@gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "batch, seq, heads, kv, dim", [(1, 1, 1, 1, 2), (2, 5, 6, 3, 8), (3, 33, 4, 1, 66), (2, 130, 12, 2, 128)]
)
def test_rope(half: bool, batch: int, seq: int, heads: int, kv: int, dim: int):
    compare(lambda device: ops.rope_freqs(seq + 9, dim, base=500.0, alpha=4.0, device=device))
    freqs = ops.rope_freqs(seq + 9, dim)
    q, k = normal(batch, seq, heads, dim), normal(batch, seq, kv, dim, seed=1)
    compare(lambda device: ops.rope_forward(q, freqs, offset=9, half=half, device=device))
    compare(lambda device: ops.rope_qk(q, k, freqs, offset=3, half=half, device=device))

    def in_place(device: str) -> Results:
        q2, k2 = q.copy(), k.copy()
        return ops.rope_qk(q2, k2, freqs, q2, k2, half=half, device=device)

    compare(in_place)


@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "b, t, s, heads, kv, d", [(1, 1, 1, 1, 1, 1), (2, 33, 33, 4, 2, 16), (1, 5, 70, 3, 1, 9), (1, 200, 200, 2, 2, 64)]
)
def test_attention(causal: bool, b: int, t: int, s: int, heads: int, kv: int, d: int):
    q, k, v = normal(b, t, heads, d), normal(b, s, kv, d, seed=1), normal(b, s, kv, d, seed=2)
    compare(lambda device: ops.attention(q, k, v, causal=causal, device=device))


@gpu
@pytest.mark.parametrize("rows, vocab", [(1, 1), (3, 33), (64, 1009), (0, 5)])
def test_cross_entropy(rows: int, vocab: int):
    logits, targets = normal(rows, vocab), integers(vocab, rows)
    compare(lambda device: ops.cross_entropy_forward(logits, targets, device=device))
    log_probs = ops.cross_entropy_forward(logits, targets)[1]
    compare(lambda device: ops.cross_entropy_backward(log_probs, targets, device=device))


@gpu
def test_aux_loss():
    probs = ops.softmax(normal(50, 6))
    _, idx = ops.softmax_topk(probs, 2)
    compare(lambda device: ops.aux_loss(probs, idx, alpha=0.5, device=device))


@gpu
@pytest.mark.parametrize("n", [1, 33, 4097])
def test_optimizer(n: int):
    grad = normal(n, seed=1)

    def adamw(device: str) -> Results:
        param, m, v = normal(n), np.zeros(n, np.float32), np.zeros(n, np.float32)
        for step in (1, 2, 3):
            assert ops.adamw_step(param, grad, m, v, 1e-2, 0.8, 0.95, 1e-7, 0.1, step, device=device) is param
        return param, m, v

    def clip(device: str) -> Results:
        g, h = grad.copy(), grad.copy()
        return ops.grad_clip(g, clip=0.5, device=device), g, ops.grad_clip(h, clip=1e9, device=device), h

    def nan(device: str) -> Results:
        g = grad.copy()
        g[-1] = np.nan
        return ops.grad_clip(g, clip=0.5, device=device), g

    def zero(device: str) -> np.ndarray:
        g = grad.copy()
        return ops.zero_grad(g, n // 2, device=device)

    for run in (adamw, clip, nan, zero):
        compare(run)


@gpu
@pytest.mark.parametrize(
    "n, rows, dim", [(5, 9, 33), (300, 7, 64), (513, 3, 31), (5000, 50257, 12), (20000, 2, 8), (0, 3, 4)]
)
def test_scatter_add(n: int, rows: int, dim: int):
    grad_out, idx, table = normal(n, dim), integers(rows, n), normal(rows, dim, seed=1)
    compare(lambda device: ops.scatter_add(grad_out, idx, table.copy(), device=device))


@gpu
@pytest.mark.parametrize("rows, vocab", [(1, 1), (9, 33), (100, 5000)])
def test_samples(rows: int, vocab: int):
    logits = normal(rows, vocab)
    seeds = np.random.default_rng(5).integers(0, 2**64, rows, dtype=np.uint64)
    for temperature in (0.0, 0.7, 1.0):
        keys = {"seeds": seeds, "temperature": temperature}
        compare(lambda device, keys=keys: ops.sample(logits, **keys, device=device))
        compare(lambda device, keys=keys: ops.topk_sample(logits, k=min(5, vocab), **keys, device=device))
        compare(lambda device, keys=keys: ops.topp_sample(logits, p=0.8, **keys, device=device))


@gpu
def test_many_threads_at_once():
    inputs = [normal(50_000 + i, seed=i) for i in range(16)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda x: ops.silu(x, device="cuda:0"), inputs))
    for x, y in zip(inputs, found, strict=True):
        assert y.tobytes() == ops.silu(x, device="cuda").tobytes()


@gpu
def test_a_gpu_that_is_not_there():
    with pytest.raises(IronhorseError) as caught:
        ops.silu(normal(3), device="cuda:63")
    assert caught.value.code is Code.NOT_AVAILABLE


def test_arguments_are_checked_before_the_device():
    for call in (
        lambda: ops.silu(normal(3).astype(np.float64), device="cuda"),
        lambda: ops.silu(normal(3), device="cuda:x"),
        lambda: ops.silu(normal(3), device="cuda:"),
        lambda: ops.silu(normal(3), device="gpu"),
        lambda: ops.scatter_add(normal(1, 2), np.array([7], np.int32), normal(3, 2), device="cuda"),
    ):
        with pytest.raises(IronhorseError) as caught:
            call()
        assert caught.value.code is Code.INVALID_VALUE


@pytest.mark.skipif(ops.cuda_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_why():
    out = np.full(3, 7, np.float32)
    with pytest.raises(IronhorseError, match=r"^silu: .{10,}") as caught:
        ops.silu(normal(3), out, device="cuda")
    assert caught.value.code is Code.NOT_AVAILABLE and (out == 7).all()
    with pytest.raises(IronhorseError) as caught:
        ops.silu(normal(3), device="cuda:5")
    assert caught.value.code is Code.NOT_AVAILABLE
