"""Adapters (LoRA): gradients and steps against PEFT's, its files there and back, merging, runs that go on, and what is
refused. Needs IRONHORSE_BIN.
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
from cli import assert_could_not_run, convert, newest_checkpoint, one_changed, rewrite_key, verify
from cli import ironhorse as command
from ironhorse.formats.safetensors import read_safetensors
from ironhorse.formats.shards import write_shard
from test_moe_export import export

transformers = pytest.importorskip("transformers", minversion="5.0", reason="the keys are made by transformers 5")
peft = pytest.importorskip("peft", reason="the keys are made by PEFT")

from lm_models import sentence, write_model  # noqa: E402
from lora_keys import Adapters, adapted, make_key, parts  # noqa: E402

ALL = "q,k,v,o,gate,up,down"
MODELS = {  # name: model, B, T, adapters
    "llama-all": ("kind=llama,C=24,L=2,NH=6,NKV=3,HD=10,F=20,V=99,maxT=40,tied=true", 2, 17, Adapters(4, 8, ALL)),
    "qwen2-qv": ("kind=qwen2,C=24,L=2,NH=6,NKV=2,HD=4,F=20,V=99,maxT=16", 3, 13, Adapters(3, 7, "q,v")),
    "qwen3-some": ("kind=qwen3,C=20,L=2,NH=5,NKV=1,HD=6,F=14,V=99,maxT=16", 2, 9, Adapters(16, 16, "k,o,gate,down")),
    "one-token": ("kind=mistral,C=18,L=1,NH=3,NKV=1,HD=6,F=7,V=31,maxT=4", 1, 1, Adapters(1, 0.5, "v,up")),
    "qwen3_moe": (
        "kind=qwen3_moe,C=24,L=2,NH=6,NKV=2,HD=6,E=5,K=2,F=14,V=99,maxT=16,aux_alpha=0", 3, 7,
        Adapters(4, 8, "q,k,v,o"),
    ),
    # a factor of 2/3: with one of 7/3 PEFT's own gradients are 1.1e-5 from those in f64, more than is allowed
    "qwen3_moe-all": (
        "kind=qwen3_moe,C=24,L=2,NH=6,NKV=2,HD=6,E=5,K=2,F=14,V=99,maxT=16,aux_alpha=0", 3, 7, Adapters(3, 2, ALL)
    ),
    "mixtral-all": ("C=24,L=2,NH=6,NKV=3,HD=8,E=4,K=2,F=20,V=99,maxT=16,aux_alpha=0", 2, 9, Adapters(4, 8, ALL)),
    "mixtral-some": ("C=18,L=1,NH=3,NKV=1,HD=6,E=3,K=3,F=7,V=31,maxT=16,aux_alpha=0", 2, 5, Adapters(2, 6, "gate,up")),
    "idle-experts": (  # three tokens, nine experts
        "kind=qwen3_moe,C=24,L=1,NH=6,NKV=2,HD=6,E=9,K=1,F=14,V=99,maxT=16,aux_alpha=0", 1, 3, Adapters(8, 8, "v,down")
    ),
}  # fmt: skip
TRAIN = ("--batch", 2, "--seq", 16, "--lr", "1e-2", "--val-batches", 0, "--sample-tokens", 0, "--device", "cpu")


def write_key(name: str, folder: Path, bf16: bool = False) -> Path:
    """The key of one of the models above, whose every number is PEFT's."""
    model, batch, seq, adapters = MODELS[name]
    flags = ("--reference", "transformers", "--steps", "0", "--no-bf16", "--no-acts")
    _, base = export(folder / name, model, batch, seq, *flags)
    make_key(base, adapters, folder / f"{name}.key.safetensors", bf16)
    return folder / f"{name}.key.safetensors"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lora")
    return {name: write_key(name, folder) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_steps_are_those_of_peft(keys: dict[str, Path], name: str, tmp_path: Path):
    outcome = verify(tmp_path, "--key", keys[name])
    assert outcome.code == 0 and outcome.failing() == [], outcome.text
    compared = {tensor["name"] for tensor in outcome.report["tensors"]}
    theirs = {tensor for tensor in read_safetensors(keys[name]).tensors if tensor.startswith(("grad.", "after."))}
    assert theirs and theirs | {"logits", "loss", "losses"} <= compared
    model, targets = MODELS[name][0], MODELS[name][3].targets.split(",")
    layers, experts = int(model.split("L=")[1][0]), int(model.split("E=")[1][0]) if "E=" in model else 1
    count = sum(experts if target in ("gate", "up", "down") else 1 for target in targets)
    assert len(theirs) == 2 * 2 * layers * count and all("lora_" in tensor for tensor in theirs)
    for level in ("full", "experts") if experts > 1 else ("full",):
        again = verify(tmp_path, "--key", keys[name], "--recompute", level)
        assert again.code == 0, again.text


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize(
    ("name", "place"), [("qwen2-qv", "self_attn.v_proj"), ("qwen3_moe-all", "mlp.experts.3.up_proj")]
)
def test_a_changed_gradient_is_found(keys: dict[str, Path], name: str, place: str, side: str, tmp_path: Path):
    tensor = f"grad.model.layers.1.{place}.lora_{side}.weight"
    was = read_safetensors(keys[name]).tensors[tensor]
    rewrite_key(keys[name], tmp_path / "changed.key.safetensors", {tensor: one_changed(was, (0, 0))})
    outcome = verify(tmp_path, "--key", tmp_path / "changed.key.safetensors")
    assert outcome.code == 1 and outcome.failing() == [tensor]


# ---- runs and files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a tokenizer, and tokens to learn beside it."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    write_model(folder, "llama")
    text = "\n".join(sentence(seed, 60) for seed in range(40))
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    write_shard(folder.parent / "text.bin", np.array(ids, np.uint16))
    return folder


def train(base: Path, out: Path, *flags: object) -> Path:
    run = command("train", "--init", base, "--data", base.parent / "text.bin", "--out", out, *TRAIN, *flags)
    assert run.returncode == 0, run.stderr
    return out


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(base, tmp_path_factory.mktemp("runs") / "run", "--lora", 4, "--alpha", 8, "--steps", 24)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_its_checkpoint_is_a_folder_of_peft(base: Path, run: Path):
    checkpoint = newest_checkpoint(run)
    names = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "state.safetensors", "trainer.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    assert np.mean(losses(run)[-5:]) < np.mean(losses(run)[:5]) - 0.3
    trainer = json.loads((checkpoint / "trainer.json").read_text())["adapter"]
    assert (trainer["rank"], trainer["alpha"], trainer["targets"]) == (4, 8, ALL) and trainer["base"] == str(base)
    theirs = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), checkpoint)
    read = {name: param for name, param in theirs.named_parameters() if "lora_" in name}
    ours = read_safetensors(checkpoint / "adapter_model.safetensors").tensors
    assert len(read) == len(ours) == 2 * 2 * 7
    for name, values in ours.items():
        assert torch.equal(read[name.replace(".weight", ".default.weight")], torch.from_numpy(values.copy())), name
    assert all(np.abs(values).max() > 0 for values in ours.values()), "B has moved away from 0"


def test_the_start_is_that_of_the_base(base: Path, tmp_path: Path):
    """B is 0 at first, so the first loss is the base's, whatever the adapters are."""
    first = {
        flags: losses(train(base, tmp_path / f"run-{number}", *flags.split(), "--steps", 1))
        for number, flags in enumerate(("--lora 4", "--lora 7 --targets q,down", "--lr 0"))
    }
    assert len({tuple(value) for value in first.values()}) == 1, first


def test_a_run_goes_on_with_the_same_bits(base: Path, run: Path, tmp_path: Path):
    flags = ("--lora", 4, "--alpha", 8, "--steps", 24, "--save-every", 12, "--keep", 0)
    other = train(base, tmp_path / "other", *flags)
    shutil.rmtree(other / "checkpoints" / "step-000024")
    resumed = command("train", "--resume", other)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("adapter_model.safetensors", "state.safetensors"):
        assert (newest_checkpoint(other) / name).read_bytes() == (newest_checkpoint(run) / name).read_bytes(), name


def greedy(model: Path, *flags: object, out: Path) -> list | dict:
    text = ("--prompt", "the sun", "--greedy", "--tokens", 24, "--context", 48, "--device", "cpu", "--json", out)
    arguments = [os.environ["IRONHORSE_BIN"], "generate", "--model", model, *text, *flags]
    written = subprocess.run([str(one) for one in arguments], capture_output=True, timeout=300)  # not all is UTF-8
    assert written.returncode == 0, written.stderr
    return json.loads(out.read_text())


def theirs_greedy(model: torch.nn.Module, tokenizer: object, count: int) -> list[int]:
    prompt = torch.tensor([tokenizer("the sun")["input_ids"]])  # type: ignore[operator]
    with torch.no_grad():
        out = model.generate(input_ids=prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, prompt.shape[1] :].tolist()


def test_adapters_of_peft_decode_as_there(base: Path, tmp_path: Path):
    """Two of different ranks and targets on one base, which is loaded once."""
    tokenizer, wanted, flags = transformers.AutoTokenizer.from_pretrained(base), {}, []
    for name, adapters in {"one": Adapters(4, 8, "q,v,up"), "two": Adapters(2, 6, "o,down")}.items():
        model = adapted(base, adapters, seed=len(name) + adapters.rank)
        model.save_pretrained(tmp_path / name)
        wanted[name] = theirs_greedy(model, tokenizer, 24)
        flags += ["--adapter", f"{name}={tmp_path / name}"]
    assert wanted["one"] != wanted["two"]
    got = greedy(base, *flags, out=tmp_path / "both.json")
    for report in got:
        count = len(report["tokens"])  # ours ends before the token between texts
        assert count > 2 and report["tokens"] == wanted[report["adapter"]][:count]
    alone = greedy(base, *flags[:2], out=tmp_path / "one.json")
    assert alone["tokens"] == next(report["tokens"] for report in got if report["adapter"] == "one")


def test_merged_weights_are_those_of_peft(base: Path, run: Path, tmp_path: Path):
    report = tmp_path / "report.json"
    made = convert(base, tmp_path / "merged", "--merge", run, "--device", "cpu", "--json", report)
    assert made.returncode == 0 and "merged and unmerged: KL" in made.stdout, made.stderr
    found = json.loads(report.read_text())["merge"]
    assert found["positions"] == 4 * 48 and found["greedy_agreement"] > 0.98
    assert 0 <= found["kl_mean"] <= found["kl_max"] < 1e-6, "f32 weights round little"
    theirs = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base),
                                            newest_checkpoint(run)).merge_and_unload()  # fmt: skip
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in theirs.state_dict().items():
        assert (ours[name] - value).norm() <= 1e-6 * value.norm(), name
    convert(base, tmp_path / "bf16", "--merge", run, "--dtype", "bf16", "--device", "cpu", "--json", report)
    coarse = json.loads(report.read_text())["merge"]
    assert coarse["kl_mean"] > found["kl_mean"], "bf16 rounds more"
    # a run with adapters is also a model
    assert convert(run, tmp_path / "again").returncode == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], value) for name, value in ours.items())
    as_model = greedy(run, out=tmp_path / "model.json")
    assert as_model["tokens"] == greedy(base, "--adapter", run, out=tmp_path / "adapter.json")["tokens"]


def test_plan_counts_neither_gradients_nor_moments_of_the_base(tmp_path: Path):
    def planned(*flags: object) -> dict:
        out = tmp_path / "plan.json"
        done = command("plan", "--model", "qwen3-8b", "--batch", 1, "--seq", 64, "--dtype", "bf16", "--device", "cpu",
                       "--json", out, *flags)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    whole, some = planned(), planned("--lora", 16)
    assert some["bytes"]["frozen weights"] == whole["bytes"]["parameters"]
    assert some["trained_parameters"] == 43_646_976 and some["bytes"]["parameters"] < 100 * 2**20
    kept = sum(some["bytes"][pool] for pool in ("gradients", "first moments", "second moments", "master weights"))
    assert kept < 14.1 * some["trained_parameters"]  # bf16 gradients; moments and master weights in f32
    assert some["total_bytes"] < 0.25 * whole["total_bytes"]


def test_plan_counts_the_adapters_of_every_expert(tmp_path: Path):
    """Layers × ((r·C + width·r) of q, k, v and o, and of every expert 3·r·(C + F))."""
    out, model = tmp_path / "plan.json", "kind=qwen3_moe,C=24,L=2,NH=6,NKV=2,HD=6,E=5,K=2,F=14,V=99,maxT=16"
    done = command("plan", "--model", model, "--lora", 3, "--targets", "all", "--seq", 8, "--device", "cpu",
                   "--json", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    attention = sum(3 * (24 + width) for width in (36, 12, 12, 36))
    assert json.loads(out.read_text())["trained_parameters"] == 2 * (attention + 5 * 3 * 3 * (24 + 14))


# ---- experts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A mixture with a tokenizer, and a run that trained adapters of all its weights."""
    folder = tmp_path_factory.mktemp("mixture") / request.param
    write_model(folder, request.param)
    text = "\n".join(sentence(seed, 60) for seed in range(40))
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    write_shard(folder.parent / "text.bin", np.array(ids, np.uint16))
    return folder, train(folder, folder.parent / "run", "--lora", 3, "--alpha", 8, "--targets", "all", "--steps", 24)


def loaded(base: Path, adapter: Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.set_experts_implementation("eager")
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


def test_adapters_of_experts_are_read_by_peft(mixture: tuple[Path, Path], tmp_path: Path):
    base, run = mixture
    assert np.mean(losses(run)[-5:]) < np.mean(losses(run)[:5]) - 0.3
    checkpoint = newest_checkpoint(run)
    ours = {
        name.removeprefix("base_model.model."): values
        for name, values in read_safetensors(checkpoint / "adapter_model.safetensors").tensors.items()
    }
    theirs = loaded(base, checkpoint)
    read = {part.name: part.of(part.param.detach()) for part in parts(theirs)}
    assert read.keys() == ours.keys()
    for name, values in ours.items():
        assert np.abs(values).max() > 0 and torch.equal(read[name], torch.from_numpy(values.copy())), name
    stacked = [param for name, param in theirs.named_parameters() if ".experts.base_layer.lora_B" in name]
    assert stacked and all(int((param != 0).sum()) <= param.numel() / 2 for param in stacked), "gate apart from up"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    wanted = theirs_greedy(theirs, tokenizer, 24)
    got = greedy(base, "--adapter", run, out=tmp_path / "got.json")["tokens"]
    plain = greedy(base, out=tmp_path / "plain.json")["tokens"]
    assert len(got) > 2 and got == wanted[: len(got)] and got != plain


@pytest.mark.parametrize("targets", [ALL, "down", "q,gate,up"])
def test_stacked_adapters_of_peft_are_read(mixture: tuple[Path, Path], targets: str, tmp_path: Path):
    """As PEFT trains them: gate and up of an expert share an A of twice the rank."""
    base, _ = mixture
    theirs = adapted(base, Adapters(2, 3, targets))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in (param for param in theirs.parameters() if param.requires_grad):
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    theirs.save_pretrained(tmp_path / "peft")
    got = greedy(base, "--adapter", tmp_path / "peft", out=tmp_path / "got.json")["tokens"]
    wanted = theirs_greedy(theirs, transformers.AutoTokenizer.from_pretrained(base), 24)
    assert len(got) > 2 and got == wanted[: len(got)]
    made = convert(base, tmp_path / "merged", "--merge", tmp_path / "peft", "--device", "cpu")
    assert made.returncode == 0, made.stderr
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in theirs.merge_and_unload().state_dict().items():
        assert (ours[name] - value).norm() <= 1e-6 * value.norm(), name


def test_merged_experts_are_those_of_peft(mixture: tuple[Path, Path], tmp_path: Path):
    base, run = mixture
    report = tmp_path / "report.json"
    made = convert(base, tmp_path / "merged", "--merge", run, "--device", "cpu", "--json", report)
    assert made.returncode == 0, made.stderr
    assert json.loads(report.read_text())["merge"]["kl_max"] < 1e-6, "f32 weights round little"
    theirs = loaded(base, newest_checkpoint(run)).merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, value in theirs.items():
        assert (ours[name] - value).norm() <= 1e-6 * value.norm(), name
        assert torch.equal(value, before[name]) == (not any(part in name for part in ("_proj", ".experts."))), name


def test_a_run_with_experts_goes_on_with_the_same_bits(mixture: tuple[Path, Path], tmp_path: Path):
    base, run = mixture
    flags = ("--lora", 3, "--alpha", 8, "--targets", "all", "--steps", 24, "--save-every", 12, "--keep", 0)
    other = train(base, tmp_path / "other", *flags)
    shutil.rmtree(other / "checkpoints" / "step-000024")
    resumed = command("train", "--resume", other)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("adapter_model.safetensors", "state.safetensors"):
        assert (newest_checkpoint(other) / name).read_bytes() == (newest_checkpoint(run) / name).read_bytes(), name


# ---- bad input ---------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name(base: Path, run: Path, tmp_path: Path):
    write_model(tmp_path / "llama", "llama")
    other = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    for file in base.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "other" / file.name)
    data = ("--data", base.parent / "text.bin", "--out", tmp_path / "never", *TRAIN)
    cases = {
        ("generate", "--model", tmp_path / "other", "--adapter", run): "for the base",
        ("convert", tmp_path / "other", tmp_path / "out", "--merge", run): "for the base",
        ("generate", "--model", base, "--adapter", base): "adapter_config.json",
        ("generate", "--model", base, "--adapter", f"a={run}", "--adapter", f"a={run}"): "--adapter",
        ("generate", "--model", newest_checkpoint(run).parent): "",
        ("train", "--lora", 4): "--init",
        ("train", "--init", base, "--lora", 4, "--targets", "q,lm_head", *data): "lm_head",
        ("train", "--init", base, "--lora", 400, *data): "400",
        ("train", "--init", base, "--lora", 4, "--optimizer", "muon", *data): "muon",
        ("train", "--init", base, "--alpha", 4, *data): "--lora",
    }
    for arguments, named in cases.items():
        refused = command(*arguments)
        assert_could_not_run(refused)
        assert named in refused.stderr, (arguments, refused.stderr)
    assert not (tmp_path / "never").exists()
    # the base of a run changes under it
    moved = tmp_path / "moved"
    shutil.copytree(base, moved / "llama")
    shutil.copy(base.parent / "text.bin", moved / "text.bin")
    started = train(moved / "llama", tmp_path / "started", "--lora", 2, "--steps", 2, "--save-every", 1, "--keep", 0)
    shutil.rmtree(newest_checkpoint(started))
    shutil.copy(tmp_path / "other" / "model.safetensors", moved / "llama" / "model.safetensors")
    refused = command("train", "--resume", started)
    assert_could_not_run(refused)
    assert "digest" in refused.stderr and "another model" in refused.stderr


def test_sets_of_experts_targets_that_peft_does_not_read_are_refused(tmp_path: Path):
    model = ("--model", MODELS["qwen3_moe"][0], "--lora", 4, "--seq", 8, "--device", "cpu")
    for targets in ("q,up", "gate,up", "gate,down"):
        refused = command("plan", *model, "--targets", targets)
        assert_could_not_run(refused)
        assert "gate, up and down" in refused.stderr and "down alone" in refused.stderr, refused.stderr
    assert command("plan", *model, "--targets", "q,down").returncode == 0


def test_trained_names_are_those_of_the_key(keys: dict[str, Path]):
    folder = next((keys["qwen2-qv"].parent / "qwen2-qv").glob("*/config.json")).parent
    names = {part.name for part in parts(adapted(folder, MODELS["qwen2-qv"][3]))}
    params = {name for name in read_safetensors(keys["qwen2-qv"]).tensors if "lora_" in name}
    assert {f"param.{name}" for name in names} <= params
