"""Times PyTorch's fastest training step of a mixture of experts on a GPU.

    python benches/gpu_torch_moe.py --model moe-6.9b --layers 8 --batch 16 --seq 1024 --json torch.json
    python benches/gpu_torch_moe.py --model moe-6.9b --recipe bf16 --recompute --batch 16 --json torch.json

The model is that of ironhorse.reference.moe with the experts of a layer in two tensors, multiplied by torch's grouped
products over rows sorted by expert (no synchronisation with the host), torch's fused attention, and q, k, v in one
product. A step and its timing are those of gpu_torch.py: forward, cross-entropy and auxiliary loss, backward,
clip_grad_norm_(1.0), fused AdamW, in windows of --steps until --seconds have passed; the figure is the median window.

--recipe autocast keeps f32 weights under bf16 autocast, the usual way; bf16 keeps weights, gradients and moments in
bf16. --experts loop multiplies expert by expert, with a synchronisation a layer, where grouped products are missing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gpu_torch import BACKENDS, fresh_start, parsed, run, timed  # noqa: E402
from ironhorse.config import MoEConfig  # noqa: E402
from ironhorse.errors import IronhorseError  # noqa: E402
from ironhorse.params import active_params, total_params  # noqa: E402
from ironhorse.reference.moe import MoE, aux_loss, rope_tables  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows (R, in) sorted by expert, weight (E, out, in), ends (E,) of each expert's rows -> (R, out)."""
    return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


def loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same, expert by expert."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, w) for part, w in zip(rows.split(counts), weight, strict=True)])


PRODUCTS = {"grouped": grouped, "loop": loop}


class Layer(nn.Module):
    """One layer: (B, T, C) -> (B, T, C) and its auxiliary loss."""

    def __init__(self, config: MoEConfig, experts: str) -> None:
        super().__init__()
        C, E, inner = config.hidden, config.n_experts, config.ffn
        q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.config, self.product = config, PRODUCTS[experts]
        self.norm_1 = nn.Parameter(torch.ones(C))
        self.norm_2 = nn.Parameter(torch.ones(C))
        self.qkv = nn.Linear(C, q + 2 * kv, bias=False)
        self.o_proj = nn.Linear(q, C, bias=False)
        self.gate = nn.Linear(C, E, bias=False)
        self.w13 = nn.Parameter(torch.empty(E, 2 * inner, C))
        self.w2 = nn.Parameter(torch.empty(E, C, inner))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.o_proj(self.attend(norm(x, self.norm_1, self.config.rms_eps), cos, sin))
        h = norm(x, self.norm_2, self.config.rms_eps)
        out, aux = self.route(h.flatten(0, 1))
        return x + out.view_as(x), aux

    def attend(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        parts = self.qkv(h).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q, k, v = parts.split((c.n_head, c.n_kv_head, c.n_kv_head), dim=1)
        q, k = (rotate(part, cos, sin) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.n_kv_head != c.n_head)
        return mixed.transpose(1, 2).flatten(2)

    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C) -> (N, C), aux."""
        c = self.config
        probs = self.gate(h).float().softmax(dim=-1)
        chosen, experts = probs.topk(c.top_k, dim=-1)
        weights = chosen / chosen.sum(dim=-1, keepdim=True)
        routes = experts.flatten()
        order = routes.argsort(stable=True)
        ends = (routes[:, None] == torch.arange(c.n_experts, device=h.device)).sum(dim=0).cumsum(0).int()
        dtype = torch.get_autocast_dtype(h.device.type) if torch.is_autocast_enabled(h.device.type) else h.dtype
        rows = h.to(dtype)[order // c.top_k]
        up_and_gate = self.product(rows, self.w13.to(dtype), ends)
        gate, up = up_and_gate.chunk(2, dim=-1)
        rows = self.product(F.silu(gate) * up, self.w2.to(dtype), ends)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=h.device))
        out = (rows[places].unflatten(0, (-1, c.top_k)).float() * weights[..., None]).sum(dim=1)
        return out.to(h.dtype), aux_loss(probs, experts, c.aux_alpha)


class Model(nn.Module):
    """tokens (B, T) to (logits, loss, aux); `config.n_experts` is at least 1."""

    def __init__(self, config: MoEConfig, experts: str = "grouped", recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config.validate(), recompute
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Layer(config, experts) for _ in range(config.n_layer))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(tokens)
        cos, sin = rope_tables(self.config, tokens.shape[1], x)
        losses = []
        for layer in self.layers:
            if self.recompute:
                x, aux = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x, aux = layer(x, cos, sin)
            losses.append(aux)
        logits = self.head(norm(x, self.norm, self.config.rms_eps))
        aux = torch.stack(losses)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return logits, loss + aux.sum(), aux

    @torch.no_grad()
    def load_reference(self, model: MoE) -> Model:
        """The weights of the reference, for a comparison."""
        self.embed.weight.copy_(model.model.embed_tokens.weight)
        self.norm.copy_(model.model.norm.weight)
        self.head.weight.copy_(model.lm_head.weight)
        for ours, theirs in zip(self.layers, model.model.layers, strict=True):
            attn, moe = theirs.self_attn, theirs.block_sparse_moe
            ours.norm_1.copy_(theirs.input_layernorm.weight)
            ours.norm_2.copy_(theirs.post_attention_layernorm.weight)
            ours.qkv.weight.copy_(torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]))
            ours.o_proj.weight.copy_(attn.o_proj.weight)
            ours.gate.weight.copy_(moe.gate.weight)
            ours.w13.copy_(torch.stack([torch.cat([e.w1.weight, e.w3.weight]) for e in moe.experts]))
            ours.w2.copy_(torch.stack([e.w2.weight for e in moe.experts]))
        return self


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def config_of(args: argparse.Namespace) -> MoEConfig:
    """The sizes, with the requested number of layers."""
    config = MoEConfig.parse(args.model)
    if not config.n_experts:
        raise ValueError(f"--model {args.model} has no experts")
    if args.seq > config.max_seq_len:
        raise ValueError(f"--seq is {args.seq}, but max_seq_len of {args.model} is {config.max_seq_len}")
    return replace(config, n_layer=args.layers or config.n_layer)


def build(args: argparse.Namespace, config: MoEConfig) -> Model:
    """The model on the device, matrices N(0, 0.02)."""
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.recipe == "bf16" and args.dtype == "bf16" else torch.float32
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # created in its final type: in f32 it would not fit
    try:
        with torch.device(args.device):
            model = Model(config, args.experts, args.recompute)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0.0, 0.02)
    return model


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The result with the fastest of the requested attention backends, and those of all runs."""
    if args.dtype != "bf16":
        torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    config = config_of(args)
    if args.device != "cuda" or args.dtype != "bf16":
        names = ["any"]
    else:
        names = list(BACKENDS) if args.sdpa == "both" else [args.sdpa]
    runs = []
    for name in names:
        fresh_start(args)
        runs.append(timed(args, name, build(args, config), config.vocab_size))
    best = min(runs, key=lambda run: run.get("ms_per_step", run["compile_s"]))
    keys = ("model", "batch", "seq", "steps", "dtype", "recipe", "mode", "experts", "recompute")
    about: dict[str, Any] = {name: getattr(args, name) for name in keys}
    about |= {"layers": config.n_layer, "parameters": total_params(config), "active": active_params(config)}
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    return {**about, "device": device, "torch": torch.__version__, **best, "runs": runs}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="moe-6.9b", help="moe-6.9b moe-tiny, or sizes such as C=64,L=2,NH=4,...")
    parser.add_argument("--layers", type=int, help="in place of the model's own number")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="steps in a window of timing")
    parser.add_argument("--seconds", type=float, default=5.0, help="windows are timed until these have passed")
    parser.add_argument("--warmup", type=int, default=3, help="steps after the first, before timing")
    parser.add_argument("--dtype", choices=("bf16", "tf32", "f32"), default="bf16")
    parser.add_argument("--recipe", choices=("autocast", "bf16"), default="autocast")
    parser.add_argument("--experts", choices=tuple(PRODUCTS), default="grouped")
    parser.add_argument("--recompute", action="store_true", help="keep only the input of each layer for the backward")
    parser.add_argument("--sdpa", choices=(*BACKENDS, "both"), default="both")
    return parsed(parser, argv, ("batch", "seq", "steps", "layers"))


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv), measure, (IronhorseError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
