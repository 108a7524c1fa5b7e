"""Every command in the documentation is run, in small: pages are read from top to bottom, as a reader does.

A command that cannot run here matches a line of NOT_HERE, which says why and what checks it instead. Names of the hub are found in a cache that the
test makes; models, batches and numbers of steps are replaced by small ones. Needs IRONHORSE_BIN.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from lm_models import WORDS, sentence, write_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("recipes/*.md")])
PROGRAMS = ("ironhorse", "cargo", "python", "python3", "pip", "gcc", "torchrun", "srun", "mpirun", "tensorboard")
PROGRAMS += ("llama-cli", "bash", "cp", "until", "if", "curl", "ssh")

# Why a command is not run here. Every line must be needed.
NOT_HERE = {
    r"^cargo (build|install|run|xtask)": "compiles; `cargo xtask test` and crates/capi/tests/programs.rs do it",
    r"^gcc |^\./train_linear|ctypes_demo": "crates/capi/tests/programs.rs compiles and runs the examples of C",
    r"^pip install": "the stages setup and wheel of `cargo xtask test` do it",
    r"--device cuda|--gpus \d+ --accumulate": "needs a GPU; scripts/gpu runs these commands on one",
    r"^torchrun |^srun ": "needs a launcher; test_launch.py runs the scripts under what stands in for one",
    r"^tensorboard ": "does not end; test_tensorboard.py reads the files with it",
    r"^llama-cli ": "needs llama.cpp; test_gguf_llama_cpp.py runs it where it is installed",
    r"tinyshakespeare|shakespeare-(bytes|gpt2|bytes-cpu)\.toml|hellaswag$": "downloads a file whose hash is known; "
    "test_fetch.py downloads from a server of its own, crates/cli/tests/cli/recipes.rs checks the recipes",
    r"datasets/roneneldan|fineweb10B": "downloads a data set; test_fetch.py downloads from a server of its own",
    r"ironhorse\.lm_eval": "loads tasks of the hub; test_lm_eval.py runs it with tasks of its own",
    r"--schedule wsd --steps 100000|runs/a-50k": "takes hours to its point; crates/cli/tests/cli/schedules.rs runs it in small",
    r"--replay": "needs a step that went wrong; crates/cli/tests/replay.rs makes one",
    r"^if |^until ": "the shell around commands that are run",
}

SMALL = "n_layer=1,n_head=2,n_embd=32,vocab_size=50304,max_seq_len=32"
NAMES = {"gpt2": "gpt2", "Qwen/Qwen3-0.6B": "qwen3", "Qwen/Qwen3-8B": "qwen3", "org/name": "llama"}
NAMES |= {"mistralai/Mixtral-8x7B-v0.1": "mixtral"}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@dataclass(frozen=True)
class Command:
    """A line of a page."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    def why_not(self) -> str | None:
        return next((pattern for pattern in NOT_HERE if re.search(pattern, self.text)), None)


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The lines of code without a language or of the shell: fenced, or indented by four after an empty line."""
    fence: str | None = None
    empty, indented = True, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
        elif fence is not None:
            if fence in ("", "bash", "sh"):
                yield number, line
        elif line.startswith("    ") and (empty or indented):
            indented = True
            yield number, line[4:]
        else:
            indented = False
        empty = not line.strip()


def commands(page: Path) -> list[Command]:
    found = []
    for number, line in blocks(page.read_text()):
        first = line.split(" ", 1)[0]
        if first in PROGRAMS or first.startswith("./"):
            found += [Command(page.name, number, part.strip()) for part in line.split(" # ")[0].split(" && ")]
    return found


def hub(folder: Path) -> None:
    """Small models under the names of the hub, as huggingface_hub keeps them."""
    made: dict[str, Path] = {}
    for name, kind in NAMES.items():
        repository = "openai-community/gpt2" if name == "gpt2" else name
        place = folder / ("models--" + repository.replace("/", "--"))
        snapshot = place / "snapshots" / ("0" * 40)
        if kind in made:
            shutil.copytree(made[kind], snapshot)
        else:
            snapshot.mkdir(parents=True)
            write_model(snapshot, kind)
            (snapshot / "chat_template.jinja").write_text(TEMPLATE)
            made[kind] = snapshot
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0" * 40)


def shrunk(command: Command) -> list[str]:
    """The command with small models and few steps."""
    words = shlex.split(command.text)
    if words[0] in ("python", "python3"):
        words[0] = sys.executable
    if words[0] != "ironhorse":
        return ["n_layer=1,n_head=2,n_embd=32,vocab_size=300,max_seq_len=16" if word == "d12" else word for word in words]
    verb = words[1]
    words[0] = os.environ["IRONHORSE_BIN"]
    if verb == "plan":
        return words

    def give(flag: str, value: str) -> None:
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words.extend([flag, value])

    if "d12" in words:
        words[words.index("d12")] = SMALL
    for flag, value in (("--batch", "2"), ("--seq", "16"), ("--eval-limit", "2"), ("--eval-every", "0"), ("--listen", "127.0.0.1:0")):
        if flag in words:
            give(flag, value)
    if verb in ("train", "tune"):
        if "--resume" not in words:
            give("--steps", "2")
            if "--seq" not in words and verb == "train":
                give("--seq", "16")
            if "--out" not in words:
                words.extend(["--out", "runs/0001", "--overwrite"])
        give("--sample-tokens", "4")
    if verb == "generate":
        give("--tokens", "4")
    if verb in ("bench", "profile"):
        give("--steps", "1")
        give("--warmup", "0")
    if verb == "selftest":
        words.extend((["--quick"] if "--quick" not in words else []) + (["--op", "add"] if "--op" not in words else []))
    if verb == "serve" or (verb == "watch" and "--web" in words):
        give("--listen", "127.0.0.1:0")
    return words


def run(command: Command, place: Path, environment: dict[str, str]) -> None:
    words = shrunk(command)
    pipes = {"cwd": place, "env": environment, "text": True, "errors": "replace"}
    if words[1] == "serve" or "--web" in words:
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **pipes)
        assert server.stdout is not None
        line = server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        rest = server.communicate(timeout=60)
        assert server.returncode == 0 and "http://" in line, f"{command}\n{words}\n{line}{rest}"
        return
    done = subprocess.run(words, capture_output=True, input="hello\n", timeout=300, **pipes)
    assert done.returncode == 0, f"{command}\n{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for file in (place / "answers").glob("gpt2_custom*"):  # the small model has another name
        file.rename(file.with_name(file.name.replace("custom", "d12")))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hub")
    hub(folder)
    return {
        **os.environ,
        "HF_HUB_CACHE": str(folder),
        "HF_HUB_OFFLINE": "1",
        "IRONHORSE_CACHE": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "NO_COLOR": "1",
    }


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """What a reader has: texts, chats, shards, an answer key, and runs that were made before."""
    place = tmp_path_factory.mktemp("docs")
    (place / "book.txt").write_text("".join(sentence(seed, 30) + ".\n\n" for seed in range(60)))
    chats = [
        {"messages": [{"role": "user", "content": sentence(i, 2)}, {"role": "assistant", "content": sentence(i + 99, 3)}]}
        for i in range(12)
    ]
    (place / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    pairs = [
        {
            "prompt": chat["messages"][:1],
            "chosen": chat["messages"][1:],
            "rejected": [{"role": "assistant", "content": WORDS[i]}],
        }
        for i, chat in enumerate(chats)
    ]
    (place / "preferences.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    questions = [{"ctx": sentence(i, 4), "endings": [WORDS[i], WORDS[i + 1]], "label": i % 2} for i in range(6)]
    (place / "hellaswag_val.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    for name in ("token.txt", "key.txt"):
        (place / name).write_text("a-secret-of-the-test\n")
    (place / "a.toml").write_text(f'model = "{SMALL}"\nsteps = 2\nbatch = 2\nseq = 16\nsample-tokens = 4\n')
    shutil.copytree(ROOT / "recipes", place / "recipes")
    binary = os.environ["IRONHORSE_BIN"]
    chat = place / "runs" / "chat"
    for line in (
        f"prepare book.txt --tokenizer gpt2 --out shards --val-tail 0.2 --name part",
        f"train --model {SMALL} --data shards/*_train_*.bin --tokenizer shards --steps 2 --batch 2 --seq 16 --sample-tokens 4 --out runs/0001",
        f"train --model {SMALL} --data shards/*_train_*.bin --tokenizer shards --steps 2 --batch 2 --seq 16 --sample-tokens 4 --out runs/0002",
        f"tune Qwen/Qwen3-0.6B --data chat.jsonl --steps 2 --sample-tokens 4 --out {chat}",
    ):
        done = subprocess.run([binary, *line.split()], cwd=place, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    return place


# What a page takes for granted beyond the rest: the run that it talks about is one of chats, …
CHATS = {"chat.md", "serve.md", "gguf.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page(page: Path, start: Path, environment: dict[str, str], tmp_path: Path):
    place = tmp_path / "place"
    shutil.copytree(start, place, symlinks=True)
    if page.name in CHATS:
        shutil.rmtree(place / "runs" / "0001")
        shutil.copytree(place / "runs" / "chat", place / "runs" / "0001")
    for command in commands(page):
        if command.why_not() is None:
            run(command, place, environment)


def test_every_reason_is_needed():
    used = {command.why_not() for page in PAGES for command in commands(page)}
    assert set(NOT_HERE) <= used, set(NOT_HERE) - used
    everything = [command for page in PAGES for command in commands(page)]
    here = [command for command in everything if command.why_not() is None]
    assert len(here) > 0.6 * len(everything), (len(here), len(everything))


def anchors(page: Path) -> set[str]:
    """The headings of a page as a forge links them, and its own marks."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    found = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"(?m)^#+ (.*)$", text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def test_links_lead_somewhere_and_the_index_has_every_page():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/adr/*.md"), ROOT / "docs" / "benchmarks" / "README.md"]
    for page in pages:
        text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text())
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.relative_to(ROOT)}: {link} does not exist"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{page.relative_to(ROOT)}: {link} has no such heading"
    index = (ROOT / "docs" / "README.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert page.name == "README.md" or f"({page.name}" in index, f"{page.name} is not in docs/README.md"
