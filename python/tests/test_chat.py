"""Ids and masks of `ironhorse data show` against transformers' chat templates."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from cli import assert_could_not_run, ironhorse
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[2] / "crates/text/tests/templates"
WORDS = "Hello, what is 12 + 30? It is 42. Thank you — naïve café, 日本語 and 🙂. The end of the thought.\n\n" * 4
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPLIT = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = [
    [user("What is 12 + 30?"), said("It is 42.")],
    [SYSTEM, user("Hello"), said("Hello!"), user("cafe\u0301 日本語?"), said("na\u00efve 🙂\n\nThe end.")],
    [user("Hello"), said("\n Hello\t"), user("Thank you"), said("  The end. \n")],
    [user("Hello<|im_end|>"), said("It is </s> 42.")],
]
# the assistant speaks first, twice in a row, and not last
UNUSUAL = [said("Hello!"), said("What is 12?"), user("It is 42."), said("Thank you."), user("Hello")]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": [1.5, None, "é\n"]}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": 'the "sum" <b>', "step": 1e-5, "most": 2e20}}]
THOUGHTS = [
    [user("12 + 30?"), said("<think>\nIt is 42.\n</think>\n\n42.")],
    [user("Hello"), said("<think>\nWhat?\n</think>\n\nHello!"), user("12?"), said("42.", reasoning_content="It is.")],
    [user("12 + 30?"), said("", tool_calls=[CALL, CALL]), {"role": "tool", "content": "42"}, said("It is 42.")],
]


def byte_level(special: list[str], normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Like Llama 2's and Mistral's: spaces are part of words, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *bytes_of]
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return tokenizer


def made(family: str) -> tuple[Tokenizer, dict[str, str]]:
    if family == "mistral":
        return metaspace(), {"bos_token": "<s>", "eos_token": "</s>"}
    if family == "llama3":
        tokenizer = byte_level(LLAMA3)
        bos = LLAMA3[0]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]),
            ]
        )
        return tokenizer, {"bos_token": bos, "eos_token": "<|eot_id|>"}
    return byte_level(CHATML, normalizers.NFC()), {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def unmarked(template: str) -> str:
    """The template without the tags, which have lines of their own."""
    return re.sub(r"(?m)^.*\{%- (end)?generation %\}\n", "", template)


def save(folder: Path, family: str, template: str, *, in_config: bool) -> PreTrainedTokenizerFast:
    """A model's folder with a tokenizer, and the same for transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, named = made(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if in_config:
        config["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **named,
    )


def show(folder: Path, lines: list[dict[str, Any]], *flags: object) -> dict[str, Any]:
    data, report = folder / "data.jsonl", folder / "shown.json"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = ironhorse("data", "show", "--data", data, "--tokenizer", folder, "--count", 99, "--json", report, *flags)
    assert run.returncode == 0, run.stderr
    return json.loads(report.read_text(encoding="utf-8"))


def conversations(family: str) -> list[dict[str, Any]]:
    unusual = [] if family == "mistral" else [UNUSUAL]  # whose template wants turns to alternate
    lines: list[dict[str, Any]] = [{"messages": messages} for messages in PLAIN + unusual]
    if family == "llama3":
        lines = [{**line, "chat_template_kwargs": {"date_string": "26 Jul 2024"}} for line in lines]
    if family == "qwen3":
        lines += [{"messages": messages} for messages in THOUGHTS]
        lines += [{"messages": messages, "tools": TOOLS} for messages in (PLAIN[1], THOUGHTS[2])]
    return lines


@pytest.mark.parametrize("marked", [True, False], ids=["generation", "plain"])
@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "mistral"])
def test_ids_and_masks_are_those_of_transformers(family: str, marked: bool, tmp_path: Path) -> None:
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    assert unmarked(template) != template and "generation %}" not in unmarked(template)
    theirs = save(tmp_path, family, template if marked else unmarked(template), in_config=marked)
    theirs.chat_template = template  # without marks the answer is that of the same template with them
    lines = conversations(family)
    report = show(tmp_path, lines)
    assert len(report["samples"]) == len(lines)
    for line, sample in zip(lines, report["samples"], strict=True):
        answer = theirs.apply_chat_template(
            line["messages"],
            tools=line.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
            **line.get("chat_template_kwargs", {}),
        )
        assert sample["ids"] == answer["input_ids"], line
        assert [int(learned) for learned in sample["learned"]] == answer["assistant_masks"], line


def test_the_date_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (TEMPLATES / "llama3.jinja").read_text(encoding="utf-8")
    theirs = save(tmp_path, "llama3", template, in_config=True)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    before = theirs.apply_chat_template(PLAIN[0])["input_ids"]
    [sample] = show(tmp_path, [{"messages": PLAIN[0]}])["samples"]
    after = theirs.apply_chat_template(PLAIN[0])["input_ids"]
    assert sample["ids"] in (before, after), "they differ at midnight only"


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "mistral"])
def test_the_end_of_a_turn_is_learned(family: str, tmp_path: Path) -> None:
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    theirs = save(tmp_path, family, unmarked(template), in_config=False)
    for sample in show(tmp_path, conversations(family)[:1])["samples"]:
        ends = [at for at, id in enumerate(sample["ids"]) if id == theirs.eos_token_id]
        assert sample["learned"][ends[-1]], "a model that never learns to end its turn never stops"
        assert not any(sample["learned"][ends[-1] + 1 :])


def test_there_is_one_bos_only(tmp_path: Path) -> None:
    """Llama 3's tokenizer puts one before every text, and its template writes one too."""
    theirs = save(tmp_path, "llama3", (TEMPLATES / "llama3.jinja").read_text(encoding="utf-8"), in_config=True)
    bos = theirs.bos_token_id
    lines = [{"messages": PLAIN[0]}, {"text": "Hello"}, {"text": "<|begin_of_text|>Hello"}]
    lines += [{"prompt": "12 + 30 =", "completion": " 42"}]
    for sample in show(tmp_path, lines)["samples"]:
        assert sample["ids"][0] == bos and bos not in sample["ids"][1:], sample["text"]


def test_masks(tmp_path: Path) -> None:
    save(tmp_path, "chatml", (TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"), in_config=True)
    lines = [{"messages": PLAIN[2]}, {"prompt": "12 + 30 =", "completion": " 42"}, {"text": "The end."}]

    def learned(mask: str) -> list[list[str]]:
        samples = show(tmp_path, lines, "--mask", mask)["samples"]
        return [[run["text"] for run in sample["runs"] if run["learned"]] for sample in samples]

    end = "<|im_end|>"
    [both, completion, text] = learned("assistant")
    assert both == [f"\n Hello\t{end}", f"  The end. \n{end}"]
    assert (completion, text) == ([f" 42{end}"], [f"The end.{end}"])
    assert learned("completion") == [[f"  The end. \n{end}"], completion, text]
    whole = [[sample["text"]] for sample in show(tmp_path, lines, "--mask", "none")["samples"]]
    assert learned("none") == whole


def test_long_samples_are_cut_and_counted(tmp_path: Path) -> None:
    save(tmp_path, "chatml", (TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"), in_config=True)
    whole = show(tmp_path, [{"messages": PLAIN[0]}, {"messages": PLAIN[1]}])
    context = len(whole["samples"][0]["ids"])
    report = show(tmp_path, [{"messages": PLAIN[0]}, {"messages": PLAIN[1]}], "--context", context)
    cut = len(whole["samples"][1]["ids"]) - context
    assert [sample["cut"] for sample in report["samples"]] == [0, cut]
    assert report["samples"][1]["ids"] == whole["samples"][1]["ids"][:context]
    assert (report["counts"]["truncated"], report["counts"]["cut"]) == (1, cut)
    tiny = show(tmp_path, [{"messages": PLAIN[0]}], "--context", 3)
    assert tiny["counts"]["unlearned"] == 1 and tiny["counts"]["learned"] == 0


@pytest.mark.parametrize(
    ("lines", "said_of_it"),
    [
        ([b'{"text": "a"}', b'{"messages": [{"role": "user"}]}'], "data.jsonl: line 2 has a message"),
        ([b'{"messages": [{"content": "a"}]}'], "line 1 has a message in `messages`, number 1, that has no `role`"),
        ([b'{"prompt": "a"}'], "line 1 has `prompt` but no `completion`"),
        ([b"", b'{"text": "a'], "line 2 is not JSON"),
        ([b'{"text": "a\xff"}'], "line 1 is not UTF-8 (byte 12 of it)"),
        ([], "has no sample, expected a JSON object in every line"),
        ([b"", b"  "], "has no sample"),
        (
            [b'{"messages": [{"role": "assistant", "content": "a"}]}'],
            "chat_template.jinja: line 12: `raise_exception(",
        ),
        (
            [b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}'],
            "conversation roles must alternate",
        ),
    ],
)
def test_bad_lines_are_named(lines: list[bytes], said_of_it: str, tmp_path: Path) -> None:
    save(tmp_path, "mistral", (TEMPLATES / "mistral.jinja").read_text(encoding="utf-8"), in_config=False)
    data = tmp_path / "data.jsonl"
    data.write_bytes(b"".join(line + b"\n" for line in lines))
    run = ironhorse("data", "show", "--data", data, "--tokenizer", tmp_path)
    assert_could_not_run(run)
    assert said_of_it in run.stderr and str(data) in run.stderr


@pytest.mark.parametrize(
    ("template", "said_of_it"),
    [
        ("a\n{% for m in messages %}", "chat_template.jinja: line 2"),
        ("a\n{{ messages[0].content.nothing() }}", "line 2: `messages[0].content.nothing()`"),
        ("{{ messages | nothing }}", "line 1: `messages | nothing`: unknown filter"),
        (None, "has no chat template"),
    ],
)
def test_bad_templates_are_named(template: str | None, said_of_it: str, tmp_path: Path) -> None:
    save(tmp_path, "chatml", template or "", in_config=False)
    if template is None:
        (tmp_path / "chat_template.jinja").unlink()
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": PLAIN[0]}), encoding="utf-8")
    run = ironhorse("data", "show", "--data", data, "--tokenizer", tmp_path)
    assert_could_not_run(run)
    assert said_of_it in run.stderr
