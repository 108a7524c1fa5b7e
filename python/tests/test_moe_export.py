"""`python -m ironhorse.export moe`: its files, keys of odd shapes, and how it refuses."""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path

import ironhorse
import numpy as np
import pytest
import safetensors.numpy
import torch
from activations import activation_names
from adamw import ten_steps
from ironhorse.config import NAMED, MoEConfig
from ironhorse.errors import FormatError, IronhorseError
from ironhorse.export import main
from ironhorse.export_answers import _mend
from ironhorse.formats.folders import read_hf_moe
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.formats.staging import Staging
from ironhorse.params import param_shapes, total_params
from ironhorse.reference.moe import MoE
from ironhorse.reference.train import AdamW, Answers, compute_answers, compute_answers_bf16, nearby, torch_errors

SMALL = "C=14,L=2,NH=6,NKV=3,HD=4,E=5,K=2,F=11,V=53,maxT=16,rope_alpha=2.5,aux_alpha=0.3"
ODD = {  # name: model, B, T, further flags
    "e3k1": ("C=24,L=2,NH=3,HD=8,E=3,K=1,F=20,V=99,maxT=16", 3, 11),
    "e8k8": ("C=24,L=2,NH=3,HD=8,E=8,K=8,F=20,V=99,maxT=16", 2, 5),
    "idle": ("C=24,L=2,NH=3,HD=8,E=4,K=2,F=20,V=99,maxT=16", 3, 11, "--init", "idle"),
    "single": ("C=24,L=2,NH=3,HD=8,E=4,K=1,F=20,V=99,maxT=16", 3, 11, "--init", "single"),
    "tied": ("C=24,L=2,NH=3,HD=8,E=4,K=2,F=20,V=99,maxT=16", 3, 11, "--init", "tied"),
    "one-token": ("C=24,L=2,NH=3,HD=8,E=4,K=2,F=20,V=99,maxT=16", 1, 1),
    "gqa-6-3": ("C=24,L=2,NH=6,NKV=3,HD=16,E=4,K=2,F=20,V=99,maxT=16", 2, 7),
    "hd64": ("C=32,L=1,NH=2,NKV=1,HD=64,E=4,K=2,F=20,V=99,maxT=40,rope_alpha=8", 2, 33),
    "hd128": ("C=32,L=1,NH=2,NKV=2,HD=128,E=4,K=2,F=20,V=99,maxT=40,rope_alpha=8", 2, 33),
    "llama": ("C=24,L=2,NH=6,NKV=3,HD=8,F=20,V=99,maxT=16", 3, 11),
}


def export(folder: Path, model: str, batch: int, seq: int, *extra: str) -> tuple[dict, Path]:
    """The report and the path of the key."""
    report = folder.with_suffix(".json")
    flags = ["--batch", str(batch), "--seq", str(seq), "--out", str(folder), "--json", str(report)]
    assert main(["moe", "--model", model, *flags, *extra]) == 0
    written = json.loads(report.read_text())
    key = next(file["name"] for file in written["files"] if file["name"].endswith(".key.safetensors"))
    return written, folder / key


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[dict, Path]:
    return export(tmp_path_factory.mktemp("moe") / "out", SMALL, 3, 7, "--weight-decay", "0.1", "--seed", "3")


def test_files(small):
    report, key = small
    names = ["moe_custom/config.json", "moe_custom/model.safetensors", "moe_custom.key.safetensors"]
    assert [file["name"] for file in report["files"]] == names
    folder = key.parent
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(names)
    assert all((folder / file["name"]).stat().st_size == file["bytes"] for file in report["files"])
    config = MoEConfig.parse(SMALL)
    assert report["config"] == config.to_dict() and report["parameters"] == total_params(config)
    assert len(report["aux"]) == 2 and report["active_parameters"] < report["parameters"]


def test_key(small):
    _, path = small
    key, config = safetensors.numpy.load_file(path), MoEConfig.parse(SMALL)
    meta = read_safetensors(path).metadata
    acts, names = activation_names(config), list(param_shapes(config))
    whole = [f"act.layers.{layer}.experts" for layer in range(2)]
    expected = {"x", "y", "logits", "loss", "aux", "losses"}
    expected |= {f"{kind}.{name}" for kind in ("param", "grad", "after") for name in names}
    expected |= {f"act.{name}" for name in acts} | {f"dact.{name}" for name in acts if not name.endswith(".experts")}
    assert set(key) == expected
    assert all(value.dtype == (np.int32 if name in ("x", "y", *whole) else np.float32) for name, value in key.items())
    for name, shape in param_shapes(config).items():
        assert all(key[f"{kind}.{name}"].shape == shape for kind in ("param", "grad", "after"))
    assert key["aux"].shape == (2,) and key["loss"].shape == () and key["losses"].shape == (10,)
    assert key["logits"].shape == (3, 7, 53) and key["act.layers.0.experts"].shape == (21, 2)
    assert meta["format"] == "ironhorse-answer-key" and (meta["version"], meta["model"]) == ("1", "moe")
    assert MoEConfig(**json.loads(meta["config"])) == config and json.loads(meta["acts"]) == acts
    assert json.loads(meta["crc32"]) == {name: zlib.crc32(value.tobytes()) for name, value in key.items()}
    errors, bf16 = json.loads(meta["torch_error"]), json.loads(meta["torch_error_bf16"])
    assert set(errors) == set(bf16) == set(key) - {"x", "y"} - {f"param.{name}" for name in names}
    assert max(errors.values()) < 1e-4 and all(errors[name] == bf16[name] == 0 for name in whole)
    assert all(error < 0.1 for name, error in bf16.items() if not name.startswith("after."))
    assert json.loads(meta["router"])["margin"] > 0.02


def test_errors_in_bf16_are_not_those_of_one_throw(tmp_path: Path):
    """Every token on one expert: one number outweighs the rest of some gradients. What is recorded, doubled as verify
    does, holds for roundings that were not looked at; what bf16 happens to do once does not.
    """
    _, path = export(tmp_path / "out", "moe-tiny", 2, 32, "--init", "single", "--seed", "1", "--steps", "0")
    key = safetensors.numpy.load_file(path)
    recorded = json.loads(read_safetensors(path).metadata["torch_error_bf16"])
    model = MoE(NAMED["moe-tiny"])
    model.load_state_dict({name: torch.from_numpy(key[f"param.{name}"]) for name, _ in model.named_parameters()})
    x, y = (torch.from_numpy(key[name]).long() for name in "xy")

    def errors(some: MoE) -> dict[str, float]:
        low, exact = compute_answers_bf16(some, x, y, AdamW(), 0), compute_answers(some.double(), x, y, AdamW(), 0)
        return {name: error for name, error in torch_errors(low, exact).items() if not name.endswith(".experts")}

    once, others = errors(copy.deepcopy(model)), [errors(nearby(model, 1000 + i)) for i in range(4)]
    beyond = [{name for name, error in other.items() if error > 2 * bound[name] + 2**-9}
              for bound in (recorded, once) for other in others]  # fmt: skip
    assert not set().union(*beyond[:4]) and set().union(*beyond[4:])
    assert all(once[name] <= error for name, error in recorded.items() if name in once)


def test_answers_are_those_of_f64_where_f32_lost_digits(tmp_path: Path):
    """A sure router: its gradient in PyTorch's f32 is off by more than verify allows, and the key has f64's, to the
    bit. All else is as f32 had it.
    """
    _, path = export(tmp_path / "out", "moe-tiny", 2, 32, "--init", "single", "--steps", "0", "--no-bf16")
    key, errors = safetensors.numpy.load_file(path), json.loads(read_safetensors(path).metadata["torch_error"])
    x, y = (torch.from_numpy(key[name]).long() for name in "xy")
    model = MoE(NAMED["moe-tiny"])
    model.load_state_dict({name: torch.from_numpy(key[f"param.{name}"]) for name, _ in model.named_parameters()})
    exact = compute_answers(copy.deepcopy(model).double(), x, y, AdamW(), 0).tensors
    plain = compute_answers(model, x, y, AdamW(), 0).tensors
    lost = {name for name, error in errors.items() if error > 2e-6}
    assert "grad.model.layers.0.block_sparse_moe.gate.weight" in lost and errors["dact.layers.0.router_logits"] > 1e-5
    assert lost < set(plain)
    for name, value in plain.items():
        assert np.array_equal(key[name], exact[name].float() if name in lost else value), name


def test_answers_of_f64_are_not_those_of_other_experts():
    def answers(experts: list[int], gradient: float) -> Answers:
        tensors = {"act.layers.0.experts": torch.tensor(experts), "grad.w": torch.tensor([gradient])}
        return Answers(tensors, ["layers.0.experts"])

    for chosen, want in (([0, 1], 2.0), ([0, 2], 3.0)):
        got, exact = answers([0, 1], 3.0), answers(chosen, 2.0)
        _mend(got, exact, torch_errors(got, exact))
        assert got.tensors["grad.w"].item() == want


def test_errors_in_bf16_need_no_activations_in_the_key(tmp_path: Path):
    """A throw that sends a token to another expert is left out, and which experts were chosen is an activation: with
    this many experts some throws do.
    """
    sizes = "C=14,L=4,NH=2,HD=6,E=16,K=4,F=12,V=99,maxT=64"
    keys = [export(tmp_path / name, sizes, 2, 64, "--steps", "0", *flags)[1]
            for name, flags in (("with", ()), ("without", ("--no-acts",)))]  # fmt: skip
    recorded = [json.loads(read_safetensors(path).metadata["torch_error_bf16"]) for path in keys]
    kept = {name: error for name, error in recorded[0].items() if not name.startswith(("act.", "dact."))}
    assert recorded[1] == kept and len(kept) < len(recorded[0])


def test_the_key_can_be_recomputed_from_the_files(small):
    """From the Hugging Face folder, in f64: loss, then AdamW written out by hand."""
    _, path = small
    key = safetensors.numpy.load_file(path)
    config, params = read_hf_moe(path.parent / "moe_custom")
    assert list(params) == list(param_shapes(config)) and (config.rope_alpha, config.aux_alpha) == (1.0, 0.3)
    model = MoE(config)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    assert all(np.array_equal(value, key[f"param.{name}"]) for name, value in params.items())
    ten_steps(model.double(), key)
    for name, p in model.named_parameters():
        assert np.linalg.norm(key[f"after.{name}"] - p.detach().numpy()) <= 1e-5 * p.norm().item(), name


@pytest.mark.parametrize("name", ODD)
def test_keys_of_odd_shapes(name: str, tmp_path):
    model, batch, seq, *extra = ODD[name]
    few = () if name in ("one-token", "tied") else ("--no-bf16",)  # the two whose errors in bf16 could be of nothing
    _, path = export(tmp_path / "out", model, batch, seq, "--steps", "2", *extra, *few)
    file = read_safetensors(path)
    key, config = file.tensors, MoEConfig.parse(model)
    assert file.metadata["model"] == ("llama" if name == "llama" else "moe")
    assert all(np.isfinite(value).all() for value in key.values())
    assert set(param_shapes(config)) == {n.removeprefix("grad.") for n in key if n.startswith("grad.")}
    if name == "llama":
        assert "aux" not in key
        return
    for layer in range(config.n_layer):
        counts = np.bincount(key[f"act.layers.{layer}.experts"].ravel(), minlength=config.n_experts)
        assert counts.sum() == batch * seq * config.top_k
        if name == "idle":
            assert counts[1] == 0
        if name == "single":
            assert list(counts) == [0, 0, 0, batch * seq]
        if name == "tied":
            assert list(counts) == [batch * seq] * 2 + [0] * 2
        for expert in np.flatnonzero(counts == 0):
            for part in ("w1", "w2", "w3"):
                assert not key[f"grad.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"].any()
        if name != "one-token":
            assert key[f"grad.model.layers.{layer}.block_sparse_moe.gate.weight"].any()


def test_same_command_same_bytes(small, tmp_path):
    _, path = small
    _, again = export(tmp_path / "out", SMALL, 3, 7, "--weight-decay", "0.1", "--seed", "3")
    for name in ("moe_custom/config.json", "moe_custom/model.safetensors", path.name):
        assert (path.parent / name).read_bytes() == (again.parent / name).read_bytes(), name


def test_from_a_hugging_face_folder(small, tmp_path):
    """Ours, and one that transformers wrote; weights and logits are theirs."""
    _, path = small
    key = safetensors.numpy.load_file(path)
    _, same = export(tmp_path / "same", str(path.parent / "moe_custom"), 3, 7, "--seed", "3", "--steps", "0")
    assert np.array_equal(safetensors.numpy.load_file(same)["param.lm_head.weight"], key["param.lm_head.weight"])
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=50, max_position_embeddings=12, bos_token_id=None,
                 eos_token_id=None)  # fmt: skip
    mixtral = transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    for name, theirs in (
        ("mixtral", transformers.MixtralForCausalLM(mixtral)),
        ("llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))),
    ):
        theirs.eval().save_pretrained(tmp_path / name)
        _, made = export(tmp_path / f"{name}-out", str(tmp_path / name), 2, 9, "--steps", "1", "--stem", name)
        file = read_safetensors(made)
        with torch.no_grad():
            expected = theirs(torch.from_numpy(file.tensors["x"].astype(np.int64))).logits.numpy()
        assert np.allclose(file.tensors["logits"], expected, rtol=0, atol=1e-5)
        assert file.metadata["model"] == ("moe" if name == "mixtral" else "llama")


def test_a_folder_with_a_missing_or_wrong_tensor(small, tmp_path):
    source = small[1].parent / "moe_custom"
    whole = read_safetensors(source / "model.safetensors").tensors
    expert = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    cases = {
        f"tensor `{expert}` is missing": {name: value for name, value in whole.items() if name != expert},
        f"shape of `{expert}` is [11, 14], expected [14, 11]": whole | {expert: whole[expert].T},
        "tensor is `extra`, expected only those of": whole | {"extra": np.zeros(1, "f4")},
        f"dtype of `{expert}` is I32, expected F32, BF16 or F16": whole | {expert: whole[expert].astype("i4")},
        "number of tensors is 5, expected at least": dict(list(whole.items())[:5]),
    }
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    for says, tensors in cases.items():
        write_safetensors(tmp_path / "model.safetensors", tensors)
        with pytest.raises(FormatError) as caught:
            read_hf_moe(tmp_path)
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "d12"], "model is d12, a gpt2, expected a moe"),
        (["--model", "moe-tiny", "--seq", "513"], "max_seq_len"),
        (["--model", "moe-tiny", "--init", "gpt2"], "--init"),
        (["--model", "C=12,L=1,NH=3,F=7,V=20", "--init", "idle"], "no experts"),
        (["--model", "C=12,L=1,NH=3,F=7,V=20,E=2,K=2", "--init", "idle"], "smaller top_k"),
        (["--model", "C=12,L=1,NH=3,F=7,V=20,E=2,K=3"], "top_k is 3"),
        (["--model", "mistralai/Mixtral-8x7B-v0.1"], "unknown model"),
        (["--hf", "mistralai/Mixtral-8x7B-v0.1"], "no such folder"),
        ([], "no --model; give moe-6.9b"),
    ],
)
def test_refusals(tmp_path, capsys, arguments: list[str], says: str):
    assert main(["moe", *arguments, "--out", str(tmp_path / "deep" / "out")]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert captured.out == "" and list(tmp_path.iterdir()) == []


def test_from_python(tmp_path):
    made = ironhorse.export("moe", model=NAMED["moe-tiny"], out=tmp_path, batch=1, seq=4, steps=1, init="single")
    assert (made.kind, made.name) == ("moe", "moe-tiny") and made.key == tmp_path / "moe-tiny.key.safetensors"
    assert made.model == tmp_path / "moe-tiny" and read_hf_moe(made.model)[0] == NAMED["moe-tiny"]
    assert made.config["top_k"] == 2 and "moe-tiny" in str(made)
    with pytest.raises(IronhorseError, match="init is 'gpt2'; expected one of spread, mixtral, idle, single, tied"):
        ironhorse.export("moe", model="moe-tiny", out=tmp_path, init="gpt2")


def test_a_failure_leaves_no_folder_below(tmp_path):
    with pytest.raises(RuntimeError), Staging(tmp_path / "out") as staging:
        staging.path("a/b/c.bin").write_text("x")
        staging.path("d").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with Staging(tmp_path / "out") as staging:
        staging.path("a/b/c.bin").write_text("x")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == ["out/a/b/c.bin"]
