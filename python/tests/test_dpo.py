"""Preferences (DPO): loss, rewards, gradients and steps against plain PyTorch, whole and with adapters, packed. Needs
IRONHORSE_BIN.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli import assert_could_not_run, one_changed, rewrite_key, verify
from cli import ironhorse as command
from dpo_keys import Case, make_key, make_pairs
from ironhorse.answer_key import json_text
from ironhorse.export import main
from ironhorse.formats.safetensors import read_safetensors, write_safetensors

MODELS = {  # name: kind, model, pairs, T, beta
    "gpt2": ("gpt2", "n_layer=2,n_head=4,n_embd=24,vocab_size=99,max_seq_len=40", 5, 40, 0.1),
    "llama": ("moe", "kind=llama,C=24,L=2,NH=6,NKV=3,HD=4,F=20,V=99,maxT=64", 7, 64, 0.5),
    "qwen3-tied": ("moe", "kind=qwen3,C=20,L=2,NH=5,NKV=1,HD=6,F=14,V=99,maxT=48,tied=true", 6, 48, 0.1),
    "mixture": ("moe", "C=24,L=2,NH=6,NKV=3,HD=8,E=4,K=2,F=20,V=99,maxT=48,aux_alpha=0", 6, 48, 0.2),
    "one-pair": ("moe", "kind=mistral,C=18,L=1,NH=3,NKV=1,HD=6,F=7,V=31,maxT=24", 1, 24, 2.0),
}


def base_key(folder: Path, kind: str, model: str) -> Path:
    flags = ["--batch", 1, "--seq", 4, "--steps", 0, "--no-bf16", "--no-acts", "--out", folder]
    assert main([kind, "--model", model, *map(str, flags)]) == 0
    [key] = folder.glob("*.key.safetensors")
    return key


def write_key(name: str, folder: Path) -> Path:
    """The key of one of the models above."""
    kind, model, count, seq, beta = MODELS[name]
    vocab = 31 if name == "one-pair" else 99
    target = folder / f"{name}.key.safetensors"
    make_key(base_key(folder / name, kind, model), Case(make_pairs(count, vocab, seq), seq, beta), target)
    return target


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dpo")
    return {name: write_key(name, folder) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_loss_rewards_gradients_and_steps_are_those_of_pytorch(keys: dict[str, Path], name: str, tmp_path: Path):
    tensors = read_safetensors(keys[name]).tensors
    assert np.abs(tensors["rewards"]).max() > 0.1, "the reference is another model"
    assert tensors["x"].shape[0] > 1 or name == "one-pair"
    outcome = verify(tmp_path, "--key", keys[name], "--device", "cpu")
    assert outcome.code == 0 and outcome.failing() == [], outcome.text
    compared = {tensor["name"] for tensor in outcome.report["tensors"]}
    theirs = {tensor for tensor in tensors if tensor.startswith(("grad.", "after."))}
    assert theirs and theirs | {"logits", "loss", "losses", "rewards"} <= compared
    again = verify(tmp_path, "--key", keys[name], "--device", "cpu", "--recompute", "full")
    assert again.code == 0, again.text
    both = command("verify", "--lockstep", "--key", keys[name], "--device", "cpu")
    assert both.returncode == 0, both.stdout + both.stderr


def test_adapters_learn_preferences_as_with_peft(tmp_path: Path):
    pytest.importorskip("transformers", minversion="5.0", reason="the model is that of transformers 5")
    pytest.importorskip("peft", reason="the adapters are PEFT's")
    from lora_keys import Adapters, adapted, trained

    folder = tmp_path / "llama"
    base = base_key(folder, "moe", "kind=llama,C=24,L=2,NH=6,NKV=3,HD=4,F=20,V=99,maxT=64")
    adapters = Adapters(4, 8, "q,k,v,o,gate,up,down")
    model = adapted(base.with_name(base.name.removesuffix(".key.safetensors")), adapters)
    meta = {"lora": json_text({"r": adapters.rank, "alpha": adapters.alpha, "targets": adapters.targets})}

    def logits_of(some: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return some(input_ids=ids, use_cache=False).logits

    key = tmp_path / "lora.key.safetensors"
    make_key(base, Case(make_pairs(7, 99, 64), 64, 0.3), key, model, trained, logits_of, meta)
    outcome = verify(tmp_path, "--key", key, "--device", "cpu")
    assert outcome.code == 0 and outcome.failing() == [], outcome.text
    compared = {tensor["name"] for tensor in outcome.report["tensors"]}
    assert "rewards" in compared and sum("grad." in name for name in compared) == 2 * 2 * 7


@pytest.mark.parametrize(
    ("tensor", "at", "failing"),
    [
        ("rewards", (1, 0), {"rewards"}),
        ("grad.model.norm.weight", (3,), {"grad.model.norm.weight"}),
        ("reference", None, {"rewards", "loss", "losses"}),
    ],
)
def test_a_changed_number_is_found(
    keys: dict[str, Path], tensor: str, at: tuple[int, ...] | None, failing: set[str], tmp_path: Path
):
    was = read_safetensors(keys["llama"]).tensors[tensor]
    if at is None:  # that of a token that counts
        at = tuple(np.argwhere(was != 0)[5])
    rewrite_key(keys["llama"], tmp_path / "changed.key.safetensors", {tensor: one_changed(was, at)})
    outcome = verify(tmp_path, "--key", tmp_path / "changed.key.safetensors", "--device", "cpu")
    assert outcome.code == 1 and failing <= set(outcome.failing()), outcome.text


def test_another_beta_or_order_is_noticed(keys: dict[str, Path], tmp_path: Path):
    file = read_safetensors(keys["llama"])
    target = tmp_path / "changed.key.safetensors"
    write_safetensors(target, file.tensors, file.metadata | {"dpo": json_text({"beta": 0.51})}, file.dtypes)
    outcome = verify(tmp_path, "--key", target, "--device", "cpu")
    assert outcome.code == 1 and {"rewards", "loss"} <= set(outcome.failing()), outcome.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pairs": [[5, 3, 9]]}, "`pairs`"),
        ({"pairs": [[0, 3, 10_000]]}, "`pairs`"),
        ({"pairs": [[0, 3]]}, "shape of `pairs`"),
        ({"positions": 2}, "`positions`"),
        ({"dpo": "{}"}, "`dpo`"),
        ({"dpo": '{"beta": -1}'}, "`dpo`"),
        ({"dpo": '{"beta": 1e300}'}, "`dpo`"),
    ],
)
def test_a_wrong_key_is_refused(keys: dict[str, Path], change: dict[str, object], says: str, tmp_path: Path):
    file = read_safetensors(keys["llama"])
    tensors, meta = dict(file.tensors), {name: text for name, text in file.metadata.items() if name != "crc32"}
    for name, value in change.items():
        if name == "dpo":
            meta[name] = str(value)
        elif name == "positions":
            tensors[name] = np.full_like(tensors[name], value)
        else:
            tensors[name] = np.array(value, np.int32)
            del tensors["rewards"]  # of other pairs
    target = tmp_path / "wrong.key.safetensors"
    write_safetensors(target, tensors, meta)
    run = command("verify", "--key", target, "--device", "cpu")
    assert_could_not_run(run)
    assert says in run.stderr, run.stderr
