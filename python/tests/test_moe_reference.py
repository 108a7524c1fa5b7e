"""The reference mixture of experts: against loops in f64, finite differences and Hugging Face's Mixtral and Llama."""

from __future__ import annotations

from dataclasses import replace

import moe_naive
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activations import activation_names
from ironhorse.config import NAMED, MoEConfig, to_hf_config
from ironhorse.errors import IronhorseError
from ironhorse.params import param_shapes
from ironhorse.reference.init import random_batch
from ironhorse.reference.init_moe import INITS, RouterLog, check_routing, init_weights, margins, routed_batch
from ironhorse.reference.moe import MoE, aux_loss, choose, rope_tables, turn
from ironhorse.reference.train import AdamW, Recorder, compute_answers, compute_answers_bf16, nearby

# No two sizes equal where they could be confused; NH·HD is not C.
BASE = MoEConfig(
    hidden=14, n_layer=2, n_head=6, n_kv_head=3, head_dim=4, n_experts=5, top_k=2, ffn=11, vocab_size=53,
    max_seq_len=16, rope_base=100.0, rope_alpha=2.5, aux_alpha=0.3,
)  # fmt: skip
DENSE = replace(BASE, n_experts=0, top_k=0, hidden=12)  # transformers wants NH to divide the width of a Llama
SHAPES = {
    "base": BASE,
    "dense": DENSE,
    "e3k1": replace(BASE, n_experts=3, top_k=1),
    "e8k8": replace(BASE, n_experts=8, top_k=8),
    "e1k1": replace(BASE, n_experts=1, top_k=1),
    "mqa": replace(BASE, n_kv_head=1),
    "hd16": replace(BASE, n_head=2, n_kv_head=2, head_dim=16),
    "hd64": replace(BASE, n_head=2, n_kv_head=1, head_dim=64),
    "hd128": replace(BASE, n_head=1, n_kv_head=1, head_dim=128),
}


def build(config: MoEConfig, batch: int = 2, seq: int = 5, how: str = "spread", seed: int = 1):
    model = init_weights(MoE(config), seed, how)
    x, y, _ = routed_batch(model, batch, seq, seed)
    return model, x, y


def arrays(model: MoE) -> dict[str, np.ndarray]:
    return {name: param.detach().double().numpy() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("batch", "seq"), [(2, 5), (1, 1)])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_loops_in_f64(name: str, batch: int, seq: int):
    model, x, y = build(SHAPES[name], batch, seq)
    naive = moe_naive.run(arrays(model), model.config, x.numpy(), y.numpy())
    log = RouterLog()
    logits, loss, aux = model.double().loss(x, y, log)
    assert np.allclose(logits.flatten(0, 1).detach().numpy(), naive["logits"], rtol=1e-12, atol=1e-12)
    assert loss.item() == pytest.approx(naive["loss"], rel=1e-13)
    assert aux.tolist() == pytest.approx(naive["aux"], rel=1e-13)
    assert [experts.tolist() for experts in log.experts] == naive["choices"][: len(log.experts)]
    assert len(log.experts) == (model.config.n_layer if model.config.n_experts else 0)


@pytest.mark.parametrize("how", [init for init in INITS if init != "mixtral"])
def test_gradients_by_finite_differences_of_the_loops(how: str):
    """The loss of another program, differentiated by steps: every parameter, with the choice of experts kept."""
    model, x, y = build(BASE, 2, 4, how)
    model.double().loss(x, y)[1].backward()
    params = arrays(model)
    fixed = moe_naive.run(params, BASE, x.numpy(), y.numpy())["choices"]
    generator = np.random.default_rng(3)
    for name, param in model.named_parameters():
        direction = generator.standard_normal(param.shape)
        losses = [
            moe_naive.run(params | {name: params[name] + step * direction}, BASE, x.numpy(), y.numpy(), fixed)["loss"]
            for step in (1e-5, -1e-5)
        ]
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx(float((param.grad.numpy() * direction).sum()), rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("config", [BASE, DENSE, SHAPES["e3k1"]], ids=["moe", "dense", "k1"])
def test_dact_by_finite_differences(config: MoEConfig):
    """Every activation moved where it is made; through the router, with the choice kept."""
    model, x, y = build(config)
    model.double()
    recorder = Recorder()
    model.loss(x, y, recorder)[1].backward()
    acts, dacts = recorder.acts(), recorder.dacts()
    assert list(dacts) == [name for name in activation_names(config) if not name.endswith(".experts")]
    for layer, block in enumerate(model.model.layers):
        if config.n_experts:
            block.block_sparse_moe.fixed = acts[f"layers.{layer}.experts"].long()
    generator = torch.Generator().manual_seed(5)
    for name, grad in dacts.items():
        direction = torch.randn(grad.shape, generator=generator, dtype=torch.float64)

        losses = []
        for step in (1e-5, -1e-5):

            def nudge(made: str, value: torch.Tensor, at: str = name, by: torch.Tensor = step * direction) -> None:
                if made == at:
                    value.add_(by)

            with torch.no_grad():
                losses.append(float(model.loss(x, y, nudge)[1]))
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-5, abs=1e-8), name


def test_parameters_are_the_table():
    for config in SHAPES.values():
        model = MoE(config)
        assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == list(param_shapes(config).items())
        assert sorted(model.state_dict()) == sorted(param_shapes(config))
        groups = AdamW(weight_decay=0.1).build(model).param_groups
        assert [(g["weight_decay"], {p.dim() for p in g["params"]}) for g in groups] == [(0.1, {2}), (0.0, {1})]


def test_recorded_names_shapes_and_equations():
    model, x, y = build(BASE)
    recorder = Recorder()
    logits, loss, aux = model.loss(x, y, recorder)
    act = recorder.acts()
    assert list(act) == activation_names(BASE)
    B, T, C, N, E, K = 2, 5, 14, 10, 5, 2
    shapes = {
        "qkv": (B, T, 12 * 4), "qkv_rope": (B, T, 12 * 4), "attn": (B, T, 24), "router_logits": (N, E),
        "probs": (N, E), "weights": (N, K), "experts": (N, K),
    }  # fmt: skip
    for name, value in act.items():
        assert tuple(value.shape) == shapes.get(name.rsplit(".")[-1], (B, T, C)), name
        assert value.dtype == (torch.int32 if name.endswith("experts") else torch.float32)
    before = act["embed"]
    for layer in range(2):
        a = {name.removeprefix(f"layers.{layer}."): value for name, value in act.items()}
        q, k, v = a["qkv"].split((24, 12, 12), dim=-1)
        tables = rope_tables(BASE, T, before)
        for part, turned in ((q, a["qkv_rope"][..., :24]), (k, a["qkv_rope"][..., 24:36])):
            want = turn(part.unflatten(-1, (-1, 4)).transpose(1, 2), *tables).transpose(1, 2).flatten(2)
            assert torch.equal(want, turned)
        assert torch.equal(v, a["qkv_rope"][..., 36:])
        assert torch.equal(a["residual_1"], before + a["o_proj"])
        assert torch.equal(a["residual_2"], a["residual_1"] + a["moe"])
        assert torch.equal(a["probs"], a["router_logits"].softmax(-1))
        assert torch.allclose(a["weights"].sum(-1), torch.ones(N))
        assert (a["weights"].diff(dim=-1) <= 0).all()
        assert torch.equal(a["weights"].argsort(descending=True), torch.arange(K).expand(N, K))
        before = a["residual_2"]
    assert torch.equal(logits, model.lm_head(act["norm"]))
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), y.flatten()) + aux.sum())


def test_ties_go_to_the_lower_number():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0, 3.0], [-1.0, 0.0, -0.0, -1.0, 5.0]])
    assert choose(logits, 3).tolist() == [[1, 2, 4], [0, 1, 2], [4, 1, 2]]
    many = torch.zeros(3, 64)
    assert choose(many, 40).tolist() == [list(range(40))] * 3


def test_aux_loss():
    """Even routing gives alpha·K, all on one expert alpha·E; the gradient goes through the probabilities alone."""
    even = torch.full((4, 4), 0.25)
    pairs = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]])
    assert aux_loss(even, pairs, 0.5).item() == pytest.approx(0.5 * 2)
    one = torch.tensor([[0.0, 1.0, 0.0]] * 5)
    assert aux_loss(one, torch.ones(5, 1, dtype=torch.long), 0.5).item() == pytest.approx(0.5 * 3)
    probs = torch.rand(4, 4, requires_grad=True)
    aux_loss(probs, torch.tensor([[0, 1]] * 3 + [[2, 1]]), 0.5).backward()
    assert torch.allclose(probs.grad, 0.5 * 4 / 4 * torch.tensor([0.75, 1.0, 0.25, 0.0]).expand(4, 4))


@pytest.mark.parametrize("how", ["idle", "single", "tied"])
def test_odd_routing(how: str):
    for K in (1, 2):
        model, x, _ = build(replace(BASE, top_k=K), 3, 7, how)
        check_routing(model, x, how)
        log = RouterLog()
        model(x, log)
        counts = [experts.long().flatten().bincount(minlength=5).tolist() for experts in log.experts]
        for count in counts:
            assert sum(count) == 21 * K
            if how == "idle":
                assert count[1] == 0 and sum(map(bool, count)) > 1
            elif how == "single":
                assert count[4] == 21
            else:
                assert count == [21] * K + [0] * (5 - K)
        spread, x, _ = build(replace(BASE, top_k=K), 3, 7)
        with pytest.raises(IronhorseError, match="does not route so"):
            check_routing(spread, x, how)
    for config, message in ((DENSE, "no experts"), (SHAPES["e8k8"], "all 8 experts" if how == "idle" else None)):
        if message:
            with pytest.raises(IronhorseError, match=message):
                init_weights(MoE(config), 0, how)


def test_an_idle_expert_has_zero_gradients_and_decays():
    """Not absent ones: with those AdamW would leave the expert out, decay and all."""
    model, x, y = build(BASE, how="idle")
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    answers = compute_answers(model, x, y, AdamW(lr=0.1, weight_decay=0.5), steps=2).tensors
    idle = [name for name in start if ".experts.1." in name]
    assert len(idle) == 6
    for name in idle:
        assert not answers[f"grad.{name}"].any()
        assert torch.allclose(answers[f"after.{name}"], start[name] * (1 - 0.05) ** 2)


def test_margins_are_kept():
    model, x, y = build(BASE, 3, 9)
    assert margins(model, x).min() > 0.02 and torch.equal(x.flatten()[1:], y.flatten()[:-1])
    first = random_batch(BASE.vocab_size, 3, 9, 1)[0]
    assert margins(model, first).min() < margins(model, x).min()
    assert torch.isinf(margins(init_weights(MoE(DENSE), 0), x)).all()
    assert torch.isinf(margins(init_weights(MoE(BASE), 0, "tied"), x)).all()


def test_same_seed_same_bits():
    runs = [compute_answers(*build(BASE, 3, 9), AdamW(), 3).tensors for _ in range(2)]
    assert list(runs[0]) == list(runs[1])
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    other = compute_answers(*build(BASE, 3, 9, seed=2), AdamW(), 3).tensors
    assert not torch.equal(runs[0]["logits"], other["logits"])


@pytest.mark.parametrize("config", [BASE, DENSE], ids=["moe", "dense"])
def test_bf16_is_close(config: MoEConfig):
    model, x, y = build(config)
    low = compute_answers_bf16(model, x, y, AdamW(), 2)
    exact = compute_answers(model.double(), x, y, AdamW(), 2)
    assert low.act_names == exact.act_names and list(low.tensors) == list(exact.tensors)
    for name, value in exact.tensors.items():
        if name.endswith(".experts"):
            assert torch.equal(low.tensors[name], value), name
        elif not name.startswith("after."):
            assert (low.tensors[name].double() - value).norm() < 0.06 * value.norm(), name
    wide = ("probs", "weights")
    assert all(low.tensors[f"act.{n}"].dtype == (torch.float32 if n.endswith(wide) else torch.bfloat16)
               for n in low.act_names if not n.endswith(".experts"))  # fmt: skip


def test_nearby_moves_weights_as_far_as_bf16_would():
    model = init_weights(MoE(BASE), 1, "spread")
    one, again, other = nearby(model, 1), nearby(model, 1), nearby(model, 2)
    for start, a, b, c in zip(*(m.parameters() for m in (model, one, again, other)), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(a, start)
        assert ((a - start).abs() <= 2**-9 * 1.001 * start.abs()).all()


def test_inits():
    model = init_weights(MoE(replace(BASE, hidden=32)), 0, "mixtral")
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), name
        elif p.numel() > 300:
            assert p.std().item() == pytest.approx(0.02, rel=0.2), name
    for name, p in init_weights(MoE(BASE), 0, "spread").named_parameters():
        assert not ((p == 0) | (p == 1)).any() and p.flatten().unique().numel() == p.numel(), name
    with pytest.raises(IronhorseError, match="unknown init"):
        init_weights(model, 0, "other")


# Hugging Face


def hf_model(model: MoE, folder):
    """Their model, from a folder as we write it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from ironhorse.formats.hf import config_json
    from ironhorse.formats.safetensors import write_safetensors

    folder.mkdir()
    (folder / "config.json").write_bytes(config_json(model.config, {"F32"}))
    params = {name: p.detach().numpy() for name, p in model.named_parameters()}
    write_safetensors(folder / "model.safetensors", params, {"format": "pt"})
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(theirs).__name__ == to_hf_config(model.config)["architectures"][0]
    if hasattr(theirs, "set_experts_implementation"):
        theirs.set_experts_implementation("eager")  # the default asks for widths that are multiples of 16 bytes
    return theirs.eval()


def hf_grads(theirs, config: MoEConfig) -> dict[str, torch.Tensor]:
    """Gradients under our names; transformers 5 keeps the experts of a layer in two tensors."""
    grads: dict[str, torch.Tensor] = {}
    for name, param in theirs.named_parameters():
        ours = name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight")
        start = ours.split(".mlp.experts.")[0] + ".block_sparse_moe.experts"
        for expert in range(config.n_experts):
            if name.endswith("experts.gate_up_proj"):
                w1, w3 = param.grad[expert].chunk(2)
                grads |= {f"{start}.{expert}.w1.weight": w1, f"{start}.{expert}.w3.weight": w3}
            elif name.endswith("experts.down_proj"):
                grads[f"{start}.{expert}.w2.weight"] = param.grad[expert]
        if "_proj" not in name or name.endswith("weight"):
            grads[ours] = param.grad
    return grads


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_equal_hugging_face(name: str, tmp_path):
    model, x, y = build(replace(SHAPES[name], aux_alpha=0.0), 3, 9)
    theirs = hf_model(model, tmp_path / "hf")
    expected = theirs(x).logits
    logits, loss, _ = model.loss(x, y)
    assert (logits - expected).norm() < 1e-5 * expected.norm()
    loss.backward()
    F.cross_entropy(expected.flatten(0, 1), y.flatten()).backward()
    grads = hf_grads(theirs, model.config)
    for param_name, param in model.named_parameters():
        if SHAPES[name].top_k == 1 and "gate.weight" in param_name:  # the weight of one expert is 1
            assert param.grad.norm() < 1e-6 and grads[param_name].norm() < 1e-6
        else:
            assert (param.grad - grads[param_name]).norm() <= 2e-5 * grads[param_name].norm(), param_name


def test_the_tiny_one_equals_hugging_face(tmp_path):
    for name, config in (("alpha 1", NAMED["moe-tiny"]), ("alpha 8", replace(NAMED["moe-tiny"], rope_alpha=8.0))):
        model = init_weights(MoE(config), 3, "spread")
        x = random_batch(1000, 1, 200, 3)[0]
        with torch.no_grad():
            ours, theirs = model(x), hf_model(model, tmp_path / name)(x).logits
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_aux_loss_of_one_layer_equals_hugging_face(tmp_path):
    """They take all layers as one, so with one layer the two agree."""
    model, x, _ = build(replace(BASE, n_layer=1, aux_alpha=0.7), 3, 9)
    theirs = hf_model(model, tmp_path / "hf")(x, output_router_logits=True)
    assert model.loss(x, x)[2].item() == pytest.approx(0.7 * theirs.aux_loss.item(), rel=1e-5)
