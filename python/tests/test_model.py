"""`ironhorse.Model` beside transformers: logits, losses, text, and the folders it writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ironhorse
import numpy as np
import pytest
import torch
from ironhorse.errors import InvalidValueError, IronhorseError, NotAvailableError

transformers = pytest.importorskip("transformers", minversion="4.51", reason="Qwen 3 is not in older ones")

from lm_models import CONTEXT, sentence, write_model  # noqa: E402

KINDS = ("gpt2", "qwen3")
# What `verify` allows a tensor in f32.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path]) -> dict[str, tuple[Any, ironhorse.Model]]:
    """Both models over the same folder."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return {
        kind: (load(folder, dtype=torch.float32).eval(), ironhorse.Model.from_pretrained(folder, device="cpu"))
        for kind, folder in folders.items()
    }


def random_ids(rows: int, count: int, vocab: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (rows, count))


def assert_same(got: np.ndarray, want: torch.Tensor) -> None:
    theirs = want.detach().double().numpy()
    assert got.shape == theirs.shape and got.dtype == np.float32
    assert np.linalg.norm(got - theirs) <= TOLERANCE * np.linalg.norm(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(pairs, kind: str) -> None:
    theirs, ours = pairs[kind]
    for rows, count in ((1, 1), (1, CONTEXT), (5, 7), (3, 33)):
        ids = random_ids(rows, count, ours.config.vocab_size)
        with torch.no_grad():
            want = theirs(torch.from_numpy(ids)).logits
        assert_same(ours.logits(ids), want)
        assert_same(ours.logits(torch.from_numpy(ids[0]).to(torch.int32)), want[0])
        assert_same(ours.logits(ids.tolist()), want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_transformers(pairs, kind: str) -> None:
    theirs, ours = pairs[kind]
    for rows, count in ((1, 2), (1, CONTEXT), (70, 30)):
        ids = random_ids(rows, count, ours.config.vocab_size)
        other = random_ids(rows, count, ours.config.vocab_size, seed=6)
        masked = np.where(other % 3 == 0, -100, other)
        masked[0, -1] = other[0, -1]  # one counts
        for labels in (ids, other, masked):
            with torch.no_grad():
                want = theirs(torch.from_numpy(ids), labels=torch.from_numpy(labels)).loss.item()
            assert ours.loss(ids, labels) == pytest.approx(want, rel=TOLERANCE)
        assert ours.loss(ids) == ours.loss(ids, ids)
    assert ours.loss([1, 2, 3], [-100, -100, -100]) == 0.0
    assert ours.loss([1, 2, 3], [1, -100, 3]) == ours.loss(np.array([1, 2, 3]), np.array([-100, -100, 3]))


def test_more_rows_than_fit_at_once_are_the_same(pairs) -> None:
    """Rows are computed in pieces of several shapes; a row does not depend on its piece."""
    _, ours = pairs["gpt2"]
    ids = random_ids(75, 40, ours.config.vocab_size)
    all_rows = ours.logits(ids)
    for row in (0, 63, 64, 74):
        np.testing.assert_allclose(all_rows[row], ours.logits(ids[row]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_transformers(pairs, kind: str) -> None:
    theirs, ours = pairs[kind]
    lengths = set()
    for seed in range(6):
        prompt = random_ids(1, 3 + 2 * seed, ours.config.vocab_size, seed)
        want = theirs.generate(
            torch.from_numpy(prompt), max_new_tokens=30, do_sample=False, eos_token_id=0, pad_token_id=0,
            attention_mask=torch.ones(prompt.shape, dtype=torch.long),
        )[0, prompt.shape[1] :].tolist()  # fmt: skip
        new = ours.generate(prompt[0], tokens=30, greedy=True)
        assert new.dtype == np.int64 and new.tolist() == [token for token in want if token != 0]
        lengths.add(len(new))
    assert max(lengths) > 5


def test_text_is_continued_as_by_the_command(pairs, folders: dict[str, Path], tmp_path: Path) -> None:
    from cli import ironhorse as command

    _, ours = pairs["gpt2"]
    prompt = sentence(3, 4)
    flags = ["--prompt", prompt, "--tokens", 20, "--seed", 7, "--temperature", 0.9, "--top-k", 12]
    flags += ["--json", tmp_path / "report.json"]  # random bytes need not be text, which the test would have to read
    done = command("generate", "--model", folders["gpt2"], "--device", "cpu", *flags)
    assert done.returncode == 0
    text = ours.generate(prompt, tokens=20, seed=7, temperature=0.9, top_k=12)
    assert isinstance(text, str) and text == json.loads((tmp_path / "report.json").read_text())["text"]
    assert ours.generate(prompt, tokens=20, seed=8, temperature=0.9, top_k=12) != text
    ids = ours.encode(prompt)
    assert ours.decode(ids) == prompt and ours.decode(np.array(ids)) == prompt
    assert ours.generate(ids, tokens=0).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_saved_folders_load_in_transformers(pairs, kind: str, tmp_path: Path) -> None:
    theirs, ours = pairs[kind]
    ids = torch.from_numpy(random_ids(2, 9, ours.config.vocab_size))
    load = transformers.AutoModelForCausalLM.from_pretrained
    folder = ours.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(load(folder, dtype=torch.float32)(ids).logits, theirs(ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(sentence(1, 9)).input_ids == ours.encode(sentence(1, 9))
    low = ours.save_pretrained(str(tmp_path / "low"), dtype=torch.bfloat16, shard_size="9KB")
    assert len(list(low.glob("*.safetensors"))) > 1
    rounded = load(ours.path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
        want = rounded(ids).logits
        assert torch.equal(load(low, dtype=torch.float32)(ids).logits, want)
    # bf16 weights stay bf16
    again = ironhorse.Model.from_pretrained(low, device="cpu").save_pretrained(tmp_path / "again")
    assert ironhorse.load(again).dtype == "bf16"
    assert_same(ironhorse.Model.from_pretrained(again, device="cpu").logits(ids), want)


def test_the_state_is_a_view_of_the_file(pairs, tmp_path: Path) -> None:
    theirs, ours = pairs["qwen3"]
    state, again, tensors = ours.state_dict(), ours.state_dict(), ours.state_dict("torch")
    want = {name: value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}  # tied
    assert set(state) == set(tensors) == set(want)
    for name, value in state.items():
        assert np.array_equal(value, want[name].numpy()) and torch.equal(tensors[name], want[name])
        assert np.shares_memory(value, again[name]) and not value.flags.owndata
        assert tensors[name].data_ptr() == value.ctypes.data, name
        with pytest.raises(ValueError, match="read-only"):
            value[...] = 0
    # bf16: torch has it, numpy only its bits
    low = ironhorse.Model.from_pretrained(ours.save_pretrained(tmp_path / "low", dtype="bf16"), device="cpu")
    name = "model.layers.1.mlp.up_proj.weight"
    bits, tensor = low.state_dict(bf16="bits")[name], low.state_dict("torch")[name]
    assert bits.dtype == np.uint16 and tensor.dtype == torch.bfloat16 and tensor.data_ptr() == bits.ctypes.data
    assert np.array_equal(low.state_dict()[name], tensor.float().numpy())


def test_what_is_known_of_a_model(pairs, folders: dict[str, Path]) -> None:
    _, ours = pairs["qwen3"]
    assert (ours.device, ours.dtype, ours.path) == ("cpu", "f32", folders["qwen3"])
    assert ours.config.kind == "qwen3" and ours.config.max_seq_len == CONTEXT
    assert repr(ours) == f"<Model qwen3: {folders['qwen3']}, f32 on cpu>"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([[1, 2], [3, 400]], r"ids\[1, 1\] is 400, expected 0 to 328"),
        ([3, -1], r"ids\[0, 1\] is -1, expected 0 to 328"),
        ([2**31 + 1], r"ids\[0, 0\] is 2147483649"),
        (np.array([2**63 + 1], np.uint64), "which is no token"),
        ([1.0, 2.0], "`ids` is float64, expected integers"),
        ([True, False], "`ids` is bool, expected integers"),
        ([[1, 2], [3]], "rows of different lengths need padding"),
        ("text", r"`ids` is a text, expected token ids: model\..*\(model.encode\(text\)\)"),
        (["a", "b"], "`ids` is a text, expected token ids"),
        ([], r"`ids` is \[0\], expected"),
        (np.zeros((2, 0), np.int64), r"`ids` is \[2, 0\], expected"),
        (np.zeros((1, 2, 3), np.int64), r"`ids` is \[1, 2, 3\], expected"),
        (7, r"`ids` is \[\], expected"),
        (np.zeros((1, CONTEXT + 1), np.int64), f"{CONTEXT + 1} tokens in a row, expected at most {CONTEXT}"),
        (np.ma.masked_array([1, 2], [True, False]), "masked array"),
        (None, "not a table of token ids"),
    ],
)  # fmt: skip
def test_tokens_that_are_none_are_named(pairs, ids: Any, text: str) -> None:
    with pytest.raises(InvalidValueError, match=text) as raised:
        pairs["gpt2"][1].logits(ids)
    assert "\n" not in str(raised.value)
    with pytest.raises(InvalidValueError):
        pairs["gpt2"][1].loss(ids)


def test_labels_that_do_not_fit_are_named(pairs) -> None:
    ours = pairs["gpt2"][1]
    for ids, labels, text in (
        ([1, 2, 3], [1, 2], r"labels is \(1, 2\), expected \(1, 3\), as ids"),
        ([[1, 2], [3, 4]], [1, 2], r"labels is \(1, 2\), expected \(2, 2\)"),
        ([1, 2, 3], [1, 2, -5], r"labels\[0, 2\] is -5, expected 0 to 328 or -100"),
        ([1], [1], "1 rows of 1 tokens, expected at least one row of 2 or more"),
        ([1, -100], [1, 2], r"ids\[0, 1\] is -100, expected 0 to 328"),
    ):
        with pytest.raises(InvalidValueError, match=text):
            ours.loss(ids, labels)


def test_messages_are_answered_through_the_template(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["qwen3"], tmp_path / "chat"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}assistant: {% endif %}")
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(folder),
        ironhorse.Model.from_pretrained(folder, device="cpu"),
    )
    messages = [{"role": "user", "content": sentence(2, 5)}, {"role": "assistant", "content": "moon"}]
    messages.append({"role": "user", "content": "the sea"})
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    answer = ours.generate(messages, tokens=9, greedy=True)
    assert answer == ours.decode(ours.generate(prompt, tokens=9, greedy=True)) and 0 in prompt
    kept = ironhorse.Model.from_pretrained(ours.save_pretrained(tmp_path / "kept"), device="cpu")
    assert kept.generate(messages, tokens=9, greedy=True) == answer  # the template is saved, too
    # the answer ends at the end of a turn, here the first token that it would write
    first = int(ours.generate(prompt, tokens=1, greedy=True)[0])
    config, file = (json.loads((folder / name).read_text()) for name in ("tokenizer_config.json", "tokenizer.json"))
    config["eos_token"] = theirs.convert_ids_to_tokens(first)
    file["added_tokens"].append({**file["added_tokens"][0], "id": first, "content": config["eos_token"]})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(file))
    assert ironhorse.Model.from_pretrained(folder, device="cpu").generate(messages, tokens=9, greedy=True) == ""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_texts_begin_and_end_as_in_transformers(kind: str, tmp_path: Path) -> None:
    """With the tokenizer's own first token or none, markers in a text as tokens; at any end that the folder names."""
    theirs = write_model(tmp_path, kind).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = ironhorse.Model.from_pretrained(tmp_path, device="cpu")
    for text in ("the sun", "the sea<|endoftext|>a boat"):
        ids = tokenizer(text)["input_ids"]
        assert 0 in ids or "<" not in text
        assert ours.generate(text, tokens=9, greedy=True) == ours.decode(ours.generate(ids, tokens=9, greedy=True))
    ids = tokenizer("the sun")["input_ids"]
    new = ours.generate(ids, tokens=9, greedy=True).tolist()
    end = new[1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, pad_token_id=0)
    stopped = ironhorse.Model.from_pretrained(tmp_path, device="cpu").generate(ids, tokens=9, greedy=True).tolist()
    assert stopped == new[: new.index(end)] == out[0, len(ids) :].tolist()[: len(stopped)]
    assert out.shape[1] == len(ids) + len(stopped) + 1  # theirs shows the end


def test_what_cannot_be_written_is_named(pairs) -> None:
    ours = pairs["gpt2"][1]
    hello = {"role": "user", "content": "hello"}
    for messages, text in (
        ([hello], "has no chat template"),
        ([{"content": "hello"}], "number 1, that has no `role`"),
        ([hello, "hello"], "number 2, that is a text"),
        ([{"role": "user", "content": b"hello"}], "not what JSON can hold"),
    ):
        with pytest.raises(InvalidValueError, match=text) as raised:
            ours.generate(messages)
        assert str(raised.value).startswith("generate: ")
    for prompt, settings, text in (
        ([], {}, r"`prompt` is \[0\]"),
        ([[1, 2], [3, 4]], {}, r"`prompt` is \[2, 2\], expected one sequence"),
        ([1, 999], {}, r"prompt\[1\] is 999, expected 0 to 328"),
        ("a", {"temperature": -1.0}, "key `temperature`: invalid value '-1"),
        ("a", {"temperature": float("nan")}, "key `temperature`: invalid value 'nan'"),
        ("a", {"tokens": "many"}, "key `tokens`: invalid value 'many'"),
        ("a", {"max_new_tokens": 5}, "tip: here it is tokens"),
        ("a", {"tokens": object()}, "tokens is of type object"),
    ):
        with pytest.raises(InvalidValueError, match=text) as raised:
            ours.generate(prompt, **settings)
        assert str(raised.value).startswith("generate: ") and "--" not in str(raised.value)


def test_what_cannot_be_opened_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    load = ironhorse.Model.from_pretrained
    for name, settings, text in (
        (tmp_path / "none", {}, "no such file or folder|cannot"),
        (tmp_path, {}, "config.json|kind of file|cannot"),
        (folders["gpt2"], {"device": "gpu"}, "gpu"),
        (folders["gpt2"], {"dtype": "f8"}, "f8"),
        (folders["gpt2"], {"device": "cpu", "dtype": "tf32"}, "computes in f32 and bf16, not tf32; use dtype bf16"),
        (folders["gpt2"], {"tokenizer": tmp_path / "none"}, "none"),
        (7, {}, "name is of type int"),
    ):
        with pytest.raises(IronhorseError, match=text) as raised:
            load(name, **settings)
        assert "\n" not in str(raised.value)
    if not ironhorse.ops.cuda_available():
        with pytest.raises(NotAvailableError):
            load(folders["gpt2"], device="cuda")


def test_a_model_without_a_tokenizer_computes(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders["qwen3"] / name).read_bytes())
    ours = ironhorse.Model.from_pretrained(tmp_path, device="cpu")
    assert len(ours.generate([1, 2], tokens=3, greedy=True)) == 3
    with pytest.raises(InvalidValueError, match="has no tokenizer beside it"):
        ours.generate("text")
    # Ctrl-C ends it; without a token between texts it would go on for a day
    killer = threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT)))
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        ours.generate([1, 2], tokens=10**8, greedy=True)
    killer.join()
    assert len(ours.generate([1, 2], tokens=3, greedy=True)) == 3


def test_a_closed_model_says_so(folders: dict[str, Path]) -> None:
    with ironhorse.Model.from_pretrained(folders["gpt2"], device="cpu") as ours:
        kept = ours.state_dict()
    ours.close()
    for call in (
        lambda: ours.logits([1]), lambda: ours.loss([1, 2]), lambda: ours.generate("a"), lambda: ours.encode("a"),
        lambda: ours.train(), lambda: ours.save_pretrained("x"), lambda: ours.state_dict(),
    ):  # fmt: skip
        with pytest.raises(InvalidValueError, match="the model is closed"):
            call()
    assert ours.config.kind == "gpt2" and np.isfinite(kept["wte.weight"]).all()


def test_several_threads_may_use_one_model(pairs) -> None:
    _, ours = pairs["gpt2"]
    batches = [random_ids(2, 5 + 3 * at, ours.config.vocab_size, at) for at in range(4)]
    want = [ours.logits(ids) for ids in batches]
    wrong: list[int] = []

    def compute(at: int) -> None:
        for _ in range(5):
            if not np.array_equal(ours.logits(batches[at]), want[at]) or not ours.generate([at, 1], tokens=2).size:
                wrong.append(at)

    threads = [threading.Thread(target=compute, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
