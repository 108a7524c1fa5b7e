"""`ironhorse watch --once` and `ironhorse report`: runs, old ones, and two side by side. Needs IRONHORSE_BIN."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli import assert_could_not_run, ironhorse

SIZES = "hidden=24,layers=2,heads=4,kv_heads=2,experts=3,top_k=2,ffn=20,vocab=256,context=32,rope_alpha=2"
FLAGS = ["--batch", 2, "--seq", 16, "--val-every", 4, "--sample-every", 5, "--sample-tokens", 8, "--device", "cpu"]
VOID = {"meta", "br", "rect", "line", "path", "circle"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and keeps texts and attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.append(tag)

    def handle_endtag(self, tag: str):
        assert self.open.pop() == tag

    def handle_data(self, data: str):
        self.texts.append(data)


def report(*arguments: object) -> None:
    done = ironhorse("report", *arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two small runs that differ in their learning rate; tests leave them as they are."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        done = ironhorse("train", "--model", SIZES, *FLAGS, "--steps", 12, "--lr", rate, "--out", folder / name)
        assert done.returncode == 0, done.stderr
    return folder / "a", folder / "b"


def test_watch_says_what_the_log_says(runs: tuple[Path, Path]):
    done = ironhorse("watch", *runs, "--once")
    assert done.returncode == 0 and not done.stderr, done.stderr
    for run in runs:
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        said = done.stdout[done.stdout.index(str(run)) :]
        for text in ("done", "12 of 12", f"{last['loss']:.4f}", f"{last['val_loss']:.4f}", "tokens/s"):
            assert text in said, (text, said)
        rate = next(line for line in said.splitlines() if line.startswith("learning rate"))
        assert float(rate.split()[-1]) == pytest.approx(last["lr"], rel=1e-3)
    piped = ironhorse("watch", runs[0])
    assert piped.returncode == 0 and "12 of 12" in piped.stdout, "a pipe is no terminal"


def test_a_log_alone_is_enough_and_the_newest_run_is_taken(runs: tuple[Path, Path], tmp_path: Path):
    old = tmp_path / "runs" / "old"
    old.mkdir(parents=True)
    shutil.copy(runs[0] / "metrics.jsonl", old)
    with (old / "metrics.jsonl").open("a") as log:
        log.write('nonsense\n{"step": 12, "loss"')
    (tmp_path / "runs" / "other").mkdir()
    for command in (["watch"], ["watch", "old", "--once"], ["report"]):
        binary = os.environ["IRONHORSE_BIN"]
        done = subprocess.run([binary, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        if command[0] == "watch":
            assert "step             12\n" in done.stdout and "line 13 is not one JSON object" in done.stdout
    page = Page((old / "report.html").read_text())
    assert "svg" in page.tags and "12" in page.texts


def test_a_report_is_one_page_that_needs_nothing_else(runs: tuple[Path, Path], tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    sample = "<script>alert(1)</script> & \x1b[31m\x00 end"
    (run / "samples" / "step-000012.txt").write_text(sample)
    tensors = [{"name": "a", "pass": True}, {"name": "b", "pass": False}]
    (run / "verify.json").write_text(json.dumps({"report": {"verdict": "fail", "tensors": tensors}, "engine": "cpu"}))
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    out = tmp_path / "report.html"
    report(run, "--out", out, "--price", 3600, "--json", tmp_path / "report.json")
    assert before == {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}, "only read"
    text = out.read_text()
    page = Page(text)
    assert page.links == [] and "script" not in page.tags and "@import" not in text and "url(" not in text
    assert text.count("http") == text.count('xmlns="http://www.w3.org/2000/svg"') > 0
    assert "\x1b" not in text and "\x00" not in text
    all_texts = "\n".join(page.texts)
    config = (run / "config.toml").read_text()
    data = json.loads((run / "run.json").read_text())["data"][0]
    for said in (
        "<script>alert(1)</script> &",
        "12 of 12",
        "1 of 2",
        "validation",
        "prefers-color-scheme: dark",
        data["sha256"],
    ):
        assert said in all_texts, said
    assert "lr = 0.001" in config and "0.001" in page.texts
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(line["ms"] for line in log) / 1e3
    assert f"{seconds:.2f} EUR" in all_texts, "3600 an hour is 1 a second"
    assert page.tags.count("svg") == 7, "loss, rate, gradient norm, speed, busiest expert, loads, loads over steps"
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["runs"] == ["run"] and [sample["step"] for sample in said["samples"][0]] == [5, 10, 12]


def test_two_runs_side_by_side(runs: tuple[Path, Path], tmp_path: Path):
    out = tmp_path / "both.html"
    report(*runs, "--out", out)
    page = Page(out.read_text())
    settings = page.texts[page.texts.index("Settings") :]
    assert settings.index("lr") < settings.index("batch"), "what differs comes first"
    at = settings.index("lr")
    assert [text for text in settings[at : at + 3] if text.strip()] == ["lr", "0.001", "0.002"]
    assert {"a training", "b training", "a validation", "b validation"} <= set(page.texts)


def test_markdown(runs: tuple[Path, Path], tmp_path: Path):
    for flags, name in (
        (["--format", "md", "--out", tmp_path / "x.txt"], "x.txt"),
        (["--out", tmp_path / "x.md"], "x.md"),
    ):
        report(*runs, *flags)
        text = (tmp_path / name).read_text()
        assert text.startswith("# a and b\n") and "| lr | 0.001 | 0.002 |" in text
        widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
        assert widths == {4}, "every row has a cell for each run"


def test_what_cannot_be_shown_is_refused(runs: tuple[Path, Path], tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for command, expected in (
        (["watch", tmp_path / "empty"], "without metrics.jsonl"),
        (["report", tmp_path / "none"], "not a folder"),
        (["report", *runs, runs[0]], "two at most"),
        (["report", runs[0], "--price", "-1"], "--price"),
        (["report", runs[0], "--out", tmp_path / "no" / "report.html"], "report.html"),
    ):
        done = ironhorse(*command)
        assert_could_not_run(done)
        assert expected in done.stderr, done.stderr
