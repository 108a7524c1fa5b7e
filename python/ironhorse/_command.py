"""The `ironhorse` command of the wheel: the same code as the Rust binary, run in this process."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Runs `sys.argv` and returns the exit code."""
    from . import _native

    # Python's handler would only run after the call; Ctrl-C must end a training run at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # `resume-check` starts the command again, as processes that it can kill: it must know by which interpreter.
    if sys.executable:
        os.environ["IRONHORSE_PYTHON"] = sys.executable
    return _native.command(["ironhorse", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
