"""The reference of Muon: the formula, the matrices it takes, and an answer key that ironhorse agrees with."""

from __future__ import annotations

from pathlib import Path

import ironhorse
import pytest
import torch
from ironhorse.config import GPT2Config, MoEConfig
from ironhorse.errors import InvalidValueError
from ironhorse.reference.gpt2 import GPT2
from ironhorse.reference.moe import MoE
from ironhorse.reference.muon import Muon, matrices_of, orthogonalized, to_bf16


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (1, 7)])
def test_singular_values_go_to_about_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    u = 1e-7 * torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(u, full_matrices=False)
    got = orthogonalized(u)
    made = torch.linalg.svdvals(got)
    kept = values / values.norm() > 0.003  # below that five iterations are not enough
    assert (made[: int(kept.sum())] > 0.6).all() and (made < 1.25).all()
    # the directions are those of the momentum
    core = left.T @ got @ right.T
    assert torch.allclose(core, torch.diag(core.diagonal()), atol=1e-9)
    assert torch.allclose(orthogonalized(u.T), got.T)
    assert (got - orthogonalized(u.float())).norm() < 1e-4 * got.norm()
    assert (got - orthogonalized(u.float(), to_bf16)).norm() < 0.1 * got.norm()


def test_a_matrix_without_a_gradient_does_not_move() -> None:
    assert not orthogonalized(torch.zeros(3, 5)).any()


def test_steps_are_those_of_torch() -> None:
    """torch computes the iterations in bf16, so the steps agree to a few roundings of it."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(2)
    config = GPT2Config.parse("n_layer=1,n_head=2,n_embd=32,vocab_size=20,max_seq_len=8")
    ours, theirs = GPT2(config), GPT2(config)
    theirs.load_state_dict(ours.state_dict())
    start = ours.h[0].mlp.c_fc.weight.detach().clone()
    optimizer = Muon(lr=0.02, weight_decay=0.1).build(ours)
    weight = theirs.h[0].mlp.c_fc.weight
    torch_muon = torch.optim.Muon([weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for name, param in ours.named_parameters():
            param.grad = torch.randn_like(param)
            if name == "h.0.mlp.c_fc.weight":
                weight.grad = param.grad.clone()
        optimizer.step()
        torch_muon.step()
    moved = (ours.h[0].mlp.c_fc.weight - start).norm()
    assert (ours.h[0].mlp.c_fc.weight - weight).norm() < 0.03 * moved


def test_muon_has_the_matrices_of_the_blocks() -> None:
    gpt2 = GPT2(GPT2Config.parse("n_layer=1,n_head=2,n_embd=8,vocab_size=20,max_seq_len=8"))
    found = {name: matrices_of(name, param) for name, param in gpt2.named_parameters()}
    assert {name: count for name, count in found.items() if count} == {
        "h.0.attn.c_attn.weight": 3, "h.0.attn.c_proj.weight": 1, "h.0.mlp.c_fc.weight": 1, "h.0.mlp.c_proj.weight": 1,
    }  # fmt: skip
    moe = MoE(MoEConfig.parse("hidden=8,n_layer=1,n_head=2,n_experts=2,top_k=1,ffn=12,vocab_size=20"))
    rest = [name for name, param in moe.named_parameters() if not matrices_of(name, param)]
    assert sorted(name for name in rest if "norm" not in name) == [
        "lm_head.weight", "model.embed_tokens.weight", "model.layers.0.block_sparse_moe.gate.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("gpt2", "n_layer=2,n_head=2,n_embd=32,vocab_size=50,max_seq_len=16"),
        ("moe", "C=32,L=1,NH=4,NKV=2,HD=8,E=3,K=2,F=24,V=50,maxT=16"),
    ],
)
def test_a_key_is_verified(tmp_path: Path, kind: str, model: str) -> None:
    options = {"optimizer": "muon", "steps": 3, "lr": 5e-4, "weight_decay": 0.1, "bf16": False}
    key = ironhorse.export(kind, model=model, out=tmp_path, batch=2, seq=16, **options).key
    report = ironhorse.verify(key, device="cpu")
    assert report.passed, str(report)
    names = [row.name for row in report.tensors]
    assert any(name.startswith("after.") and name.endswith("proj.weight") for name in names)


def test_wrong_optimizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="optimizer is 'sgd'"):
        ironhorse.export("gpt2", model="d12", out=tmp_path, optimizer="sgd")
    with pytest.raises(ironhorse.IronhorseError, match="optimizer muon goes with"):
        ironhorse.export("moe", model="moe-tiny", out=tmp_path, optimizer="muon", reference="transformers")
