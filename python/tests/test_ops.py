"""ironhorse.ops against float64 formulas in numpy, in both forms: result returned, result written."""

from __future__ import annotations

import numpy as np
import pytest
from ironhorse import ops

SHAPES = [(1,), (31,), (33,), (2, 3, 5), (7, 129), (0,), (3, 0), (1000, 67)]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def close(found: np.ndarray, want: np.ndarray, tolerance: float = 3e-6) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return e / e.sum(-1, keepdims=True)


UNARY = {"silu": lambda x: x * sigmoid(x), "gelu": gelu}
BINARY = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "swiglu": lambda a, b: a * sigmoid(a) * b,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_elementwise(name: str, shape: tuple[int, ...]):
    op = getattr(ops, name)
    inputs = [normal(*shape, seed=i) for i in range(1 if name in UNARY else 2)]
    want = (UNARY | BINARY)[name](*(x.astype(np.float64) for x in inputs))
    result = op(*inputs)
    close(result, want)
    out = np.full(shape, 7, np.float32)
    assert op(*inputs, out) is out
    assert out.tobytes() == result.tobytes()
    flat = np.zeros(result.size, np.float32)
    op(*inputs, flat)
    assert flat.tobytes() == result.tobytes()
    op(*inputs, inputs[0])  # in place
    assert inputs[0].tobytes() == result.tobytes()


def test_extremes_stay_finite():
    x = np.array([-1e30, -100, 0, 100, 1e30], np.float32)
    assert ops.silu(x).tolist() == [0, pytest.approx(0, abs=1e-30), 0, 100, pytest.approx(1e30)]
    assert np.isfinite(ops.softmax(x)).all() and np.isfinite(ops.gelu(x[1:4])).all()


def test_scale_has_three_spellings():
    x, out = normal(4, 5), np.zeros((4, 5), np.float32)
    for result in (ops.scale(x, 2.5), ops.scale(x, scale=2.5), ops.scale(x, out, 2.5), ops.scale(x, None, 2.5)):
        close(result, x * np.float32(2.5), 0)
    assert ops.scale(x, out, 1.0) is out


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (2, 3, 33), (5, 1000), (0, 4), (64, 4099)])
def test_softmax(shape: tuple[int, ...]):
    x = normal(*shape)
    want = softmax(x.astype(np.float64))
    close(ops.softmax(x), want)
    out = np.zeros(x.size, np.float32)
    ops.softmax(x.ravel(), out, x.size // shape[-1], shape[-1])  # flat arrays and sizes, as C programs do
    close(out.reshape(shape), want)


@pytest.mark.parametrize("shape, k", [((1, 1), 1), ((3, 8), 2), ((2, 5, 33), 4), ((7, 64), 64)])
def test_softmax_topk(shape: tuple[int, ...], k: int):
    x = normal(*shape)
    weights, idx = ops.softmax_topk(x, k)
    want = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    assert idx.dtype == np.int32 and idx.shape == (*shape[:-1], k)
    np.testing.assert_array_equal(idx, want)
    chosen = np.take_along_axis(softmax(x.astype(np.float64)), want, -1)
    close(weights, chosen / chosen.sum(-1, keepdims=True))
    rows = x.size // shape[-1]
    w2, i2 = np.zeros((rows, k), np.float32), np.zeros((rows, k), np.int32)
    ops.softmax_topk(x.reshape(rows, -1), w2, i2, rows, shape[-1], k)
    assert w2.tobytes() == weights.tobytes() and i2.tobytes() == idx.tobytes()
    assert ops.softmax_topk(x, k=k)[1].tobytes() == idx.tobytes()


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (2, 3, 33), (5, 1000), (0, 4), (300, 768)])
def test_norms(shape: tuple[int, ...]):
    x, residual = normal(*shape), normal(*shape, seed=1)
    weight, bias = normal(shape[-1], seed=2), normal(shape[-1], seed=3)
    rows = x.size // shape[-1]

    def rms(x, eps):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight

    x64 = x.astype(np.float64)
    close(ops.rmsnorm(x, weight), rms(x64, 1e-6))
    out, kept = np.zeros(x.size, np.float32), np.zeros(x.size, np.float32)
    ops.rmsnorm(x.ravel(), weight, out, rows, shape[-1], 1e-3)
    close(out.reshape(shape), rms(x64, 1e-3))

    y, total = ops.rmsnorm_residual(x, residual, weight, eps=1e-5)
    close(total, x + residual, 0)
    close(y, rms(total.astype(np.float64), 1e-5))
    ops.rmsnorm_residual(x.ravel(), residual.ravel(), weight, out, kept, rows, shape[-1], 1e-5)
    assert out.tobytes() == y.tobytes() and kept.tobytes() == total.tobytes()

    centred = x64 - x64.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias
    if shape[-1] > 1:
        close(ops.layernorm(x, weight, bias), want, 1e-5)
    assert ops.layernorm(x, weight, bias, x) is x


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (3, 5, 7), (33, 31, 129), (0, 3, 2), (3, 4, 0), (128, 96, 200)])
def test_gemm(m: int, n: int, k: int):
    a, b, c = normal(m, k), normal(k, n, seed=1), normal(m, n, seed=2)
    product = a.astype(np.float64) @ b.astype(np.float64)
    close(ops.gemm(a, b), product, 2e-5)
    close(ops.gemm(a, b, alpha=0.5), 0.5 * product, 2e-5)
    want = 2 * product - 0.5 * c
    assert ops.gemm(a, b, c, alpha=2.0, beta=-0.5) is c
    close(c, want, 3e-5)
    flat = np.full(m * n, np.nan, np.float32)  # beta = 0: not read
    ops.gemm(a.ravel(), b.ravel(), flat, m, n, k, 1.0, 0.0)
    close(flat.reshape(m, n), product, 2e-5)

    batch = [normal(3, m, k), normal(3, k, n, seed=1)]
    want = batch[0].astype(np.float64) @ batch[1].astype(np.float64)
    close(ops.gemm_batched(*batch), want, 2e-5)
    out = np.zeros((3, m, n), np.float32)
    ops.gemm_batched(*batch, out, 3, m, n, k, 1.0, 0.0)
    close(out, want, 2e-5)


def angles(positions: int, dim: int, base: float, alpha: float) -> np.ndarray:
    base = base * alpha ** (dim / (dim - 2)) if alpha != 1 else base
    return np.arange(positions)[:, None] / base ** (np.arange(0, dim, 2) / dim)


def rotate(x: np.ndarray, table: np.ndarray, half: bool) -> np.ndarray:
    d = x.shape[-1]
    first, second = (slice(0, d // 2), slice(d // 2, d)) if half else (slice(0, d, 2), slice(1, d, 2))
    cos, sin = np.cos(table)[:, None], np.sin(table)[:, None]
    out = np.empty(x.shape, np.float64)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_rope(half: bool, alpha: float):
    freqs = ops.rope_freqs(40, 8, base=500.0, alpha=alpha)
    np.testing.assert_allclose(freqs, angles(40, 8, 500.0, alpha), rtol=1e-6)
    given = np.zeros((40, 4), np.float32)
    ops.rope_freqs(given, 40, 8, 500.0, alpha)
    assert given.tobytes() == freqs.tobytes() == ops.rope_freqs(None, 40, 8, 500.0, alpha).tobytes()

    q, k = normal(2, 5, 6, 8), normal(2, 5, 3, 8, seed=1)
    table = freqs[9:14].astype(np.float64)
    close(ops.rope_forward(q, freqs, offset=9, half=half), rotate(q, table, half))
    q2, k2 = ops.rope_qk(q, k, freqs, offset=9, half=half)
    close(q2, rotate(q, table, half))
    close(k2, rotate(k, table, half))
    out = np.zeros(q.size, np.float32)
    ops.rope_forward(q.ravel(), freqs.ravel(), out, 2, 5, 6, 8, 9, half=half)
    assert out.tobytes() == q2.tobytes()
    q3, k3 = np.zeros_like(q), np.zeros_like(k)
    ops.rope_qk(q, k, freqs, q3, k3, 2, 5, 6, 3, 8, 9, half=half)
    assert q3.tobytes() == q2.tobytes() and k3.tobytes() == k2.tobytes()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("b, t, s, heads, kv, d", [(1, 1, 1, 1, 1, 1), (2, 33, 33, 4, 2, 16), (1, 5, 70, 3, 1, 9)])
def test_attention(causal: bool, b: int, t: int, s: int, heads: int, kv: int, d: int):
    q, k, v = normal(b, t, heads, d), normal(b, s, kv, d, seed=1), normal(b, s, kv, d, seed=2)
    wide = [np.repeat(x, heads // kv, axis=2).astype(np.float64) for x in (k, v)]
    scores = np.einsum("bthd,bshd->bhts", q.astype(np.float64), wide[0]) / np.sqrt(d)
    if causal:
        scores[..., np.arange(s)[None] > np.arange(t)[:, None] + s - t] = -np.inf
    want = np.einsum("bhts,bshd->bthd", softmax(scores), wide[1])
    close(ops.attention(q, k, v, causal=causal), want, 1e-5)
    if t == s and heads == kv:
        out = np.zeros_like(q)
        ops.flash_attention(q, k, v, out, b, t, heads, d, 1 / np.sqrt(d), int(causal))
        close(out, want, 1e-5)


@pytest.mark.parametrize("rows, vocab", [(1, 1), (3, 33), (64, 1009)])
def test_cross_entropy(rows: int, vocab: int):
    logits = normal(rows, vocab)
    targets = np.random.default_rng(1).integers(0, vocab, rows, dtype=np.int32)
    x = logits.astype(np.float64)
    want = x - np.log(np.exp(x).sum(-1, keepdims=True))
    mean = -want[np.arange(rows), targets].mean()
    loss, log_probs = ops.cross_entropy_forward(logits, targets)
    assert float(loss) == pytest.approx(mean, rel=1e-5, abs=1e-6) and loss.shape == ()
    close(log_probs, want)
    one, flat = np.zeros(1, np.float32), np.zeros(rows * vocab, np.float32)
    ops.cross_entropy_forward(logits.ravel(), targets, one, flat, rows, vocab)
    assert one[0] == loss and flat.tobytes() == log_probs.tobytes()

    d_logits = ops.cross_entropy_backward(log_probs, targets)
    grad = np.exp(want)
    grad[np.arange(rows), targets] -= 1
    close(d_logits, grad / rows)
    ops.cross_entropy_backward(flat, targets, flat, rows, vocab, 2.0)
    close(flat.reshape(rows, vocab), 2 * grad)


def test_cross_entropy_of_nothing_is_nan():
    loss, log_probs = ops.cross_entropy_forward(np.zeros((0, 5), np.float32), np.zeros(0, np.int32))
    assert np.isnan(loss) and log_probs.shape == (0, 5)


def test_aux_loss():
    probs = softmax(normal(50, 6).astype(np.float64)).astype(np.float32)
    _, idx = ops.softmax_topk(probs, 2)
    aux, shares, means = ops.aux_loss(probs, idx, alpha=0.5)
    want = np.array([(idx == e).any(-1).mean() for e in range(6)])
    close(shares, want)
    close(means, probs.astype(np.float64).mean(0))
    assert float(aux) == pytest.approx(0.5 * 6 * (want * probs.mean(0)).sum(), rel=1e-5)
    outs = [np.zeros(1, np.float32), np.zeros(6, np.float32), np.zeros(6, np.float32)]
    ops.aux_loss_forward(probs, idx, *outs, 50, 6, 2, 0.5)
    assert outs[0][0] == aux and outs[1].tobytes() == shares.tobytes()


def test_adamw_is_pytorchs():
    torch = pytest.importorskip("torch")
    param, grads = normal(1001), [normal(1001, seed=i) for i in (1, 2, 3)]
    theirs = torch.nn.Parameter(torch.tensor(param))
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)
    m, v = np.zeros_like(param), np.zeros_like(param)
    for step, grad in enumerate(grads, 1):
        theirs.grad = torch.tensor(grad)
        optimizer.step()
        assert ops.adamw_step(param, grad, m, v, 1e-2, 0.8, 0.95, 1e-7, 0.1, step) is param
    close(param, theirs.detach().numpy(), 1e-6)


def test_gradients_in_place():
    grad = normal(5, 77)
    before = grad.astype(np.float64)
    norm = np.sqrt((before**2).sum())
    found = ops.grad_clip(grad, clip=1.5)
    assert float(found) == pytest.approx(norm, rel=1e-6)
    close(grad, before * 1.5 / (norm + 1e-6), 1e-6)
    total = np.zeros(1, np.float32)
    ops.grad_clip(grad, np.zeros(2, np.float32), total, 100.0, grad.size)
    assert total[0] == pytest.approx(1.5, rel=1e-5)
    ops.zero_grad(grad.reshape(-1), 77)
    assert not grad[0].any() and grad[1:].all()
    assert ops.zero_grad(grad) is grad and not grad.any()


def test_scatter_add():
    idx = np.array([3, 0, 3, 3, 8], np.int32)
    grad_out, table = normal(5, 33), normal(9, 33, seed=1)
    want = table.astype(np.float64)
    np.add.at(want, idx, grad_out)
    flat = table.ravel().copy()
    ops.scatter_add(grad_out, idx, table)
    close(table, want)
    ops.scatter_add(grad_out.ravel(), idx, flat, 5, 33)
    assert flat.tobytes() == table.tobytes()


def test_argmax():
    logits = normal(4, 5, 100)
    logits[1, 2, 7] = logits[1, 2, 3] = 50
    found = ops.argmax(logits)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, logits.argmax(-1))
    out = np.zeros(20, np.int32)
    ops.argmax(logits.ravel(), out, 20, 100)
    np.testing.assert_array_equal(out, found.ravel())


@pytest.mark.parametrize(
    "op, keys, allowed",
    [(ops.sample, {}, 5), (ops.topk_sample, {"k": 2}, 2), (ops.topp_sample, {"p": 0.8}, 3)],
)
def test_samples_follow_the_distribution(op, keys: dict, allowed: int):
    probs = np.array([0.05, 0.4, 0.2, 0.3, 0.05])
    n = 20_000
    logits = np.tile(np.log(probs).astype(np.float32), (n, 1))
    seeds = np.random.default_rng(5).integers(0, 2**64, n, dtype=np.uint64)
    drawn = op(logits, seeds=seeds, **keys)
    kept = np.argsort(-probs)[:allowed]
    want = np.where(np.isin(np.arange(5), kept), probs, 0)
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / n, want / want.sum(), atol=0.015)
    out = np.zeros(n, np.int32)
    op(logits.ravel(), out, seeds, n, 5, *keys.values(), 1.0)
    np.testing.assert_array_equal(out, drawn)
    assert (op(logits, seeds=seeds, temperature=0.0, **keys) == 1).all()
    assert set(op(logits, **keys)) <= set(kept)


def test_top_p_is_another_name_of_p():
    logits = np.random.default_rng(6).standard_normal((50, 9)).astype(np.float32)
    seeds = np.arange(50, dtype=np.uint64)
    for share in (0.3, 0.9, 1.0):
        want = ops.topp_sample(logits, seeds=seeds, p=share)
        np.testing.assert_array_equal(ops.topp_sample(logits, seeds=seeds, top_p=share), want)
        np.testing.assert_array_equal(ops.topp_sample(logits, None, seeds, None, None, share), want)
    np.testing.assert_array_equal(ops.topp_sample(logits, seeds=seeds), ops.topp_sample(logits, seeds=seeds, top_p=0.9))
    with pytest.raises(ops.IronhorseError, match="expected only one"):
        ops.topp_sample(logits, seeds=seeds, p=0.9, top_p=0.9)
