"""Answer keys of preferences (DPO), whose every number is PyTorch's: documents one by one through the reference models
or PEFT's, the loss from its formula, gradients by autograd. The key has the documents packed into rows; nothing is
computed that way here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from ironhorse.answer_key import crc32_table, json_text
from ironhorse.config import GPT2Config, from_dict
from ironhorse.export_answers import LOST
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.reference.gpt2 import GPT2
from ironhorse.reference.moe import MoE
from ironhorse.reference.train import AdamW, run_steps

IGNORED = -100
STEPS = 3
Trained = Callable[[torch.nn.Module], Iterator[tuple[str, torch.nn.Parameter]]]
Logits = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Document:
    """Tokens, and from which of them on they are the answer."""

    ids: list[int]
    prompt: int


Pair = tuple[Document, Document]  # chosen, rejected


def make_pairs(count: int, vocab: int, room: int, seed: int = 3) -> list[Pair]:
    """Questions with two answers of different lengths, both together at most `room` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (1,), generator=generator))
        return torch.randint(vocab, (length,), generator=generator).tolist()

    pairs = []
    for _ in range(count):
        prompt = tokens(1, room // 8)
        pairs.append(tuple(Document(prompt + tokens(1, room // 4), len(prompt)) for _ in range(2)))
    return pairs


def log_probs(model: torch.nn.Module, document: Document, logits_of: Logits) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a document, and ln p of each token of its answer."""
    ids = torch.tensor([document.ids])
    logits = logits_of(model, ids)[0]
    each = F.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return logits, each[document.prompt - 1 :]


@dataclass
class Pass:
    """What one forward of all pairs gives."""

    logits: list[torch.Tensor]  # of the documents, chosen and rejected in turns
    rewards: torch.Tensor  # (P, 2)
    loss: torch.Tensor


def dpo(
    model: torch.nn.Module, pairs: list[Pair], reference: list[torch.Tensor], beta: float, logits_of: Logits
) -> Pass:
    """-ln sigmoid(reward of the chosen - reward of the rejected), the mean over pairs; a reward is beta times the sum
    over the tokens of an answer of ln p - ln p of the reference."""
    logits, rewards = [], []
    for number, document in enumerate(document for pair in pairs for document in pair):
        one, each = log_probs(model, document, logits_of)
        logits.append(one)
        rewards.append(beta * (each - reference[number].to(each.dtype)).sum())
    by_pair = torch.stack(rewards).view(-1, 2)
    return Pass(logits, by_pair, -F.logsigmoid(by_pair[:, 0] - by_pair[:, 1]).mean())


def answers(model: torch.nn.Module, run: Callable[[torch.nn.Module], Pass], trained: Trained) -> dict[str, object]:
    """Everything that the key says: of one pass, and of some steps."""
    first = run(model)
    first.loss.backward()
    out: dict[str, object] = {"passed": first, "loss": first.loss.detach(), "rewards": first.rewards.detach()}
    out |= {f"grad.{name}": param.grad.clone() for name, param in trained(model) if param.grad is not None}
    only = torch.nn.Module()
    only.some = torch.nn.ParameterList(param for _, param in trained(model))
    built = AdamW(lr=1e-3, weight_decay=0.1).build(only)
    out["losses"] = run_steps(built, lambda: run(model).loss, STEPS, first.loss)
    return out | {f"after.{name}": param.detach().clone() for name, param in trained(model)}


def reference_model(base_key: Path) -> torch.nn.Module:
    """The model of a key, in plain PyTorch."""
    file = read_safetensors(base_key)
    config = from_dict(json.loads(file.metadata["config"]), file.metadata["model"], str(base_key))
    model: torch.nn.Module = GPT2(config) if isinstance(config, GPT2Config) else MoE(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.from_numpy(file.tensors[f"param.{name}"].copy()))
    return model


def moved(model: torch.nn.Module, seed: int = 8, by: float = 0.5) -> torch.nn.Module:
    """Another model of the same sizes: what rewards are measured against."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1 + by * torch.randn(param.shape, generator=generator))
    return other


@dataclass
class Rows:
    """Where documents are: row by row, pairs side by side, padding at the end."""

    x: np.ndarray
    y: np.ndarray
    positions: np.ndarray
    pairs: list[list[int]]
    starts: list[int]  # of the documents


def packed(pairs: list[Pair], seq: int) -> Rows:
    """As many pairs in a row as fit, in their order."""
    rows: list[list[Pair]] = []
    left = 0
    for pair in pairs:
        length = sum(len(document.ids) for document in pair)
        if length > left:
            rows.append([])
            left = seq
        rows[-1].append(pair)
        left -= length
    made = Rows(np.zeros((len(rows), seq), np.int32), np.full((len(rows), seq), IGNORED, np.int32),
                np.zeros((len(rows), seq), np.int32), [], [])  # fmt: skip
    for row, here in enumerate(rows):
        at = 0
        for pair in here:
            bounds = [row * seq + at]
            for document in pair:
                ids, end = document.ids, at + len(document.ids)
                made.starts.append(row * seq + at)
                made.x[row, at:end] = ids
                made.positions[row, at:end] = range(len(ids))
                made.y[row, at + document.prompt - 1 : end - 1] = ids[document.prompt :]
                at = end
                bounds.append(row * seq + at)
            made.pairs.append(bounds)
    return made


@dataclass(frozen=True)
class Case:
    """What to make a key of."""

    pairs: list[Pair]
    seq: int
    beta: float


def make_key(
    base_key: Path,
    case: Case,
    target: Path,
    model: torch.nn.Module | None = None,
    trained: Trained = lambda model: model.named_parameters(),
    logits_of: Logits = lambda model, ids: model(ids),
    meta: dict[str, str] | None = None,
) -> None:
    """Writes the key of pairs for the model of another key, whose parameters it takes, or for `model`, of which what is
    `trained` is in the key besides."""
    file = read_safetensors(base_key)
    start = model or reference_model(base_key)
    pairs, beta = case.pairs, case.beta
    with torch.no_grad():
        other = moved(start)
        documents = [document for pair in pairs for document in pair]
        reference = [log_probs(other, document, logits_of)[1] for document in documents]

    def run(some: torch.nn.Module) -> Pass:
        return dpo(some, pairs, reference, beta, logits_of)

    found, exact = (answers(some, run, trained) for some in (copy.deepcopy(start), copy.deepcopy(start).double()))
    rows = packed(pairs, case.seq)
    tensors = {name: value for name, value in file.tensors.items() if name.startswith("param.")}
    tensors |= {f"param.{name}": param.detach().numpy().copy() for name, param in trained(start)}
    tensors |= {"x": rows.x, "y": rows.y, "positions": rows.positions, "pairs": np.array(rows.pairs, np.int32)}
    with torch.no_grad():
        padding = logits_of(start, torch.tensor([[0]]))[0, 0].numpy()
    logits = np.tile(padding, (*rows.x.shape, 1)).reshape(-1, len(padding))
    theirs = np.zeros(rows.x.size, np.float32)
    for at, document, one, each in zip(rows.starts, documents, found["passed"].logits, reference, strict=True):
        logits[at : at + len(document.ids)] = one.detach().numpy()
        theirs[at + document.prompt - 1 : at + len(document.ids) - 1] = -each.numpy()
    tensors |= {"logits": logits.reshape(*rows.x.shape, -1), "reference": theirs.reshape(rows.x.shape)}
    kept = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    once = [name for name in kept if name.startswith(("grad.", "rewards", "loss")) and name != "losses"]
    for name in once:  # as `export` does: where f32 loses digits, the answer is that of f64
        if error(kept[name], exact[name]) > LOST:
            kept[name] = exact[name]
    tensors |= {name: value.float().contiguous().numpy() for name, value in kept.items()}
    errors = {name: error(kept[name], exact[name]) for name in kept if name.startswith(("after.", "losses"))}
    text = {name: value for name, value in file.metadata.items() if not name.startswith("torch_error")}
    described = AdamW(lr=1e-3, weight_decay=0.1).describe(STEPS)
    text |= {"acts": "[]", "optimizer": json_text(described), "dpo": json_text({"beta": beta})} | (meta or {})
    text["torch_error"] = json_text({name: value for name, value in errors.items() if value > 0})
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    text["crc32"] = json_text(crc32_table(tensors))
    write_safetensors(target, tensors, text)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
