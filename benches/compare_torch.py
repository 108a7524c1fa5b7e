"""PyTorch and ironhorse, the same training step, alternately in one run on the CPU.

    python benches/compare_torch.py --model d12 --batch 4 --seq 64 --threads 2 --steps 10 --rounds 3 --json cmp.json
    python benches/compare_torch.py --scaling --model d12 --threads 2          # ironhorse only, over B and over T

Both sides start from the same weights and train on the same tokens, so their losses must agree. Every round runs
each side in a process of its own: its peak memory is its own, and starting up is not timed. The binary is
--bin, else IRONHORSE_BIN, else target/release/ironhorse of this checkout.

This process imports neither torch nor numpy: a child's peak memory as the kernel counts it starts at its parent's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from ironhorse.config import GPT2Config  # noqa: E402
from ironhorse.errors import IronhorseError  # noqa: E402

WARMUP = 2
SCALING_BATCHES = (1, 2, 4, 8)  # at T = 64
SCALING_SEQS = (64, 128, 256, 512, 1024)  # at B = 1


@dataclass
class Side:
    """One competitor and what its rounds gave."""

    name: str
    dtype: str
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ms_per_step(self) -> float:
        """Median over every timed step of every round; over the rounds' medians where single steps are not given."""
        steps = [ms for r in self.rounds for ms in r.get("step_ms") or [r["ms_per_step"]]]
        return statistics.median(steps)

    @property
    def losses(self) -> list[float]:
        return self.rounds[-1]["losses"]

    @property
    def peak_bytes(self) -> int:
        """Largest resident set of any round, as the kernel counted it."""
        return max(r["max_rss_bytes"] for r in self.rounds)


# ---- running one side ------------------------------------------------------------------------------------------


def run_child(command: list[str], threads: int) -> int:
    """Runs to the end; returns the peak resident set in bytes. A failure becomes a one-line error."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = {**os.environ, **{name: str(threads) for name in variables}, "PYTHONPATH": str(ROOT / "python")}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if child.returncode != 0:
        what = " ".join([Path(command[0]).name, *command[1:3]])
        raise IronhorseError(f"`{what} ...` ended with {child.returncode}: {lines[-1] if lines else 'no message'}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_torch(args: argparse.Namespace, folder: Path, dtype: str, fused: bool, steps: int) -> dict[str, Any]:
    """One process of PyTorch."""
    report = folder / "torch.json"
    command = [sys.executable, "-m", "ironhorse.reference.bench", "run", "--files", str(folder), "--dtype", dtype]
    command += ["--threads", str(args.threads), "--warmup", str(WARMUP), "--steps", str(steps), "--json", str(report)]
    peak = run_child(command + (["--fused"] if fused else []), args.threads)
    return json.loads(report.read_text()) | {"max_rss_bytes": peak}


def run_ironhorse(args: argparse.Namespace, folder: Path, dtype: str, **shape: Any) -> dict[str, Any]:
    """One process of `ironhorse bench`; without `data` it makes up its own tokens."""
    report = folder / "ironhorse.json"
    command = [str(args.bin), "bench"]
    options = {"device": "cpu", "dtype": dtype, "steps": args.steps, "threads": args.threads, "json": report, **shape}
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    peak = run_child(command, args.threads)
    try:
        result = json.loads(report.read_text())
        result["ms_per_step"], result["loss"]
    except (OSError, ValueError, KeyError) as error:
        raise IronhorseError(f"ironhorse bench wrote no usable --json file ({error!r})") from None
    result.setdefault("losses", [result["loss"]])
    return result | {"max_rss_bytes": peak}


# ---- the comparison --------------------------------------------------------------------------------------------


def choose_adamw(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times torch's AdamW both ways, once; the comparison uses the faster."""
    steps = min(args.steps, 5)
    ms = {name: run_torch(args, folder, "f32", name == "fused", steps)["ms_per_step"] for name in ("default", "fused")}
    return {"default_ms": ms["default"], "fused_ms": ms["fused"], "used": min(ms, key=ms.__getitem__)}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the sides take turns so that a slow minute of the machine falls on each of them."""
    torch_sides = [Side(f"torch {'f32' if d == 'f32' else 'bf16 autocast'}", d) for d in args.torch_dtypes]
    iron_sides = [] if args.torch_only else [Side(f"ironhorse {d}", d) for d in args.ironhorse_dtypes]
    with tempfile.TemporaryDirectory(prefix="ironhorse-bench-") as name:
        folder = Path(name)
        say("writing the weights and the batch both sides start from")
        prepare = [sys.executable, "-m", "ironhorse.reference.bench", "prepare", "--model", args.model]
        prepare += ["--batch", str(args.batch), "--seq", str(args.seq), "--out", name]
        run_child(prepare, args.threads)
        adamw = choose_adamw(args, folder)
        say(f"AdamW: default {adamw['default_ms']:.1f} ms/step, fused {adamw['fused_ms']:.1f}; using {adamw['used']}")
        data = {"model": folder / "model.bin", "data": folder / "state.bin", "batch": args.batch, "seq": args.seq}
        for number in range(args.rounds):
            for side in torch_sides:
                side.rounds.append(run_torch(args, folder, side.dtype, adamw["used"] == "fused", args.steps))
                say(f"round {number + 1}  {side.name:<20} {side.rounds[-1]['ms_per_step']:9.1f} ms/step")
            for side in iron_sides:
                side.rounds.append(run_ironhorse(args, folder, side.dtype, **data))
                say(f"round {number + 1}  {side.name:<20} {side.rounds[-1]['ms_per_step']:9.1f} ms/step")
    return comparison_report(args, torch_sides + iron_sides, adamw)


def comparison_report(args: argparse.Namespace, sides: list[Side], adamw: dict[str, Any]) -> dict[str, Any]:
    base = sides[0]
    rows = []
    for side in sides:
        first, last = side.rounds[0], side.rounds[-1]
        rows.append({
            "name": side.name,
            "ms_per_step": side.ms_per_step,
            "round_ms": [r["ms_per_step"] for r in side.rounds],
            "tokens_per_s": 1e3 * args.batch * args.seq / side.ms_per_step,
            "speed_against_first": base.ms_per_step / side.ms_per_step,
            "max_rss_bytes": side.peak_bytes,
            "rss_at_start_bytes": first.get("rss_at_start_bytes"),
            "peak_bytes": last.get("peak_bytes"),  # what ironhorse itself planned
            "losses": side.losses,
            "loss_max_rel_diff": loss_difference(base.losses, side.losses),
            "version": first.get("torch") or first.get("version"),
        })  # fmt: skip
    shape = {name: getattr(args, name) for name in ("batch", "seq", "threads", "steps", "rounds")}
    return {
        "kind": "compare",
        "model": no_folders(args.model),
        **shape,
        "warmup": WARMUP,
        "adamw": adamw,
        "sides": rows,
        **provenance(),
    }


def loss_difference(base: list[float], other: list[float]) -> float:
    """Largest relative difference over the steps both report; a side that left warm-up out is aligned at the end."""
    common = min(len(base), len(other))
    pairs = zip(base[-common:], other[-common:], strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def print_comparison(report: dict[str, Any]) -> None:
    hardware = report["hardware"]
    print(f"\nGPT-2 {report['model']}  B={report['batch']} T={report['seq']}  {report['threads']} threads  "
          f"{report['rounds']} rounds of {report['steps']} steps  torch AdamW: {report['adamw']['used']}")  # fmt: skip
    print(f"{hardware['cpu']}, {hardware['cores']} cores, {' '.join(hardware['flags']) or 'no avx512, no amx'}")
    print(f"commit {report['commit']}\n")
    print(f"{'':<22}{'ms/step':>10}{'tokens/s':>10}{'speed':>8}{'peak MiB':>10}{'last loss':>12}{'loss diff':>11}")
    for side in report["sides"]:
        print(f"{side['name']:<22}{side['ms_per_step']:>10.1f}{side['tokens_per_s']:>10.0f}"
              f"{side['speed_against_first']:>7.2f}x{side['max_rss_bytes'] / 2**20:>10.0f}"
              f"{side['losses'][-1]:>12.6f}{side['loss_max_rel_diff']:>11.1e}")  # fmt: skip
    print(f"\nspeed and loss difference are against {report['sides'][0]['name']}")
    start = report["sides"][0]["rss_at_start_bytes"]
    if start:
        print(f"torch's peak includes {start / 2**20:.0f} MiB that importing torch takes before there is a model")
    for side in report["sides"]:
        spread = max(side["round_ms"]) / min(side["round_ms"]) - 1
        if spread > 0.1:
            print(f"note: the rounds of {side['name']} differ by {spread:.0%}; the machine was not quiet, run it again")


# ---- scaling ---------------------------------------------------------------------------------------------------


def step_flops(config: GPT2Config, batch: int, seq: int) -> float:
    """Multiply-adds of the matrix products of one step, counted as two each; backward is twice the forward.

    Per token: 24 L C² for the layers, 2 V C for the head, 2 L C (T + 1) for causal attention (half of the square).
    """
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    return 3.0 * batch * seq * (24 * L * C * C + 2 * V * C + 2 * L * C * (seq + 1))


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """ironhorse alone over B at T=64 and over T at B=1."""
    config = GPT2Config.parse(args.model)
    seqs = [seq for seq in SCALING_SEQS if seq <= config.max_seq_len]
    groups = {"batch": [(b, min(64, seqs[-1] if seqs else config.max_seq_len)) for b in SCALING_BATCHES],
              "seq": [(1, seq) for seq in seqs]}  # fmt: skip
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ironhorse-bench-") as name:
        for over, shapes in groups.items():
            for batch, seq in shapes:
                shape = {"model": args.model, "batch": batch, "seq": seq}
                result = run_ironhorse(args, Path(name), args.ironhorse_dtypes[0], **shape)
                flops = step_flops(config, batch, seq)
                rows.append({"over": over, "batch": batch, "seq": seq, "ms_per_step": result["ms_per_step"],
                             "flops": flops, "max_rss_bytes": result["max_rss_bytes"]})  # fmt: skip
                first = next(row for row in rows if row["over"] == over)
                rows[-1]["time_ratio"] = rows[-1]["ms_per_step"] / first["ms_per_step"]
                rows[-1]["flops_ratio"] = flops / first["flops"]
                say(f"B={batch} T={seq}: {result['ms_per_step']:.1f} ms/step")
    shape = {
        "model": no_folders(args.model),
        "dtype": args.ironhorse_dtypes[0],
        "threads": args.threads,
        "steps": args.steps,
    }
    return {"kind": "scaling", **shape, "rows": rows, **provenance()}


def print_scaling(report: dict[str, Any]) -> None:
    hardware = report["hardware"]
    print(f"\nGPT-2 {report['model']} {report['dtype']}, {report['threads']} threads, {hardware['cpu']}, "
          f"{hardware['cores']} cores, commit {report['commit']}\n")  # fmt: skip
    print(f"{'B':>4}{'T':>6}{'ms/step':>11}{'GFLOP/s':>10}{'time':>9}{'FLOPs':>9}{'time/FLOPs':>12}")
    previous = None
    for row in report["rows"]:
        if previous not in (None, row["over"]):
            print()
        previous = row["over"]
        rate, growth = row["flops"] / row["ms_per_step"] / 1e6, row["time_ratio"] / row["flops_ratio"]
        print(f"{row['batch']:>4}{row['seq']:>6}{row['ms_per_step']:>11.1f}{rate:>10.1f}"
              f"{row['time_ratio']:>8.2f}x{row['flops_ratio']:>8.2f}x{growth:>12.2f}")  # fmt: skip
    print("\ntime and FLOPs are against the first row of each block; a last column above 1 grows faster than the work")


# ---- where it ran ----------------------------------------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """Commit, command and hardware, with nothing in it that names this machine's folders."""
    command = " ".join(map(no_folders, sys.argv))
    git = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {"command": command, "commit": git.stdout.strip() or "unknown", "hardware": hardware()}


def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, and the wide instruction sets that decide the speed."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
    return {"cpu": fields.get("model name", "unknown"), "cores": cores(), "flags": [f for f in wanted if f in flags]}


def cores() -> int:
    """Cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def no_folders(text: str) -> str:
    """Of a path only its last part: results must not carry this machine's folders."""
    return Path(text).name if os.sep in text else text


def say(text: str) -> None:
    """Progress goes to stderr, so that the table is all there is on stdout."""
    print(text, file=sys.stderr, flush=True)


# ---- command line ----------------------------------------------------------------------------------------------


def dtype_list(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= {"f32", "bf16"}:
        raise argparse.ArgumentTypeError(f"'{text}'; give f32, bf16 or f32,bf16")
    return names


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="d12", help="d12 d24 d36 d48, a .toml or .json file, or n_layer=3,n_head=..."
    )
    parser.add_argument("--batch", type=int, default=4, metavar="B")
    parser.add_argument("--seq", type=int, default=64, metavar="T")
    parser.add_argument("--threads", type=int, default=cores(), metavar="N")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--torch-dtypes", type=dtype_list, default=["f32", "bf16"], metavar="LIST")
    parser.add_argument("--ironhorse-dtypes", type=dtype_list, default=["f32"], metavar="LIST")
    parser.add_argument("--torch-only", action="store_true", help="time PyTorch alone")
    parser.add_argument("--scaling", action="store_true", help="ironhorse alone, over B and over T")
    parser.add_argument(
        "--bin", default=os.environ.get("IRONHORSE_BIN") or ROOT / "target/release/ironhorse", type=Path
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    for name in ("batch", "seq", "threads", "steps", "rounds"):
        if getattr(args, name) < 1:
            raise IronhorseError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not args.torch_only and not args.bin.is_file():
        raise IronhorseError("no ironhorse binary; `cargo build --release`, then give --bin or IRONHORSE_BIN")
    config = GPT2Config.parse(args.model)
    if not args.scaling and args.seq > config.max_seq_len:
        raise IronhorseError(f"--seq is {args.seq}, but max_seq_len of {args.model} is {config.max_seq_len}")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        report = scaling(args) if args.scaling else compare(args)
    except IronhorseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    (print_scaling if args.scaling else print_comparison)(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
