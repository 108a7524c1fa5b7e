"""Times PyTorch's fastest training step of a model of transformers on a GPU, to compare with `ironhorse bench`.

    python benches/gpu_torch_hf.py --model qwen2.5-0.5b --batch 32 --seq 1024 --json torch.json
    python benches/gpu_torch_hf.py --model qwen3-0.6b --lora 16 --batch 16 --seq 2048 --json torch.json

The model is transformers' own, with random weights and `attn_implementation="sdpa"`, compiled as a whole with its loss.
A step and its timing are those of gpu_torch.py: forward, cross-entropy, backward, clip_grad_norm_(1.0), fused AdamW,
in windows of --steps until --seconds have passed; the figure is the median window.

--recipe autocast keeps f32 weights under bf16 autocast; bf16 keeps weights, gradients and moments in bf16, which is
less work and less precise. --lora R freezes the weights in bf16 and trains f32 matrices A and B of that rank beside
every product of the layers, as PEFT does.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gpu_torch import BACKENDS, fresh_start, parsed, run, timed  # noqa: E402
from ironhorse.config import MoEConfig, to_hf_config  # noqa: E402
from ironhorse.errors import IronhorseError  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402


class Adapted(nn.Module):
    """A frozen product with LoRA's matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.scale = base, 1.0
        self.A = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        beside = F.linear(F.linear(x, self.A.to(x.dtype)), self.B.to(x.dtype))
        return self.base(x) + self.scale * beside


class WithLoss(nn.Module):
    """What gpu_torch.timed trains: `loss(x, y)` gives (logits, loss)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=x, use_cache=False).logits
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def adapt(model: nn.Module, rank: int) -> None:
    """Freezes every weight and puts LoRA's matrices beside the products of the layers."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, Adapted(child, rank))


def build(args: argparse.Namespace, config: MoEConfig) -> WithLoss:
    theirs = AutoConfig.for_model(**to_hf_config(config))
    theirs.max_position_embeddings = max(args.seq, 1)
    torch.manual_seed(args.seed)
    frozen = torch.bfloat16 if args.recipe == "bf16" or args.lora else torch.float32
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa", dtype=frozen)
        if args.lora:
            adapt(model, args.lora)
    if args.recompute:
        model.gradient_checkpointing_enable()
    return WithLoss(model.train())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = MoEConfig.parse(args.model)
    runs = []
    for name in list(BACKENDS) if args.sdpa == "both" else [args.sdpa]:
        fresh_start(args)
        runs.append(timed(args, name, build(args, config), config.vocab_size))
    best = min(runs, key=lambda run: run.get("ms_per_step", run["compile_s"]))
    keys = ("model", "batch", "seq", "steps", "dtype", "recipe", "mode", "lora", "recompute")
    about: dict[str, Any] = {name: getattr(args, name) for name in keys}
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    return {**about, "device": device, "torch": torch.__version__, **best, "runs": runs}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a named model of the Llama kind, or its sizes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="steps in a window of timing")
    parser.add_argument("--seconds", type=float, default=5.0, help="windows are timed until these have passed")
    parser.add_argument("--warmup", type=int, default=3, help="steps after the first, before timing")
    parser.add_argument("--recipe", choices=("autocast", "bf16"), default="autocast")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="the rank of adapters; 0 trains every weight")
    parser.add_argument("--recompute", action="store_true", help="keep only the input of each layer for the backward")
    parser.add_argument("--sdpa", choices=(*BACKENDS, "both"), default="both")
    args = parsed(parser, argv, ("batch", "seq", "steps"))
    args.dtype = "bf16"
    return args


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv), measure, (IronhorseError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
