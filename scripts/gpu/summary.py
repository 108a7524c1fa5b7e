"""The table at the end of run.sh, and summary.json.

    python summary.py WORK OUT SECONDS

WORK holds parts.tsv (name, status, seconds of every part that run.sh ran), and NAME.json and NAME.log of each. Exit
code 0 if every part passed, 1 otherwise. If a report is missing or unreadable, only its figure is missing in the table.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

GIB = 2**30


class Work:
    """The files that run.sh wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = [line.split("\t") for line in (folder / "parts.tsv").read_text().splitlines()]
        self.parts = [{"name": name, "status": status, "seconds": float(seconds)} for name, status, seconds in rows]

    def json(self, name: str) -> dict[str, Any]:
        try:
            report = json.loads((self.folder / f"{name}.json").read_text())
        except (OSError, ValueError):
            return {}
        return report if isinstance(report, dict) else {}

    def log(self, name: str) -> str:
        try:
            return (self.folder / f"{name}.log").read_text(errors="replace")
        except OSError:
            return ""


# ---- one figure for each part ------------------------------------------------------------------------------------


def figure(work: Work, name: str) -> str:
    """The most important figure of a part."""
    report, kind = work.json(name), name.split("-")[0]
    if kind in ("bench", "torch", "determinism", "startup", "data") and "tokens_per_s" in report:
        return speed_figure(report)
    makers = {"doctor": doctor_figure, "selftest": selftest_figure, "verify": verify_figure, "lockstep": verify_figure,
              "profile": profile_figure}  # fmt: skip
    if kind in makers and report:
        return makers[kind](report)
    if kind == "data" and report.get("steps_s"):
        ms = 1e3 * report["steps_s"] / (report["steps"] - 1)
        return f"{ms:.2f} ms a step, loss {report['last_loss']:.4f}"
    if kind == "python":
        found = re.findall(r"^.*\b(?:passed|failed|error|skipped)\b.* in [0-9.]+s.*$", work.log(name), re.MULTILINE)
        return found[-1].strip("= ") if found else ""
    if kind == "sanitizer":
        found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: *(.*)", work.log(name))
        if found:
            return found[-1]
    # a verdict in words, or why the part was skipped
    found = re.findall(r"^(?:skipped|passed|failed): .*$", work.log(name), re.MULTILINE)
    return found[-1] if found else ""


def speed_figure(report: dict[str, Any]) -> str:
    parts = [f"{report['tokens_per_s']:,.0f} tokens/s", f"{report['ms_per_step']:.2f} ms"]
    if report.get("peak_bytes"):
        parts.append(f"{report['peak_bytes'] / GIB:.1f} GiB")
    parts.append(f"loss {report['loss']:.4f}")
    if "sdpa" in report:
        parts.append(f"{report['mode']}, {report['sdpa']}")
    return ", ".join(parts)


def doctor_figure(report: dict[str, Any]) -> str:
    for device in report.get("devices", ()):
        if str(device.get("device", "")).startswith("cuda"):
            return str(device.get("why", ""))
    return "no GPU is listed"


def selftest_figure(report: dict[str, Any]) -> str:
    return ", ".join(f"{report[key]} {key}" for key in ("passed", "failed", "skipped") if key in report)


def verify_figure(report: dict[str, Any]) -> str:
    wrong = report.get("first_wrong")
    if wrong:
        return f"first wrong: {wrong.get('op')} {wrong.get('tensor')} at {wrong.get('index')}"
    for name, what in (("tensors", "tensors agree"), ("ops", "ops agree")):
        if name in report:
            count = report[name] if isinstance(report[name], int) else len(report[name])
            return f"{count} {what}"
    return str(report.get("verdict", ""))


def profile_figure(report: dict[str, Any]) -> str:
    groups = sorted(report.get("by_kind", ()), key=lambda group: -group.get("ms", 0))[:4]
    top = ", ".join(f"{group.get('name')} {group['ms']:.1f}" for group in groups if "ms" in group)
    return f"{report.get('ms', float('nan')):.1f} ms: {top}"


# ---- what needs several parts ------------------------------------------------------------------------------------


def determinism(work: Work) -> dict[str, Any] | None:
    """Checks that losses are bitwise equal from run to run, and with and without graphs."""
    names = [part["name"] for part in work.parts if part["name"].startswith("determinism-")]
    if not names:
        return None
    losses = {name: work.json(name).get("losses") for name in names}
    first, *others = losses.values()
    if len(names) < 2 or not all(losses.values()):
        said, same = "losses are missing", False
    else:
        differ = [name for name, other in losses.items() if other != first]
        same = not differ
        said = f"{len(first)} losses equal in {len(names)} runs" if same else f"{', '.join(differ)} differs"
    return {"name": "determinism", "status": "ok" if same else "failed", "seconds": 0.0, "figure": said}


def comparison(work: Work) -> list[dict[str, Any]]:
    """ironhorse compared with PyTorch, a row for each model, batch and precision."""
    configs: list[str] = []
    for part in work.parts:
        match = re.fullmatch(r"(?:bench|torch)-((?:d|moe)\d+-b\d+-\w+?)(?:-fast)?", part["name"])
        if match and match[1] not in configs:
            configs.append(match[1])
    rows = []
    for config in configs:
        model, batch, dtype = config.split("-")
        names = {"default": f"bench-{config}", "fast": f"bench-{config}-fast", "torch": f"torch-{config}"}
        sides = {side: work.json(name) for side, name in names.items()}
        row: dict[str, Any] = {"model": model, "batch": int(batch[1:]), "dtype": dtype}
        for side, report in sides.items():
            for key in ("tokens_per_s", "ms_per_step", "peak_bytes", "loss"):
                row[f"{side}_{key}"] = report.get(key)
        for side in ("default", "fast"):
            ours, theirs = row[f"{side}_tokens_per_s"], row["torch_tokens_per_s"]
            row[f"{side}_ratio"] = ours / theirs if ours and theirs else None
        row["torch_how"] = f"{sides['torch']['mode']}, {sides['torch']['sdpa']}" if sides["torch"].get("sdpa") else None
        rows.append(row)
    return rows


# ---- printing ----------------------------------------------------------------------------------------------------


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, form)


def comparison_table(rows: list[dict[str, Any]]) -> list[str]:
    head = f"{'tokens/s':<16}{'default':>10}{'fast':>10}{'torch':>10}{'ratio':>8}{'fast':>7}{'GiB':>8}{'torch':>7}"
    lines = [f"{head}  torch as"]
    for row in rows:
        lines.append(
            f"{row['model'] + ' B=' + str(row['batch']) + ' ' + row['dtype']:<16}"
            f"{number(row['default_tokens_per_s'], ',.0f'):>10}{number(row['fast_tokens_per_s'], ',.0f'):>10}"
            f"{number(row['torch_tokens_per_s'], ',.0f'):>10}{number(row['default_ratio'], '.3f'):>8}"
            f"{number(row['fast_ratio'], '.3f'):>7}{number(row['default_peak_bytes'], '.1f', GIB):>8}"
            f"{number(row['torch_peak_bytes'], '.1f', GIB):>7}  {row['torch_how'] or '-'}"
        )
    return lines


def table(parts: list[dict[str, Any]], rows: list[dict[str, Any]], seconds: int) -> str:
    lines = [f"{'part':<26}{'result':<12}{'time':>8}  figure"]
    for part in parts:
        line = f"{part['name']:<26}{part['status']:<12}{part['seconds']:>6.1f} s  {part['figure']}"
        lines.append(line.rstrip()[:150])
    if rows:
        lines += ["", *comparison_table(rows)]
    bad = [part["name"] for part in parts if not passed(part)]
    absent = sum(part["status"] == "absent" for part in parts)
    counts = f"{len(parts) - len(bad) - absent} passed, {len(bad)} failed{f', {absent} skipped' if absent else ''}"
    lines += ["", f"{counts} in {seconds} s"]
    if bad:
        lines.append(f"failed: {', '.join(bad)}")
    return "\n".join(lines)


def passed(part: dict[str, Any]) -> bool:
    """Whether the part passed, or was skipped because a tool is missing."""
    return part["status"] in ("ok", "absent")


def main(argv: list[str]) -> int:
    work, out, seconds = Work(Path(argv[0])), Path(argv[1]), int(argv[2])
    parts = [{**part, "figure": figure(work, part["name"])} for part in work.parts]
    if (same := determinism(work)) is not None:
        last = max(i for i, part in enumerate(parts) if part["name"].startswith("determinism-"))
        parts.insert(last + 1, same)
    rows = comparison(work)
    text = table(parts, rows, seconds)
    print(f"\n{text}")
    (out / "table.txt").write_text(f"{text}\n")
    summary = {"seconds": seconds, "doctor": work.json("doctor"), "parts": parts, "bench": rows}
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    return 0 if all(map(passed, parts)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
