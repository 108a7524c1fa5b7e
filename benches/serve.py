#!/usr/bin/env python3
"""First token and tokens per second of `ironhorse serve`, alone and with many clients, beside transformers' `generate`.

    python benches/serve.py --binary target/release/ironhorse --make gpt2 --json serve.json
    python benches/serve.py --binary ironhorse --model FOLDER --device cuda --clients 16

`--make` writes a model of random weights (the speed does not depend on them) for where there are none: gpt2, or 8b,
the shape of Qwen3-8B. Every answer goes on to its last token (`ignore_eos`), prompts are tokens, and the clock of a
client starts before it connects. transformers runs the same prompts, one at a time, then all as one batch. The two take
turns: a round is one client and all clients of the server, then the same of transformers; both models are in memory all
the time. Figures are medians of the
rounds, and `times_as_fast` compares the two round by round.

`together.tokens_per_s` is all tokens by all of the time, prompts included; `together.writing_tokens_per_s` is the rate
while all clients are written to and no prompt is read, to compare with `alone.tokens_per_s`, the same of one client.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import http.client
import json
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "n_positions": 1024,
    "n_ctx": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
QWEN_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers has them."""
    if config["model_type"] == "gpt2":
        c = config["n_embd"]
        all_: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (config["vocab_size"], c),
            "transformer.wpe.weight": (config["n_positions"], c),
        }
        for layer in range(config["n_layer"]):
            for name, shape in {
                "ln_1.weight": (c,),
                "ln_1.bias": (c,),
                "attn.c_attn.weight": (c, 3 * c),
                "attn.c_attn.bias": (3 * c,),
                "attn.c_proj.weight": (c, c),
                "attn.c_proj.bias": (c,),
                "ln_2.weight": (c,),
                "ln_2.bias": (c,),
                "mlp.c_fc.weight": (c, 4 * c),
                "mlp.c_fc.bias": (4 * c,),
                "mlp.c_proj.weight": (4 * c, c),
                "mlp.c_proj.bias": (c,),
            }.items():
                all_[f"transformer.h.{layer}.{name}"] = shape
        return {**all_, "transformer.ln_f.weight": (c,), "transformer.ln_f.bias": (c,)}
    c, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    all_ = {"model.embed_tokens.weight": (config["vocab_size"], c)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm.weight": (c,),
            "self_attn.q_proj.weight": (q, c),
            "self_attn.k_proj.weight": (kv, c),
            "self_attn.v_proj.weight": (kv, c),
            "self_attn.o_proj.weight": (c, q),
            "self_attn.q_norm.weight": (d,),
            "self_attn.k_norm.weight": (d,),
            "post_attention_layernorm.weight": (c,),
            "mlp.gate_proj.weight": (f, c),
            "mlp.up_proj.weight": (f, c),
            "mlp.down_proj.weight": (c, f),
        }.items():
            all_[f"model.layers.{layer}.{name}"] = shape
    return {**all_, "model.norm.weight": (c,), "lm_head.weight": (config["vocab_size"], c)}


def make(folder: Path, config: dict[str, Any]) -> None:
    """A folder of random weights: one block over and over, so that it is written as fast as the disk takes it."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    is_gpt2 = config["model_type"] == "gpt2"
    numbers = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(np.float32)
    block = (numbers if is_gpt2 else (numbers.view(np.uint32) >> 16).astype(np.uint16)).tobytes()
    size, dtype = (4, "F32") if is_gpt2 else (2, "BF16")
    head, at = {}, 0
    for name, shape in tensors(config).items():
        count = size
        for dim in shape:
            count *= dim
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            file.write(block[: min(at, len(block))])
            at -= min(at, len(block))
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32" if is_gpt2 else "bfloat16"}))


@dataclasses.dataclass
class Answer:
    start: float
    pieces: list[float]
    """When each piece came: a token each, but for those that end in the middle of a character."""
    end: float
    tokens: int

    def first_s(self) -> float:
        return self.pieces[0] - self.start

    def all_s(self) -> float:
        return self.end - self.start

    def within(self, start: float, end: float) -> float:
        """Tokens that came after `start`, up to `end`."""
        count = sum(start < at <= end for at in self.pieces)
        return count * self.tokens / len(self.pieces)


def writing_rate(answers: list[Answer]) -> float:
    """Tokens per second while all clients are written to: from the last first token to the first last token."""
    start, end = max(one.pieces[0] for one in answers), min(one.pieces[-1] for one in answers)
    if end <= start:
        sys.exit("one answer ended before another began: ask for more tokens")
    return sum(one.within(start, end) for one in answers) / (end - start)


class Server:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        command = [
            args.binary,
            "serve",
            str(folder),
            "--listen",
            "127.0.0.1:0",
            "--name",
            "m",
            "--device",
            args.device,
            "--dtype",
            args.dtype,
            "--tokenizer",
            args.tokenizer,
            "--rows",
            str(args.clients),
            "--context",
            str(args.prompt + args.tokens),
            *args.flags,
        ]
        started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://([0-9.]+):(\d+)", line)
        if not found:
            sys.exit(f"the server did not start: {line}")
        self.host, self.port = found.group(1), int(found.group(2))
        self.start_s = time.perf_counter() - started

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        """What a client sees of its answer, by its clock."""
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer, pieces, usage = connection.getresponse(), [], None
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                sys.exit(f"the server answered {event}")
            if event["choices"]:
                pieces.append(time.perf_counter())
            usage = event.get("usage") or usage
        if usage is None or usage["completion_tokens"] != tokens:
            sys.exit(f"expected {tokens} tokens, found {usage}")
        return Answer(start, pieces, time.perf_counter(), tokens)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


class Transformers:
    """`generate` of the same prompts: one at a time, and all as one batch."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import torch
        import transformers

        if args.device == "cpu":
            torch.set_num_threads(args.threads)
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
        self.device, self.version = args.device, transformers.__version__
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model: Any = model.to(args.device).eval()

    def write(self, batch: list[list[int]], tokens: int) -> float:
        """Seconds until the batch has that many tokens more."""
        import torch

        ids = torch.tensor(batch, device=self.device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        out.cpu()
        return time.perf_counter() - start


Figures = dict[str, dict[str, float]]


def served_round(server: Server, args: argparse.Namespace, one: list[int], prompts: list[list[int]]) -> Figures:
    """One round of the server: a client alone, then all of them."""
    alone = server.ask(one, args.tokens)
    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        start = time.perf_counter()
        together = list(pool.map(lambda prompt: server.ask(prompt, args.tokens), prompts))
        seconds = time.perf_counter() - start
    return {
        "alone": {
            "first_s": alone.first_s(),
            # the tokens after the first by the time they take
            "tokens_per_s": (args.tokens - 1) / (alone.end - alone.pieces[0]),
            "whole_tokens_per_s": args.tokens / alone.all_s(),
        },
        "together": {
            "tokens_per_s": args.clients * args.tokens / seconds,
            "first_s": statistics.median(each.first_s() for each in together),
            "writing_tokens_per_s": writing_rate(together),
        },
    }


def transformers_round(
    model: Transformers, args: argparse.Namespace, one: list[int], prompts: list[list[int]]
) -> Figures:
    """The same of transformers."""
    first, whole = model.write([one], 1), model.write([one], args.tokens)
    many_first, many = model.write(prompts, 1), model.write(prompts, args.tokens)
    return {
        "alone": {
            "first_s": first,
            "tokens_per_s": (args.tokens - 1) / (whole - first),
            "whole_tokens_per_s": args.tokens / whole,
        },
        "together": {
            "tokens_per_s": args.clients * args.tokens / many,
            "first_s": many_first,
            "writing_tokens_per_s": args.clients * (args.tokens - 1) / (many - many_first),
        },
    }


def medians(rounds: list[Figures]) -> Figures:
    return {
        part: {name: statistics.median(each[part][name] for each in rounds) for name in figures}
        for part, figures in rounds[0].items()
    }


def ratios(ours: list[Figures], theirs: list[Figures]) -> Figures:
    """How many times as fast as transformers, round by round: the median, the slowest and the fastest round."""
    found: Figures = {}
    for part, figures in ours[0].items():
        for name in figures:
            pairs = [(mine[part][name], its[part][name]) for mine, its in zip(ours, theirs, strict=True)]
            each = [its / mine if name.endswith("first_s") else mine / its for mine, its in pairs]
            found[f"{part}.{name}"] = spread(each)
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def measure(args: argparse.Namespace, folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Rounds of both in turns, so that a machine whose speed changes is as fast for one as for the other."""
    server = Server(args, folder)
    ours: list[Figures] = []
    theirs: list[Figures] = []
    everyone = prompts[: args.clients]
    try:
        model = None if args.alone else Transformers(args, folder)
        # once before the clock, alone and together
        server.ask(prompts[0], 4)
        with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
            list(pool.map(lambda prompt: server.ask(prompt, 4), everyone))
        if model:
            model.write(prompts[:1], 2)
            model.write(everyone, 2)
        for one in prompts[: args.rounds]:
            ours.append(served_round(server, args, one, everyone))
            if model:
                theirs.append(transformers_round(model, args, one, everyone))
                time.sleep(0.5)  # its threads wait in a loop for a while
            print(f"round {len(ours)} of {args.rounds}", file=sys.stderr)
    finally:
        server.end()
    report: dict[str, Any] = {
        "ironhorse": {"start_s": server.start_s, **medians(ours)},
        "together_by_alone": spread(
            [each["together"]["writing_tokens_per_s"] / each["alone"]["tokens_per_s"] for each in ours]
        ),
    }
    if model:
        report["transformers"] = {"version": model.version, **medians(theirs)}
        report["times_as_fast"] = ratios(ours, theirs)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", type=Path, help="a folder as transformers saves it")
    parser.add_argument("--make", choices=["gpt2", "8b"])
    parser.add_argument("--tokenizer", default="gpt2", help="only its vocabulary counts: prompts are tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], help="of both; f32 on the CPU, bf16 on a GPU")
    parser.add_argument("--threads", type=int, default=2, help="of transformers")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of serve, behind --")
    args = parser.parse_args()
    args.dtype = args.dtype or ("f32" if args.device == "cpu" else "bf16")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or Path(temporary) / "model"
        if args.make:
            make(folder, GPT2 if args.make == "gpt2" else QWEN_8B)
        prompts = [
            [(i * 7919 + j * 104729 + 17) % 50000 for j in range(args.prompt)]
            for i in range(max(args.clients, args.rounds))
        ]
        report: dict[str, Any] = {
            "prompt": args.prompt,
            "tokens": args.tokens,
            "clients": args.clients,
            "rounds": args.rounds,
            "device": args.device,
            "dtype": args.dtype,
            **measure(args, folder, prompts),
        }
    text = json.dumps(report, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
