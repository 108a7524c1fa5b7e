"""Every command in the documentation is run, in small: pages are read from top to bottom, as a reader does.

A command that cannot run here matches a line of NOT_HERE, which says why and what checks it instead. Names of the hub
are found in a cache that the test makes; models, batches and numbers of steps are replaced by small ones. Needs
IRONHORSE_BIN.
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

import ironhorse
import numpy as np
import pytest

pytest.importorskip("transformers")

import torch  # noqa: E402
import transformers  # noqa: E402
from lm_models import WORDS, sentence, write_model, write_tokenizer  # noqa: E402

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
    r"tinyshakespeare|recipes/(shakespeare.*|moe-small)\.toml|hellaswag$": "downloads a file whose hash is known; "
    "test_fetch.py downloads from a server of its own, crates/cli/tests/cli/recipes.rs checks the recipes",
    r"datasets/roneneldan|fineweb10B": "downloads a data set; test_fetch.py downloads from a server of its own",
    r"ironhorse\.lm_eval": "loads tasks of the hub; test_lm_eval.py runs it with tasks of its own",
    r"--schedule wsd --steps 100000|runs/a-50k": "takes hours; crates/cli/tests/cli/schedules.rs runs it in small",
    r"--replay": "needs a step that went wrong; crates/cli/tests/replay.rs makes one",
    r"^if |^until ": "the shell around commands that are run",
}

SMALL = "n_layer=1,n_head=2,n_embd=32,vocab_size=50304,max_seq_len=32"
EXPORTED = "n_layer=1,n_head=2,n_embd=32,vocab_size=300,max_seq_len=16"
MIXTURE = "C=24,L=1,NH=4,NKV=2,E=3,K=2,F=20,V=99"
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


def write_wide(folder: Path) -> None:
    """A Qwen 3 whose widths are multiples of 32, as q8_0 asks for."""
    config = transformers.Qwen3Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=32, vocab_size=write_tokenizer(folder, None), max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


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
            if kind == "qwen3":
                write_wide(snapshot)
            else:
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
        return [{"d12": EXPORTED, "moe-tiny": MIXTURE, "64": "16", "32": "16"}.get(word, word) for word in words]
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
    few = {"--batch": "2", "--seq": "16", "--eval-limit": "2", "--eval-every": "1", "--rampup-steps": "2"}
    for flag, value in few.items():
        if flag in words:
            give(flag, value)
    if verb in ("train", "tune"):
        if "--resume" not in words:
            give("--steps", "2")
            if "--seq" not in words and verb == "train":
                give("--seq", "16")
            if "--out" not in words:
                words.extend(["--out", "runs/0001"])
            words.append("--overwrite")  # a page may begin a run of the same name again
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
    if words[1:3] == ["-m", "ironhorse.export"]:  # in this process: torch is imported already
        out = words.index("--out") + 1
        words[out] = str(place / words[out])
        assert ironhorse.export.main(words[3:]) == 0, str(command)
        return name_keys(place / "answers")
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
    # two steps are not on the track of a recipe, and compare says so
    assert done.returncode in ((0, 1) if words[1] == "compare" else (0,)), (
        f"{command}\n{shlex.join(words)}\n{done.stdout[-999:]}\n{done.stderr[-999:]}"
    )
    name_keys(place / "answers")


def name_keys(answers: Path) -> None:
    """The small models have other names than those that the pages export."""
    for small, name in (("gpt2_custom", "gpt2_d12"), ("moe_custom", "moe-tiny"), ("moe-custom", "moe-tiny")):
        for file in answers.glob(f"{small}*"):
            target = file.with_name(file.name.replace(small, name))
            if not target.is_dir():
                file.replace(target)


def write_choices(path: Path) -> None:
    """Questions in llm.c's format (docs/formats.md)."""
    body = []
    for index in range(3):
        tokens = [3, 1, 2, 3] + [2, 4, 5] * 4  # the context and four answers, each after its length
        body += [65535, 2 * (5 + len(tokens)), index, index % 4, 4, *tokens]
    header = np.zeros(256, "<i4")
    header[:4] = [20240522, 1, 3, 2 * 21]
    path.write_bytes(header.tobytes() + np.array(body, "<u2").tobytes())


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


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """What a reader has: texts, chats, shards, an answer key, and runs that were made before."""
    place = tmp_path_factory.mktemp("docs")
    (place / "book.txt").write_text("".join(sentence(seed, 30) + ".\n\n" for seed in range(60)))
    chats = [
        {
            "messages": [
                {"role": "user", "content": sentence(i, 2)},
                {"role": "assistant", "content": sentence(i + 99, 3)},
            ]
        }
        for i in range(12)
    ]
    (place / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    pairs = [
        {
            "prompt": chat["messages"][:1],
            "chosen": chat["messages"][1:],
            "rejected": [says("assistant", WORDS[i])],
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
    ironhorse.export("gpt2", model=EXPORTED, batch=2, seq=16, out=place / "answers")
    name_keys(place / "answers")
    shutil.copy(place / "answers" / "gpt2_d12.key.safetensors", place)
    write_choices(place / "hellaswag_val.bin")
    data = "--data shards/*_train_*.bin --val-data shards/*_val_*.bin --tokenizer shards --val-every 1"
    for line in (
        "prepare book.txt --tokenizer gpt2 --out shards --val-tail 0.2 --name part",
        f"train --model {SMALL} {data} --steps 2 --batch 2 --seq 16 --sample-tokens 4 --out runs/0001",
        "tune Qwen/Qwen3-0.6B --data chat.jsonl --steps 2 --sample-tokens 4 --out runs/tuned",
    ):
        done = subprocess.run(
            [binary, *line.split()], cwd=place, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    shutil.copytree(place / "runs" / "0001", place / "runs" / "0002")
    return place


# The run that these pages talk about is one of chats.
CHATS = {"chat.md", "serve.md", "gguf.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page(page: Path, start: Path, environment: dict[str, str], tmp_path: Path):
    place = tmp_path / "place"
    shutil.copytree(start, place, symlinks=True)
    if page.name in CHATS:
        shutil.rmtree(place / "runs" / "0001")
        shutil.copytree(place / "runs" / "tuned", place / "runs" / "0001")
    if page.name == "eval.md":
        (place / "fineweb").mkdir()
        for shard in (place / "shards").glob("part_train_*.bin"):
            shutil.copy(shard, place / "fineweb")
        snapshot = Path(environment["HF_HUB_CACHE"]) / "models--openai-community--gpt2" / "snapshots" / ("0" * 40)
        shutil.copytree(snapshot, place / "gpt2-folder")
    for command in commands(page):
        if "folder-of-peft" in command.text:  # the adapter that the page has trained before, as PEFT has it
            (checkpoint,) = (place / "runs" / "0001" / "checkpoints").glob("step-*")
            shutil.copytree(checkpoint, place / "folder-of-peft")
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


def test_named_paths_exist():
    """Paths of the tree in backticks; capitals stand for a name to fill in."""
    tops = "crates|python|docs|scripts|benches|recipes|examples|fuzz"
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/benchmarks/*.md")]
    for page in pages:
        if page.name in ("log.md", "CHANGELOG.md"):  # they speak of what the tree was
            continue
        for path in re.findall(rf"`((?:{tops})/[^`\s]*)`", page.read_text()):
            if not re.search(r"[A-Z]{4}|<|…", path.replace("README", "").replace("CONTRIBUTING", "")):
                assert any(ROOT.glob(path.rstrip("/"))), f"{page.relative_to(ROOT)}: {path} does not exist"


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
