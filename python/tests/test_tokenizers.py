"""Ids and files of `ironhorse tokenizer` and `prepare` against Hugging Face tokenizers, transformers and tiktoken."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
from pathlib import Path

import numpy as np
import pytest
from cli import ironhorse
from tokenizers import Tokenizer

TEXT = (
    "The quick brown fox's 1234 jumps over the LAZY dog's back; it'll DON'T I'M we'Re\n\n   indented\n\t\ttabs  \r\n"
    "def f(x):\n    return x ** 2  # 日本語のコメント\n\n\n"
    "Съешь же ещё этих мягких булок… 우리는 별 صِف خَلقَ Voix ambiguë d’un cœur e\u0301te\u0301 ǅ ʰ 1\u00b2\u0663 "
    "🙂👩‍👩‍👧‍👦 €100 — “naïve” \u00a0\u3000\u2028 'ſ x'S <|endoftext|> a/b//\n/c   \n \n  end "
)
NAMES = ["gpt2", "p50k_base", "cl100k_base", "o200k_base"]


def nasty(seed: int) -> str:
    """Characters on which split patterns decide, in random order."""
    rng = random.Random(seed)
    pieces = [
        *" \n\t\r'/!…_aBéÉ1²٣中한ßǅʰ😀",
        "  ",
        "\r\n",
        "'s",
        "'LL",
        "don't",
        "22",
        "6789",
        "e\u0301",
        "\u0301A",
        "\u00a0",
        "\u0085",
    ]
    return "".join(rng.choice(pieces) for _ in range(400))


def much(count: int = 20) -> str:
    """All texts in one: the command reads a vocabulary of megabytes each time it is started."""
    return TEXT + "".join(map(nasty, range(count)))


def shown(text: str, *flags: object, folder: Path) -> list[int]:
    source, report = folder / "text.txt", folder / "shown.json"
    source.write_bytes(text.encode())
    run = ironhorse("tokenizer", "show", "--file", source, "--json", report, *flags)
    assert run.returncode == 0, run.stderr
    return [token["id"] for token in json.loads(report.read_text())["tokens"]]


@pytest.fixture(scope="module", params=NAMES)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A folder of shards, with the tokenizer.json that `prepare` puts there."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "a.txt").write_bytes(TEXT.encode())
    run = ironhorse("prepare", folder / "a.txt", "--tokenizer", request.param, "--out", folder / "out", "--val", "0")
    assert run.returncode == 0, run.stderr
    return request.param, folder / "out"


def test_ids_are_those_of_tokenizers(prepared: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = prepared
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.encode_special_tokens = True
    ids = theirs.encode(much(), add_special_tokens=False).ids
    assert shown(much(), "--tokenizer", name, folder=tmp_path) == ids
    assert shown(much(), "--tokenizer", folder / "tokenizer.json", folder=tmp_path) == ids
    theirs.encode_special_tokens = False
    assert shown(TEXT, "--tokenizer", name, "--special", folder=tmp_path) == theirs.encode(TEXT).ids


def test_ids_are_those_of_tiktoken(prepared: tuple[str, Path], tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    name, folder = prepared
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    spelled |= {chr(0x100 + n): byte for n, byte in enumerate(others)}
    special = {token["id"] for token in model["added_tokens"]}
    vocab = {token: id for token, id in model["model"]["vocab"].items() if id not in special}
    ranks = {bytes(spelled[c] for c in token): id for token, id in vocab.items()}
    pattern = (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        if name in ("gpt2", "p50k_base")
        else model["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    )
    theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert shown(much(), "--tokenizer", name, folder=tmp_path) == theirs.encode_ordinary(much())


@pytest.mark.parametrize(
    ("package", "file", "eot"),
    [
        ("dashscope", "resources/qwen.tiktoken", 151643),
        ("llama_models", "llama3/tokenizer.model", 128001),
        ("llama_models", "llama4/tokenizer.model", 200001),
    ],
)
def test_rank_files_of_real_models(package: str, file: str, eot: int, tmp_path: Path) -> None:
    """Qwen's and Llama's, out of packages that carry them: `pip install --no-deps dashscope llama-models`."""
    tiktoken = pytest.importorskip("tiktoken")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    path = Path(found.submodule_search_locations[0]) / file
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}
    digits = r"\p{N}" if package == "dashscope" else r"\p{N}{1,3}"
    cl100k = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    short = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    before = r"[^\r\n\p{L}\p{N}]?"
    o200k = (
        f"{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}"
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    pattern = o200k if "llama4" in file else cl100k
    theirs = tiktoken.Encoding(package, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert shown(much(), "--tokenizer", path, folder=tmp_path) == theirs.encode_ordinary(much())
    (tmp_path / "a.txt").write_text("a b")
    out = tmp_path / "out"
    run = ironhorse("prepare", tmp_path / "a.txt", "--tokenizer", path, "--out", out, "--name", "d", "--val", 0)
    assert run.returncode == 0, run.stderr
    assert np.fromfile(out / "d_train_000000.bin", dtype=np.uint32, offset=1024)[0] == eot
    again = Tokenizer.from_file(str(out / "tokenizer.json"))
    again.encode_special_tokens = True
    assert again.encode(TEXT, add_special_tokens=False).ids == theirs.encode_ordinary(TEXT)


def test_transformers_load_the_tokenizer_of_a_folder_of_shards(prepared: tuple[str, Path]) -> None:
    from transformers import PreTrainedTokenizerFast

    name, folder = prepared
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    wide = name in ("cl100k_base", "o200k_base")
    shard = next(folder.glob("*_train_000000.bin"))
    header = np.fromfile(shard, dtype=np.int32, count=256)
    assert (header[0], header[1]) == ((20240801, 7) if wide else (20240520, 1))
    ids = np.fromfile(shard, dtype=np.uint32 if wide else np.uint16, offset=1024)
    assert header[2] == len(ids)
    assert tokenizer.decode(ids[1:]) == TEXT


def test_a_trained_vocabulary_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "a.txt").write_bytes((TEXT * 30).encode())
    for split in ["gpt2", "cl100k", "o200k", "qwen2", r"\w+|\W"]:
        out = tmp_path / f"tok-{len(split)}{split[0]}"
        flags = ("--vocab-size", 400, "--split", split, "--special", "<|endoftext|>", "--special", "<|im_start|>")
        run = ironhorse("tokenizer", "train", tmp_path / "a.txt", "--out", out, *flags)
        assert run.returncode == 0, run.stderr
        theirs = AutoTokenizer.from_pretrained(str(out))
        assert theirs.eos_token == "<|endoftext|>" and len(theirs) == 400
        text = TEXT.replace("<|endoftext|>", "")
        assert shown(text, "--tokenizer", out, folder=tmp_path) == theirs.encode(text, add_special_tokens=False)
        marked = "a<|im_start|>b"
        assert shown(marked, "--tokenizer", out, "--special", folder=tmp_path) == theirs.encode(marked)
        assert theirs.decode(theirs.encode(text)) == text


def test_other_kinds_of_tokenizer_json(tmp_path: Path) -> None:
    """WordPiece and Unigram go through the crate that `tokenizers` is made of."""
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.train_from_iterator(
        [TEXT] * 5, trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    )
    piece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    piece.normalizer = normalizers.BertNormalizer()
    piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    piece.train_from_iterator([TEXT] * 5, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"]))
    for theirs in (unigram, piece):
        theirs.save(str(tmp_path / "tokenizer.json"))
        theirs.encode_special_tokens = True
        assert (
            shown(TEXT, "--tokenizer", tmp_path, folder=tmp_path) == theirs.encode(TEXT, add_special_tokens=False).ids
        )


@pytest.mark.parametrize("prepared", ["cl100k_base"], indirect=True)
def test_qwen_like_normalisation_and_added_tokens(prepared: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = prepared
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model["normalizer"] = {"type": "NFC"}
    split = model["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    split["Regex"] = split["Regex"].replace(r"\p{N}{1,3}", r"\p{N}")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    model["added_tokens"].append({"id": 100300, "content": "<tool_call>", **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(model, ensure_ascii=False), encoding="utf-8")
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    text = "a <tool_call>b</tool_call> 12345" + much(10)
    assert shown(text, "--tokenizer", tmp_path, folder=tmp_path) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt"])
def test_every_kind_of_input_gives_the_same_documents(kind: str, tmp_path: Path) -> None:
    import gzip

    texts = [TEXT, "second\n", nasty(5)]
    data = tmp_path / f"data.{kind}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    flags: tuple[object, ...] = ()
    if kind == "jsonl":
        data.write_bytes(lines)
    elif kind == "jsonl.gz":
        data.write_bytes(gzip.compress(lines))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        arrow = pytest.importorskip("pyarrow")
        parquet.write_table(arrow.table({"text": texts}), data)
    else:
        data.write_bytes("<|doc|>".join(texts).replace("second\n", "second").encode())
        texts[1], flags = "second", ("--delimiter", "<|doc|>")
    run = ironhorse(
        "prepare", data, "--out", tmp_path / "out", "--name", "d", "--val", 0, "--tokenizer", "bytes", *flags
    )
    assert run.returncode == 0, run.stderr
    ids = np.fromfile(tmp_path / "out" / "d_train_000000.bin", dtype=np.uint16, offset=1024)
    assert bytes(ids.astype(np.uint8)) == b"".join(b"\0" + text.encode() for text in texts)
