"""Bad input to a mixture of experts, line by line of what was promised: by the command and in Python. Needs
IRONHORSE_BIN.

Sizes in config.json and in texts: test_verify_moe.py, test_moe_config.py. Idle experts and all tokens on one expert are
no errors: test_verify_moe.py and test_verify_hf.py compare them with PyTorch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ironhorse
import numpy as np
import pytest
from cli import assert_could_not_run, newest_checkpoint, rewrite_key
from cli import ironhorse as command
from ironhorse.answer_key import json_text
from ironhorse.errors import Code, FormatError, IronhorseError
from ironhorse.formats.checkpoint import crc32_of
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.nn import MoETransformer
from test_moe_export import SMALL, export

SIZES = "hidden=24,layers=2,heads=6,kv_heads={kv},head_dim=4,experts=3,top_k={k},ffn=20,vocab=256,context=32"
GOOD = SIZES.format(kv=3, k=2)
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
GATE = "model.layers.1.block_sparse_moe.gate.weight"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("bad") / "out", SMALL, 2, 7, "--steps", "1", "--no-bf16")[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bad") / "run"
    flags = ["--batch", 2, "--seq", 16, "--steps", 1, "--sample-tokens", 0, "--out", out]
    run = command("train", "--model", GOOD, *flags)
    assert run.returncode == 0, run.stderr
    return newest_checkpoint(out)


def refused_in_python(says: str, **arguments: object) -> None:
    with pytest.raises(IronhorseError) as caught:
        ironhorse.verify(**arguments)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.code == Code.INVALID_VALUE


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (SIZES.format(kv=3, k=4), "top_k is 4, expected from 1 to n_experts, 3"),
        (SIZES.format(kv=3, k=0), "top_k is 0, expected from 1 to n_experts, 3"),
        (SIZES.format(kv=4, k=2), "n_kv_head is 4, expected a divisor of n_head, 6"),
        (SIZES.format(kv=0, k=2), "n_kv_head is 0"),
    ],
)
def test_sizes(model: str, says: str, tmp_path: Path):
    for run in (
        command("train", "--model", model, "--batch", 1, "--seq", 4, "--steps", 1, "--out", tmp_path / "run"),
        command("plan", "--model", model, "--batch", 1, "--seq", 4),
    ):
        assert_could_not_run(run)
        assert says in run.stderr
    refused_in_python(says, model=model, lockstep=True, batch=1, seq=4)
    with pytest.raises(IronhorseError, match="top_k is|n_kv_head"):
        ironhorse.export("moe", model=model, out=tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tensor", ["x", "y"])
@pytest.mark.parametrize("token", [53, -1, 2**31 - 1])
def test_ids_out_of_range(key: Path, tensor: str, token: int, tmp_path: Path):
    ids = read_safetensors(key).tensors[tensor].copy()
    ids[1, 2] = token
    changed = tmp_path / "ids.key.safetensors"
    rewrite_key(key, changed, {tensor: ids})
    says = f"{tensor}[9] is {token}, expected a token of the vocabulary, 0 to 52"
    run = command("verify", "--key", changed)
    assert_could_not_run(run)
    assert says in run.stderr
    refused_in_python(says, key=changed)


def test_ids_of_a_dataset_out_of_range(tmp_path: Path):
    ironhorse.save(tmp_path / "tokens.bin", np.array([1, 2, 300] * 200))
    data = ["--data", tmp_path / "tokens.bin", "--val-data", tmp_path / "tokens.bin"]
    run = command("train", "--model", GOOD, *data, "--batch", 2, "--seq", 8, "--steps", 2, "--out", tmp_path / "run")
    assert run.returncode == 2 and "panicked" not in run.stderr  # below a line that says what is trained
    assert run.stderr.splitlines()[-1].endswith(
        "tokens.bin: token at position 2 is 300, expected a token of the vocabulary, 0 to 255"
    )


def test_context_exceeded(key: Path, tmp_path: Path):
    run = command("train", "--model", GOOD, "--batch", 1, "--seq", 33, "--steps", 1, "--out", tmp_path / "run")
    assert_could_not_run(run)
    assert "--seq 33 is beyond the model's context of 32" in run.stderr
    refused_in_python("length 33 is beyond the model's context of 32", model=GOOD, lockstep=True, batch=1, seq=33)
    with pytest.raises(IronhorseError, match="max_seq_len of this model is 32"):
        ironhorse.export("moe", model=GOOD, out=tmp_path / "keys", seq=33)
    # a key whose batch is longer than the model it describes
    file = read_safetensors(key)
    sizes = json.loads(file.metadata["config"]) | {"max_seq_len": 6}
    short = tmp_path / "short.key.safetensors"
    write_safetensors(short, file.tensors, file.metadata | {"config": json_text(sizes)}, file.dtypes)
    run = command("verify", "--key", short)
    assert_could_not_run(run)
    assert "6" in run.stderr and "7" in run.stderr
    refused_in_python("6", key=short)
    assert not (tmp_path / "run").exists() and not (tmp_path / "keys").exists()


def _changed_checkpoint(checkpoint: Path, folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """With sizes and checksums that agree, so that the content is looked at."""
    shutil.copytree(checkpoint, folder)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    trainer = json.loads((folder / "trainer.json").read_text())
    trainer["bytes"]["model.safetensors"] = (folder / "model.safetensors").stat().st_size
    trainer["crc32"]["model.safetensors"] = crc32_of(folder / "model.safetensors")
    (folder / "trainer.json").write_text(json.dumps(trainer))


@pytest.mark.parametrize("what", ["expert", "shape", "nan"])
def test_checkpoints(checkpoint: Path, what: str, tmp_path: Path):
    tensors = {n: np.array(t) for n, t in read_safetensors(checkpoint / "model.safetensors").tensors.items()}
    if what == "expert":
        del tensors[EXPERT]
        says = f"tensor `{EXPERT}` is missing"
    elif what == "shape":
        tensors[GATE] = tensors[GATE][:2].copy()
        says = f"shape of `{GATE}` is [2, 24], expected [3, 24]"
    else:
        tensors[GATE][2, 1] = np.nan
        says = f"{GATE}[2, 1] is NaN, expected a finite number"
    folder = tmp_path / "checkpoint"
    _changed_checkpoint(checkpoint, folder, tensors)
    flags = ["--batch", 1, "--seq", 4, "--steps", 1, "--sample-tokens", 0, "--out", tmp_path / "run"]
    for run in (
        command("train", "--init", folder, *flags),
        command("generate", "--model", folder, "--prompt", "a", "--tokens", 2),
        command("convert", folder, tmp_path / "hf"),
    ):
        assert_could_not_run(run)
        assert says in run.stderr
    assert not (tmp_path / "hf").exists()
    refused_in_python(says, model=folder, lockstep=True, batch=1, seq=4)
    if what != "nan":
        with pytest.raises(IronhorseError) as caught:
            ironhorse.load(folder)
        assert says in str(caught.value)
    with pytest.raises(FormatError) as caught:
        MoETransformer.from_folder(folder)
    assert says in str(caught.value)


def test_a_flipped_bit(checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    MoETransformer.from_folder(folder)
    bits = bytearray((folder / "model.safetensors").read_bytes())
    bits[-7] ^= 1
    (folder / "model.safetensors").write_bytes(bits)
    run = command("generate", "--model", folder, "--prompt", "a", "--tokens", 2)
    assert_could_not_run(run)
    assert "model.safetensors: crc32 is" in run.stderr
    with pytest.raises(FormatError, match=r"model\.safetensors: crc32 is .*as trainer.json says"):
        MoETransformer.from_folder(folder)


def test_weights_of_another_model(key: Path, checkpoint: Path):
    run = command("verify", "--key", key, "--model", checkpoint)
    assert_could_not_run(run)
    with pytest.raises(IronhorseError):
        ironhorse.verify(key, model=checkpoint)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_the_router_overflows(key: Path, value: float, tmp_path: Path):
    """What is no number in a file is refused; what becomes none in a run is an error of the router, never a choice."""
    loaded = ironhorse.load(key.with_name("moe_custom"))
    loaded.tensors[GATE][...] = value
    loaded.tensors[GATE][0] *= -1
    ironhorse.save(tmp_path / "model", loaded)
    says = "router: a logit of token 0 is" if value == 3e38 else f"{GATE}[0, 0] is"
    run = command("verify", "--key", key, "--model", tmp_path / "model")
    assert_could_not_run(run)
    assert says in run.stderr
    with pytest.raises(IronhorseError, match="logit of token 0" if value == 3e38 else "expected a finite number"):
        ironhorse.verify(key, model=tmp_path / "model")
