"""Makes tables from the reports of `run.sh --only table` and `--only compare`.

python table.py WORK --json FILE             a Markdown row for each bench-NAME.json: beside torch-NAME.json, or in fp8
                                             beside ours in bf16
python table.py WORK --compare --json FILE   two builds: before-N-NAME.json and after-N-NAME.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

GIB = 2**30


def read(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        report = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and "tokens_per_s" in report else None


def beside_torch(work: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(work.glob("bench-*.json"), key=lambda path: path.stat().st_mtime):
        name = path.stem.removeprefix("bench-")
        ours, theirs = read(work, path.stem), read(work, f"torch-{name}")
        if ours is None:
            continue
        row: dict[str, Any] = {"row": name, "tokens_per_s": ours["tokens_per_s"], "peak_bytes": ours.get("peak_bytes")}
        row |= {key: ours.get(key) for key in ("ms_per_step", "mfu", "loss", "commit", "device")}
        if theirs:
            row |= {"torch_tokens_per_s": theirs["tokens_per_s"], "torch_peak_bytes": theirs.get("peak_bytes"),
                    "torch": theirs.get("torch"), "ratio": ours["tokens_per_s"] / theirs["tokens_per_s"]}  # fmt: skip
        plain = read(work, path.stem.partition("-fp8")[0]) if "-fp8" in name else None
        if plain:
            row |= {
                "bf16_tokens_per_s": plain["tokens_per_s"],
                "bf16_ratio": ours["tokens_per_s"] / plain["tokens_per_s"],
            }
        rows.append(row)
    return rows


def builds(work: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(work.glob("after-1-*.json"), key=lambda path: path.stat().st_mtime):
        name = path.stem.removeprefix("after-1-")
        sides = {side: [read(work, f"{side}-{turn}-{name}") for turn in (1, 2)] for side in ("before", "after")}
        reports = {side: [report for report in found if report] for side, found in sides.items()}
        rates = {side: [report["tokens_per_s"] for report in found] for side, found in reports.items()}
        if not all(rates.values()):
            continue
        best = {side: max(found) for side, found in rates.items()}
        noise = max(max(found) / min(found) - 1 for found in rates.values())
        losses = {report["loss"] for found in reports.values() for report in found}
        rows.append({"row": name, **rates, "ratio": best["after"] / best["before"], "noise": noise,
                     "same_loss": len(losses) == 1})  # fmt: skip
    return rows


def gib(count: float | None) -> str:
    return f"{count / GIB:.1f} GiB" if count else ""


def show_torch(rows: list[dict[str, Any]]) -> None:
    print("| row | ironhorse | PyTorch | | memory | PyTorch's |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        theirs = f"{row['torch_tokens_per_s']:,.0f}" if "ratio" in row else ""
        ratio = f"{row['ratio']:.2f}×" if "ratio" in row else ""
        if "bf16_ratio" in row:
            ratio = f"{row['bf16_ratio']:.2f}× ours in bf16"
        print(f"| {row['row']} | {row['tokens_per_s']:,.0f} tokens/s | {theirs} | {ratio} | {gib(row['peak_bytes'])} "
              f"| {gib(row.get('torch_peak_bytes'))} |")  # fmt: skip


def show_builds(rows: list[dict[str, Any]]) -> None:
    print("| row | before | after | after / before | noise | loss |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        before, after = (" ".join(f"{rate:,.0f}" for rate in row[side]) for side in ("before", "after"))
        loss = "equal" if row["same_loss"] else "DIFFERS"
        print(f"| {row['row']} | {before} | {after} | {row['ratio']:.3f} | {row['noise']:.3f} | {loss} |")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = builds(args.work) if args.compare else beside_torch(args.work)
    if not rows:
        print("error: no reports found to make a table from", file=sys.stderr)
        return 1
    (show_builds if args.compare else show_torch)(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
