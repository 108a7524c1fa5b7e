"""Gradients of ironhorse.torch: torch's own checkers on every operator, and the ways gradients are asked for."""

from __future__ import annotations

import ironhorse.torch as ops
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch_cases import BY_NAME, again, distance, each_case, each_device, operator, run

SMALL = {"cross_entropy": (3, 5), "rope": (2, 2, 3, 4), "attention": (1, 4, 2, 3, 5, 4)}


def small(case) -> tuple[int, ...]:
    return SMALL.get(case.operator or case.name, (2, 3, 5))


@each_device
@each_case
def test_gradcheck(case, device):
    arguments = case.arguments(small(case), device, torch.float64)
    assert gradcheck(case.ours, arguments)
    assert gradgradcheck(case.ours, arguments)


@each_device
@each_case
def test_gradcheck_of_the_operator(case, device):
    """torch.ops.ironhorse.NAME, which compiled code and torch.func call."""
    function = operator(case)

    def first(*arguments):
        y = function(*case.op(*arguments))
        return y[0] if isinstance(y, tuple) else y

    arguments = case.arguments(small(case), device, torch.float64)
    assert gradcheck(first, arguments)
    assert gradgradcheck(first, arguments)


@each_device
@each_case
def test_opcheck(case, device):
    for dtype in (torch.float32, torch.bfloat16):
        arguments = case.op(*case.arguments(small(case), device, dtype))
        torch.library.opcheck(operator(case), arguments)
        twin = getattr(torch.ops.ironhorse, f"{case.operator or case.name}_fwd").default
        torch.library.opcheck(twin, case.op(*case.arguments(small(case), device, dtype, grad=False)))


@each_device
@pytest.mark.parametrize("need", [True, False])
def test_opcheck_of_backward_operators(need, device):
    def normal(*sizes):
        return torch.randn(*sizes, device=device)

    bwd = torch.ops.ironhorse
    x, row, stat = normal(3, 5), normal(5), normal(3)
    q, k = normal(2, 4, 3, 8), normal(2, 7, 2, 8).transpose(1, 2)
    targets = torch.tensor([1, -100, 2], device=device)
    one = torch.ones((), device=device)
    for name, arguments in {
        "square_bwd": (x, x),
        "silu_bwd": (x, x),
        "gelu_bwd": (x, x, need),
        "swiglu_bwd": (x, x, x, need, True),
        "fused_scale_bias_relu_gated": (x, row, 2.0),
        "fused_scale_bias_relu_bwd": (x, x, 2.0, True, need),
        "softmax_bwd": (x, x),
        "rmsnorm_bwd": (x, x, row, stat, need, True),
        "layernorm_bwd": (x, x, row, stat, stat, True, need, need),
        "cross_entropy_bwd": (one, x, targets, stat, one, -100, 1),
        "attention_bwd": (q, q, k, k, q, normal(2, 4, 3), True, 0.5, need, True, need),
        "attention_any_order_bwd": (q, q, k, k, q, normal(2, 4, 3), True, 0.5, need, True, need),
    }.items():
        torch.library.opcheck(getattr(bwd, name).default, arguments)


@each_device
@each_case
def test_the_gradient_of_a_sum_has_stride_zero(case, device):
    arguments = case.arguments(case.shapes[1], device, torch.float32)
    case.ours(*arguments).sum().backward()
    got = [a.grad for a in arguments if getattr(a, "requires_grad", False)]
    fresh = again(arguments)
    case.torchs(*fresh).sum().backward()
    want = [a.grad for a in fresh if getattr(a, "requires_grad", False)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))


@each_device
@pytest.mark.parametrize("name", ["swiglu", "fused_scale_bias_relu", "rmsnorm", "layernorm", "attention_causal"])
def test_only_wanted_gradients_are_computed(name, device):
    case = BY_NAME[name]
    full = case.arguments(small(case), device, torch.float32)
    y, *want = run(case.ours, full)
    for i in range(len(full)):
        arguments = tuple(a.detach().requires_grad_(j == i) for j, a in enumerate(full))
        y, got = run(case.ours, arguments)
        assert torch.equal(got, want[i])
        # Also in the backward that can be differentiated, and through the operator.
        (twice,) = torch.autograd.grad(case.ours(*arguments).sum(), arguments[i], create_graph=True)
        assert distance(twice, want[i]) < 1e-5


@each_device
def test_forward_is_connected_to_backward(device):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    w = torch.ones(6, device=device, requires_grad=True)
    y = ops.rmsnorm(ops.gelu(ops.square(x)), w)
    assert y.requires_grad and y.grad_fn is not None
    y.square().sum().backward()
    assert x.grad.abs().sum() > 0 and w.grad.abs().sum() > 0
    with torch.no_grad():
        assert not ops.square(x).requires_grad
    assert not ops.square(x.detach()).requires_grad
    with torch.inference_mode():
        assert ops.square(x).is_inference()


def test_statistics_have_no_gradient():
    x, w = torch.randn(2, 3, requires_grad=True), torch.ones(3)
    y, rstd = torch.ops.ironhorse.rmsnorm(x, w, 1e-6)
    assert y.requires_grad and not rstd.requires_grad


def test_inputs_of_one_another_get_the_right_gradient():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda x: ops.rmsnorm(x, x.sum(0)), (x,))
    assert gradgradcheck(lambda x: ops.swiglu(x, x), (x,))


@each_case
def test_torch_func(case):
    arguments = case.arguments(small(case), "cpu", torch.float64, grad=False)
    rest = arguments[1:]

    def ours(x):
        return case.ours(x, *rest).square().sum()

    def torchs(x):
        return case.torchs(x, *rest).square().sum()

    x = arguments[0]
    assert distance(torch.func.grad(ours)(x), torch.func.grad(torchs)(x)) < 1e-9
    got = torch.func.jacrev(torch.func.grad(ours))(x)
    # By double backward, which gradgradcheck looks at; torch has no second gradient of its attention.
    assert distance(got, torch.autograd.functional.hessian(ours, x)) < 1e-9
    # vmap over the first dimension of one argument.
    xs = torch.stack((x, 2 * x))
    each = torch.stack([ours(x) for x in xs])
    assert distance(torch.func.vmap(ours)(xs), each) < 1e-12
