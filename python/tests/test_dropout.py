"""Dropout: the masks of the reference are those of the engines, and verify proves it. Needs IRONHORSE_BIN."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from cli import ironhorse, verify
from conftest import SMALL, export
from ironhorse.config import GPT2Config
from ironhorse.export import main
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.reference.dropout import Dropout
from ironhorse.reference.gpt2 import GPT2
from ironhorse.reference.init import init_weights, random_batch

ODD = "n_layer=3,n_head=5,n_embd=80,vocab_size=1003,max_seq_len=41"


def test_the_bits_are_those_of_the_engines():
    # crates/core/src/dropout.rs has the same numbers
    assert Dropout(0.1, 7, 3, 1).bits(5, 4, 1000)[3, [0, 1, 8, 31]].tolist() == [40832, 32449, 18455, 41498]


def test_rates():
    for rate, threshold in ((0.0, 0), (0.25, 16384), (0.1, 6554), (0.9999999, 65535)):
        assert Dropout(rate, 0).threshold == threshold
    x = torch.ones(400, 500, dtype=torch.float64)
    dropped = Dropout(0.2, 3, 1).drop(4, x)
    assert set(dropped.unique().tolist()) == {0.0, 65536 / (65536 - 13107)}
    assert abs(dropped.mean().item() - 1) < 6 * 0.5 / 200_000**0.5  # six standard deviations


def test_a_model_without_dropout_and_with_rate_0_are_the_same():
    config = GPT2Config.parse(SMALL)
    model = init_weights(GPT2(config), 1, "spread").double()
    x, y = random_batch(config.vocab_size, 2, 7, 1)
    plain = model.loss(x, y)[0]
    model.dropout = Dropout(0.0, 1)
    assert torch.allclose(model.loss(x, y)[0], plain, rtol=1e-12)
    model.dropout = Dropout(0.5, 1)
    first, second = (model.loss(x, y)[1].item() for _ in range(2))
    assert first != second, "each loss is a step with masks of its own"
    model.dropout = Dropout(0.5, 1)
    assert copy.deepcopy(model).loss(x, y)[1].item() == model.loss(x, y)[1].item() == first


CASES = [(ODD, 3, 37, "0.2"), (SMALL, 2, 7, "0.5"), (SMALL, 1, 1, "0.1")]


@pytest.mark.parametrize(("model", "batch", "seq", "rate"), CASES)
def test_verify_agrees_with_torch_under_the_same_masks(tmp_path, model: str, batch: int, seq: int, rate: str):
    flags = ("--dropout", rate, "--seed", "5", "--weight-decay", "0.1", "--no-bf16")
    case = export(tmp_path / "out", model, batch, seq, *flags)
    assert [file.name for file in case.folder.iterdir()] == [case.key.name], "other files cannot say that they drop"
    key = read_safetensors(case.key)
    assert json.loads(key.metadata["dropout"]) == float(rate) and key.metadata["seed"] == "5"
    for recompute in ("none", "full"):
        outcome = verify(tmp_path, "--key", case.key, "--recompute", recompute, "--device", "cpu")
        assert outcome.code == 0, outcome.text
        names = {tensor["name"] for tensor in outcome.report["tensors"]}
        for name in ("embed_dropout", "h.0.attn.dropout", "h.1.mlp.dropout"):
            assert {f"act.{name}", f"dact.{name}"} <= names
        assert "losses" in names and "after.wte.weight" in names


def test_bf16_tolerances_are_measured_with_the_masks(tmp_path):
    case = export(tmp_path / "out", SMALL, 2, 7, "--dropout", "0.3", "--seed", "2", "--steps", "0")
    errors = json.loads(read_safetensors(case.key).metadata["torch_error_bf16"])
    assert 1e-4 < errors["act.h.1.mlp.dropout"] < 3e-2
    assert 1e-4 < errors["act.h.0.attn.sdpa"] < 3e-2


def test_another_mask_or_rate_is_noticed(tmp_path):
    case = export(tmp_path / "out", SMALL, 2, 7, "--dropout", "0.5", "--seed", "5", "--steps", "2", "--no-bf16")
    key = read_safetensors(case.key)
    for change in ({"seed": "6"}, {"dropout": "0.25"}, {"dropout": "0.0"}):
        write_safetensors(tmp_path / "other.safetensors", key.tensors, {**key.metadata, **change}, key.dtypes)
        outcome = verify(tmp_path, "--key", tmp_path / "other.safetensors", "--device", "cpu")
        assert outcome.code == 1, change
    wrong = {**key.metadata, "dropout": "1.5"}
    write_safetensors(tmp_path / "other.safetensors", key.tensors, wrong, key.dtypes)
    run = ironhorse("verify", "--key", tmp_path / "other.safetensors")
    assert run.returncode == 2
    assert 'metadata `dropout` is "1.5", expected a number of at least 0 and below 1' in run.stderr


@pytest.mark.parametrize("rate", ["1", "-0.1", "nan"])
def test_senseless_rates_are_refused(tmp_path, capsys, rate: str):
    assert main(["gpt2", "--model", SMALL, f"--dropout={rate}", "--out", str(tmp_path / "out")]) == 2
    assert "it must be at least 0 and below 1" in capsys.readouterr().err


def test_only_gpt2_has_dropout(tmp_path):
    import ironhorse as library

    with pytest.raises(library.IronhorseError, match="only gpt2 has dropout"):
        library.export("moe", model="moe-tiny", out=tmp_path / "out", dropout=0.1)
    with pytest.raises(library.IronhorseError, match="dropout is 'x', expected a number"):
        library.export("gpt2", model=SMALL, out=tmp_path / "out", dropout="x")  # type: ignore[arg-type]


def test_rows_beyond_32_bits_of_words_have_masks_of_their_own():
    drop = Dropout(0.5, 1, 1)
    assert drop.bits(0, 3, 16).dtype == np.uint32
    few, many = drop.bits(0, 3, 33), drop.bits(0, 3, 48)
    assert (few == many[:, :33]).all(), "rows of as many words have the same masks"
