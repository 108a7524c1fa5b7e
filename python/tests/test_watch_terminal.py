"""`ironhorse watch` in a real terminal, by tmux: small, large, resized, while a run is alive. Needs IRONHORSE_BIN.

Skipped without tmux (Debian: `apt install tmux`); crates/cli draws the same screens without a terminal.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli import ironhorse

SIZES = "hidden=24,layers=2,heads=4,kv_heads=2,experts=3,top_k=2,ffn=20,vocab=256,context=32,rope_alpha=2"
FLAGS = ["--model", SIZES, "--batch", 2, "--seq", 16, "--val-every", 4, "--sample-every", 5, "--sample-tokens", 8]
PATIENCE = 60
"""Seconds after which a screen that does not come is a failure; a busy machine may need some."""


class Terminal:
    """A tmux server of its own with one window, in which a command runs under a shell."""

    def __init__(self, folder: Path, columns: int, rows: int, command: str):
        self.socket = folder / f"tmux-{columns}x{rows}"
        size = ["-x", str(columns), "-y", str(rows)]
        self.tmux("new-session", "-d", *size, f"{command}; echo code $?; sleep 1000", cwd=folder)

    def tmux(self, *arguments: str, cwd: Path | None = None) -> str:
        command = ["tmux", "-S", str(self.socket), "-f", "/dev/null", *arguments]
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        return subprocess.run(command, check=True, text=True, capture_output=True, cwd=cwd, env=environment).stdout

    def lines(self) -> list[str]:
        """The screen as it is."""
        return self.tmux("capture-pane", "-p").rstrip("\n").split("\n")

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """Waits for a screen."""
        end = time.monotonic() + PATIENCE
        while not seen(lines := self.lines()):
            assert time.monotonic() < end, "\n".join(lines)
            time.sleep(0.05)
        return lines

    def press(self, key: str) -> None:
        self.tmux("send-keys", key)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[[int, int, str], Terminal]]:
    if not shutil.which("tmux"):
        pytest.skip("there is no tmux: `apt install tmux`")
    opened = []

    def start(columns: int, rows: int, command: str) -> Terminal:
        opened.append(Terminal(tmp_path, columns, rows, command))
        return opened[-1]

    yield start
    for one in opened:
        one.tmux("kill-server")


def train(out: Path, steps: int) -> None:
    done = ironhorse("train", *FLAGS, "--device", "cpu", "--steps", steps, "--out", out)
    assert done.returncode == 0, done.stderr


def watch(*arguments: object) -> str:
    return shlex.join([os.environ["IRONHORSE_BIN"], "watch", *map(str, arguments)])


def complete(lines: list[str]) -> bool:
    """Whether the screen has its head, its figures and its foot."""
    return lines[0].startswith("ironhorse watch") and lines[-1].startswith("q end")


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_every_panel_fits_its_terminal(
    terminal: Callable[[int, int, str], Terminal], tmp_path: Path, columns: int, rows: int
):
    for name in ("a", "b"):
        train(tmp_path / name, 12)
    screen = terminal(columns, rows, watch("a", "b"))
    lines = screen.until(complete)
    assert len(lines) == rows and max(map(len, lines)) == columns, "\n".join(lines)
    text = "\n".join(lines)
    for word in ("step 12 of 12", "training loss", "validation loss", "learning rate", "tokens/s", "checkpoints"):
        assert word in text, text
    frames = [text]
    for panel in lines[2].split()[1:]:
        screen.press("Tab")
        frames.append("\n".join(screen.until(lambda now: complete(now) and "\n".join(now) != frames[-1])))
        assert len(frames[-1].split("\n")) == rows, (panel, frames[-1])
    screen.press("q")
    end = screen.until(lambda now: "code 0" in now)
    assert not any("ironhorse watch" in line for line in end), "the screen from before is back"


def test_a_window_may_change_its_size(terminal: Callable[[int, int, str], Terminal], tmp_path: Path):
    train(tmp_path / "a", 12)
    screen = terminal(200, 50, watch("a"))
    screen.until(lambda lines: complete(lines) and len(lines) == 50)
    for columns, rows in ((80, 24), (20, 5), (120, 40)):
        screen.tmux("resize-window", "-x", str(columns), "-y", str(rows))
        screen.until(lambda lines, rows=rows: len(lines) == rows and lines[-1].startswith("q end"))
    screen.until(complete)
    screen.press("C-c")
    screen.until(lambda lines: "code 0" in lines)


def test_a_run_is_watched_while_it_goes_on(terminal: Callable[[int, int, str], Terminal], tmp_path: Path):
    binary = os.environ["IRONHORSE_BIN"]
    flags = [*map(str, FLAGS), "--device", "cpu", "--steps", "1000000", "--out", str(tmp_path / "a")]
    run = subprocess.Popen([binary, "train", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE
        while not (tmp_path / "a" / "metrics.jsonl").exists():
            assert time.monotonic() < end and run.poll() is None
            time.sleep(0.05)
        screen = terminal(80, 24, watch("a"))
        first = screen.until(lambda lines: complete(lines) and lines[1].startswith("step "))[1]
        screen.until(lambda lines: lines[1].startswith("step ") and lines[1] != first)
        screen.press("q")
        screen.until(lambda lines: "code 0" in lines)
        assert run.poll() is None, "the run goes on"
    finally:
        run.terminate()
        run.wait(PATIENCE)
