"""What users of hand-written extensions stumble over: strides, types, devices, sizes, threads, memory, versions."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading

import ironhorse.torch as ops
import pytest
import torch
from torch_cases import BY_NAME, CASES, again, each_case, each_device, run, tensors


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with gaps in between, reversed dimensions in memory, and an odd start."""
    if x.dim() == 0:
        return x
    flipped = x.permute(*reversed(range(x.dim())))
    room = torch.zeros(*(2 * n + 1 for n in flipped.shape), dtype=x.dtype, device=x.device)
    view = room[tuple(slice(1, None, 2) for _ in flipped.shape)]
    view.copy_(flipped)
    return view.permute(*reversed(range(x.dim())))


@each_device
@each_case
def test_any_strides(case, device):
    for shape in case.shapes[:4]:
        plain = case.arguments(shape, device, torch.float32, grad=False)
        strided = tuple(
            _strided(a).requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in plain
        )
        dense = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in plain)
        y = case.torchs(*dense)
        d_y = torch.randn_like(y)
        want, got = run(case.ours, dense, d_y), run(case.ours, strided, _strided(d_y))
        assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-5) for a, b in zip(got, want, strict=True)), shape


@each_device
def test_heads_lie_as_they_come(device):
    """What a linear layer gives is used without copies, and its result is ready for the next one."""
    q, k, v = (torch.randn(2, 5, 4, 8, device=device).transpose(1, 2).requires_grad_() for _ in range(3))
    out = ops.attention(q, k, v)
    assert out.stride() == q.stride() and out.transpose(1, 2).is_contiguous()
    d_q, d_k, d_v = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert d_q.stride() == q.stride() and d_k.stride() == k.stride() and d_v.stride() == v.stride()
    cos, sin = ops.rope_tables(5, 8, device=device)
    assert ops.rope(q, cos, sin).stride() == q.stride()
    plain = [t.detach().contiguous() for t in (q, k, v)]
    assert ops.attention(*plain).is_contiguous()
    assert torch.allclose(ops.attention(*plain), out, atol=1e-6)


@each_device
def test_expanded_heads(device):
    q = torch.randn(2, 4, 5, 8, device=device, requires_grad=True)
    k = torch.randn(2, 1, 5, 8, device=device, requires_grad=True)
    got = run(lambda q, k: ops.attention(q, k.expand(2, 4, 5, 8), k.expand(2, 4, 5, 8)), (q, k))
    want = run(lambda q, k: ops.attention(q, k, k), (q, k))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))


def _refused(call, *words: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        call()
    text = str(caught.value)
    assert all(word in text for word in words), text


@each_device
def test_wrong_types(device):
    whole = torch.ones(2, 3, dtype=torch.int32, device=device)
    x, w = torch.randn(2, 3, device=device), torch.ones(3, device=device)
    low = w.bfloat16()
    _refused(lambda: ops.square(whole), "square: `x` is int32, expected float64, float32")
    _refused(lambda: ops.square(x.to(torch.complex64)), "square: `x` is another type")
    _refused(lambda: ops.fused_scale_bias_relu(x, low), "fused_scale_bias_relu: `bias` is bfloat16, expected float32")
    _refused(lambda: ops.rmsnorm(x, low), "rmsnorm: `weight` is bfloat16, expected float32")
    _refused(lambda: ops.layernorm(x, w, low), "layernorm: `bias` is bfloat16, expected float32")
    _refused(lambda: ops.swiglu(x, x.double()), "swiglu: `up` is float64, expected float32")
    _refused(lambda: ops.cross_entropy(x, w[:2]), "cross_entropy: `targets` is float32, expected int64 or int32")
    _refused(lambda: ops.rope(x, *(t.bfloat16() for t in ops.rope_tables(2, 2))), "rope: `x`")
    with pytest.raises(ValueError, match="approximate"):
        ops.gelu(x, "sometimes")
    with pytest.raises(ValueError, match="reduction"):
        ops.cross_entropy(x, w.long(), reduction="median")


def test_what_is_not_a_tensor():
    for name in set(ops.__all__) - {"rope_tables"}:
        function = getattr(ops, name)
        required = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
        ]
        for wrong in ([1, 2, 3], 1.0, None, "x"):
            with pytest.raises(TypeError) as caught:
                function(*[wrong] * len(required))
            assert f"`{required[0]}` is of type {type(wrong).__name__}, expected a torch.Tensor" in str(caught.value)
    with pytest.raises(TypeError, match="rmsnorm: `weight` is of type list"):
        ops.rmsnorm(torch.ones(2, 3), [1.0, 1.0, 1.0])


@each_device
def test_wrong_shapes(device):
    x = torch.randn(2, 3, device=device)
    q = torch.randn(1, 4, 5, 8, device=device)
    cos, sin = ops.rope_tables(4, 8, device=device)
    long = torch.zeros(3, dtype=torch.long, device=device)
    _refused(lambda: ops.fused_scale_bias_relu(x, x[0, :2]), "`bias` is [2], expected [3]")
    _refused(lambda: ops.fused_scale_bias_relu(x[0, 0], x[0]), "`x` is a single number")
    _refused(lambda: ops.rmsnorm(x, x), "`weight` is [2, 3], expected [3]")
    _refused(lambda: ops.swiglu(x, x[0]), "`up` is [3], expected [2, 3]")
    _refused(lambda: ops.cross_entropy(x, long), "`targets` is [3], expected [2]")
    _refused(lambda: ops.attention(x, x, x), "`q` is [2, 3], expected (batch, heads, positions, head_dim)")
    _refused(lambda: ops.attention(q, q[:, :3], q[:, :3]), "3 heads", "divisor of q's 4")
    _refused(lambda: ops.attention(q, q, q[:, :, :2]), "`v` is [1, 4, 2, 8], expected [1, 4, 5, 8]")
    _refused(lambda: ops.rope(q, cos, sin), "4 positions", "offset 0 + 5")
    _refused(lambda: ops.rope(q[:, :, :2], cos, sin, offset=-1), "offset -1")
    _refused(lambda: ops.rope(q[..., :7], cos, sin), "even head_dim")
    with pytest.raises(RuntimeError, match="requires grad"):
        ops.rope(q[:, :, :4], cos.requires_grad_(), sin)


def test_targets_out_of_range():
    x = torch.randn(2, 3)
    for bad in (3, -1):
        _refused(
            lambda bad=bad: ops.cross_entropy(x, torch.tensor([0, bad])), f"targets[1]` is {bad}", "an index in 0..3"
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_targets_out_of_range_on_a_gpu_are_nan():
    x = torch.randn(2, 3, device="cuda", requires_grad=True)
    losses = ops.cross_entropy(x, torch.tensor([0, 7], device="cuda"), reduction="none")
    losses.sum().backward()
    assert losses[0].isfinite() and losses[1].isnan() and x.grad[0].isfinite().all() and x.grad[1].isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_devices_are_not_mixed():
    x, w = torch.randn(2, 3), torch.ones(3)
    _refused(lambda: ops.rmsnorm(x.cuda(), w), "`weight` is on cpu, expected cuda:0")
    _refused(lambda: ops.rmsnorm(x, w.cuda()), "`weight` is on cuda:0, expected cpu")


def test_meta_tensors_have_shapes():
    x = torch.randn(2, 3, device="meta", requires_grad=True)
    y = ops.layernorm(x, torch.ones(3, device="meta"), torch.ones(3, device="meta"))
    assert y.shape == (2, 3) and y.device.type == "meta"


@pytest.mark.parametrize("name", ["square", "rmsnorm", "cross_entropy_mean", "attention_causal"])
def test_threads_at_once(name):
    case = BY_NAME[name]
    arguments = case.arguments(case.shapes[3], "cpu", torch.float32)
    want = run(case.ours, again(arguments))
    wrong: list[str] = []

    def work():
        for _ in range(20):
            got = run(case.ours, again(arguments))
            if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                wrong.append("differs")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
@each_case
def test_memory_is_given_back(case):
    arguments = case.arguments(case.shapes[3], "cpu", torch.float32)
    inputs = tensors(arguments)
    used = [torch._C._storage_Use_Count(x.untyped_storage()._cdata) for x in inputs]
    grown = 0
    for i in range(600):
        case.ours(*arguments).sum().backward()
        if i == 100:
            gc.collect()
            grown = _resident()
    for x in inputs:
        x.grad = None
    gc.collect()
    assert [torch._C._storage_Use_Count(x.untyped_storage()._cdata) for x in inputs] == used
    assert _resident() - grown < 16 << 20


def test_memory_is_given_back_after_errors():
    x, w = torch.randn(2, 3), torch.ones(4)
    used = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, w)]
    for _ in range(500):
        with pytest.raises(RuntimeError):
            ops.rmsnorm(x, w)
    gc.collect()
    assert [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, w)] == used


@each_device
def test_autocast(device):
    x, w, b = torch.randn(4, 6, device=device), torch.ones(6, device=device), torch.zeros(6, device=device)
    low = x.bfloat16()
    q = torch.randn(1, 2, 3, 8, device=device)
    targets = torch.tensor([0, 1, 2, 3], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ops.square(low).dtype is ops.gelu(low).dtype is ops.silu(low).dtype is torch.bfloat16
        assert ops.fused_scale_bias_relu(low, b).dtype is torch.float32
        assert ops.swiglu(low, x).dtype is torch.float32 and ops.swiglu(low, low).dtype is torch.bfloat16
        assert ops.softmax(low).dtype is ops.rmsnorm(low, w).dtype is torch.float32
        assert ops.layernorm(low, w, b).dtype is ops.cross_entropy(low, targets).dtype is torch.float32
        assert ops.attention(q, q, q).dtype is torch.bfloat16
        assert ops.attention(q.double(), q.double(), q.double()).dtype is torch.float64
        got = ops.cross_entropy(low, targets)
        # torch rounds the log-probabilities to bfloat16 on a GPU; the loss itself is what is wanted.
        want = torch.nn.functional.cross_entropy(low.float(), targets)
    assert want.dtype is got.dtype and torch.allclose(got, want)
    leaf = low.detach().requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        ops.rmsnorm(leaf, w).sum().backward()
    assert leaf.grad.dtype is torch.bfloat16


def _python(code: str, **environment: str) -> subprocess.CompletedProcess:
    import os

    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)


def test_without_torch():
    ran = _python("import sys; sys.modules['torch'] = None; import ironhorse; import ironhorse.torch")
    assert ran.returncode == 1 and "ImportError: ironhorse.torch needs PyTorch 2.4" in ran.stderr


def test_with_a_torch_that_is_too_old():
    ran = _python("import torch; torch.__version__ = '2.3.1'; import ironhorse.torch")
    assert ran.returncode == 1 and "needs PyTorch 2.4 or newer, this is 2.3.1" in ran.stderr


def test_the_interpreter_survives_errors_in_backward():
    x = torch.randn(2, 3, requires_grad=True)
    y = ops.square(x)
    with pytest.raises(RuntimeError):
        y.backward(torch.ones(2, 4))
    with pytest.raises(RuntimeError):
        torch.ops.ironhorse.square_bwd(torch.ones(2, 4), x)
    assert ops.square(x).shape == (2, 3)


def test_every_function_is_documented_and_typed():
    import inspect

    for name in ops.__all__:
        function = getattr(ops, name)
        signature = inspect.signature(function)
        assert function.__doc__, name
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values()), name
    assert len(CASES) > 12


def test_forward_mode_is_refused_and_not_0():
    x = torch.randn(2, 4)
    for function in (ops.square, ops.softmax, lambda x: ops.rmsnorm(x, torch.ones(4))):
        with pytest.raises((NotImplementedError, RuntimeError), match="(?i)jvp|forward"):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("call", [
    lambda x, m: ops.rmsnorm(x, m[0]),
    lambda x, m: ops.swiglu(x, m),
    lambda x, m: ops.fused_scale_bias_relu(m, x[0]),
])  # fmt: skip
def test_a_meta_tensor_beside_a_real_one_is_refused(call):
    with pytest.raises(RuntimeError, match="expected one device|is on|on cpu"):
        call(torch.randn(3, 4), torch.empty(3, 4, device="meta"))


def test_a_learned_scale_is_refused():
    scale = torch.nn.Parameter(torch.tensor(2.0))
    with pytest.raises(RuntimeError, match="`scale` is a number"):
        ops.fused_scale_bias_relu(torch.randn(2, 3), torch.zeros(3), scale)


def test_nothing_counts_in_cross_entropy_twice():
    logits = torch.randn(2, 3, requires_grad=True)
    loss = ops.cross_entropy(logits, torch.tensor([-100, -100]))
    for create_graph in (False, True):
        (d,) = torch.autograd.grad(loss, logits, retain_graph=True, create_graph=create_graph)
        assert d.abs().sum() == 0


def test_no_columns_twice():
    x, w = torch.randn(4, 0, requires_grad=True), torch.ones(0, requires_grad=True)
    for y in (ops.rmsnorm(x, w), ops.layernorm(x, w, w), ops.fused_scale_bias_relu(x, w)):
        grads = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        assert [g.shape for g in grads] == [x.shape, w.shape]


@each_device
def test_no_columns_leave_no_memory_unwritten(device):
    """What is kept of each row is NaN, the mean of nothing; softmax and norms of nothing are nothing, as in torch."""
    x, w = torch.empty(4, 0, device=device), torch.ones(0, device=device)
    for _ in range(8):
        torch.full((64,), 7.0, device=device)  # memory that is not zero, given back
        y, rstd = torch.ops.ironhorse.rmsnorm(x, w, 1e-6)
        assert y.shape == x.shape and rstd.shape == (4,) and rstd.isnan().all()
        y, mean, rstd = torch.ops.ironhorse.layernorm(x, w, w, 1e-5)
        assert y.shape == x.shape and mean.isnan().all() and rstd.isnan().all()
    assert ops.softmax(x).shape == x.shape
    zero = torch.zeros(4, dtype=torch.long, device=device)
    for reduction in ("mean", "sum", "none"):
        _refused(lambda r=reduction: ops.cross_entropy(x, zero, reduction=r), "4 rows of 0 classes", "at least 1 class")
    nothing = torch.empty(0, 0, device=device)
    assert ops.cross_entropy(nothing, zero[:0]).isnan() and ops.cross_entropy(nothing, zero[:0], reduction="sum") == 0
