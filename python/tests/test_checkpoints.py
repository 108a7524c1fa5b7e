"""Checkpoints of every kind and the runs they are in, as `ironhorse.load`, `save`, `export` and the command see them.

Needs IRONHORSE_BIN. Training in bf16 needs a GPU: such checkpoints are made by checkpoint_files.py.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from pathlib import Path

import ironhorse
import numpy as np
import pytest
from checkpoint_files import KINDS, Kind, Made, flip, make, make_version_1, train, write_manifest
from cli import convert, newest_checkpoint
from cli import ironhorse as command
from ironhorse.errors import FormatError
from ironhorse.formats.bf16 import from_bf16, join_master, split_master, to_bf16
from ironhorse.formats.llmc import read_model
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.formats.shards import write_shard
from ironhorse.nn import MoETransformer
from load_save_files import same_folders

FC = "h.0.mlp.c_fc.weight"  # stored transposed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def made(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """One of each kind; tests must not change their files."""
    folder = tmp_path_factory.mktemp("made")
    return {name: make(trained, folder / name, kind) for name, kind in KINDS.items()}


def exact_in_rust(folder: Path, out: Path) -> dict[str, np.ndarray]:
    """The weights that the command takes from a checkpoint."""
    run = convert(folder, out)
    assert run.returncode == 0, run.stderr
    return read_model(out).params


def same(found: object, expected: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(found[name], array) for name, array in expected.items())


# ---- reading and writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_the_exact_ones(made: dict[str, Made], name: str, tmp_path: Path):
    one = made[name]
    loaded = ironhorse.load(one.folder)
    assert (loaded.kind, loaded.path, loaded.meta["version"]) == ("checkpoint", one.folder, 2)
    assert len(loaded.params) == len(one.params) and len(loaded.tensors) == 3 * len(one.params)
    assert same(loaded.tensors, one.params) and same(loaded.tensors, one.moments)
    assert loaded.tensors[FC].dtype == np.float32 and "tokenizer: 256 tokens" in str(loaded)
    assert same(exact_in_rust(one.folder, tmp_path / "rust.bin"), one.params)
    ironhorse.save(tmp_path / "ours.bin", loaded)
    assert same(read_model(tmp_path / "ours.bin").params, one.params)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_unchanged_it_has_the_same_bytes(
    made: dict[str, Made], name: str, framework: str, looked_at: bool, tmp_path: Path
):
    loaded = ironhorse.load(made[name].folder, framework)
    if looked_at:
        dict(loaded.tensors)
    ironhorse.save(tmp_path / "again", loaded)
    assert same_folders(made[name].folder, tmp_path / "again")
    ironhorse.save(tmp_path / "again", ironhorse.load(tmp_path / "again"))  # onto itself, while it is mapped
    assert same_folders(made[name].folder, tmp_path / "again")


@pytest.mark.parametrize("name", KINDS)
def test_changed_weights(made: dict[str, Made], name: str, tmp_path: Path):
    one, kind = made[name], KINDS[name]
    expected = {tensor: array.copy() for tensor, array in one.params.items()}
    expected["wte.weight"][259] = 0.1
    expected[FC][5, 3] = -1 / 3
    loaded = ironhorse.load(one.folder)
    loaded.tensors["wte.weight"][259] = 0.1  # in place
    loaded.tensors[FC] = expected[FC].astype(np.float64)
    loaded.tensors["m.ln_f.bias"] = np.full(32, 0.1, np.float32)
    folder = tmp_path / "changed"
    ironhorse.save(folder, loaded)
    trainer = json.loads((folder / "trainer.json").read_text())
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "trainer.json"}
    assert trainer["bytes"] == {file: len(content) for file, content in files.items()}
    assert trainer["crc32"] == {file: zlib.crc32(content) for file, content in files.items()}
    assert sorted(files) == sorted(file.name for file in one.folder.iterdir() if file.name != "trainer.json")
    again = ironhorse.load(folder)
    assert same(again.tensors, expected)
    moment = np.full(32, 0.1, np.float32)
    assert np.array_equal(again.tensors["m.ln_f.bias"], from_bf16(to_bf16(moment)) if "lean" in name else moment)
    assert same(exact_in_rust(folder, tmp_path / "rust.bin"), expected)
    if kind.weights == "bf16":  # what was not changed keeps how it had been rounded
        held, was = again.source.weights.params[FC], ironhorse.load(one.folder).source.weights.params[FC]
        assert held[5, 3] == to_bf16(expected[FC])[5, 3] != was[5, 3]
        assert np.count_nonzero(held != was) == 1
    run = command("generate", "--model", folder, "--tokens", 3, "--prompt", "a", "--greedy")
    assert run.returncode == 0, run.stderr
    shard = tmp_path / "tokens.bin"
    write_shard(shard, np.arange(1000) % 260)
    flags = ["--batch", 1, "--seq", 8, "--steps", 1, "--sample-tokens", 0, "--device", "cpu"]
    run = command("train", "--init", folder, "--data", shard, "--val-data", shard, *flags, "--out", tmp_path / "run")
    assert run.returncode == 0, run.stderr


def test_rows_that_pad_a_token_table_are_kept(made: dict[str, Made], tmp_path: Path):
    loaded = ironhorse.load(made["bf16"].folder)
    loaded.tensors["wte.weight"][0] = 2
    ironhorse.save(tmp_path / "c", loaded)
    master = read_safetensors(tmp_path / "c" / "master.safetensors").tensors["wte.weight"]
    assert master.shape == (384, 32) and (master[0] == 2).all() and (master[260:] == 7).all()


def test_version_1(trained: Path, tmp_path: Path):
    old = make_version_1(trained, tmp_path / "old" / "checkpoint")
    loaded = ironhorse.load(old)
    new = ironhorse.load(trained)
    assert loaded.meta["version"] == 1 and same(loaded.tensors, dict(new.tensors))
    ironhorse.save(tmp_path / "again", loaded)
    assert same_folders(old, tmp_path / "again")
    loaded.tensors["ln_f.bias"] = np.ones(32, np.float32)
    ironhorse.save(tmp_path / "again", loaded)
    assert ironhorse.load(tmp_path / "again").meta["version"] == 1
    assert (exact_in_rust(tmp_path / "again", tmp_path / "m.bin")["ln_f.bias"] == 1).all()
    assert ironhorse.load(tmp_path / "old").path == old  # a run of that version


def test_masters_split_and_join():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    special = np.array([0, 0x8000, 0x7FFF, 0x3F808000, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    numbers = values[~np.isnan(values)]
    weights, residual = split_master(numbers)
    assert np.array_equal(join_master(weights, residual).view(np.uint32), numbers.view(np.uint32))
    assert split_master(np.array([1.00390625], np.float32))[0] == 0x3F81  # a tie, away from 0
    assert [int(part[0]) for part in split_master(np.array([np.nan], np.float32))] == [0x7FC0, 0]


# ---- runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run with three checkpoints, and folders that are none."""
    for step in (5, 100, 1_000_000):
        make(trained, tmp_path / "run" / "checkpoints" / f"step-{step:06}", KINDS["lean"])
    (tmp_path / "run/checkpoints/step-2000000").mkdir()  # no manifest
    shutil.copytree(trained, tmp_path / "run/checkpoints/.step-3000000.tmp-0")
    shutil.copytree(trained, tmp_path / "run/checkpoints/step-x")
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore:.* is taken instead")
def test_the_newest_whole_checkpoint_of_a_run(run: Path, tmp_path: Path):
    def path() -> str:
        return ironhorse.load(run).path.name

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert path() == "step-1000000"
    flip(run / "checkpoints/step-1000000/state.safetensors")
    with pytest.warns(UserWarning, match="step-1000000/state.safetensors: crc32 is .* step-000100 is taken instead"):
        assert path() == "step-000100"
    assert ironhorse.load(run, check=False).path.name == "step-1000000"
    (run / "checkpoints/step-000100/model.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="model.safetensors: file size is 4 bytes, expected .*, as trainer.json says"):
        assert path() == "step-000005"
    (run / "checkpoints/step-000005/trainer.json").write_text("{")
    with pytest.raises(FormatError, match="run is without a valid checkpoint .*step-1000000"):
        path()
    shutil.rmtree(run / "checkpoints")
    for file in ("config.toml", "metrics.jsonl"):
        (run / file).write_text("")
    with pytest.raises(FormatError, match="run is without a checkpoint: the run ended before the first was written"):
        path()


def test_export_takes_a_run(run: Path, tmp_path: Path, made: dict[str, Made]):
    """Its exact weights; the moments need not be whole."""
    flip(run / "checkpoints/step-1000000/state.safetensors")
    flags = dict(batch=1, seq=4, steps=0, bf16=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        key = ironhorse.export("gpt2", model=run, out=tmp_path / "keys", **flags).key
    assert same(ironhorse.load(key).params, made["lean"].params)
    with pytest.raises(FormatError, match="expected llama, mistral"):
        ironhorse.export("moe", model=run, out=tmp_path / "keys", **flags)
    with pytest.raises(FormatError, match="expected llama, mistral"):
        MoETransformer.from_folder(run)


def test_a_mixture_of_a_run(tmp_path: Path):
    sizes = "hidden=24,layers=1,heads=4,kv_heads=2,experts=3,top_k=2,ffn=20,vocab=256,context=32"
    flags = f"--batch 2 --seq 16 --steps 1 --sample-tokens 0 --device cpu --out {tmp_path / 'run'}".split()
    assert command("train", "--model", sizes, *flags).returncode == 0
    folder = newest_checkpoint(tmp_path / "run")
    tensors = {name: array.copy() for name, array in ironhorse.load(tmp_path / "run").params.items()}
    model = dict(MoETransformer.from_folder(tmp_path / "run").named_parameters())
    assert len(model) == len(tensors) and all(np.array_equal(model[name].data, tensors[name]) for name in tensors)
    # the same, with a master that differs from the weights
    file = read_safetensors(folder / "model.safetensors")
    write_safetensors(folder / "master.safetensors", tensors)
    low = {name: to_bf16(array) for name, array in file.tensors.items()}
    write_safetensors(folder / "model.safetensors", low, file.metadata, dict.fromkeys(low, "BF16"))
    precision = Kind("bf16").precision
    write_manifest(folder, json.loads((folder / "trainer.json").read_text()) | {"precision": precision})
    model = dict(MoETransformer.from_folder(tmp_path / "run").named_parameters())
    assert all(np.array_equal(model[name].data, tensors[name]) for name in tensors)
    key = ironhorse.export(
        "moe", model=tmp_path / "run", out=tmp_path / "keys", batch=1, seq=4, steps=0, bf16=False
    ).key
    assert same(ironhorse.load(key).params, tensors)


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 9}, "version is 9, expected 1 to 2"),
        ({"version": True}, "invalid type: boolean `true`, expected u32"),
        ({"format": "other"}, 'format is "other", expected "ironhorse-checkpoint"'),
        ({"crc32": {}}, "crc32 of config.json is missing"),
        ({"crc32": {"config.json": 1, "model.safetensors": 2, "../x": 3}}, 'crc32 is of "../x"'),
        ({"bytes": {}}, "bytes of config.json is missing, expected a number"),
        ({"precision": None}, "precision is missing, expected the run's element types"),
        ({"precision": Kind("f64").precision}, 'precision.weights is "f64", expected f32 or bf16'),
        (
            {"precision": Kind("bf16", "f32").precision},
            "master.safetensors: dtype of `wte.weight` is I16, expected F32",
        ),
        (
            {"precision": Kind("bf16", "i16").precision},
            "state.safetensors: dtype of `m.wte.weight` is BF16, expected F32",
        ),
        (
            {"precision": Kind("f32", "f32", "bf16").precision},
            "wte.weight` is BF16, expected F32, as trainer.json says",
        ),
        ({"config": {}}, "config is wrong"),
    ],
)
def test_bad_manifests(made: dict[str, Made], changes: dict, says: str, tmp_path: Path):
    shutil.copytree(made["lean"].folder, tmp_path / "c")
    trainer = json.loads((tmp_path / "c/trainer.json").read_text())
    (tmp_path / "c/trainer.json").write_text(json.dumps(trainer | changes))
    with pytest.raises(FormatError) as caught:
        ironhorse.load(tmp_path / "c")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_of_another_model(trained: Path, tmp_path: Path):
    shutil.copytree(trained, tmp_path / "c")
    trainer = json.loads((tmp_path / "c/trainer.json").read_text())
    trainer["config"]["max_seq_len"] = 31
    (tmp_path / "c/trainer.json").write_text(json.dumps(trainer))
    with pytest.raises(FormatError, match="config is .*, expected that of config.json"):
        ironhorse.load(tmp_path / "c")


@pytest.mark.parametrize("name", ["lean", "lean-parts"])
def test_every_file_counts(made: dict[str, Made], name: str, tmp_path: Path):
    for file in sorted(made[name].folder.iterdir()):
        if file.name == "trainer.json":
            continue
        folder = tmp_path / "c"
        shutil.copytree(made[name].folder, folder)
        flip(folder / file.name)
        with pytest.raises(FormatError, match=f"{file.name}: crc32 is .*, as trainer.json says"):
            ironhorse.load(folder)
        (folder / file.name).unlink()
        with pytest.raises(FormatError, match=f"{file.name}: cannot read it"):
            ironhorse.load(folder)
        shutil.rmtree(folder)


def test_what_cannot_be_saved(made: dict[str, Made], tmp_path: Path):
    def refused(says: str, **options: object) -> None:
        with pytest.raises(FormatError, match=says) as caught:
            ironhorse.save(tmp_path / "new", loaded, **options)
        assert list(tmp_path.iterdir()) == [] and "\n" not in str(caught.value)

    loaded = ironhorse.load(made["lean"].folder)
    refused('a checkpoint keeps its types, and the weights of this one are bf16; format="hf"', dtype="f32")
    refused("a checkpoint keeps its sizes", config="d12")
    loaded.tensors["v.ln_f.bias"] = np.zeros(3, np.float32)
    refused(r"v.ln_f.bias is \[3\], expected \[32\]")
    loaded.tensors["v.ln_f.bias"] = np.zeros(32, int)
    refused("v.ln_f.bias is int64, expected floats")
    del loaded.tensors["v.ln_f.bias"]
    refused("no tensor v.ln_f.bias to save")
    ironhorse.save(tmp_path / "hf", loaded, format="hf", dtype="f32")
    assert same(ironhorse.load(tmp_path / "hf").tensors, made["lean"].params)
