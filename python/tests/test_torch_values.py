"""ironhorse.torch computes what torch computes, forward and backward: every op, type and shape, on every device."""

from __future__ import annotations

import ironhorse.torch as ops
import pytest
import torch
from torch_cases import BY_NAME, CASES, again, allowed, distance, each_case, each_device, each_float, run


@each_device
@each_float
@each_case
def test_values_and_gradients(case, dtype, device):
    for shape in case.shapes:
        arguments = case.arguments(shape, device, dtype)
        truth_arguments = again(arguments, torch.float64)
        y = case.torchs(*truth_arguments)
        d_y = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(dtype).to(device)
        truth = run(case.torchs, truth_arguments, d_y.double())
        got = run(case.ours, again(arguments), d_y)
        torchs = run(case.torchs, again(arguments), d_y)
        for i, (mine, theirs, true) in enumerate(zip(got, torchs, truth, strict=True)):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype == dtype, (shape, i)
            error, most = distance(mine, true), allowed(theirs, true)
            assert error <= most, f"{case.name} {shape} result {i}: {error:.2e}, allowed {most:.2e}"


@each_device
@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_norms_of_one_element(name, device):
    case = BY_NAME[name]
    arguments = case.arguments((3, 1), device, torch.float32)
    got, want = run(case.ours, arguments), run(case.torchs, again(arguments))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@each_device
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_softmax_of_any_dimension(dim, device):
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    d_y = torch.randn(3, 4, 5, device=device)
    got, want = run(lambda x: ops.softmax(x, dim), (x,), d_y), run(lambda x: torch.softmax(x, dim), (x,), d_y)
    assert all(distance(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


def test_softmax_of_a_number():
    assert ops.softmax(torch.tensor(3.0)).item() == 1.0


@each_device
def test_nan_and_infinity_go_through(device):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, inf, -inf, -1.0, 0.0, 1.0], device=device)
    zero = torch.zeros(6, device=device)
    for ours, torchs in [
        (ops.square(x), torch.square(x)),
        (ops.fused_scale_bias_relu(x, zero), torch.relu(x)),
        (ops.gelu(x[3:]), torch.nn.functional.gelu(x[3:])),
        (ops.softmax(x), torch.softmax(x, -1)),
    ]:
        torch.testing.assert_close(ours, torchs, equal_nan=True)
    x = x.clone().requires_grad_()
    want = torch.autograd.grad(torch.relu(x * 2).sum(), x)[0]
    got = torch.autograd.grad(ops.fused_scale_bias_relu(x, zero, 2.0).sum(), x)[0]
    torch.testing.assert_close(got, want, equal_nan=True)


@each_device
def test_no_target_counts_gives_what_torch_gives(device):
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    targets = torch.full((3,), -100, device=device)
    for reduction in ("mean", "sum", "none"):
        got = ops.cross_entropy(logits, targets, reduction=reduction)
        want = torch.nn.functional.cross_entropy(logits, targets, reduction=reduction)
        torch.testing.assert_close(got, want, equal_nan=True)


@each_device
def test_targets_may_be_int32_and_another_index_ignored(device):
    logits = torch.randn(4, 5, device=device)
    targets = torch.tensor([0, 2, 2, 4], device=device)
    want = torch.nn.functional.cross_entropy(logits, targets, ignore_index=2)
    assert distance(ops.cross_entropy(logits, targets.int(), ignore_index=2), want) < 1e-6


@each_device
def test_rope_with_an_offset_is_rope_of_later_positions(device):
    cos, sin = ops.rope_tables(20, 8, device=device)
    x = torch.randn(2, 3, 5, 8, device=device)
    late = ops.rope(x, cos, sin, offset=7)
    assert torch.equal(late, ops.rope(x, cos[7:12].contiguous(), sin[7:12].contiguous()))
    ntk, _ = ops.rope_tables(20, 8, alpha=2.0, device=device)
    angle = 19 / (10000.0 * 2 ** (8 / 6)) ** (2 / 8)
    assert abs(ntk[19, 1].item() - torch.tensor(angle, dtype=torch.float64).cos().item()) < 1e-6


@each_device
def test_more_queries_than_keys_gives_zeros_for_the_blind(device):
    q, k, v = (torch.randn(1, 2, n, 8, device=device, requires_grad=True) for n in (5, 3, 3))
    out = ops.attention(q, k, v)
    assert out[:, :, :2].abs().max() == 0 and out[:, :, 2:].abs().min() > 0
    out.sum().backward()
    assert q.grad[:, :, :2].abs().max() == 0 and torch.isfinite(k.grad).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_than_two_to_the_31_elements():
    n = 2**31 + 66
    if torch.cuda.mem_get_info()[0] < 5 * 2 * n:
        pytest.skip("not enough memory")
    x = torch.full((n,), 3.0, dtype=torch.bfloat16, device="cuda")
    x[-1] = 2.0
    y = ops.square(x)
    assert y[0].item() == 9.0 and y[-1].item() == 4.0 and y[2**31].item() == 9.0
    y = ops.softmax(x.view(2, -1))
    assert torch.isfinite(y[-1, -1]) and y.shape == (2, n // 2)


def test_the_list_has_every_operator():
    from ironhorse import _native

    known = {case.operator or case.name for case in CASES}
    names = {name for name, _ in _native.torch_ops()}
    assert {name for name in names if not name.endswith(("_fwd", "_bwd", "_gated"))} == known
