"""Hugging Face folders of mixtures of experts and Llamas, in one file and in several, f32 and bf16: transformers, the
command and `ironhorse.load`/`save` against each other. Needs IRONHORSE_BIN.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import ironhorse
import ironhorse._native
import numpy as np
import pytest
import torch
from cli import assert_could_not_run, convert, newest_checkpoint
from ironhorse.config import NAMED, GPT2Config, MoEConfig, parse_config
from ironhorse.errors import FormatError, IronhorseError
from ironhorse.formats.bf16 import from_bf16
from ironhorse.formats.hf_files import INDEX, parse_size
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.params import param_shapes
from load_save_files import same_folders

transformers = pytest.importorskip("transformers")

SIZES = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=4,
    intermediate_size=20, vocab_size=99, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 54321.0},
)  # fmt: skip
SHARD = "9KB"
NAMES = [f"{kind}-{dtype}" for kind in ("mixtral", "llama") for dtype in ("f32", "bf16")]


def build(name: str) -> torch.nn.Module:
    """A random model of transformers' own making."""
    torch.manual_seed(5)
    if name.startswith("mixtral"):
        config = transformers.MixtralConfig(
            **SIZES, num_local_experts=3, num_experts_per_tok=2, router_aux_loss_coef=0.02
        )
        model = transformers.MixtralForCausalLM(config)
        model.set_experts_implementation("eager")  # the default asks for widths that are multiples of 16 bytes
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return (model.bfloat16() if name.endswith("bf16") else model).eval()


def opened(folder: Path) -> torch.nn.Module:
    """What transformers makes of a folder; nothing may be missing or left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(14).reshape(2, 7) * 5).logits


def parts(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if re.fullmatch(r"model-\d{5}-of-\d{5}.safetensors", name))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that transformers wrote, in several files."""
    top = tmp_path_factory.mktemp("theirs")
    for name in NAMES:
        build(name).save_pretrained(top / name, max_shard_size=SHARD)
        (top / name / "generation_config.json").unlink()  # that it goes along is tested in test_families
        assert len(parts(top / name)) > 2
    return {name: top / name for name in NAMES}


# ---- with the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_several_files_go_there_and_back(theirs: dict[str, Path], name: str, tmp_path: Path):
    dtype = name.partition("-")[2]
    for flags in ((), ("--shard-size", SHARD), ("--shard-size", "1")):
        folder = tmp_path / "ours"
        run = convert(theirs[name], folder, "--dtype", dtype, *flags)
        assert run.returncode == 0, run.stderr
        files = parts(folder)
        if not flags:
            assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
        else:
            assert sorted(os.listdir(folder)) == sorted(["config.json", INDEX, *files])
            index = json.loads((folder / INDEX).read_text())
            held = [read_safetensors(folder / file).tensors for file in files]
            assert index["weight_map"] == {t: file for file, part in zip(files, held, strict=True) for t in part}
            sizes = [sum(tensor.nbytes for tensor in part.values()) for part in held]
            assert index["metadata"]["total_size"] == sum(sizes)
            assert all(size <= parse_size(flags[1]) or len(part) == 1 for size, part in zip(sizes, held, strict=True))
        model = opened(folder)
        assert model.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
        assert model.config.rope_parameters["rope_theta"] == 54321.0
        assert torch.equal(logits(model), logits(opened(theirs[name])))


def test_precision_changes_on_the_way(theirs: dict[str, Path], tmp_path: Path):
    assert convert(theirs["mixtral-bf16"], tmp_path / "wide").returncode == 0  # f32 is the default
    assert convert(theirs["mixtral-f32"], tmp_path / "narrow", "--dtype", "bf16", "--shard-size", "4KB").returncode == 0
    for name, dtype, source in (("wide", torch.float32, "mixtral-bf16"), ("narrow", torch.bfloat16, "mixtral-f32")):
        found, expected = opened(tmp_path / name).state_dict(), opened(theirs[source]).state_dict()
        assert found.keys() == expected.keys()
        for tensor, value in found.items():
            assert value.dtype == dtype and torch.equal(value, expected[tensor].to(dtype)), tensor


def test_a_failed_conversion_leaves_what_was_there(theirs: dict[str, Path], tmp_path: Path):
    assert convert(theirs["mixtral-f32"], tmp_path / "ours", "--shard-size", SHARD).returncode == 0
    shutil.copytree(tmp_path / "ours", tmp_path / "before")
    bad = tmp_path / "bad"
    shutil.copytree(theirs["mixtral-f32"], bad)
    last = bad / parts(bad)[-1]
    tensors = {name: np.array(tensor) for name, tensor in read_safetensors(last).tensors.items()}
    tensors[list(tensors)[-1]].flat[0] = np.nan  # found out when most of it is written
    write_safetensors(last, tensors, {"format": "pt"})
    run = convert(bad, tmp_path / "ours", "--shard-size", "2KB")
    assert_could_not_run(run)
    assert "expected a finite number" in run.stderr
    assert same_folders(tmp_path / "ours", tmp_path / "before")
    assert sorted(os.listdir(tmp_path)) == ["bad", "before", "ours"]
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    run = convert(theirs["mixtral-f32"], tmp_path / "ours")
    assert_could_not_run(run)
    assert "not replaced because it holds notes.txt" in run.stderr


@pytest.mark.parametrize("size", ["0", "-5GB", "5 lots", "nan"])
def test_senseless_shard_sizes(theirs: dict[str, Path], size: str, tmp_path: Path):
    run = convert(theirs["llama-f32"], tmp_path / "ours", f"--shard-size={size}")
    assert_could_not_run(run)
    assert "--shard-size" in run.stderr and "such as 500MB or 5GB" in run.stderr


def _damage(folder: Path, what: str) -> None:
    files = parts(folder)
    index = json.loads((folder / INDEX).read_text())
    places = index["weight_map"]
    expert = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    if what == "shard":
        (folder / files[1]).unlink()
    elif what == "unknown":
        places["lm_head.weight"] = "other.safetensors"
    elif what == "outside":
        places["lm_head.weight"] = "../model.safetensors"
    elif what == "elsewhere":
        places[expert] = next(file for file in files if file != places[expert])
    elif what in ("expert", "shape", "twice"):
        file = folder / places[expert]
        tensors = {name: np.array(tensor) for name, tensor in read_safetensors(file).tensors.items()}
        if what == "expert":
            del tensors[expert], places[expert]
        elif what == "shape":
            tensors[expert] = tensors[expert].T.copy()
        else:
            tensors["lm_head.weight"] = np.zeros((99, 24), np.float32)
        write_safetensors(file, tensors, {"format": "pt"})
    elif what == "index":
        (folder / INDEX).unlink()
        return
    else:
        index["weight_map"] = None
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("shard", "file is missing, expected in the folder"),
        ("unknown", "other.safetensors: file is missing"),
        ("outside", "expected an object: names of tensors and of files in this folder"),
        ("elsewhere", "experts.2.w3.weight` is in this file, but"),
        ("expert", "experts.2.w3.weight` is missing"),
        ("shape", "experts.2.w3.weight` is [24, 20], expected [20, 24]"),
        ("twice", "tensor `lm_head.weight` is also in"),
        ("index", "index.json: file is missing, expected in the folder"),
        ("map", "weight_map is null"),
    ],
)
def test_what_is_wrong_is_named(theirs: dict[str, Path], what: str, says: str, tmp_path: Path):
    folder = tmp_path / "bad"
    shutil.copytree(theirs["mixtral-f32"], folder)
    _damage(folder, what)
    run = convert(folder, tmp_path / "out")
    assert_could_not_run(run)
    assert says in run.stderr and not (tmp_path / "out").exists()
    with pytest.raises(FormatError) as caught:
        ironhorse.load(folder)
    assert says in str(caught.value) and "\n" not in str(caught.value)


# ---- in Python -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_load_and_save(theirs: dict[str, Path], name: str, framework: str, tmp_path: Path):
    kind, dtype = name.split("-")
    loaded = ironhorse.load(theirs[name], framework)
    assert (loaded.kind, loaded.dtype, loaded.config.kind) == ("hf", dtype, "moe" if kind == "mixtral" else "llama")
    shapes = param_shapes(loaded.config)
    assert set(loaded.params) == set(shapes) and loaded.meta["model_type"] == kind
    held = {n: t for file in parts(theirs[name]) for n, t in read_safetensors(theirs[name] / file).tensors.items()}
    for tensor, shape in shapes.items():
        value = loaded.tensors[tensor]
        assert tuple(value.shape) == shape
        if framework == "torch":
            assert value.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
            value = value.float().numpy()
        assert np.array_equal(value, from_bf16(held[tensor]) if dtype == "bf16" else held[tensor]), tensor
    assert f"n_experts {3 if kind == 'mixtral' else 0}" in str(loaded)
    for flags, size in (((), "5GB"), (("--shard-size", SHARD), SHARD)):
        ironhorse.save(tmp_path / "python", dict(loaded.tensors), config=loaded.config, dtype=dtype, shard_size=size)
        assert convert(theirs[name], tmp_path / "rust", "--dtype", dtype, *flags).returncode == 0
        kept, alone = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("rust", "python"))
        tokens = ("bos_token_id", "eos_token_id")  # tensors alone say nothing of these, and of what has no effect
        assert [kept[key] for key in tokens] == [1, 2] and [alone[key] for key in tokens] == [98, 98]
        assert {key: kept[key] for key in alone if key not in tokens} | dict.fromkeys(tokens, 98) == alone
        shutil.copy(tmp_path / "python/config.json", tmp_path / "rust/config.json")
        assert same_folders(tmp_path / "python", tmp_path / "rust")
        saved = ironhorse.save(tmp_path / "python", loaded, shard_size=size)  # keeps their config.json
        assert (tmp_path / "python/config.json").read_bytes() == (theirs[name] / "config.json").read_bytes()
        assert saved.bytes == sum(file.stat().st_size for file in (tmp_path / "python").iterdir())
        assert torch.equal(logits(opened(tmp_path / "python")), logits(opened(theirs[name])))
    assert ironhorse.load(tmp_path / "python" / INDEX).kind == "hf"


@pytest.mark.parametrize("said", [{"bos_token_id": 1, "eos_token_id": [2, 7]}, {"eos_token_id": None}, {}])
def test_the_tokens_around_a_text_are_kept(theirs: dict[str, Path], said: dict, tmp_path: Path):
    folder = tmp_path / "said"
    shutil.copytree(theirs["mixtral-f32"], folder)
    table = json.loads((folder / "config.json").read_text())
    table = {key: value for key, value in table.items() if key not in ("bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(table | said))
    ironhorse.save(tmp_path / "python", ironhorse.load(folder), dtype="bf16")
    assert convert(folder, tmp_path / "rust", "--dtype", "bf16").returncode == 0
    assert same_folders(tmp_path / "python", tmp_path / "rust")
    for made in ("python", "rust"):
        found = json.loads((tmp_path / made / "config.json").read_text())
        assert {key: found[key] for key in ("bos_token_id", "eos_token_id") if key in found} == said
        assert opened(tmp_path / made).config.eos_token_id == opened(folder).config.eos_token_id


def test_a_model_from_tensors_by_name(tmp_path: Path):
    config = NAMED["moe-tiny"]
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.05, shape).astype("f4") for name, shape in param_shapes(config).items()}
    ironhorse.save(tmp_path / "tiny", tensors, config="moe-tiny", shard_size=400_000)
    again = ironhorse.load(tmp_path / "tiny")
    assert again.config == config and len(parts(tmp_path / "tiny")) > 1
    assert all(np.array_equal(again.tensors[name], tensors[name]) for name in tensors)
    missing = {name: tensor for name, tensor in tensors.items() if not name.endswith("experts.3.w2.weight")}
    for what, says, options in (
        (missing, "no tensor model.layers.0.block_sparse_moe.experts.3.w2.weight to save", {}),
        (tensors | {"model.norm.weight": np.ones(3)}, r"model.norm.weight is \[3\], expected \[64\]", {}),
        (tensors, 'shard_size is 0; give bytes above 0, or text such as "500MB"', {"shard_size": 0}),
        (tensors, "shard_size is '5 lots'", {"shard_size": "5 lots"}),
        (tensors, "shard_size is True", {"shard_size": True}),
        (tensors, "top_k is 9", {"config": "hidden=64,layers=2,heads=4,ffn=256,experts=4,top_k=9"}),
        (tensors, "config is of type dict", {"config": {}}),
        (tensors, "holds a GPT-2 only, not a moe", {"format": "model"}),
    ):
        with pytest.raises(IronhorseError, match=says):
            ironhorse.save(tmp_path / "new", what, **{"config": config} | options)
        assert sorted(os.listdir(tmp_path)) == ["tiny"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("d12", GPT2Config),
        ("n_layer=2,n_head=2,n_embd=8", GPT2Config),
        ("kind=llama,n_layer=2,n_head=2,n_embd=8,ffn=4", MoEConfig),
        ("C=8,L=1,NH=2,F=4", MoEConfig),
        ("moe-6.9b", MoEConfig),
    ],
)
def test_the_kind_of_sizes(text: str, kind: type, tmp_path: Path):
    assert isinstance(parse_config(text), kind)
    if "=" in text:
        table = [item.split("=") for item in text.split(",")]
        lines = "".join(f"{key} = {value if value.isdigit() else repr(value)}\n" for key, value in table)
        (tmp_path / "sizes.toml").write_text("\ufeff" + lines, encoding="utf-8")  # as Windows editors save it
        assert parse_config(str(tmp_path / "sizes.toml")) == parse_config(text)


def test_a_byte_order_mark_before_json(theirs: dict[str, Path], tmp_path: Path):
    folder = tmp_path / "marked"
    shutil.copytree(theirs["llama-f32"], folder)
    for file in ("config.json", INDEX):
        (folder / file).write_bytes(b"\xef\xbb\xbf" + (folder / file).read_bytes())
    assert ironhorse.load(folder).config.kind == "llama"
    run = convert(folder, tmp_path / "out")
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that `ironhorse train` wrote; alpha is more than config.json can say."""
    out = tmp_path_factory.mktemp("train") / "run"
    sizes = "hidden=24,layers=2,heads=4,kv_heads=2,experts=3,top_k=2,ffn=20,vocab=256,context=32,rope_alpha=2"
    flags = "--batch 2 --seq 16 --steps 2 --sample-tokens 0 --device cpu --out"
    assert ironhorse._native.command(["ironhorse", "train", "--model", sizes, *flags.split(), str(out)]) == 0
    return newest_checkpoint(out)


def test_checkpoints(checkpoint: Path, tmp_path: Path):
    loaded = ironhorse.load(checkpoint)
    assert (loaded.kind, loaded.config.kind, loaded.config.rope_alpha) == ("checkpoint", "moe", 2.0)
    assert len(loaded.tensors) == 3 * len(loaded.params) and loaded.tensors["m.lm_head.weight"].shape == (256, 24)
    ironhorse.save(tmp_path / "again", loaded)
    assert same_folders(checkpoint, tmp_path / "again")
    ironhorse.save(tmp_path / "plain", loaded, format="hf", shard_size="20KB")
    assert convert(checkpoint, tmp_path / "rust", "--shard-size", "20KB").returncode == 0
    assert same_folders(tmp_path / "plain", tmp_path / "rust")
    assert (tmp_path / "plain/tokenizer.bin").read_bytes() == (checkpoint / "tokenizer.bin").read_bytes()
    assert opened(tmp_path / "plain").config.eos_token_id == 0  # of bytes
    ironhorse.save(tmp_path / "narrow", loaded, format="hf", dtype="bf16")
    assert opened(tmp_path / "narrow").config.eos_token_id == 0
    assert torch.equal(logits(opened(tmp_path / "plain")), logits(opened(checkpoint)))
    other = json.loads((checkpoint / "trainer.json").read_text())
    other["config"]["n_head"] = 2
    (tmp_path / "again" / "trainer.json").write_text(json.dumps(other))
    with pytest.raises(FormatError, match="config is .*, expected that of config.json"):
        ironhorse.load(tmp_path / "again")
