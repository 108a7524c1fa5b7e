"""ironhorse.nn with device="cuda" against device="cpu": layers, the model against PyTorch, training, generation."""

from __future__ import annotations

import numpy as np
import pytest
from ironhorse import _native, ops
from ironhorse.nn import MoELayer, MoETransformer, MQAttention, RMSNorm, SwiGLU, TrainConfig, Trainer
from nn_cases import ALPHA, CASES, ODD, error, normal, pair

gpu = pytest.mark.skipif(not ops.cuda_available(), reason="ironhorse.ops.cuda_available() is false: no usable GPU here")
BOUND = 1e-5


@gpu
@pytest.mark.parametrize("sizes", [(1, 1, 1), (31, 33, 5), (64, 64, 64), (3, 129, 200), (200, 999, 64), (512, 768, 99)])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("adds", [False, True])
def test_products(sizes: tuple[int, int, int], transposed: tuple[bool, bool], adds: bool):
    m, n, k = sizes
    a = normal(*((k, m) if transposed[0] else (m, k)))
    b = normal(*((n, k) if transposed[1] else (k, n)), seed=1)
    c = normal(m, n, seed=2) if adds else None
    found, again, want = (
        _native.nn_matmul(a, b, None if c is None else c.copy(), *transposed, device)
        for device in ("cuda", "cuda", "cpu")
    )
    exact = (a.T if transposed[0] else a).astype(np.float64) @ (b.T if transposed[1] else b).astype(np.float64)
    exact = exact if c is None else exact + c
    assert found.tobytes() == again.tobytes()
    assert error(found, exact) <= BOUND and error(want, exact) <= BOUND


@gpu
@pytest.mark.parametrize("offsets", [[0, 5, 5, 37, 64], [0, 0, 0, 0, 64], [0, 16, 32, 48, 64], [0, 1, 2, 3, 64]])
def test_products_of_experts(offsets: list[int]):
    rows, outs, ins = 64, 33, 20
    x, weight, d_y = normal(rows, ins), normal(4, outs, ins, seed=1), normal(rows, outs, seed=2)
    ends = np.array(offsets, np.int32)
    found, want = (
        (
            _native.nn_grouped(x, weight, ends, device),
            _native.nn_grouped_input(d_y, weight, ends, device),
            _native.nn_grouped_weight(d_y, x, normal(4, outs, ins, seed=3), ends, device),
        )
        for device in ("cuda", "cpu")
    )
    assert all(error(a, b) <= BOUND for a, b in zip(found, want, strict=True))


@gpu
@pytest.mark.parametrize("make", [
    lambda device: RMSNorm(14, device=device),
    lambda device: SwiGLU(14, 33, seed=1, device=device),
    lambda device: MQAttention(ODD, seed=1, device=device),
    lambda device: MoELayer(ODD, seed=1, device=device),
])  # fmt: skip
def test_layers(make):
    ours, theirs = make("cuda"), make("cpu")
    x, grad = normal(2, 5, 14), normal(2, 5, 14, seed=2)
    assert error(ours.forward(x), theirs.forward(x)) <= BOUND
    assert error(ours.backward(grad), theirs.backward(grad)) <= BOUND
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert error(a.grad, b.grad) <= BOUND


@gpu
@pytest.mark.parametrize("name", CASES)
def test_model_against_the_reference(name: str):
    theirs, ours, x, y = pair(*CASES[name], device="cuda")
    logits, loss, _ = theirs.loss(x, y)
    loss.backward()
    trainer = Trainer(ours, TrainConfig(aux_loss_alpha=ALPHA))
    found = ours.forward(x.numpy())
    ce, d_logits = trainer._compute_loss(found, y.numpy())
    ours.backward(d_logits, aux_loss_alpha=ALPHA)
    assert error(found, logits.detach()) <= BOUND
    assert ce + ours.total_aux_loss(ALPHA) == pytest.approx(loss.item(), rel=1e-6)
    wanted = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        want = wanted[key].grad
        if float(want.abs().max()) < 1e-7:  # rounding alone
            assert float(np.abs(parameter.grad.data).max()) < 1e-6, key
        else:
            assert error(parameter.grad, want) <= BOUND, key


@gpu
def test_training_and_generation():
    losses, sequences = [], []
    for device in ("cuda", "cpu"):
        model = MoETransformer.tiny(seed=3, device=device)
        trainer = Trainer(model, TrainConfig(lr=3e-3, warmup_steps=2, total_steps=20))
        x = np.random.default_rng(1).integers(0, 50, (2, 17))
        losses.append([trainer.train_step(x[:, :-1], x[:, 1:]) for _ in range(8)])
        sequences.append(model.generate([1, 2, 3], 12))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0] - 0.5
    assert sequences[0] == sequences[1]
