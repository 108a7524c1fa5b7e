"""Every backward of ironhorse.nn against PyTorch's autograd on the same mathematics, and by finite differences.

The bound of 1e-5 on the relative error by norm is that of f32 everywhere in ironhorse.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ironhorse.nn import Embedding, Linear, MoELayer, MQAttention, RMSNorm, Router, SwiGLU, Tensor, TransformerBlock
from ironhorse.nn.model import _named
from ironhorse.nn.train import TrainConfig, Trainer
from ironhorse.reference import moe as reference
from ironhorse.reference.gpt2 import causal_attention
from nn_cases import ALPHA, CASES, ODD, error, normal, pair, torch_of

BOUND = 1e-5
SHAPES = [(1, 1), (3, 31), (2, 5, 33), (64, 64)]


def check(found: dict[str, object], want: dict[str, object]) -> None:
    """All of them, so that a failure shows which."""
    assert found.keys() == want.keys()
    errors = {name: error(found[name], want[name]) for name in want}
    wrong = {name: value for name, value in errors.items() if not value <= BOUND}
    assert not wrong, wrong


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(shape: tuple[int, ...], bias: bool):
    layer = Linear(shape[-1], 7, bias=bias, seed=3)
    layer.weight._data[...] = normal(7, shape[-1], seed=1)
    x, grad = normal(*shape), normal(*shape[:-1], 7, seed=2)
    t_x, t_w = torch_of(x), torch_of(layer.weight.data)
    t_b = torch_of(normal(7, seed=4)) if bias else None
    if bias:
        layer.bias._data[...] = t_b.detach().numpy()
    y = F.linear(t_x, t_w, t_b)
    y.backward(torch.from_numpy(grad))
    found = {"y": layer.forward(Tensor.from_numpy(x)), "d_x": layer.backward(Tensor.from_numpy(grad))}
    want = {"y": y.detach(), "d_x": t_x.grad}
    found["weight"], want["weight"] = layer.weight.grad, t_w.grad
    if bias:
        found["bias"], want["bias"] = layer.bias.grad, t_b.grad
    check(found, want)


@pytest.mark.parametrize("shape", SHAPES)
def test_rmsnorm(shape: tuple[int, ...]):
    layer = RMSNorm(shape[-1])
    layer.weight._data[...] = normal(shape[-1], seed=1)
    x, grad = normal(*shape), normal(*shape, seed=2)
    t_x, t_w = torch_of(x), torch_of(layer.weight.data)
    y = t_x * torch.rsqrt(t_x.square().mean(-1, keepdim=True) + 1e-6) * t_w
    y.backward(torch.from_numpy(grad))
    found = {"y": layer.forward(x), "d_x": layer.backward(grad), "weight": layer.weight.grad}
    if shape[-1] == 1:  # then y is the sign of x, and d_x a difference of equals: only its size can be bounded
        assert abs(found.pop("d_x").data).max() < 1e-6 * abs(grad).max() / abs(x).min()
        check(found, {"y": y.detach(), "weight": t_w.grad})
    else:
        check(found, {"y": y.detach(), "d_x": t_x.grad, "weight": t_w.grad})


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape: tuple[int, ...]):
    layer = SwiGLU(shape[-1], 13)
    for i, linear in enumerate((layer.gate, layer.up, layer.down)):
        linear.weight._data[...] = normal(*linear.weight.shape, seed=10 + i)
    x, grad = normal(*shape), normal(*shape, seed=2)
    t_x, weights = torch_of(x), [torch_of(p.data) for p in layer.parameters()]
    y = (F.silu(t_x @ weights[0].T) * (t_x @ weights[1].T)) @ weights[2].T
    y.backward(torch.from_numpy(grad))
    found = {"y": layer.forward(x), "d_x": layer.backward(grad)}
    want = {"y": y.detach(), "d_x": t_x.grad}
    for i, (ours, theirs) in enumerate(zip(layer.parameters(), weights, strict=True)):
        found[f"weight {i}"], want[f"weight {i}"] = ours.grad, theirs.grad
    check(found, want)


def test_embedding_adds_up_tokens_that_come_twice():
    layer = Embedding(11, 5, seed=0)
    ids, grad = np.array([[1, 10, 1], [0, 1, 3]]), normal(2, 3, 5)
    t_w = torch_of(layer.weight.data)
    y = F.embedding(torch.from_numpy(ids), t_w)
    y.backward(torch.from_numpy(grad))
    found = layer.forward(Tensor.from_numpy(ids))
    layer.backward(grad)
    check({"y": found, "weight": layer.weight.grad}, {"y": y.detach(), "weight": t_w.grad})


@pytest.mark.parametrize(("batch", "seq"), [(2, 5), (1, 1), (1, 16)])
@pytest.mark.parametrize("heads", [(6, 3, 4), (4, 1, 16), (2, 2, 6), (1, 1, 128)])
def test_attention(heads: tuple[int, int, int], batch: int, seq: int):
    config = replace(ODD, n_heads=heads[0], n_kv_heads=heads[1], head_dim=heads[2])
    layer = MQAttention(config)
    theirs = reference.SelfAttention(config.sizes(), causal_attention)
    pairs = zip(layer.parameters(), (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj), strict=True)
    for i, (ours, linear) in enumerate(pairs):
        ours._data[...] = normal(*ours.shape, seed=i) / np.sqrt(ours.shape[1])
        linear.weight.data.copy_(torch.from_numpy(ours.data))
    x, grad = normal(batch, seq, 14), normal(batch, seq, 14, seed=2)
    t_x = torch_of(x)
    tables = reference.rope_tables(config.sizes(), seq, t_x)
    y = theirs(t_x, tables, "", lambda name, value: None)
    y.backward(torch.from_numpy(grad))
    found = {"y": layer.forward(x), "d_x": layer.backward(grad)}
    want = {"y": y.detach(), "d_x": t_x.grad}
    if seq == 1:  # one key: its weight is 1 whatever q and k are
        assert not layer.w_q.weight.grad.data.any() and not layer.w_k.weight.grad.data.any()
        found |= {"v": layer.w_v.weight.grad, "o": layer.w_o.weight.grad}
        want |= {"v": theirs.v_proj.weight.grad, "o": theirs.o_proj.weight.grad}
    else:
        found |= {f"weight {i}": p.grad for i, p in enumerate(layer.parameters())}
        want |= {f"weight {i}": p.grad for i, p in enumerate(theirs.parameters())}
    check(found, want)


def torch_router(x: torch.Tensor, gate: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = x.flatten(0, -2) @ gate.T
    probs = logits.softmax(-1)
    experts = reference.choose(logits.detach(), k)
    chosen = probs.gather(1, experts)
    return probs, experts, chosen / chosen.sum(-1, keepdim=True)


@pytest.mark.parametrize(("experts", "k"), [(5, 2), (3, 1), (4, 4), (1, 1), (64, 8)])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_router(experts: int, k: int, alpha: float):
    router = Router(14, experts, k)
    router.gate.weight._data[...] = normal(experts, 14, seed=1)
    x, grad = normal(2, 5, 14), normal(10, k, seed=2)
    t_x, t_w = torch_of(x), torch_of(router.gate.weight.data)
    probs, chosen, weights = torch_router(t_x, t_w, k)
    aux = reference.aux_loss(probs, chosen, alpha)
    ((weights * torch.from_numpy(grad)).sum() + aux).backward()
    found, indices = router.forward(Tensor.from_numpy(x))
    assert indices == chosen.tolist()
    assert router.compute_aux_loss(alpha) == pytest.approx(aux.item(), rel=1e-6)
    d_x = router.backward(Tensor.from_numpy(grad), aux_loss_alpha=alpha)
    if k == 1 and alpha == 0 or experts == 1:  # a single weight is 1, whatever the logits are
        assert abs(d_x.data).max() < 1e-5 and abs(router.gate.weight.grad.data).max() < 1e-5
        assert (np.asarray(found) == 1).all()
    else:
        got = {"weights": found, "d_x": d_x, "gate": router.gate.weight.grad}
        check(got, {"weights": weights.detach(), "d_x": t_x.grad, "gate": t_w.grad})


def test_router_takes_the_gradient_of_its_input_too():
    router = Router(14, 5, 2, seed=1)
    x, grad = normal(2, 5, 14), normal(2, 5, 14, seed=2)
    router.forward(x)
    assert (router.backward(grad).data == grad).all()
    alone = router.backward(np.zeros((10, 2), np.float32), aux_loss_alpha=ALPHA).data
    assert error(router.backward(grad, aux_loss_alpha=ALPHA), grad + alone) < BOUND and alone.any()


@pytest.mark.parametrize("name", ["gqa", "e3k1", "e8k8"])
@pytest.mark.parametrize("alpha", [0.0, ALPHA])
def test_moe_layer(name: str, alpha: float):
    config = CASES[name][0]
    layer, theirs = MoELayer(config), reference.SparseMoE(replace(config.sizes(), aux_alpha=alpha))
    for i, p in enumerate(layer.parameters()):
        p._data[...] = normal(*p.shape, seed=i) / np.sqrt(p.shape[1])
    names = ["gate"] + [f"experts.{e}.{w}" for e in range(config.n_experts) for w in ("w1", "w3", "w2")]
    params = dict(theirs.named_parameters())
    for part, p in zip(names, layer.parameters(), strict=True):
        params[f"{part}.weight"].data.copy_(torch.from_numpy(p.data))
    x, grad = normal(2, 5, 14), normal(2, 5, 14, seed=99)
    t_x = torch_of(x)
    y, aux = theirs(t_x, "", lambda name, value: None)
    ((y * torch.from_numpy(grad)).sum() + aux).backward()
    found = {"y": layer.forward(x), "d_x": layer.backward(grad, aux_loss_alpha=alpha)}
    want = {"y": y.detach(), "d_x": t_x.grad}
    for part, p in zip(names, layer.parameters(), strict=True):
        found[part], want[part] = p.grad, params[f"{part}.weight"].grad
    if config.top_k_experts == 1 and alpha == 0:  # a single weight is 1: no gradient but rounding
        assert abs(found.pop("gate").data).max() < 1e-5
        want.pop("gate")
    check(found, want)


def test_block_equals_its_parts_in_torch():
    config = ODD
    block, theirs = TransformerBlock(config), reference.Block(config.sizes(), causal_attention)
    params = dict(theirs.named_parameters())
    for i, (name, p) in enumerate(_named(block)):
        p._data[...] = normal(*p.shape, seed=i) / np.sqrt(p.shape[-1])
        params[f"{name}.weight"].data.copy_(torch.from_numpy(p.data))
    x, grad = normal(2, 5, 14), normal(2, 5, 14, seed=99)
    t_x = torch_of(x)
    y, aux = theirs(t_x, reference.rope_tables(config.sizes(), 5, t_x), "", lambda name, value: None)
    ((y * torch.from_numpy(grad)).sum() + aux).backward()
    found = {"y": block.forward(x), "d_x": block.backward(grad, aux_loss_alpha=0.01)}
    assert block.aux_loss() == pytest.approx(aux.item(), rel=1e-6)
    found |= {name: p.grad for name, p in _named(block)}
    want = {name: params[f"{name}.weight"].grad for name, _ in _named(block)}
    check(found, want | {"y": y.detach(), "d_x": t_x.grad})


@pytest.mark.parametrize("name", CASES)
def test_model_against_the_reference(name: str):
    theirs, ours, x, y = pair(*CASES[name])
    logits, loss, aux = theirs.loss(x, y)
    logits.retain_grad()
    loss.backward()
    trainer = Trainer(ours, TrainConfig(aux_loss_alpha=ALPHA))
    found = ours.forward(x.numpy())
    ce, d_logits = trainer._compute_loss(found, y.numpy())
    ours.backward(d_logits, aux_loss_alpha=ALPHA)
    assert error(found, logits.detach()) <= BOUND and error(d_logits, logits.grad) <= BOUND
    assert ce + ours.total_aux_loss(ALPHA) == pytest.approx(loss.item(), rel=1e-6)
    layers = [block.aux_loss(ALPHA) for block in ours.blocks]
    assert layers == pytest.approx(aux.tolist(), rel=1e-6)
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    got = {name: parameter.grad for name, parameter in ours.named_parameters()}
    # What one token's attention does not depend on, and a router with one weight, have a gradient of rounding alone.
    for key in [key for key, grad in grads.items() if float(grad.abs().max()) < 1e-7]:
        assert float(np.abs(got.pop(key).data).max()) < 1e-6, key
        grads.pop(key)
    assert len(grads) > 5
    check(got, grads)


def test_gradients_add_up_and_become_0():
    _, ours, x, y = pair(*CASES["gqa"])
    grad = normal(2, 5, 53)
    ours.forward(x.numpy())
    ours.backward(grad)
    once = [p.grad.data.copy() for p in ours.parameters()]
    ours.forward(x.numpy())
    ours.backward(grad)
    assert max(error(p.grad, 2 * g) for p, g in zip(ours.parameters(), once, strict=True)) < BOUND
    ours.zero_grad()
    assert not any(p.grad.data.any() for p in ours.parameters())
    for p in ours.parameters():
        p.grad = None
    ours.forward(x.numpy())
    ours.backward(grad)
    assert max(error(p.grad, g) for p, g in zip(ours.parameters(), once, strict=True)) < BOUND


def test_router_by_finite_differences():
    """Through the weights and through the balancing loss: L(gate) of the whole layer, in one random direction."""
    layer = MoELayer(replace(ODD, n_experts=4, top_k_experts=2), seed=5)
    for i, p in enumerate(layer.parameters()):
        p._data[...] = normal(*p.shape, seed=i) / np.sqrt(p.shape[1])
    x, grad = normal(2, 9, 14), normal(2, 9, 14, seed=99)
    gate = layer.router.gate.weight
    start, direction = gate.data.copy(), normal(*gate.shape, seed=7)

    def loss(step: float) -> tuple[float, list[list[int]]]:
        gate._data[...] = start + np.float32(step) * direction
        y = layer.forward(x).data.astype(np.float64)
        return float((y * grad).sum()) + layer.aux_loss(10.0), layer.router._last.experts.tolist()

    step = 2e-3
    (up, chosen_up), (down, chosen_down), (_, chosen) = loss(step), loss(-step), loss(0.0)
    assert chosen_up == chosen == chosen_down, "the choice changed: take another seed"
    layer.backward(grad, aux_loss_alpha=10.0)
    slope = float((gate.grad.data.astype(np.float64) * direction).sum())
    assert abs(slope) > 0.1
    # The difference of two f32 results of size ~1e1 over 4e-3, and the third derivative times step²
    assert (up - down) / (2 * step) == pytest.approx(slope, rel=5e-3, abs=5e-3)


def test_a_replaced_expert_weight_is_used():
    layer = MoELayer(ODD, seed=1)
    x = normal(2, 5, 14)
    for expert in layer.experts:
        expert.down.weight = Tensor.zeros(expert.down.weight.shape)
    assert not layer.forward(x).data.any()
    layer.experts[0].down.weight._data = np.ones((14, 11), np.float32)
    assert layer.forward(x).data.any() and layer._stacked._stacks[2][0].all()
    layer.experts[1].gate.weight = Tensor.zeros((3, 4))
    with pytest.raises(ValueError, match=r"`gate` of expert 1 has a weight that is \[3, 4\], expected \[11, 14\]"):
        layer.forward(x)
