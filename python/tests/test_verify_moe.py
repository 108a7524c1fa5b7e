"""The Rust binary against PyTorch on mixtures of experts and Llamas: answer keys of odd shapes, the op that a changed
number points to, Hugging Face folders both ways, training. Needs IRONHORSE_BIN.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from activations import activation_names
from cli import Verified, assert_could_not_run, convert, ironhorse, newest_checkpoint, one_changed, rewrite_key, verify
from ironhorse.config import MoEConfig
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.params import param_shapes
from test_moe_export import ODD, SMALL, export

CASES = ODD | {"small": (SMALL, 3, 7, "--weight-decay", "0.1"), "tiny": ("moe-tiny", 2, 32)}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The keys of all cases, exported once; tests copy what they change. One has all that a key may have: the errors of
    bf16 are most of the work of an export, and nothing here asks for them.
    """
    folder = tmp_path_factory.mktemp("moe")
    flags = {name: () if name == "small" else ("--no-bf16",) for name in CASES}
    return {name: export(folder / name, *case, *flags[name])[1] for name, case in CASES.items()}


def config_of(name: str) -> MoEConfig:
    return MoEConfig.parse(CASES[name][0])


def model_of(key: Path) -> Path:
    """The Hugging Face folder beside a key."""
    return key.with_name(key.name.removesuffix(".key.safetensors"))


def assert_passed(outcome: Verified) -> None:
    assert outcome.code == 0, outcome.text
    assert outcome.report["verdict"] == "pass" and outcome.failing() == []


# ---- it agrees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_key_agrees(keys: dict[str, Path], name: str, tmp_path: Path):
    outcome = verify(tmp_path, "--key", keys[name])
    assert_passed(outcome)
    config, key = config_of(name), read_safetensors(keys[name]).tensors
    compared = {tensor["name"]: tensor for tensor in outcome.report["tensors"]}
    # The gradient of the probabilities never exists: softmax and choice have one backward. A choice has no gradient.
    fused = {f"dact.layers.{layer}.probs" for layer in range(config.n_layer)}
    aux = {"aux"} if config.n_experts == 0 else set()  # of no layers
    missing = {n for n in key if not n.startswith("param.")} - {"x", "y"} - fused - aux - set(compared)
    assert missing == set()
    assert {f"act.{n}" for n in activation_names(config)} <= set(compared)
    for tensor_name, tensor in compared.items():
        assert tuple(tensor["shape"]) == key[tensor_name].shape, tensor_name
    assert outcome.report["losses"] == pytest.approx(key["losses"].tolist(), rel=1e-5)


@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize("init", ["idle", "single"])
def test_wider_keys_with_odd_routing_agree(init: str, seed: str, tmp_path: Path):
    flags = ("--steps", "0", "--init", init, "--seed", seed, "--no-bf16")
    for name, model in {"tiny": "moe-tiny", "gqa": "C=64,L=2,NH=6,NKV=3,HD=16,E=8,K=2,F=64,V=128"}.items():
        _, key = export(tmp_path / name, model, 2, 32, *flags)
        assert_passed(verify(tmp_path, "--key", key))


@pytest.mark.parametrize("recompute", ["gelu", "full", "experts"])
@pytest.mark.parametrize("name", ["small", "llama"])
def test_recomputation_agrees(keys: dict[str, Path], name: str, recompute: str, tmp_path: Path):
    assert_passed(verify(tmp_path, "--key", keys[name], "--recompute", recompute))


@pytest.mark.parametrize("name", ["small", "llama", "hd64"])
def test_key_with_its_own_folder_agrees(keys: dict[str, Path], name: str, tmp_path: Path):
    assert_passed(verify(tmp_path, "--key", keys[name], "--model", model_of(keys[name])))


def test_two_hundred_steps_lie_on_those_of_pytorch(tmp_path: Path):
    _, key = export(tmp_path / "long", "moe-tiny", 4, 32, "--steps", "200", "--lr", "1e-3", "--no-bf16", "--no-acts")
    outcome = verify(tmp_path, "--key", key)
    assert_passed(outcome)
    losses = outcome.report["losses"]
    assert losses[-1] < 0.01 * losses[0]
    assert losses == pytest.approx(read_safetensors(key).tensors["losses"].tolist(), rel=1e-5)


def test_lockstep_agrees(keys: dict[str, Path]):
    run = ironhorse("verify", "--lockstep", "--device", "cpu", "--key", keys["small"])
    assert run.returncode == 0, run.stdout + run.stderr


# ---- it names what is wrong ------------------------------------------------------------------------------------

WRONG = {  # the tensor that is changed: the op that wrote it, its origin, section
    "act.layers.0.qkv_rope": ("rope", "layers.0.qkv_rope", "forward"),
    "act.layers.1.probs": ("router_fwd", "layers.1.router", "forward"),
    "act.layers.0.moe": ("combine", "layers.0.moe", "forward"),
    "aux": ("router_load", "layers.0.router", "forward"),
    "loss": ("add", "loss", "forward"),
    "dact.layers.1.router_logits": ("router_bwd", "layers.1.router", "backward"),
    "dact.layers.0.weights": ("combine_bwd", "layers.0.moe", "backward"),
    "grad.model.layers.1.block_sparse_moe.gate.weight": ("linear_bwd_weight", "layers.1.router_logits", "backward"),
    "grad.model.layers.0.block_sparse_moe.experts.3.w3.weight": (
        "grouped_linear_bwd_weight",
        "layers.0.experts.w1_w3",
        "backward",
    ),
    "grad.model.layers.0.self_attn.v_proj.weight": ("linear_bwd_weight", "layers.0.qkv", "backward"),
}


@pytest.mark.parametrize("name", WRONG)
def test_changed_answer_names_its_op(keys: dict[str, Path], name: str, tmp_path: Path):
    was = read_safetensors(keys["small"]).tensors[name]
    index = (0,) * was.ndim
    changed = tmp_path / "changed.key.safetensors"
    rewrite_key(keys["small"], changed, {name: one_changed(was, index)})
    outcome = verify(tmp_path, "--key", changed)
    assert outcome.code == 1 and outcome.failing() == [name], outcome.text
    wrong = outcome.first_wrong
    assert wrong["tensor"] == name and tuple(wrong["index"]) == index
    assert (wrong["op"], wrong["origin"], wrong["section"]) == WRONG[name]


def test_another_choice_of_experts_is_found(keys: dict[str, Path], tmp_path: Path):
    name = "act.layers.1.experts"
    was = read_safetensors(keys["small"]).tensors[name]
    swapped = was.copy()
    swapped[4] = was[4][::-1]
    changed = tmp_path / "changed.key.safetensors"
    rewrite_key(keys["small"], changed, {name: swapped})
    outcome = verify(tmp_path, "--key", changed)
    assert outcome.code == 1 and outcome.failing() == [name], outcome.text
    assert outcome.first_wrong["index"] == [4, 0]


# ---- Hugging Face ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "llama", "hd64"])
def test_converted_key_is_loaded_by_transformers(keys: dict[str, Path], name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "hf"
    run = convert(keys[name], folder)
    assert run.returncode == 0, run.stderr
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default asks for widths that are multiples of 16 bytes
    key = read_safetensors(keys[name]).tensors
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(key["x"]).long()).logits.numpy()
    assert np.linalg.norm(logits - key["logits"]) <= 2e-6 * np.linalg.norm(key["logits"])


@pytest.mark.parametrize("experts", [4, 0])
def test_a_folder_of_transformers_is_read(experts: int, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = dict(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=4,
        intermediate_size=20, vocab_size=99, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    if experts:
        config = transformers.MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=2)
        model = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.eval().save_pretrained(tmp_path / "theirs", safe_serialization=True)
    copied = convert(tmp_path / "theirs", tmp_path / "ours")
    assert copied.returncode == 0, copied.stderr
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(0, 99, (2, 7))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)
    report, key = export(tmp_path / "answers", str(tmp_path / "ours"), 2, 7, "--no-bf16")
    assert report["config"]["n_experts"] == experts
    assert_passed(verify(tmp_path, "--key", key, "--model", tmp_path / "theirs"))


def _copied(keys: dict[str, Path], tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path / "copy"
    shutil.copytree(model_of(keys["small"]), folder)
    tensors = read_safetensors(folder / "model.safetensors").tensors
    return folder, {name: np.array(tensor) for name, tensor in tensors.items()}  # the file is written over


def test_a_missing_expert_is_named(keys: dict[str, Path], tmp_path: Path):
    folder, tensors = _copied(keys, tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    del tensors[name]
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    run = convert(folder, tmp_path / "out")
    assert_could_not_run(run)
    assert f"tensor `{name}` is missing" in run.stderr


def test_another_shape_is_named(keys: dict[str, Path], tmp_path: Path):
    folder, tensors = _copied(keys, tmp_path)
    name = "model.layers.0.block_sparse_moe.gate.weight"
    tensors[name] = tensors[name][:4].copy()
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    run = convert(folder, tmp_path / "out")
    assert_could_not_run(run)
    assert f"shape of `{name}` is [4, 14], expected [5, 14]" in run.stderr


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_experts_per_tok", 6, "num_experts_per_tok is 6, expected from 1 to num_local_experts, 5"),
        ("num_key_value_heads", 4, "num_key_value_heads is 4, expected a divisor of num_attention_heads, 6"),
        ("num_local_experts", 0, "num_local_experts is 0, expected at least 1"),
        ("sliding_window", -8, "sliding_window is -8, expected"),
        ("hidden_act", "gelu", 'hidden_act is "gelu", expected "silu"'),
        ("rope_scaling", {"rope_type": "yarn"}, 'rope_type is "yarn", expected "default", "linear" or "llama3"'),
        ("hidden_size", None, "hidden_size is null, expected a whole number"),
    ],
)
def test_other_settings_are_refused(keys: dict[str, Path], key: str, value, expected: str, tmp_path: Path):
    folder, _ = _copied(keys, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    run = convert(folder, tmp_path / "out")
    assert_could_not_run(run)
    assert expected in run.stderr


def test_nan_in_the_router_is_an_error(keys: dict[str, Path], tmp_path: Path):
    folder, tensors = _copied(keys, tmp_path)
    tensors["model.layers.0.block_sparse_moe.gate.weight"][2, 3] = np.nan
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    run = ironhorse("verify", "--key", keys["small"], "--model", folder)
    assert_could_not_run(run)
    assert "gate.weight" in run.stderr


def test_a_bin_or_state_is_refused(keys: dict[str, Path], tmp_path: Path):
    run = convert(keys["small"], tmp_path / "model.bin")
    assert_could_not_run(run)
    assert "holds a GPT-2 only" in run.stderr


# ---- the other commands ----------------------------------------------------------------------------------------


def test_train_generate_and_back_to_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = "hidden=24,layers=2,heads=4,kv_heads=2,experts=3,top_k=2,ffn=20,vocab=256,context=32,rope_alpha=2"
    flags = ["--batch", 2, "--seq", 16, "--steps", 12, "--sample-tokens", 8, "--accumulate", 2]
    run = ironhorse("train", "--model", sizes, *flags, "--out", tmp_path / "run")
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    for line in lines:
        assert len(line["router"]) == 2
        for layer in line["router"]:
            assert sum(layer["load"]) == pytest.approx(2, rel=1e-5) and len(layer["load"]) == 3
            assert 0 < layer["entropy"] <= np.log(3) + 1e-5 and 0.015 < layer["aux"] < 0.06
    assert (tmp_path / "run/experts.svg").read_text().count("<rect") == 1 + 2 * 3
    checkpoint = newest_checkpoint(tmp_path / "run")
    command = [os.environ["IRONHORSE_BIN"], "generate", "--model", str(checkpoint), "--tokens", "50", "--prompt", "Ivy"]
    written = subprocess.run(command, capture_output=True, timeout=300)  # bytes, and not always UTF-8
    assert written.returncode == 0 and written.stdout.startswith(b"Ivy"), written.stderr
    again = ironhorse("train", "--init", checkpoint, *flags, "--out", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    model, info = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    kept = read_safetensors(checkpoint / "model.safetensors").tensors
    assert set(param_shapes(MoEConfig.parse(sizes))) == set(kept)
    assert model.config.num_local_experts == 3


@pytest.mark.parametrize("command", ["bench", "profile", "plan"])
def test_a_named_mixture_runs(command: str, tmp_path: Path):
    report = tmp_path / "report.json"
    flags = ["--batch", 2, "--seq", 16, "--json", report]
    run = ironhorse(command, "--model", "moe-tiny", *flags, *(["--steps", 2] if command != "plan" else []))
    assert run.returncode == 0, run.stderr
    written = json.loads(report.read_text())
    assert written["model"] == "moe-tiny"
    if command != "profile":
        assert written["active_parameters"] < written["parameters"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("moe-tiny,", "unknown model"),
        ("kind=moe,hidden=64,layers=2,heads=4,ffn=8,experts=4,top_k=5", "top_k is 5, expected from 1 to n_experts, 4"),
        ("kind=moe,hidden=64,layers=2,heads=4,ffn=8,kv_heads=3", "n_kv_head is 3, expected a divisor of n_head, 4"),
        ("hidden=60,layers=2,heads=4,ffn=8,head_dim=15", "expected an even number"),
        ("hidden=64,layers=2,heads=4,ffn=8,context=8", "beyond the model's context of 8"),
        ("hidden=64,layers=2,heads=4,ffn=8,rope_base=0", "rope_base is 0, expected a number above 0"),
    ],
)
def test_senseless_sizes_are_refused(model: str, expected: str):
    run = ironhorse("bench", "--model", model, "--batch", 1, "--seq", 16)
    assert_could_not_run(run)
    assert expected in run.stderr
