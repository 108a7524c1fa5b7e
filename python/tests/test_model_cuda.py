"""`ironhorse.Model` on a GPU: the same as on the CPU and in transformers, and its memory comes back."""

from __future__ import annotations

from pathlib import Path

import ironhorse
import numpy as np
import pytest
import torch
from ironhorse import ops

transformers = pytest.importorskip("transformers")

from lm_models import CONTEXT, sentence  # noqa: E402

pytestmark = pytest.mark.skipif(not ops.cuda_available(), reason="ironhorse.ops.cuda_available() is false: no GPU")
KINDS = ("gpt2", "qwen3")


def ids_of(model: ironhorse.Model, rows: int, count: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, model.config.vocab_size, (rows, count))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_text_in_f32(folders: dict[str, Path], kind: str) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).eval()
    ours = ironhorse.Model.from_pretrained(folders[kind], device="cuda", dtype="f32")
    assert ours.device.startswith("cuda") and ours.dtype == "f32"
    for rows, count in ((1, 5), (7, CONTEXT)):
        ids = ids_of(ours, rows, count)
        labels = np.where(ids % 4 == 0, -100, ids)
        labels[0, -1] = ids[0, -1]
        with torch.no_grad():
            want = theirs(torch.from_numpy(ids), labels=torch.from_numpy(labels))
        logits = want.logits.double().numpy()
        assert np.linalg.norm(ours.logits(torch.from_numpy(ids).cuda()) - logits) <= 1e-5 * np.linalg.norm(logits)
        assert ours.loss(ids, labels) == pytest.approx(want.loss.item(), rel=1e-5)
    on_cpu = ironhorse.Model.from_pretrained(folders[kind], device="cpu")
    new = ours.generate([1, 2, 3], tokens=30, greedy=True)
    assert new.tolist() == on_cpu.generate([1, 2, 3], tokens=30, greedy=True).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_near_f32(folders: dict[str, Path], kind: str) -> None:
    """At most twice the error of transformers in bf16, and one rounding error, as `verify` allows."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    exact, low = (load(folders[kind], dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16))
    ours = ironhorse.Model.from_pretrained(folders[kind], device="cuda")
    assert ours.dtype == "bf16"
    ids = ids_of(ours, 4, CONTEXT)
    with torch.no_grad():
        want, theirs = (model(torch.from_numpy(ids)).logits.double().numpy() for model in (exact, low))
    size = np.linalg.norm(want)
    allowed = 2 * np.linalg.norm(theirs - want) / size + 1 / 512
    assert np.linalg.norm(ours.logits(ids) - want) / size <= allowed


def test_training_goes_on_from_the_weights(folders: dict[str, Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n".join(sentence(seed % 5, 12) for seed in range(60)))
    ours = ironhorse.Model.from_pretrained(folders["qwen3"], device="cuda")
    ids = ours.encode(Path("text.txt").read_text())[:40]
    before = ours.loss(ids)
    stop = {"callback": lambda line: line["step"] < 40}
    report = ours.train("text.txt", out="run", steps=60, batch=4, seq=16, lr=3e-3, progress=False, **stop)
    assert report.ending == "stopped" and 41 <= report.steps <= 43  # one step may be in flight
    assert ours.loss(ids) < before - 1
    assert ours.state_dict("torch")["model.norm.weight"].dtype == torch.float32  # the master weights


def test_memory_comes_back(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=4, n_head=8, n_embd=512, vocab_size=50257, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    free = []
    for _ in range(3):
        with ironhorse.Model.from_pretrained(tmp_path, device="cuda", dtype="f32") as ours:
            ours.logits(ids_of(ours, 8, 64))
            held = torch.cuda.mem_get_info()[0]
        free.append(torch.cuda.mem_get_info()[0])
        assert free[-1] - held > 100 << 20
    assert abs(free[-1] - free[0]) < 64 << 20
