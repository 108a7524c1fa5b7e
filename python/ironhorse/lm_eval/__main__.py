"""`python -m ironhorse.lm_eval`: the command of lm-evaluation-harness, with the model `ironhorse`."""

from __future__ import annotations

import sys

from ..errors import IronhorseError


def main() -> int:
    """Runs the harness with `sys.argv`."""
    from lm_eval.__main__ import cli_evaluate

    # importing this package has registered the model
    try:
        cli_evaluate()
    except IronhorseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
