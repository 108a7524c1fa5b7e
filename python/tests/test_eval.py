"""`ironhorse eval` against transformers: the log-likelihood of every answer, one by one. Needs IRONHORSE_BIN."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import ironhorse

transformers = pytest.importorskip("transformers")

VOCAB, CONTEXT = 99, 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.nn.Module]]:
    """A random GPT-2 and a random Llama, saved as transformers saves them."""
    torch.manual_seed(3)
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=VOCAB, n_positions=CONTEXT)
    )
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=4,
            intermediate_size=20, vocab_size=VOCAB, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        )
    )  # fmt: skip
    made = {}
    for name, model in (("gpt2", gpt2), ("llama", llama)):
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        made[name] = (folder, model.eval())
    return made


def examples(count: int) -> list[tuple[list[int], list[list[int]], int]]:
    """Random contexts, each with four answers of other lengths, and the right one; some exceed the context."""
    rng = np.random.default_rng(5)
    made = []
    for i in range(count):
        length = int(rng.integers(1, CONTEXT - 12)) if i % 7 else CONTEXT + 5
        context = rng.integers(0, VOCAB, length).tolist()
        answers = [rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist() for _ in range(4)]
        made.append((context, answers, int(rng.integers(0, 4))))
    return made


def write_bin(path: Path, made: list[tuple[list[int], list[list[int]], int]]) -> None:
    """llm.c's format of multiple-choice questions."""
    words: list[int] = []
    for index, (context, answers, label) in enumerate(made):
        body = [len(context), *context]
        for answer in answers:
            body += [len(answer), *answer]
        words += [65535, 2 * (5 + len(body)), index, label, len(answers), *body]
    header = np.zeros(256, dtype="<i4")
    header[:4] = (20240522, 1, len(made), 0)
    path.write_bytes(header.tobytes() + struct.pack(f"<{len(words)}H", *words))


def log_likelihood(model: torch.nn.Module, context: list[int], answer: list[int]) -> float:
    tokens = (context + answer)[-(CONTEXT + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0].double()
    log_probs = torch.log_softmax(logits, -1)
    return float(sum(log_probs[len(tokens) - 2 - i, answer[-1 - i]] for i in range(len(answer))))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_answer_has_the_likelihood_of_transformers(models, name: str, tmp_path: Path) -> None:
    folder, model = models[name]
    made = examples(30)
    write_bin(tmp_path / "q.bin", made)
    done = ironhorse(
        "eval", "--model", folder, "--device", "cpu", "--choices", f"q={tmp_path / 'q.bin'}",
        "--samples", tmp_path / "s.jsonl", "--json", tmp_path / "e.json", "--batch-tokens", 300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    report = json.loads((tmp_path / "e.json").read_text())["results"]["q"]
    right = {"acc": 0, "acc_token": 0}
    for (context, answers, label), line in zip(made, lines, strict=True):
        want = [log_likelihood(model, context, answer) for answer in answers]
        np.testing.assert_allclose(line["log_likelihoods"], want, rtol=1e-5)
        assert line["target"] == label
        right["acc"] += int(np.argmax(want)) == label
        right["acc_token"] += int(np.argmax([w / len(a) for w, a in zip(want, answers, strict=True)])) == label
    for metric, count in right.items():
        share = count / len(made)
        assert report[f"{metric},none"] == pytest.approx(share)
        # as lm-evaluation-harness: the deviation of the sample over the root of its size
        assert report[f"{metric}_stderr,none"] == pytest.approx((share * (1 - share) / (len(made) - 1)) ** 0.5)
    assert report["cut,none"] == sum(len(c) + max(map(len, a)) > CONTEXT + 1 for c, a, _ in made)


def test_the_loss_of_data_is_that_of_transformers(models, tmp_path: Path) -> None:
    folder, model = models["gpt2"]
    tokens = np.random.default_rng(6).integers(0, VOCAB, 5 * CONTEXT + 17)
    header = np.zeros(256, dtype="<i4")
    header[:3] = (20240520, 1, len(tokens))
    (tmp_path / "v.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    done = ironhorse(
        "eval", "--model", folder, "--device", "cpu", "--data", tmp_path / "v.bin", "--json", tmp_path / "e.json"
    )
    assert done.returncode == 0, done.stderr
    nats = 0.0
    for start in range(0, len(tokens) - 1, CONTEXT):
        x = tokens[start : start + CONTEXT + 1]
        with torch.no_grad():
            logits = model(torch.tensor(x[None, :-1])).logits[0].double()
        nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(x[1:]), reduction="sum"))
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["results"]["data"]["loss,none"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
    assert report["n-samples"]["data"]["effective"] == len(tokens) - 1
