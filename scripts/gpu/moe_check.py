"""Checks the results of a training run for run.sh; the last line is the verdict.

    python moe_check.py fell RUN              the loss of the run folder fell
    python moe_check.py continued RUN NEXT    NEXT starts from the weights that RUN ended with
    python moe_check.py same A.json B.json    two reports of `ironhorse generate` hold the same tokens

Exit code: 0 if the statement is true, 1 if not.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

# The number of steps averaged at each end, so that the difference between single batches does not count as a fall.
ENDS = 10
# Random weights have a loss of ln V. After 300 steps on the built-in stories it is below the entropy of single bytes,
# which is half of that.
FALL = 0.5
# The tolerance of the loss of the same weights on the same batches. In bf16 a resumed run rounds the master weights to
# the nearest, where training rounded stochastically: they differ by 2^-9 on average. The tolerance is 4 times that.
SAME_LOSS = 4 * 2**-9


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def fell(run: Path) -> tuple[bool, str]:
    losses = [step["loss"] for step in metrics(run)]
    wrong = [step for step, loss in enumerate(losses) if loss is None or not math.isfinite(loss)]
    if len(losses) < 2 * ENDS or wrong:
        return False, f"{len(losses)} losses, not finite at steps {wrong[:5]}"
    first, last = sum(losses[:ENDS]) / ENDS, sum(losses[-ENDS:]) / ENDS
    return last < FALL * first, f"loss {first:.4f} to {last:.4f} in {len(losses)} steps"


def continued(run: Path, following: Path) -> tuple[bool, str]:
    ended = [step["val_loss"] for step in metrics(run) if step.get("val_loss") is not None][-1]
    steps = metrics(following)
    began, last = steps[0]["val_loss"], [step["val_loss"] for step in steps if step.get("val_loss") is not None][-1]
    said = f"validation loss {ended:.6f}, after loading {began:.6f}, {len(steps)} steps on {last:.6f}"
    return abs(began - ended) <= SAME_LOSS * ended and math.isfinite(last), said


def same(one: Path, other: Path) -> tuple[bool, str]:
    a, b = (json.loads(path.read_text())["tokens"] for path in (one, other))
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return False, f"token {at} of {len(a)} is {left} in {one.stem}, {right} in {other.stem}"
    return len(a) == len(b) > 0, f"{len(a)} tokens equal" if len(a) == len(b) else f"{len(a)} tokens beside {len(b)}"


def main(argv: list[str]) -> int:
    checks = {"fell": (fell, 1), "continued": (continued, 2), "same": (same, 2)}
    check, count = checks.get(argv[0] if argv else "", (None, 0))
    if check is None or len(argv) != 1 + count:
        print(__doc__, file=sys.stderr)
        return 2
    good, said = check(*map(Path, argv[1:]))
    print(f"{'passed' if good else 'failed'}: {said}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
