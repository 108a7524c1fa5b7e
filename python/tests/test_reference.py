"""The reference model is GPT-2: equal to Hugging Face's, its gradients right by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from activations import activation_names
from conftest import SMALL_BATCH, SMALL_CONFIG, SMALL_SEQ
from ironhorse.errors import IronhorseError
from ironhorse.params import param_shapes
from ironhorse.reference.gpt2 import GPT2, causal_attention
from ironhorse.reference.hf import from_hf_state, load_hf, to_hf_state
from ironhorse.reference.init import init_weights, random_batch
from ironhorse.reference.train import Recorder


@pytest.fixture()
def model() -> GPT2:
    return init_weights(GPT2(SMALL_CONFIG), seed=1, how="spread")


@pytest.fixture()
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return random_batch(SMALL_CONFIG.vocab_size, SMALL_BATCH, SMALL_SEQ, seed=1)


def hf_model(model: GPT2):
    import transformers

    c = model.config
    sizes = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, vocab_size=c.vocab_size)
    config = transformers.GPT2Config(**sizes, n_positions=c.max_seq_len, bos_token_id=0, eos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(to_hf_state(model.state_dict()))
    return theirs


def test_parameters_are_the_table(model: GPT2):
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == param_shapes(SMALL_CONFIG)
    assert list(model.state_dict()) == list(param_shapes(SMALL_CONFIG))


def test_logits_and_gradients_equal_hugging_face(model: GPT2, batch):
    x, y = batch
    theirs = hf_model(model)
    expected = theirs(x).logits
    logits, loss = model.loss(x, y)
    assert (logits - expected).norm() / expected.norm() < 1e-5
    loss.backward()
    F.cross_entropy(expected.flatten(0, 1), y.flatten()).backward()
    grads = from_hf_state({name: p.grad for name, p in theirs.named_parameters()}, SMALL_CONFIG, "hf")
    for name, param in model.named_parameters():
        assert (param.grad - grads[name]).norm() <= 1e-5 * grads[name].norm(), name


def test_hugging_face_folder_round_trip(model: GPT2, tmp_path):
    hf_model(model).save_pretrained(tmp_path / "hf")
    loaded = load_hf(str(tmp_path / "hf"))
    assert loaded.config == SMALL_CONFIG
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    (tmp_path / "empty").mkdir()
    with pytest.raises(IronhorseError, match="without config.json"):
        load_hf(str(tmp_path / "empty"))


def test_attention_equals_torchs_own():
    q, k, v = torch.randn(3, 2, 3, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(causal_attention(q, k, v), expected, rtol=1e-12, atol=1e-12)


def test_recorded_names_order_and_shapes(model: GPT2, batch):
    recorder = Recorder()
    model(batch[0], recorder)
    assert list(recorder.kept) == activation_names(SMALL_CONFIG)
    C = SMALL_CONFIG.n_embd
    wide = {"c_attn": 3 * C, "c_fc": 4 * C, "gelu": 4 * C}
    for name, value in recorder.kept.items():
        assert tuple(value.shape) == (SMALL_BATCH, SMALL_SEQ, wide.get(name.rsplit(".")[-1], C)), name


def test_recorded_activations_obey_the_equations(model: GPT2, batch):
    recorder = Recorder()
    logits = model(batch[0], recorder)
    act = recorder.acts()
    params = dict(model.named_parameters())
    before = act["embed"]
    assert torch.equal(before, params["wte.weight"][batch[0]] + params["wpe.weight"][:SMALL_SEQ])
    for layer in ("h.0", "h.1"):
        assert torch.equal(act[f"{layer}.residual_1"], before + act[f"{layer}.attn.c_proj"])
        assert torch.equal(act[f"{layer}.residual_2"], act[f"{layer}.residual_1"] + act[f"{layer}.mlp.c_proj"])
        assert torch.equal(act[f"{layer}.mlp.gelu"], F.gelu(act[f"{layer}.mlp.c_fc"], approximate="tanh"))
        before = act[f"{layer}.residual_2"]
    assert torch.equal(act["ln_f"], model.ln_f(before))
    assert torch.equal(logits, act["ln_f"] @ params["wte.weight"].t())


def loss_with_nudge(model: GPT2, batch, name: str, nudge: torch.Tensor) -> float:
    """The loss when activation `name` is moved by `nudge` where it is made (in place: everything after sees it)."""

    def record(at: str, value: torch.Tensor) -> None:
        if at == name:
            value.add_(nudge)

    with torch.no_grad():
        return float(model.loss(*batch, record)[1])


def test_dact_by_finite_differences(model: GPT2, batch):
    model.double()
    recorder = Recorder()
    model.loss(*batch, recorder)[1].backward()
    dacts = recorder.dacts()
    assert list(dacts) == activation_names(SMALL_CONFIG)
    generator = torch.Generator().manual_seed(5)
    for name, grad in dacts.items():
        direction = torch.randn(grad.shape, generator=generator, dtype=torch.float64)
        step = 1e-5 * direction
        slope = (loss_with_nudge(model, batch, name, step) - loss_with_nudge(model, batch, name, -step)) / 2e-5
        assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-5, abs=1e-9), name


def test_parameter_gradients_by_finite_differences(model: GPT2, batch):
    model.double()
    model.loss(*batch)[1].backward()
    generator = torch.Generator().manual_seed(6)
    for name, param in model.named_parameters():
        direction = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            losses = []
            for sign in (1, -2):
                param.add_(direction, alpha=sign * 1e-5)
                losses.append(float(model.loss(*batch)[1]))
            param.add_(direction, alpha=1e-5)
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx(float((param.grad * direction).sum()), rel=1e-5, abs=1e-9), name


def test_gpt2_init():
    model = init_weights(GPT2(SMALL_CONFIG), seed=0, how="gpt2")
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert bool((p == (1 if name.endswith("weight") else 0)).all()) and not torch.signbit(p).any(), name
        elif p.numel() > 100:
            std = 0.02 / math.sqrt(2 * SMALL_CONFIG.n_layer) if "c_proj" in name else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.25), name


def test_spread_init_leaves_nothing_trivial(model: GPT2):
    for name, p in model.named_parameters():
        assert not ((p == 0) | (p == 1)).any() and p.flatten().unique().numel() == p.numel(), name


def test_batch_is_one_stream():
    x, y = random_batch(50, 3, 4, seed=9)
    assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
    again, other = random_batch(50, 3, 4, seed=9)[0], random_batch(50, 3, 4, seed=10)[0]
    assert torch.equal(x, again) and not torch.equal(x, other)
