"""The Rust binary against PyTorch: it agrees on odd models, names the one number that was changed, refuses
damaged files, and writes files that PyTorch can use. Needs IRONHORSE_BIN.
"""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from activations import activation_names
from cli import Verified, assert_could_not_run, convert, ironhorse, newest_checkpoint, one_changed, rewrite_key, verify
from conftest import Exported, export
from ironhorse.formats.llmc import read_debug_state, read_model, write_debug_state, write_model
from ironhorse.formats.safetensors import read_safetensors
from ironhorse.formats.shards import write_shard
from ironhorse.params import param_shapes
from ironhorse.reference.gpt2 import GPT2

CASES = {
    "odd": ("n_layer=3,n_head=5,n_embd=80,vocab_size=1003,max_seq_len=41", 3, 37),
    "one-token": ("n_layer=3,n_head=5,n_embd=80,vocab_size=1003,max_seq_len=41", 1, 1),
    "one-layer-one-head": ("n_layer=1,n_head=1,n_embd=24,vocab_size=200,max_seq_len=16", 2, 13),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """All cases, exported once; tests copy what they change."""
    folder = tmp_path_factory.mktemp("cases")
    # one has all that a key may have; nothing here asks for the errors of bf16
    few = {name: () if name == "one-layer-one-head" else ("--no-bf16",) for name in CASES}
    return {name: export(folder / name, *case, *few[name], "--weight-decay", "0.1") for name, case in CASES.items()}


@pytest.fixture(scope="module")
def odd(exported: dict[str, Exported]) -> Exported:
    return exported["odd"]


def key_names(case: Exported) -> list[str]:
    """Every name verify compares when it is given the whole key."""
    config = read_model(case.model).config
    params, acts = list(param_shapes(config)), activation_names(config)
    names = [f"param.{n}" for n in params] + [f"act.{n}" for n in acts] + ["logits", "loss"]
    names += [f"dact.{n}" for n in acts] + [f"grad.{n}" for n in params]
    return [*names, "losses", *(f"after.{n}" for n in params)]


def assert_passed(outcome: Verified) -> None:
    assert outcome.code == 0, outcome.text
    assert outcome.report["verdict"] == "pass" and outcome.report["first_wrong"] is None
    assert outcome.failing() == []
    assert all(tensor["rel_error"] <= tensor["tolerance"] for tensor in outcome.report["tensors"])


def assert_first_wrong(outcome: Verified, tensor: str, section: str) -> None:
    assert outcome.code == 1, outcome.text
    assert outcome.report["verdict"] == "fail"
    assert (outcome.first_wrong["tensor"], outcome.first_wrong["section"]) == (tensor, section), outcome.text
    assert tensor in outcome.text  # a person must see it too


# ---- it agrees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_model_and_state_agree(exported: dict[str, Exported], name: str, tmp_path: Path):
    case = exported[name]
    outcome = verify(tmp_path, "--model", case.model, "--state", case.state)
    assert_passed(outcome)
    grads = {f"grad.{n}" for n in param_shapes(read_model(case.model).config)}
    assert {"logits", "loss"} | grads <= {tensor["name"] for tensor in outcome.report["tensors"]}


@pytest.mark.parametrize("name", CASES)
def test_key_agrees(exported: dict[str, Exported], name: str, tmp_path: Path):
    case = exported[name]
    outcome = verify(tmp_path, "--key", case.key)
    assert_passed(outcome)
    compared = {tensor["name"]: tensor for tensor in outcome.report["tensors"]}
    key = read_safetensors(case.key).tensors
    # Weights are inputs, and the gradient after GELU never exists: GELU's derivative is fused into the product.
    fused = [n for n in key_names(case) if n.startswith("dact.") and n.endswith(".mlp.gelu")]
    inputs = [n for n in key_names(case) if n.startswith("param.")]
    missing = [n for n in key_names(case) if n not in compared and n not in fused + inputs]
    assert missing == []
    for tensor_name, tensor in compared.items():
        assert tuple(tensor["shape"]) == key[tensor_name].shape, tensor_name
        assert {"index", "expected", "got", "ulps"} <= set(tensor["worst"]), tensor_name
    assert outcome.report["losses"] == pytest.approx(key["losses"].tolist(), rel=1e-5)


def test_key_with_its_own_model_agrees(odd: Exported, tmp_path: Path):
    assert_passed(verify(tmp_path, "--key", odd.key, "--model", odd.model))


def test_key_without_activations_agrees(tmp_path: Path):
    case = export(tmp_path / "bare", *CASES["one-layer-one-head"], "--no-acts", "--steps", "0")
    assert_passed(verify(tmp_path, "--key", case.key))


# ---- it names the one number that was changed ------------------------------------------------------------------


def assert_names_the_number(
    outcome: Verified, name: str, section: str, was: np.ndarray, index: tuple[int, ...]
) -> None:
    """The changed number, and nothing else, is wrong; `expected` is the changed value, `got` the true one."""
    assert_first_wrong(outcome, name, section)
    assert outcome.failing() == [name]
    wrong = outcome.first_wrong
    assert tuple(wrong["index"]) == index
    assert wrong["expected"] == pytest.approx(float(one_changed(was, index)[index]), rel=1e-6)
    assert wrong["got"] == pytest.approx(float(was[index]), rel=1e-3, abs=1e-5 * float(np.linalg.norm(was)))


def test_products_of_bf16_on_the_cpu(odd: Exported, tmp_path: Path):
    """Their errors are those of a rounding, which the limits of f32 do not allow; wrong numbers are found still."""
    outcome = verify(tmp_path, "--key", odd.key, "--dtype", "bf16")
    assert_passed(outcome)
    assert "simulated" in outcome.text
    errors = [tensor["rel_error"] for tensor in outcome.report["tensors"] if tensor["name"].startswith("grad.h.")]
    assert 5e-4 < max(errors) < 0.05
    name = "grad.h.1.mlp.c_fc.weight"
    changed = tmp_path / "changed.key.safetensors"
    rewrite_key(odd.key, changed, {name: -read_safetensors(odd.key).tensors[name]})
    assert_first_wrong(verify(tmp_path, "--key", changed, "--dtype", "bf16"), name, "backward")


def test_changed_weight_beside_a_state(odd: Exported, tmp_path: Path):
    """A state has no weights, but the exporter's key beside it has: the weight is named, not only the logits."""
    model = read_model(odd.model)
    name = "h.1.mlp.c_fc.weight"
    was = model.params[name]
    model.params[name] = one_changed(was, (17, 5))
    write_model(tmp_path / "m.bin", model.config, model.params)
    outcome = verify(tmp_path, "--model", tmp_path / "m.bin", "--state", odd.state)
    assert_first_wrong(outcome, f"param.{name}", "file")
    wrong = outcome.first_wrong
    assert (wrong["index"], wrong["expected"]) == ([17, 5], pytest.approx(float(was[17, 5]), rel=1e-6))
    assert wrong["got"] == pytest.approx(float(model.params[name][17, 5]), rel=1e-6)


def test_changed_logit_in_a_state(odd: Exported, tmp_path: Path):
    config = read_model(odd.model).config
    state = read_debug_state(odd.state, config)
    index = (2, 36, 1002)  # the very last one
    write_debug_state(tmp_path / "s.bin", config, replace(state, logits=one_changed(state.logits, index)))
    outcome = verify(tmp_path, "--model", odd.model, "--state", tmp_path / "s.bin")
    assert_names_the_number(outcome, "logits", "forward", state.logits, index)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("wte.weight", (1002, 79)),
        ("wpe.weight", (40, 3)),  # a position beyond T: its gradient must be zero
        ("h.0.ln_1.bias", (79,)),
        ("h.2.attn.c_attn.weight", (239, 0)),
        ("h.1.mlp.c_proj.weight", (0, 319)),
        ("ln_f.bias", (0,)),
    ],
)
def test_changed_gradient_in_a_state(odd: Exported, tmp_path: Path, name: str, index: tuple[int, ...]):
    config = read_model(odd.model).config
    state = read_debug_state(odd.state, config)
    grads = {**state.grads, name: one_changed(state.grads[name], index)}
    write_debug_state(tmp_path / "s.bin", config, replace(state, grads=grads))
    outcome = verify(tmp_path, "--model", odd.model, "--state", tmp_path / "s.bin")
    assert_names_the_number(outcome, f"grad.{name}", "backward", state.grads[name], index)


@pytest.mark.parametrize(
    ("name", "index", "section"),
    [
        ("act.embed", (0, 0, 0), "forward"),
        ("act.h.0.attn.sdpa", (1, 20, 33), "forward"),
        ("act.h.1.mlp.gelu", (2, 36, 319), "forward"),
        ("act.h.2.residual_2", (0, 5, 7), "forward"),
        ("logits", (1, 0, 500), "forward"),
        ("loss", (), "forward"),
        ("dact.h.2.mlp.c_proj", (1, 1, 1), "backward"),
        ("dact.h.0.residual_1", (2, 0, 79), "backward"),
        ("grad.h.1.attn.c_proj.bias", (40,), "backward"),
        ("grad.wte.weight", (7, 7), "backward"),
        ("losses", (9,), "update"),
        ("after.h.2.ln_2.weight", (3,), "update"),
        ("after.wpe.weight", (12, 1), "update"),
    ],
)
def test_changed_number_in_a_key(odd: Exported, tmp_path: Path, name: str, index: tuple[int, ...], section: str):
    """The file is sound (its checksums are right), but one number in it is not what the model computes."""
    was = read_safetensors(odd.key).tensors[name]
    rewrite_key(odd.key, tmp_path / "k.safetensors", {name: one_changed(was, index)})
    assert_names_the_number(verify(tmp_path, "--key", tmp_path / "k.safetensors"), name, section, was, index)


@pytest.mark.parametrize("name", ["param.h.1.mlp.c_fc.bias", "act.h.1.ln_2", "grad.h.0.ln_1.weight", "logits"])
def test_damaged_number_in_a_key(odd: Exported, tmp_path: Path, name: str):
    """One number changed behind the checksum's back: the file is at fault, not an op."""
    was = read_safetensors(odd.key).tensors[name]
    changed = one_changed(was, (0,) * was.ndim)
    rewrite_key(odd.key, tmp_path / "k.safetensors", {name: changed}, refresh_crc=False)
    outcome = verify(tmp_path, "--key", tmp_path / "k.safetensors")
    assert_first_wrong(outcome, name, "file")


def test_model_that_differs_from_the_key(odd: Exported, tmp_path: Path):
    model = read_model(odd.model)
    name = "h.2.attn.c_attn.bias"
    model.params[name] = one_changed(model.params[name], (100,))
    write_model(tmp_path / "m.bin", model.config, model.params)
    outcome = verify(tmp_path, "--key", odd.key, "--model", tmp_path / "m.bin")
    assert_first_wrong(outcome, f"param.{name}", "file")
    assert outcome.first_wrong["index"] == [100]


@pytest.mark.parametrize(
    ("name", "index", "first"),
    [
        ("wpe.weight", (3, 3), "embed"),
        ("h.0.ln_1.weight", (2,), "h.0.ln_1"),
        ("h.1.attn.c_attn.weight", (81, 4), "h.1.attn.c_attn"),
        ("h.2.attn.c_attn.bias", (100,), "h.2.attn.c_attn"),  # a bias of k: the loss does not depend on it
        ("h.1.attn.c_proj.weight", (5, 6), "h.1.attn.c_proj"),
        ("h.0.ln_2.bias", (7,), "h.0.ln_2"),
        ("h.2.mlp.c_fc.weight", (319, 79), "h.2.mlp.c_fc"),
        ("h.0.mlp.c_proj.bias", (8,), "h.0.mlp.c_proj"),
        ("ln_f.weight", (9,), "ln_f"),
    ],
)
def test_wrong_weight_is_found_at_the_first_op_that_uses_it(
    odd: Exported, tmp_path: Path, name: str, index: tuple[int, ...], first: str
):
    """The key and its checksums claim another weight: the first op to use it is the first to go wrong."""
    was = read_safetensors(odd.key).tensors[f"param.{name}"]
    rewrite_key(odd.key, tmp_path / "k.safetensors", {f"param.{name}": one_changed(was, index)})
    outcome = verify(tmp_path, "--key", tmp_path / "k.safetensors")
    assert_first_wrong(outcome, f"act.{first}", "forward")
    acts = activation_names(read_model(odd.model).config)
    before = {f"act.{act}" for act in acts[: acts.index(first)]}
    assert not before & set(outcome.failing())


# ---- it refuses what it cannot read ----------------------------------------------------------------------------


def damaged(good: bytes) -> dict[str, bytes]:
    noise = np.random.default_rng(0).bytes(4096)
    return {
        "empty": b"",
        "three bytes": good[:3],
        "cut in the header": good[:500],
        "cut in the middle": good[: len(good) // 2],
        "one byte short": good[:-1],
        "one byte long": good + b"\0",
        "noise": noise,
        "zeros": bytes(4096),
        "huge first number": struct.pack("<Q", 2**63 - 1) + good[8:],
        "text": b"this is not a model\n" * 100,
    }


DAMAGES = list(damaged(bytes(1000)))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["model", "state", "key"])
def test_damaged_files_are_refused(odd: Exported, tmp_path: Path, which: str, damage: str):
    good: Path = getattr(odd, which)
    bad = tmp_path / good.name
    bad.write_bytes(damaged(good.read_bytes())[damage])
    files = {"model": odd.model, "state": odd.state} | ({which: bad} if which != "key" else {})
    given = ("--key", bad) if which == "key" else ("--model", files["model"], "--state", files["state"])
    run = ironhorse("verify", *given)
    assert_could_not_run(run)
    assert bad.name in run.stderr


@pytest.mark.parametrize(("field", "value"), [(1, 99), (2, -1), (3, 0), (4, 2**31 - 1), (5, 7), (6, 2**30), (7, 1003)])
def test_model_header_with_impossible_sizes(odd: Exported, tmp_path: Path, field: int, value: int):
    good = odd.model.read_bytes()
    bad = tmp_path / "m.bin"
    bad.write_bytes(good[: 4 * field] + struct.pack("<i", value) + good[4 * field + 4 :])
    assert_could_not_run(ironhorse("verify", "--model", bad, "--state", odd.state))


def test_files_that_do_not_belong_together(exported: dict[str, Exported], tmp_path: Path):
    odd, other = exported["odd"], exported["one-layer-one-head"]
    assert_could_not_run(ironhorse("verify", "--model", other.model, "--state", odd.state))
    assert_could_not_run(ironhorse("verify", "--model", odd.state, "--state", odd.model))
    assert_could_not_run(ironhorse("verify", "--key", odd.key, "--model", other.model))
    assert_could_not_run(ironhorse("verify", "--model", tmp_path / "missing.bin", "--state", odd.state))
    assert_could_not_run(ironhorse("verify", "--key", tmp_path / "missing.safetensors"))
    assert_could_not_run(ironhorse("verify", "--key", tmp_path))


# ---- what it writes, PyTorch reads -----------------------------------------------------------------------------


def hf_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


def assert_done(run) -> None:
    assert run.returncode == 0, run.stdout + run.stderr


def test_convert_to_hugging_face_and_back(odd: Exported, tmp_path: Path):
    assert_done(convert(odd.model, tmp_path / "hf"))
    key = read_safetensors(odd.key).tensors
    logits = hf_logits(tmp_path / "hf", key["x"])
    assert np.linalg.norm(logits - key["logits"]) <= 1e-5 * np.linalg.norm(key["logits"])
    assert_done(convert(tmp_path / "hf", tmp_path / "back.bin"))
    assert (tmp_path / "back.bin").read_bytes() == odd.model.read_bytes()


def test_convert_reads_what_transformers_wrote(tmp_path: Path):
    import transformers

    sizes = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=150, n_positions=12, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "hf")
    assert_done(convert(tmp_path / "hf", tmp_path / "m.bin"))
    file = read_model(tmp_path / "m.bin")
    ours = GPT2(file.config)
    ours.load_state_dict({name: torch.from_numpy(value) for name, value in file.params.items()})
    tokens = np.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = ours(torch.from_numpy(tokens)).numpy()
    assert np.allclose(logits, hf_logits(tmp_path / "hf", tokens), rtol=0, atol=1e-5)


def test_trained_checkpoint_opens_in_transformers(odd: Exported, tmp_path: Path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        write_shard(tmp_path / f"x_{split}.bin", rng.integers(0, 1003, 2000))
    model = shutil.copy(odd.model, tmp_path / "start.bin")
    assert_done(
        ironhorse("train", "--model", model, "--data", tmp_path / "x_train.bin", "--val-data", tmp_path / "x_val.bin",
                  "--batch", 2, "--seq", 16, "--steps", 3, "--device", "cpu", "--out", tmp_path / "run")
    )  # fmt: skip
    checkpoint = newest_checkpoint(tmp_path / "run")
    tokens = rng.integers(0, 1003, (2, 16))
    logits = hf_logits(checkpoint, tokens)
    assert logits.shape == (2, 16, 1003) and np.isfinite(logits).all()
    before = read_model(odd.model).params["h.0.mlp.c_fc.weight"]
    after = read_safetensors(checkpoint / "model.safetensors").tensors
    name = next(n for n in after if n.endswith("h.0.mlp.c_fc.weight"))
    assert after[name].shape == before.T.shape and not np.array_equal(after[name], before.T)
