"""Times `ironhorse prepare` beside Hugging Face `tokenizers` and a nanoGPT-like prepare with tiktoken, in one run.

    python benches/prepare.py --binary target/release/ironhorse --megabytes 100 --json docs/benchmarks/cpu-prepare.json
    python benches/prepare.py --binary target/release/ironhorse --text enwik8 --threads 1

Without --text the data are made here: English out of this repository's documents in random order, its source code, text
in many scripts, runs of white space, broken UTF-8. All three get the same documents (JSON lines) and must give the same
ids. `tokenizers` gets them in batches of 1,000 (`encode_batch_fast`, its fastest), and its ids are joined with numpy;
the nanoGPT-like prepare maps documents over processes and writes a memory map in 1,024 pieces, as its script does.
Each is measured from the file to the ids on disk. tiktoken takes its ranks out of the tokenizer.json that we write, so
that no network is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
EOT = 50256
SCRIPTS = [
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ",
    "色は匂へど散りぬるを我が世誰ぞ常ならむ有為の奥山今日越えて。",
    "우리는 모두 별의 먼지로 만들어졌다. ",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت ",
    "Voix ambiguë d’un cœur qui, au zéphyr, préfère les jattes de kiwis. ",
    "🙂👩‍👩‍👧‍👦 €100 — “naïve” café №5 ½ ",
]


def made_text(megabytes: int, seed: int = 1) -> list[str]:
    """Documents of mixed text; the same for the same seed and the same repository."""
    rng = random.Random(seed)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    prose, code = [], []
    for name in files:
        path = ROOT / name
        if path.suffix in {".md", ".rs", ".py", ".cu", ".toml"} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.suffix == ".md":
                prose += text.split("\n\n")
            else:
                code += text.split("\n\n")
    documents: list[str] = []
    size = 0
    while size < megabytes * 1_000_000:
        parts = []
        for _ in range(rng.randrange(1, 60)):
            kind = rng.random()
            if kind < 0.55:
                parts.append(rng.choice(prose))
            elif kind < 0.9:
                parts.append(rng.choice(code))
            elif kind < 0.97:
                parts.append(rng.choice(SCRIPTS) * rng.randrange(1, 5))
            else:
                parts.append(rng.choice([" ", "\n", "\t", "=", "-", "aA", "0"]) * rng.randrange(1, 300))
        document = "\n\n".join(parts) + rng.choice(["", " \ufffd\ufffd", "\n"])
        if document.strip():  # `prepare` leaves out what is white space only
            documents.append(document)
            size += len(document.encode())
    return documents


def our_tokenizer(binary: str, folder: Path) -> Path:
    """The tokenizer.json that we write for GPT-2."""
    text = folder / "one.txt"
    text.write_text("x")
    subprocess.run([binary, "prepare", text, "--out", folder / "one"], check=True, capture_output=True)
    return folder / "one" / "tokenizer.json"


def run_ours(binary: str, data: Path, out: Path, threads: int) -> np.ndarray:
    command = [
        binary,
        "prepare",
        data,
        "--out",
        out,
        "--name",
        "d",
        "--val",
        "0",
        "--threads",
        str(threads),
        "--overwrite",
    ]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    shards = sorted(out.glob("d_train_*.bin"))
    return np.concatenate([np.fromfile(shard, dtype=np.uint16, offset=1024) for shard in shards])


def run_hf(vocabulary: Path, data: Path, out: Path, threads: int) -> np.ndarray:
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    code = f"""
import json, numpy as np
from tokenizers import Tokenizer
t = Tokenizer.from_file({str(vocabulary)!r})
t.encode_special_tokens = True
def batches():
    batch = []
    with open({str(data)!r}, encoding="utf-8") as f:
        for line in f:
            batch.append(json.loads(line)["text"])
            if len(batch) == 1000:
                yield batch
                batch = []
    yield batch
with open({str(out)!r}, "wb") as f:
    for batch in batches():
        for e in t.encode_batch_fast(batch, add_special_tokens=False):
            np.array([{EOT}] + e.ids, dtype=np.uint16).tofile(f)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    return np.fromfile(out, dtype=np.uint16)


def run_nano(vocabulary: Path, data: Path, out: Path, threads: int) -> np.ndarray:
    """nanoGPT's data/openwebtext/prepare.py without `datasets`: a pool of processes, then a memory map."""
    code = f"""
import json, multiprocessing, numpy as np, tiktoken
def encoding():
    model = json.load(open({str(vocabulary)!r}, encoding="utf-8"))["model"]
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    spelled = {{chr(b): b for b in printable}}
    spelled |= {{chr(0x100 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)}}
    vocab = {{token: id for token, id in model["vocab"].items() if id != {EOT}}}
    ranks = {{bytes(spelled[c] for c in token): id for token, id in vocab.items()}}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\\p{{L}}++| ?\\p{{N}}++| ?[^\\s\\p{{L}}\\p{{N}}]++|\\s++$|\\s+(?!\\S)|\\s"
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={{"<|endoftext|>": {EOT}}})
def start():
    global enc
    enc = encoding()
def process(line):
    ids = enc.encode_ordinary(json.loads(line)["text"])
    ids.insert(0, enc.eot_token)
    return ids
if __name__ == "__main__":
    with open({str(data)!r}, encoding="utf-8") as f, multiprocessing.Pool({threads}, start) as pool:
        documents = pool.map(process, f, chunksize=100)
    total = sum(map(len, documents))
    arr = np.memmap({str(out)!r}, dtype=np.uint16, mode="w+", shape=(total,))
    pieces, at = min(1024, len(documents)), 0
    for n in range(pieces):
        batch = documents[n * len(documents) // pieces : (n + 1) * len(documents) // pieces]
        if batch:
            ids = np.concatenate([np.array(d, dtype=np.uint16) for d in batch])
            arr[at : at + len(ids)] = ids
            at += len(ids)
    arr.flush()
"""
    script = out.with_suffix(".py")
    script.write_text(code)
    subprocess.run([sys.executable, str(script)], check=True)
    return np.fromfile(out, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="the ironhorse binary, a release build")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--text", help="a text file to use instead of made text, cut into documents of 100 lines")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.text:
            lines = Path(args.text).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            documents = ["".join(lines[n : n + 100]) for n in range(0, len(lines), 100)]
        else:
            documents = made_text(args.megabytes)
        data = folder / "data.jsonl"
        with data.open("w", encoding="utf-8") as file:
            for document in documents:
                file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
        size = sum(len(document.encode()) for document in documents)
        vocabulary = our_tokenizer(args.binary, folder)
        systems: dict[str, Any] = {
            "ironhorse": lambda: run_ours(args.binary, data, folder / "ours", args.threads),
            "tokenizers": lambda: run_hf(vocabulary, data, folder / "hf.bin", args.threads),
            "nanogpt_like": lambda: run_nano(vocabulary, data, folder / "nano.bin", args.threads),
        }
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        ids: dict[str, np.ndarray] = {}
        for _ in range(args.rounds):
            for system, run in systems.items():
                start = time.perf_counter()
                ids[system] = run()
                seconds[system].append(time.perf_counter() - start)
        for system, found in ids.items():
            assert np.array_equal(found, ids["ironhorse"]), f"the ids of {system} differ from ours"
        best = {system: min(times) for system, times in seconds.items()}
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        report = {
            "commit": commit,
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "threads": args.threads,
            "bytes": size,
            "documents": len(documents),
            "tokens": int(len(ids["ironhorse"])),
            "ids_identical": True,
            "seconds": seconds,
            "mb_per_s": {system: size / 1e6 / time for system, time in best.items()},
            "times_tokenizers": best["tokenizers"] / best["ironhorse"],
            "times_nanogpt_like": best["nanogpt_like"] / best["ironhorse"],
        }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
