"""Times PyTorch's fastest GPT-2 training step on a GPU, to compare with `ironhorse bench`.

    python benches/gpu_torch.py --model d12 --batch 64 --seq 1024 --seconds 5 --json torch.json
    python benches/gpu_torch.py --model d12 --batch 4 --mode reduce-overhead --json torch.json

A step is: forward, cross-entropy, backward, clip_grad_norm_(1.0), fused AdamW, on one batch of random tokens. The
model is the reference (ironhorse.reference.gpt2) with torch's fused attention, its vocabulary padded to a multiple of
128 as ironhorse does. Steps are timed in windows of --steps until --seconds have passed, because the
clock of a GPU at its power limit settles only after seconds; the figure is the median window.

--recipe autocast keeps f32 weights under bf16 autocast, the usual way; bf16 keeps weights, gradients and moments in
bf16, which is less work and less precise. --sdpa best times both attentions alone and compiles with the faster; both
compiles with each and reports the faster. f32 and tf32 have no fused attention of the two, torch chooses one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(folder) for folder in (HERE / "python", HERE.parent / "python") if folder.is_dir()]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from ironhorse.config import GPT2Config  # noqa: E402
from ironhorse.reference.gpt2 import GPT2  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "eager")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention on (B, NH, T, HD); the caller selects the kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def build(args: argparse.Namespace) -> GPT2:
    """The model on the device, with GPT-2's initial weights."""
    config = GPT2Config.parse(args.model)
    if args.seq > config.max_seq_len:
        raise ValueError(f"--seq is {args.seq}, but max_seq_len of {args.model} is {config.max_seq_len}")
    config = replace(config, vocab_size=config.padded_vocab_size)
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        model = GPT2(config, attention)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.zero_()
            elif param.dim() > 1:
                residual = name.endswith("c_proj.weight")
                param.normal_(0.0, 0.02 / (2 * config.n_layer) ** 0.5 if residual else 0.02)
    return model.to(torch.bfloat16) if args.recipe == "bf16" and args.dtype == "bf16" else model


def optimizer_of(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW with decay on matrices only; on a GPU fused into one kernel for all parameters."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=args.device == "cuda")


def time_attention(args: argparse.Namespace, backend: SDPBackend) -> float:
    """Seconds of one layer's attention, forward and backward; infinite if the backend does not support the shape."""
    config = GPT2Config.parse(args.model)
    shape = (args.batch, args.seq, 3, config.n_head, config.head_size)
    packed = torch.randn(shape, device=args.device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
    grad = torch.randn_like(q)
    try:
        with sdpa_kernel(backend):
            for i in range(23):
                if i == 3:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                attention(q, k, v).backward(grad)
        torch.cuda.synchronize()
    except RuntimeError:
        return float("inf")
    return (time.perf_counter() - start) / 20


def candidates(args: argparse.Namespace) -> tuple[list[str], dict[str, float]]:
    """The attention backends to compile with, and the time of each alone in ms."""
    if args.device != "cuda" or args.dtype != "bf16":
        return ["any"], {}
    if args.sdpa in BACKENDS:
        return [args.sdpa], {}
    alone = {name: 1e3 * time_attention(args, backend) for name, backend in BACKENDS.items()}
    alone = {name: ms for name, ms in alone.items() if ms != float("inf")}
    if not alone:
        return ["any"], {}
    ranked = sorted(alone, key=alone.__getitem__)
    return (ranked if args.sdpa == "both" else ranked[:1]), alone


def make_step(args: argparse.Namespace, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """One training step; returns the loss, still on the device."""
    optimizer = optimizer_of(model, args)
    use_autocast = args.dtype == "bf16" and args.recipe == "autocast"

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(args.device, torch.bfloat16) if use_autocast else contextlib.nullcontext():
            return model.loss(x, y)[1]

    if args.mode != "eager":
        loss_of = torch.compile(loss_of, mode=None if args.mode == "default" else args.mode)
    graphs = args.mode == "reduce-overhead"
    parameters = list(model.parameters())

    def step() -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        # If gradients were kept, the next replay of a captured graph would overwrite them before they are added to.
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone() if graphs else loss.detach()

    return step


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def fresh_start(args: argparse.Namespace) -> None:
    """Frees the model of the previous run."""
    torch._dynamo.reset()
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_one(args: argparse.Namespace, sdpa: str) -> dict[str, Any]:
    """Compiles with one attention backend and times the step."""
    fresh_start(args)
    return timed(args, sdpa, build(args), GPT2Config.parse(args.model).vocab_size)


def timed(args: argparse.Namespace, sdpa: str, model: nn.Module, vocabulary: int) -> dict[str, Any]:
    """Times a step of any model whose `loss(x, y)` returns (logits, loss, ..)."""
    tokens = torch.randint(vocabulary, (args.batch, args.seq + 1), device=args.device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    step = make_step(args, model, x, y)
    with sdpa_kernel(BACKENDS[sdpa]) if sdpa in BACKENDS else contextlib.nullcontext():
        start = time.perf_counter()
        first = step().item()
        synchronize(args)
        compile_s = time.perf_counter() - start
        result = {"sdpa": sdpa, "compile_s": compile_s, "first_loss": first}
        if args.compile_only:
            return result
        for _ in range(args.warmup):
            step()
        synchronize(args)
        windows: list[float] = []
        begin = time.perf_counter()
        while not windows or time.perf_counter() - begin < args.seconds:
            start = time.perf_counter()
            for _ in range(args.steps):
                loss = step()
            synchronize(args)
            windows.append(1e3 * (time.perf_counter() - start) / args.steps)
    ms = statistics.median(windows)
    result |= {"ms_per_step": ms, "tokens_per_s": 1e3 * args.batch * args.seq / ms, "windows_ms": windows,
               "loss": loss.item()}  # fmt: skip
    if args.device == "cuda":
        result |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The result with the fastest of the requested attention backends, and those of all runs."""
    if args.dtype != "bf16":
        torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    names, alone = candidates(args)
    runs = [run_one(args, name) for name in names]
    best = min(runs, key=lambda run: run.get("ms_per_step", run["compile_s"]))
    keys = ("model", "batch", "seq", "steps", "dtype", "recipe", "mode")
    about = {name: getattr(args, name) for name in keys}
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    return {**about, "device": device, "torch": torch.__version__, "attention_ms": alone, **best, "runs": runs}


def show(report: dict[str, Any]) -> None:
    for run in report["runs"]:
        line = f"torch {report['torch']} {report['model']} B={report['batch']} T={report['seq']} {report['dtype']}"
        line += f" {report['recipe']} {report['mode']} sdpa={run['sdpa']}: first step {run['compile_s']:.1f} s"
        if "ms_per_step" in run:
            line += f", {run['ms_per_step']:.2f} ms/step, {run['tokens_per_s']:,.0f} tokens/s, loss {run['loss']:.4f}"
            if "peak_bytes" in run:
                line += f", {run['peak_bytes'] / 2**30:.1f} GiB ({run['reserved_bytes'] / 2**30:.1f} reserved)"
        print(line, flush=True)


def parsed(parser: argparse.ArgumentParser, argv: list[str] | None, sizes: tuple[str, ...]) -> argparse.Namespace:
    """The arguments of a benchmark: its own, and those that all of them have. `sizes` must be at least 1."""
    parser.add_argument("--mode", choices=MODES, default="default", help="of torch.compile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile-only", action="store_true", help="one step, which fills torch's caches on disk")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    for name in sizes:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    return args


def run(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> int:
    """Measures, shows the report and writes it. Returns the exit code: 2 for one of `errors`, which is the user's."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU; --device cpu tries the script without one", file=sys.stderr)
        return 2
    # With an in-memory cache only, every process would compile everything again.
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    try:
        report = measure(args)
    except errors as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="d12", help="d12 d24 d36 d48, or sizes such as n_layer=2,n_head=4,...")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="steps in a window of timing")
    parser.add_argument("--seconds", type=float, default=5.0, help="windows are timed until these have passed")
    parser.add_argument("--warmup", type=int, default=5, help="steps after the first, before timing")
    parser.add_argument("--dtype", choices=("bf16", "tf32", "f32"), default="bf16")
    parser.add_argument("--recipe", choices=("autocast", "bf16"), default="autocast")
    parser.add_argument("--sdpa", choices=(*BACKENDS, "best", "both"), default="best")
    return parsed(parser, argv, ("batch", "seq", "steps"))


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv), measure)


if __name__ == "__main__":
    sys.exit(main())
