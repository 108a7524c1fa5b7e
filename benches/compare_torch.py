"""Times the same training step in PyTorch and in ironhorse, alternating in one run on the CPU.

    python benches/compare_torch.py --model d12 --batch 4 --seq 64 --threads 2 --steps 10 --rounds 3 --json cmp.json
    python benches/compare_torch.py --model moe-tiny --batch 8 --seq 128 --torch-dtypes f32 --steps 40
    python benches/compare_torch.py --scaling --model d12 --threads 2          # ironhorse only, over B and over T

Both sides start from the same weights and train on the same tokens, so their losses must agree. Every round runs
each side in a separate process, so that peak memory is measured per side; startup is not timed. torch's AdamW runs both
with fused=True and with its default; speeds are relative to the faster. The binary is --bin, else IRONHORSE_BIN, else
target/release/ironhorse of this checkout.

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

from ironhorse.config import GPT2Config, MoEConfig, parse_config  # noqa: E402
from ironhorse.errors import IronhorseError  # noqa: E402
from ironhorse.formats.staging import check_writable_file, write_json  # noqa: E402

# default timed steps and warm-up steps
COMPARE_STEPS, COMPARE_WARMUP = 10, 2
SCALING_STEPS, SCALING_WARMUP = 3, 1
SCALING_BATCHES = (1, 2, 4, 8)  # at T = 64
SCALING_SEQS = (64, 128, 256, 512, 1024)  # at B = 1


@dataclass
class Side:
    """One side of the comparison and the results of its rounds."""

    name: str
    dtype: str
    adamw: str | None = None  # torch: fused or default; None until the first round has decided which is faster
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ms_per_step(self) -> float:
        """Median over all timed steps of all rounds, or over the rounds' medians if single steps are not reported."""
        steps = [ms for r in self.rounds for ms in r.get("step_ms") or [r["ms_per_step"]]]
        return statistics.median(steps)

    @property
    def ms_fastest(self) -> float:
        """The fastest of all timed steps, which is least affected by other load on the machine."""
        return min(ms for r in self.rounds for ms in r.get("step_ms") or [r["ms_per_step"]])

    @property
    def losses(self) -> list[float]:
        return self.rounds[-1]["losses"]

    @property
    def max_rss_bytes(self) -> int:
        """Largest resident set of any round, from start to exit, as reported by the kernel."""
        return max(r["max_rss_bytes"] for r in self.rounds)

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the process up to its last step.

        For torch that is the kernel's count. `ironhorse bench` reads its own after the last step, because it goes on
        to measure the machine, which takes memory of its own; where it cannot, it gives what it planned, and the
        kernel's count is taken.
        """
        own = [r["peak_bytes"] for r in self.rounds if r.get("peak_bytes") not in (None, r.get("planned_bytes"))]
        return max(own) if len(own) == len(self.rounds) else self.max_rss_bytes


# ---- running one side ------------------------------------------------------------------------------------------


def run_child(command: list[str], threads: int) -> int:
    """Runs to the end; returns the peak resident set in bytes. A failure becomes a one-line error."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = {**os.environ, **{name: str(threads) for name in variables}, "PYTHONPATH": str(ROOT / "python")}
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            raise IronhorseError(f"cannot run {command[0]}: {error.strerror}") from None
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if child.returncode != 0:
        what = " ".join([Path(command[0]).name, *command[1:3]])
        raise IronhorseError(f"`{what} ...` ended with {child.returncode}: {lines[-1] if lines else 'no message'}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_torch(args: argparse.Namespace, folder: Path, dtype: str, adamw: str) -> dict[str, Any]:
    """One process of PyTorch."""
    report = folder / "torch.json"
    command = [sys.executable, "-m", "ironhorse.reference.bench", "run", "--files", str(folder), "--dtype", dtype]
    for name in ("threads", "warmup", "steps"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--json", str(report)] + (["--fused"] if adamw == "fused" else [])
    peak = run_child(command, args.threads)
    return json.loads(report.read_text()) | {"max_rss_bytes": peak}


def run_ironhorse(args: argparse.Namespace, folder: Path, dtype: str, **shape: Any) -> dict[str, Any]:
    """One process of `ironhorse bench`; without `data` it generates random tokens."""
    report = folder / "ironhorse.json"
    command = [str(args.bin), "bench"]
    options = {"device": "cpu", "dtype": dtype, "json": report, **shape}
    options |= {name: getattr(args, name) for name in ("threads", "warmup", "steps")}
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    peak = run_child(command, args.threads)
    try:
        result = json.loads(report.read_text())
        result["loss"]
        if not all(ms > 0 for ms in (result["ms_per_step"], *result.get("step_ms", ()))):
            raise ValueError("a step with a duration of 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IronhorseError(f"ironhorse bench wrote no usable --json file ({error!r})") from None
    result.setdefault("losses", [result["loss"]])
    return result | {"max_rss_bytes": peak}


# ---- the comparison --------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all rounds. The sides alternate, so that a slow phase of the machine affects all of them."""
    f32 = [Side(f"torch f32, {adamw} AdamW", "f32", adamw) for adamw in ("fused", "default")]
    f32 = f32 if "f32" in args.torch_dtypes else []
    bf16 = [Side("torch bf16 autocast", "bf16")] if "bf16" in args.torch_dtypes else []
    iron = [] if args.torch_only else [Side(f"ironhorse {d}", d) for d in args.ironhorse_dtypes]
    with tempfile.TemporaryDirectory(prefix="ironhorse-bench-") as name:
        folder = Path(name)
        say("writing the weights and the batch both sides start from")
        prepare = [sys.executable, "-m", "ironhorse.reference.bench", "prepare", "--model", args.model]
        prepare += ["--batch", str(args.batch), "--seq", str(args.seq), "--out", name]
        run_child(prepare, args.threads)
        files = (
            ("moe", "tokens.safetensors")
            if isinstance(parse_config(args.model), MoEConfig)
            else ("model.bin", "state.bin")
        )
        data = {"model": folder / files[0], "data": folder / files[1], "batch": args.batch, "seq": args.seq}
        for number in range(args.rounds):
            for side in (*f32, *bf16, *iron):
                if side in iron:
                    result = run_ironhorse(args, folder, side.dtype, **data)
                else:
                    side.adamw = side.adamw or (faster(f32).adamw if f32 else "fused")
                    result = run_torch(args, folder, side.dtype, side.adamw)
                side.rounds.append(result)
                say(f"round {number + 1}  {side.name:<{NAME_WIDTH}}{figure(result['ms_per_step']):>10} ms/step")
    return comparison_report(args, f32, bf16, iron)


def faster(sides: list[Side]) -> Side:
    """The side with the lower median; the first of equal ones."""
    return min(sides, key=lambda side: side.ms_per_step)


def comparison_report(args: argparse.Namespace, f32: list[Side], bf16: list[Side], iron: list[Side]) -> dict[str, Any]:
    """`speed_vs_torch_f32` is relative to the faster AdamW; the two ratios compare ironhorse's first row with each."""
    base = faster(f32) if f32 else None
    sides = [*sorted(f32, key=lambda side: side is not base), *bf16, *iron]
    rows = []
    for side in sides:
        first = side.rounds[0]
        rows.append({
            "name": side.name,
            "ms_per_step": side.ms_per_step,
            "ms_fastest": side.ms_fastest,
            "tokens_per_s": 1e3 * args.batch * args.seq / side.ms_per_step,
            "speed_vs_torch_f32": base.ms_per_step / side.ms_per_step if base else None,
            "peak_bytes": side.peak_bytes,
            "losses": side.losses,
            "rounds_ms": [r["ms_per_step"] for r in side.rounds],
            "median_over": "steps" if all(r.get("step_ms") for r in side.rounds) else "rounds",
            "max_rss_bytes": side.max_rss_bytes,
            "rss_at_start_bytes": first.get("rss_at_start_bytes"),
            "loss_max_rel_diff": loss_difference(sides[0].losses, side.losses),
            "adamw": side.adamw,
            "version": first.get("torch") or first.get("version"),
        })  # fmt: skip
    ratios = {f"ratio_vs_torch_{side.adamw}": side.ms_per_step / iron[0].ms_per_step for side in f32 if iron}
    fastest = {f"ratio_fastest_vs_torch_{side.adamw}": side.ms_fastest / iron[0].ms_fastest for side in f32 if iron}
    torch_sides = [*f32, *bf16]
    return {
        "kind": "compare",
        **provenance(),
        "torch": torch_sides[0].rounds[0]["torch"],
        "threads": args.threads,
        "model": no_folders(args.model),
        "batch": args.batch,
        "seq": args.seq,
        "steps": args.steps,
        "warmup": args.warmup,
        "rounds": args.rounds,
        "rows": rows,
        "torch_f32_adamw": base.adamw if base else None,
        "ratio_vs_torch_fused": None,
        "ratio_vs_torch_default": None,
        **ratios,
        **fastest,
    }


def loss_difference(base: list[float], other: list[float]) -> float:
    """Largest relative difference over the steps that both report; sides with fewer steps are aligned at the end."""
    common = min(len(base), len(other))
    pairs = zip(base[-common:], other[-common:], strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


NAME_WIDTH = 27


def figure(value: float) -> str:
    """A positive number in at most 8 characters: more decimals for small numbers, fewer for large ones."""
    if 1e6 <= value or value < 1e-3:
        return f"{value:.2e}"
    return f"{value:.{1 if value >= 100 else 2 if value >= 1 else 4}f}"


def print_comparison(report: dict[str, Any]) -> None:
    hardware, rows = report["hardware"], report["rows"]
    kind = "" if isinstance(parse_config(report["model"]), MoEConfig) else "GPT-2 "
    print(f"\n{kind}{report['model']}  B={report['batch']} T={report['seq']}  {report['threads']} threads  "
          f"{report['rounds']} rounds of {report['steps']} steps  torch {report['torch']}")  # fmt: skip
    print(f"{hardware['cpu']}, {hardware['cores']} cores, {' '.join(hardware['flags']) or 'no avx512, no amx'}")
    print(f"commit {report['commit']}\n")
    print(f"{'':<{NAME_WIDTH}}{'ms/step':>10}{'fastest':>10}{'tokens/s':>10}{'speed':>10}{'peak MiB':>10}"
          f"{'last loss':>12}{'loss diff':>11}")  # fmt: skip
    for row in rows:
        speed = row["speed_vs_torch_f32"]
        print(f"{row['name']:<{NAME_WIDTH}}{figure(row['ms_per_step']):>10}{figure(row['ms_fastest']):>10}"
              f"{figure(row['tokens_per_s']):>10}{'-' if speed is None else figure(speed) + 'x':>10}"
              f"{row['peak_bytes'] / 2**20:>10.0f}{row['losses'][-1]:>12.6f}"
              f"{row['loss_max_rel_diff']:>11.1e}")  # fmt: skip
    print(f"\nspeed and loss difference are against {rows[0]['name']}")
    iron = next((row["name"] for row in rows if row["name"].startswith("ironhorse")), None)
    if report["ratio_vs_torch_default"] is not None:
        print(f"{iron} is {figure(report['ratio_vs_torch_default'])}x the speed of torch f32 with its default AdamW, "
              f"{figure(report['ratio_vs_torch_fused'])}x with fused=True; by the fastest steps "
              f"{figure(report['ratio_fastest_vs_torch_default'])}x and "
              f"{figure(report['ratio_fastest_vs_torch_fused'])}x")  # fmt: skip
    start = rows[0]["rss_at_start_bytes"]
    if start:
        print(f"torch's peak includes {start / 2**20:.0f} MiB that importing torch takes before there is a model")
    for row in rows:
        spread = max(row["rounds_ms"]) / min(row["rounds_ms"]) - 1
        if spread > 0.1:
            print(f"note: the rounds of {row['name']} differ by {spread:.0%}; the machine was not quiet, run it again")


# ---- scaling ---------------------------------------------------------------------------------------------------


def step_flops(config: GPT2Config, batch: int, seq: int) -> float:
    """Multiply-adds of the matrix products of one step, counted as two each; backward is twice the forward.

    Per token: 24 L C² for the layers, 2 V C for the head, 2 L C (T + 1) for causal attention (half of the square).
    """
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    return 3.0 * batch * seq * (24 * L * C * C + 2 * V * C + 2 * L * C * (seq + 1))


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Measures ironhorse alone, over B at T=64 and over T at B=1."""
    config = GPT2Config.parse(args.model)
    seqs = [seq for seq in SCALING_SEQS if seq <= config.max_seq_len]
    groups = {"batch": [(b, min(64, seqs[-1] if seqs else config.max_seq_len)) for b in SCALING_BATCHES],
              "seq": [(1, seq) for seq in seqs]}  # fmt: skip
    rows: list[dict[str, Any]] = []
    measured: dict[tuple[int, int], dict[str, Any]] = {}  # the two blocks share a shape
    with tempfile.TemporaryDirectory(prefix="ironhorse-bench-") as name:
        for over, shapes in groups.items():
            for batch, seq in shapes:
                if (batch, seq) not in measured:
                    shape = {"model": args.model, "batch": batch, "seq": seq}
                    measured[batch, seq] = run_ironhorse(args, Path(name), args.ironhorse_dtypes[0], **shape)
                    say(f"B={batch} T={seq}: {figure(measured[batch, seq]['ms_per_step'])} ms/step")
                result = Side("", "", rounds=[measured[batch, seq]])
                row = {
                    "over": over,
                    "batch": batch,
                    "seq": seq,
                    "ms_per_step": result.ms_per_step,
                    "tokens_per_s": 1e3 * batch * seq / result.ms_per_step,
                    "flops": step_flops(config, batch, seq),
                    "peak_bytes": result.peak_bytes,
                    "max_rss_bytes": result.max_rss_bytes,
                }
                rows.append(row)
                first = next(row for row in rows if row["over"] == over)
                row["flops_ratio"] = row["flops"] / first["flops"]  # expected
                row["time_ratio"] = row["ms_per_step"] / first["ms_per_step"]  # measured
    return {
        "kind": "scaling",
        **provenance(),
        "threads": args.threads,
        "model": no_folders(args.model),
        "dtype": args.ironhorse_dtypes[0],
        "steps": args.steps,
        "warmup": args.warmup,
        "rows": rows,
    }


def print_scaling(report: dict[str, Any]) -> None:
    hardware = report["hardware"]
    print(f"\nGPT-2 {report['model']} {report['dtype']}, {report['threads']} threads, {hardware['cpu']}, "
          f"{hardware['cores']} cores, commit {report['commit']}\n")  # fmt: skip
    print(f"{'B':>4}{'T':>6}{'ms/step':>11}{'tokens/s':>11}{'expected':>11}{'measured':>11}{'meas./exp.':>12}")
    previous = None
    for row in report["rows"]:
        if previous not in (None, row["over"]):
            print()
        previous = row["over"]
        growth = row["time_ratio"] / row["flops_ratio"]
        print(f"{row['batch']:>4}{row['seq']:>6}{figure(row['ms_per_step']):>11}{figure(row['tokens_per_s']):>11}"
              f"{figure(row['flops_ratio']) + 'x':>11}{figure(row['time_ratio']) + 'x':>11}"
              f"{figure(growth):>12}")  # fmt: skip
    print("\nexpected is the ratio of FLOPs, measured that of times, both to the first row of the block; a last column "
          "above 1 grows faster than the work")  # fmt: skip


# ---- where it ran ----------------------------------------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """Commit, command and hardware, without paths of this machine."""
    command = " ".join(map(no_folders, sys.argv))
    git = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {"command": command, "commit": git.stdout.strip() or "unknown", "hardware": hardware()}


def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, and the vector instruction sets that determine the speed."""
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
    """The number of cores this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def no_folders(text: str) -> str:
    """Reduces a path to its last part, because results must not contain paths of this machine."""
    return Path(text).name if os.sep in text else text


def say(text: str) -> None:
    """Prints progress to stderr, so that stdout contains only the table."""
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
        "--model", default="d12", help="d12 d24 d36 d48 moe-tiny, a .toml or .json file, or n_layer=3,n_head=..."
    )
    parser.add_argument("--batch", type=int, default=4, metavar="B")
    parser.add_argument("--seq", type=int, default=64, metavar="T")
    parser.add_argument("--threads", type=int, default=cores(), metavar="N")
    parser.add_argument("--steps", type=int, metavar="N",
                        help=f"timed steps a round: {COMPARE_STEPS}, with --scaling {SCALING_STEPS}")  # fmt: skip
    parser.add_argument("--warmup", type=int, metavar="N",
                        help=f"steps before: {COMPARE_WARMUP}, with --scaling {SCALING_WARMUP}")  # fmt: skip
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
    if args.steps is None:
        args.steps = SCALING_STEPS if args.scaling else COMPARE_STEPS
    if args.warmup is None:
        args.warmup = SCALING_WARMUP if args.scaling else COMPARE_WARMUP
    if args.warmup < 0:
        raise IronhorseError(f"--warmup is {args.warmup}; it must be 0 or more")
    for name in ("batch", "seq", "threads", "steps", "rounds"):
        if getattr(args, name) < 1:
            raise IronhorseError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.json is not None:
        check_writable_file(args.json, "--json")
    if not args.torch_only and not args.bin.is_file():
        raise IronhorseError("no ironhorse binary; `cargo build --release`, then give --bin or IRONHORSE_BIN")
    if args.scaling and isinstance(parse_config(args.model), MoEConfig):
        raise IronhorseError("--scaling is for GPT-2; benches/moe_experts.py varies the experts of a mixture")
    config = parse_config(args.model)
    if not args.scaling and args.seq > config.max_seq_len:
        raise IronhorseError(f"--seq is {args.seq}, but max_seq_len of {args.model} is {config.max_seq_len}")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        report = scaling(args) if args.scaling else compare(args)
        (print_scaling if args.scaling else print_comparison)(report)  # before the file, which may fail
        if args.json is not None:
            write_json(args.json, report)
    except IronhorseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or args.json or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
