"""Answer keys whose every number was computed by `transformers`' own Mixtral and Llama, held against the Rust binary
and `ironhorse.verify`. Needs IRONHORSE_BIN.
"""

from __future__ import annotations

from pathlib import Path

import ironhorse
import numpy as np
import pytest
import torch
from activations import activation_names
from cli import one_changed, rewrite_key, verify
from ironhorse.config import MoEConfig
from ironhorse.errors import IronhorseError
from ironhorse.formats.safetensors import read_safetensors
from ironhorse.params import param_shapes
from test_moe_export import ODD, SMALL, export

pytest.importorskip("transformers", minversion="5.0", reason="the keys are made by transformers 5")

LLAMA = "C=24,L=2,NH=6,NKV={kv},HD={hd},F=20,V=99,maxT=40,rope_alpha=3"
CASES = {name: case for name, case in ODD.items() if name != "tied"}  # torch.topk promises nothing about ties
CASES |= {
    "small": (SMALL, 3, 7, "--weight-decay", "0.1"),
    "tiny": ("moe-tiny", 2, 32),
    "hd16": ("C=32,L=1,NH=2,NKV=1,HD=16,E=4,K=2,F=20,V=99,maxT=40,rope_alpha=8", 2, 33),
    "one-expert": ("C=24,L=2,NH=3,HD=8,E=1,K=1,F=20,V=99,maxT=16", 2, 5),
    "llama-6-3": (LLAMA.format(kv=3, hd=16), 2, 33, "--weight-decay", "0.1"),
    "llama-hd64": (LLAMA.format(kv=6, hd=64), 1, 17),
    "llama-hd128": (LLAMA.format(kv=1, hd=128), 2, 9),
    "llama-one-token": (LLAMA.format(kv=2, hd=8), 1, 1),
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hf")
    flags = ("--reference", "transformers", "--steps", "4")
    # one has all that a key may have; the errors of bf16 do not depend on who computes the answers
    few = {name: () if name == "small" else ("--no-bf16",) for name in CASES}
    return {name: export(folder / name, *case, *flags, *few[name])[1] for name, case in CASES.items()}


def config_of(name: str) -> MoEConfig:
    return MoEConfig.parse(CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_the_command_agrees(keys: dict[str, Path], name: str, tmp_path: Path):
    outcome = verify(tmp_path, "--key", keys[name])
    assert outcome.code == 0 and outcome.failing() == [], outcome.text
    config, compared = config_of(name), {tensor["name"] for tensor in outcome.report["tensors"]}
    unseen = (".qkv_rope", ".probs")
    acts = {act for act in activation_names(config) if not act.endswith(unseen)}
    assert {f"act.{act}" for act in acts} <= compared
    assert {f"dact.{act}" for act in acts if not act.endswith(".experts")} <= compared
    assert {f"{kind}.{param}" for kind in ("grad", "after") for param in param_shapes(config)} <= compared
    assert {"logits", "loss", "losses"} <= compared and ("aux" in compared) == (config.n_experts > 0)


@pytest.mark.parametrize("name", ["small", "llama-6-3", "single"])
def test_python_agrees(keys: dict[str, Path], name: str):
    report = ironhorse.verify(keys[name], recompute="full")
    assert report, str(report)
    assert len(report.losses) == 4 and ironhorse.load(keys[name]).config == config_of(name)


@pytest.mark.parametrize("name", ["small", "llama-6-3"])
def test_the_numbers_are_theirs(keys: dict[str, Path], name: str):
    """Bit by bit those of the model that transformers makes of the folder beside the key."""
    import transformers

    file = read_safetensors(keys[name])
    assert file.metadata["reference"] == f"transformers {transformers.__version__}"
    folder = keys[name].with_name(keys[name].name.removesuffix(".key.safetensors"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    if config_of(name).n_experts:
        theirs.set_experts_implementation("eager")
    x, y = (torch.from_numpy(file.tensors[part]).long() for part in "xy")
    logits = theirs(x).logits
    assert np.array_equal(logits.detach().numpy(), file.tensors["logits"])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    assert float(file.tensors["loss"]) - file.tensors.get("aux", np.zeros(1)).sum() == pytest.approx(loss, rel=1e-6)


def test_routing_is_as_odd_as_it_says(keys: dict[str, Path]):
    for name in ("idle", "single", "e8k8", "e3k1"):
        config, key = config_of(name), read_safetensors(keys[name]).tensors
        for layer in range(config.n_layer):
            counts = np.bincount(key[f"act.layers.{layer}.experts"].ravel(), minlength=config.n_experts)
            tokens = key["x"].size
            assert {
                "idle": counts[1] == 0,
                "single": list(counts) == [0, 0, 0, tokens],
                "e8k8": list(counts) == [tokens] * 8,
                "e3k1": counts.sum() == tokens,
            }[name]
            for expert in np.flatnonzero(counts == 0):
                grad = key[f"grad.model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"]
                assert not grad.any()


@pytest.mark.parametrize("name", ["act.layers.1.qkv", "dact.layers.0.weights", "after.lm_head.weight", "aux"])
def test_a_changed_number_is_found(keys: dict[str, Path], name: str, tmp_path: Path):
    was = read_safetensors(keys["small"]).tensors[name]
    index = (0,) * was.ndim
    rewrite_key(keys["small"], tmp_path / "changed.key.safetensors", {name: one_changed(was, index)})
    report = ironhorse.verify(tmp_path / "changed.key.safetensors")
    assert [tensor.name for tensor in report.wrong] == [name] and report.first_wrong.element.index == index


def test_from_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    sizes = "C=8,L=1,NH=2,E=2,K=1,F=4,V=11,maxT=4"
    made = ironhorse.export("moe", model=sizes, out=tmp_path, batch=1, seq=3, steps=1, reference="transformers")
    assert ironhorse.verify(made.key, model=made.model)
    assert capfd.readouterr().err == ""  # no progress bar of others
    with pytest.raises(IronhorseError, match="reference is 'transformers'; expected one of ironhorse"):
        ironhorse.export("gpt2", model="d12", out=tmp_path, reference="transformers")
