"""Answer keys of adapters, whose every number is PEFT's: a frozen model of transformers, random A and B, their
gradients, and steps of AdamW on them.

transformers stacks the weights of experts, gate above up, and PEFT stacks their adapters alike: one A and one B of
twice the rank for gate and up of all experts. Where up's columns of B meet gate's rows, or gate's columns up's rows, it
is 0 and stays so: its other parts are the adapters of gate and of up, as files have them and we train them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from ironhorse.answer_key import crc32_table, json_text
from ironhorse.export_answers import SAMPLES
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.reference.init_moe import clear_batch
from ironhorse.reference.train import AdamW, run_steps

PREFIX = "base_model.model."
MODULES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
           "down": "down_proj"}  # fmt: skip
EXPERTS = {  # of a model type: where experts are, and their gate, up and down, in files
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
STACKED = {"gate_up_proj": ["gate", "up"], "down_proj": ["down"]}  # of a parameter that PEFT adapts
STEPS = 3


@dataclass(frozen=True)
class Adapters:
    """What `--lora R --alpha A --targets LIST` asks for."""

    rank: int
    alpha: float
    targets: str

    def modules(self, model_type: str = "") -> list[str]:
        """What PEFT calls the targets, in a model of this type."""
        names = MODULES | EXPERTS.get(model_type, ("", {}))[1]
        return [names[target] for target in self.targets.split(",")]

    def peft(self, model_type: str = "") -> peft.LoraConfig:
        modules = self.modules(model_type)
        return peft.LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=modules, lora_dropout=0.0, task_type="CAUSAL_LM"
        )  # fmt: skip


def adapted(folder: Path, adapters: Adapters, seed: int = 5) -> peft.PeftModel:
    """The model of a folder with adapters that change something: B is random too."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if hasattr(base, "set_experts_implementation"):
        base.set_experts_implementation("eager")
    model = peft.get_peft_model(base, adapters.peft(base.config.model_type))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, param in trained(model):
            param.zero_()
        for part in parts(model):
            part.of(part.param.data).copy_(torch.randn(part.of(part.param).shape, generator=generator) * 0.3)
    return model.eval()


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of the adapters, under PEFT's names."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            yield name.removeprefix(PREFIX).replace(".default.weight", ".weight"), param


@dataclass(frozen=True)
class Part:
    """A tensor of the key, and where it is in PEFT's model: all of a parameter, or a part of one that is stacked."""

    name: str
    param: torch.nn.Parameter
    shape: tuple[int, int, int] | None = None  # of the parameter where it is stacked: (E,P·r,C) of A, (OC,P·r,E) of B
    where: tuple[slice | int, ...] = ()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of a tensor that is like the parameter, such as its gradient."""
        return whole if self.shape is None else whole.reshape(self.shape)[self.where]


def parts(model: torch.nn.Module) -> Iterator[Part]:
    """The tensors of the adapters, under the names of the key."""
    for name, param in trained(model):
        place, side = name.removesuffix(".weight").rsplit(".lora_", 1)
        stacked = getattr(model.get_submodule(PREFIX + place), "parameter_name", "")
        yield from stacked_parts(model, (name, param), side, STACKED[stacked]) if stacked else [Part(name, param)]


def stacked_parts(
    model: torch.nn.Module, whole: tuple[str, torch.nn.Parameter], side: str, targets: list[str]
) -> Iterator[Part]:
    name, param = whole
    config, layer = model.config, name.split(".mlp.")[0]
    count, (experts, modules) = config.num_local_experts, EXPERTS[config.model_type]
    wide = param.shape[0 if side == "A" else 1] // count
    shape = (count, wide, param.shape[1]) if side == "A" else (param.shape[0], wide, count)
    rank, rows = wide // len(targets), param.shape[0] // len(targets)
    for expert in range(count):
        for i, target in enumerate(targets):
            ranks = slice(i * rank, (i + 1) * rank)
            where = (expert, ranks) if side == "A" else (slice(i * rows, (i + 1) * rows), ranks, expert)
            yield Part(f"{layer}.{experts}.{expert}.{modules[target]}.lora_{side}.weight", param, shape, where)


def keep_parts_only(model: torch.nn.Module) -> None:
    """What is no part of a parameter has no gradient."""
    masks: dict[torch.nn.Parameter, torch.Tensor] = {}
    for part in parts(model):
        part.of(masks.setdefault(part.param, torch.zeros_like(part.param))).fill_(1)
    for param, mask in masks.items():
        if not bool(mask.all()):
            param.register_hook(lambda grad, mask=mask: grad * mask)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=x, use_cache=False).logits
    return logits, F.cross_entropy(logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else
                                   logits.flatten(0, 1), y.flatten())  # fmt: skip


def answers(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients, then losses and weights of some steps."""
    keep_parts_only(model)
    logits, loss = loss_of(model, x, y)
    loss.backward()
    out = {"logits": logits.detach(), "loss": loss.detach()}
    found = list(parts(model))
    out |= {f"grad.{part.name}": part.of(part.param.grad).clone() for part in found if part.param.grad is not None}
    if steps:
        built = AdamW(lr=1e-3, weight_decay=0.1).build(_Only(model))
        out["losses"] = run_steps(built, lambda: loss_of(model, x, y)[1], steps, loss)
        out |= {f"after.{part.name}": part.of(part.param.detach()).clone() for part in found}
    return out


class _Only(torch.nn.Module):
    """What is trained of a model, for the optimizer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.some = torch.nn.ParameterList(param for _, param in trained(model))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def make_key(base_key: Path, adapters: Adapters, target: Path, bf16: bool = False) -> peft.PeftModel:
    """Writes the key of adapters on the model of another key, beside which its folder is. Gives the model, as it
    started."""
    file = read_safetensors(base_key)
    folder = base_key.with_name(base_key.name.removesuffix(".key.safetensors"))
    start = adapted(folder, adapters)
    x, y = (torch.from_numpy(file.tensors[name].astype(np.int64)) for name in ("x", "y"))
    if bf16 and getattr(start.config, "num_local_experts", 0) > 1:  # adapters move what routers see: bf16 met near ties
        x, y, _ = clear_batch(lambda x: margins(start, x), start.config.vocab_size, x.shape, 3, 32 * x.shape[1], 0.15)

    def run(change: Callable[[torch.nn.Module], torch.nn.Module], steps: int = STEPS) -> dict[str, torch.Tensor]:
        return answers(change(copy.deepcopy(start)), x, y, steps)

    found, exact = run(lambda model: model), run(lambda model: model.double())
    tensors = {"x": x.numpy().astype(np.int32), "y": y.numpy().astype(np.int32)}
    tensors |= {name: value for name, value in file.tensors.items() if name.startswith("param.")}
    tensors |= {f"param.{part.name}": part.of(part.param.detach()).numpy().copy() for part in parts(start)}
    tensors |= {name: value.float().contiguous().numpy() for name, value in found.items()}
    steps = {name: error(found[name], exact[name]) for name in found if name.startswith(("after.", "losses"))}
    errors = {name: value for name, value in steps.items() if value > 0}
    meta = {name: text for name, text in file.metadata.items() if not name.startswith("torch_error")}
    described = AdamW(lr=1e-3, weight_decay=0.1).describe(STEPS)
    meta |= {"acts": "[]", "optimizer": json_text(described), "torch_error": json_text(errors)}
    meta |= {"lora": json_text({"r": adapters.rank, "alpha": adapters.alpha, "targets": adapters.targets})}
    if bf16:
        meta["torch_error_bf16"] = json_text(bf16_errors(start, x, y))
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    meta["crc32"] = json_text(crc32_table(tensors))
    write_safetensors(target, tensors, meta)
    assert json.loads(meta["lora"])["r"] == adapters.rank
    return start


@torch.no_grad()
def margins(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """(B, T): per token the least distance, over the layers, between neighbours among the K + 1 largest router logits,
    in units of how far the logits of all tokens spread."""
    least = torch.full(x.shape, torch.inf)
    for logits in model(input_ids=x, use_cache=False, output_router_logits=True).router_logits:
        ranked = logits.sort(dim=-1, descending=True).values[:, : model.config.num_experts_per_tok + 1]
        least = torch.minimum(least, (-ranked.diff(dim=-1)).amin(dim=-1).view_as(least) / logits.std())
    return least


def bf16_errors(start: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """The largest error of PyTorch in bf16 over weights nearby, as `export` measures it."""
    worst: dict[str, float] = {}
    for seed in range(SAMPLES):
        moved = copy.deepcopy(start)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in moved.parameters() if seed else ():
                param.mul_(1 + 0.01 * torch.randn(param.shape, generator=generator))
            for param in moved.parameters():
                param.copy_(param.bfloat16().float())
        exact = answers(copy.deepcopy(moved).double(), x, y, STEPS)
        low = bf16_answers(moved, x, y)
        for name, want in exact.items():
            off = (low[name].double() - want).abs() / want.abs()
            found = float(off.max()) if name == "losses" else error(low[name], want)
            worst[name] = max(worst.get(name, 0.0), found)
    return worst


def bf16_answers(start: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """`answers` in mixed precision: all in bf16, the loss from f32 logits, the optimizer on f32 copies of A and B."""
    low, master = copy.deepcopy(start).bfloat16(), copy.deepcopy(start)
    out, losses = answers(low, x, y, 0), []
    stepper = AdamW(lr=1e-3, weight_decay=0.1).build(_Only(master))
    both = [(exact, rounded) for (_, exact), (_, rounded) in zip(trained(master), trained(low), strict=True)]
    for step in range(STEPS):
        if step:
            low.zero_grad(set_to_none=True)
            loss_of(low, x, y)[1].backward()
        with torch.no_grad():
            losses.append(loss_of(low, x, y)[1])
        for exact, rounded in both:
            exact.grad = None if rounded.grad is None else rounded.grad.float()
        stepper.step()
        with torch.no_grad():
            for exact, rounded in both:
                rounded.copy_(exact)
    out["losses"] = torch.stack(losses)
    return out | {f"after.{part.name}": part.of(part.param.detach()).clone() for part in parts(master)}
