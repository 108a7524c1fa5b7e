"""ironhorse.nn: copies of models, experts that are replaced, arrays that belong to the caller, and saving."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ironhorse
import numpy as np
import pytest
from ironhorse.errors import InvalidValueError
from ironhorse.nn import (
    Linear,
    MoELayer,
    MoETransformer,
    MQAttention,
    RMSNorm,
    Router,
    SwiGLU,
    Tensor,
    TrainConfig,
    Trainer,
    TransformerBlock,
)
from nn_cases import ODD, normal

IDS = np.arange(12).reshape(2, 6) * 4 % 53
COPIES: list[Callable[[Any], Any]] = [
    copy.deepcopy,
    *(lambda m, p=p: pickle.loads(pickle.dumps(m, protocol=p)) for p in (2, 4, 5)),
]
X, GRAD = normal(2, 5, 14), normal(2, 5, 14, seed=1)


def plain(moe: MoELayer, x: np.ndarray) -> np.ndarray:
    """The layer by its definition, of the experts as they are."""
    weights, chosen = moe.router.forward(x)
    rows = x.reshape(-1, x.shape[-1])
    made = [
        sum(w * expert_of(moe.experts[e], row) for w, e in zip(ws, es, strict=True))
        for row, ws, es in zip(rows, weights, chosen, strict=True)
    ]
    return np.stack(made).reshape(x.shape)


def expert_of(expert: SwiGLU, row: np.ndarray) -> np.ndarray:
    gate, up, down = (np.array(linear.weight.data) for linear in (expert.gate, expert.up, expert.down))
    g = gate @ row
    return down @ (g / (1 + np.exp(-g)) * (up @ row))


def loud(moe: MoELayer) -> MoELayer:
    for i, parameter in enumerate(moe.parameters()):
        parameter.data[...] = normal(*parameter.shape, seed=i)
    return moe


def uses_its_experts(moe: MoELayer) -> None:
    np.testing.assert_allclose(moe.forward(X).data, plain(moe, X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", range(len(COPIES)))
def test_a_copy_of_a_layer_is_whole_and_its_own(number: int):
    moe = loud(MoELayer(ODD, seed=1))
    want = moe.forward(X).data
    moe.backward(GRAD)
    other = COPIES[number](moe)
    assert (other.forward(X).data == want).all()
    held = other.experts[0].gate.weight.data
    for expert in other.experts:
        for parameter in expert.parameters():
            parameter.data.fill(0)
    assert (other.forward(X).data == 0).all() and (moe.forward(X).data == want).all()
    assert other.experts[0].gate.weight.data is held
    grads = [p.grad.data.copy() for p in moe.parameters()]
    loud(other).forward(X)
    other.backward(GRAD)  # adds to the gradients that were copied
    for mine, theirs, before in zip(moe.parameters(), other.parameters(), grads, strict=True):
        np.testing.assert_allclose(theirs.grad.data, 2 * before, rtol=1e-4, atol=1e-4)
        assert (mine.grad.data == before).all()


@pytest.mark.parametrize("number", range(len(COPIES)))
def test_a_copy_of_a_model_trains_as_the_model(number: int):
    model = MoETransformer(ODD, seed=1)
    other = COPIES[number](model)
    config = TrainConfig(lr=1e-2, warmup_steps=0, total_steps=100)
    losses = [[Trainer(m, config).train_step(IDS, IDS) for _ in range(3)] for m in (model, other)]
    assert losses[0] == losses[1]
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (a.data == b.data).all(), name
    assert (model.forward(IDS).data == other.forward(IDS).data).all()


def test_a_copy_of_a_trainer_goes_on_alone():
    trainer = Trainer(MoETransformer(ODD, seed=1), TrainConfig(lr=1e-2, warmup_steps=0))
    trainer.train_step(IDS, IDS)
    other = copy.deepcopy(trainer)
    assert [trainer.train_step(IDS, IDS) for _ in range(3)] == [other.train_step(IDS, IDS) for _ in range(3)]


def test_an_expert_that_is_replaced_is_used():
    moe = loud(MoELayer(ODD, seed=1))
    before = moe.forward(X).data
    old = moe.experts[0]
    moe.experts[0] = SwiGLU(14, 11, seed=5)
    uses_its_experts(moe)
    assert (moe.forward(X).data != before).any()
    moe.experts[1].gate = Linear(14, 11, seed=6)
    uses_its_experts(moe)
    moe.experts[2].up.weight = Tensor(normal(11, 14, seed=7))
    uses_its_experts(moe)
    moe.experts[3], moe.experts[4] = moe.experts[4], moe.experts[3]
    uses_its_experts(moe)
    kept = old.gate.weight.data.copy()
    for parameter in moe.parameters():
        parameter.data[...] = 0
    assert (old.gate.weight.data == kept).all()  # who left has memory of its own
    assert (moe.forward(X).data == 0).all()


def test_gradients_reach_an_expert_that_is_replaced():
    moe = loud(MoELayer(ODD, seed=1))
    fresh = loud(MoELayer(ODD, seed=1))
    moe.forward(X)
    moe.backward(GRAD)
    moe.experts[0] = SwiGLU(14, 11, seed=5)
    moe.experts[3], moe.experts[4] = moe.experts[4], moe.experts[3]
    kept = [None if p.grad is None else p.grad.data.copy() for p in moe.parameters()]
    for mine, theirs in zip(moe.parameters(), fresh.parameters(), strict=True):
        theirs.data[...] = mine.data
    for layer in (moe, fresh):
        layer.forward(X)
        layer.backward(GRAD)
    for mine, theirs, before in zip(moe.parameters(), fresh.parameters(), kept, strict=True):
        want = theirs.grad.data if before is None else theirs.grad.data + before
        np.testing.assert_allclose(mine.grad.data, want, rtol=1e-5, atol=1e-5)


def test_nothing_is_copied_when_nothing_was_replaced(monkeypatch: pytest.MonkeyPatch):
    moe = MoELayer(ODD, seed=1)
    monkeypatch.setattr(moe._stacked, "_take", lambda _: pytest.fail("copied"))
    moe.forward(X)
    moe.backward(GRAD)


def replaced(change: Callable[[MoELayer], Any]) -> None:
    moe = MoELayer(ODD, seed=1)
    change(moe)
    moe.forward(X)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.experts.pop(), "there are 4 experts, expected 5"),
        (lambda m: m.experts.__setitem__(1, Linear(14, 14)), "expert 1 is of type Linear, expected SwiGLU"),
        (lambda m: m.experts.__setitem__(1, SwiGLU(14, 12)), r"`gate` of expert 1 .* \[12, 14\], expected \[11, 14\]"),
        (lambda m: m.experts.__setitem__(1, m.experts[0]), "two experts have the same weight"),
        (lambda m: setattr(m.experts[2], "up", Linear(14, 11, bias=True)), "`up` of expert 2 has a bias"),
        (lambda m: setattr(m.experts[2], "up", RMSNorm(14)), "`up` of expert 2 is of type RMSNorm"),
    ],
)
def test_an_expert_that_does_not_fit_is_refused(change: Callable[[MoELayer], Any], text: str):
    with pytest.raises(InvalidValueError, match=text):
        replaced(change)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Linear(14, 14, seed=1), lambda: RMSNorm(14), lambda: SwiGLU(14, 5, seed=1),
        lambda: MQAttention(ODD, seed=1), lambda: MoELayer(ODD, seed=1), lambda: TransformerBlock(ODD, seed=1),
        lambda: Router(14, 5, 2, seed=1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tensor", [False, True])
def test_what_the_caller_changes_later_changes_no_gradient(make: Callable[[], Any], tensor: bool):
    grads = []
    for change in (False, True):
        layer, x = make(), Tensor(X) if tensor else X.copy()
        made = layer.forward(x)
        if change:
            x[:] = 0
            (made[0] if isinstance(made, tuple) else made.data).fill(0)
        grads.append([layer.backward(GRAD).data, *(p.grad.data for p in layer.parameters())])
        if isinstance(made, tuple):
            grads[-1].append(layer.backward(np.ones(made[0].shape) * [1, 2]).data)
    assert all((a == b).all() for a, b in zip(*grads, strict=True)) and any(a.any() for a in grads[0])


def test_a_model_is_saved_and_loaded(tmp_path: Path):
    model = MoETransformer(ODD, seed=3)
    ironhorse.save(tmp_path / "model", dict(model.named_parameters()), config=model.config)
    loaded = MoETransformer.from_folder(tmp_path / "model")
    assert loaded.config.sizes().rope_theta == model.config.sizes().rope_theta  # a folder has base and alpha as one
    assert (loaded.forward(IDS).data == model.forward(IDS).data).all()
    with pytest.raises(InvalidValueError, match="config is of type int; expected a GPT2Config, a MoEConfig, an nn.Con"):
        ironhorse.save(tmp_path / "model", dict(model.named_parameters()), config=3)
