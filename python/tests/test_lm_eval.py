"""`ironhorse.lm_eval` beside the harness's own model `hf` (transformers): the same tasks, answer by answer."""

from __future__ import annotations

import json
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
pytest.importorskip("transformers")

import lm_eval  # noqa: E402
from cli import ironhorse  # noqa: E402
from ironhorse.errors import InvalidValueError, IronhorseError  # noqa: E402
from ironhorse.lm_eval import IronhorseLM  # noqa: E402
from ironhorse.lm_eval.__main__ import main  # noqa: E402
from ironhorse.lm_eval._generation import parse  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_models import CONTEXT, sentence, write_tasks  # noqa: E402

KINDS = ("gpt2", "llama")


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory):
    """Nothing is looked for on the network, and caches are the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path]) -> dict[str, tuple[HFLM, IronhorseLM]]:
    """Both models over the same folder."""
    make = {
        kind: (
            HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, attn_implementation="eager"),
            IronhorseLM(pretrained=str(folder), device="cpu", batch_tokens=200),
        )
        for kind, folder in folders.items()
    }
    return make


def evaluated(model: Any, folder: Path) -> dict[str, Any]:
    tasks = write_tasks(folder)
    return lm_eval.simple_evaluate(
        model=model, tasks=tasks, task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True, bootstrap_iters=0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_of_the_harness_give_the_same(pairs, kind: str, tmp_path: Path) -> None:
    want, got = (evaluated(model, tmp_path) for model in pairs[kind])
    pairs_of = {
        task: list(zip(want["samples"][task], got["samples"][task], strict=True))
        for task in ("choosing", "rolling", "writing")
    }
    greedy = set()
    for theirs, ours in pairs_of["choosing"]:
        assert theirs["doc"] == ours["doc"]
        for (log_prob, is_greedy), (our_log_prob, our_is_greedy) in zip(
            theirs["filtered_resps"], ours["filtered_resps"], strict=True
        ):
            assert our_log_prob == pytest.approx(log_prob, rel=1e-5)
            assert our_is_greedy == is_greedy
            greedy.add(is_greedy)
    for theirs, ours in pairs_of["rolling"]:
        assert ours["filtered_resps"][0] == pytest.approx(theirs["filtered_resps"][0], rel=1e-5)
    for theirs, ours in pairs_of["writing"]:
        assert ours["filtered_resps"] == theirs["filtered_resps"]
    assert len({sample["filtered_resps"][0] for sample, _ in pairs_of["writing"]}) > 3
    for name in ("acc,none", "acc_norm,none"):
        assert got["results"]["choosing"][name] == want["results"]["choosing"][name]
    for name in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        assert got["results"]["rolling"][name] == pytest.approx(want["results"]["rolling"][name], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_told_as_transformers_tells_it(pairs, kind: str) -> None:
    theirs, ours = pairs[kind]
    generator = torch.Generator().manual_seed(2)
    vocab = theirs.model.config.vocab_size
    requests = []
    for at in range(24):
        before = torch.randint(vocab, (1, 1 + 2 * at), generator=generator)
        count = 1 + at % 5
        tokens = before
        with torch.no_grad():
            for _ in range(count):
                tokens = torch.cat([tokens, theirs.model(tokens[:, -CONTEXT:]).logits[:, -1].argmax(-1)[None]], 1)
        counted = tokens[0, before.shape[1] :].tolist()
        requests.append((None, before[0].tolist(), counted))
        # one token of it is another one
        other = list(counted)
        other[at % count] = (other[at % count] + 1) % vocab
        requests.append((None, before[0].tolist(), other))
    want = theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    got = ours._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert {greedy for _, greedy in got} == {True, False}
    for (our_log_prob, _), (log_prob, _) in zip(got, want, strict=True):
        assert our_log_prob == pytest.approx(log_prob, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_text_has_the_tokens_of_transformers(pairs, kind: str) -> None:
    theirs, ours = pairs[kind]
    assert (ours.eot_token_id, ours.prefix_token_id) == (theirs.eot_token_id, theirs.prefix_token_id)
    assert ours.max_length == theirs.max_length == CONTEXT
    begin = theirs.tokenizer.bos_token
    for text in ("", "the sun", sentence(3, 20), "é ☃ \n\n x", f"{begin}the sun", "the<|endoftext|> sun"):
        for special in (None, True, False):
            assert ours.tok_encode(text, add_special_tokens=special) == theirs.tok_encode(
                text, add_special_tokens=special
            ), (text, special)
    ids = theirs.tok_encode("the red boat é", add_special_tokens=False)
    assert ours.tok_decode(ids) == theirs.tok_decode(ids)


def test_a_checkpoint_is_scored_as_eval_scores_it(checkpoint: Path, tmp_path: Path) -> None:
    questions = [("Ivy was", ["happy.", "zqx", "e"]), ("One day the", ["sun", "?"])]
    lines = [{"question": text, "choices": choices, "label": 0} for text, choices in questions]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = ironhorse(
        "eval", "--model", checkpoint, "--device", "cpu", "--choices", tmp_path / "q.jsonl",
        "--samples", tmp_path / "s.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    samples = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    model = IronhorseLM(pretrained=str(checkpoint), device="cpu")
    for (text, choices), sample in zip(questions, samples, strict=True):
        args = [(text, f" {choice}") for choice in choices]
        got = model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in args], disable_tqdm=True)
        assert [log_prob for log_prob, _ in got] == pytest.approx(sample["log_likelihoods"], rel=1e-6)
        assert [greedy for _, greedy in got] == sample["is_greedy"]


def test_the_command_of_the_harness_knows_the_model(folders, tmp_path: Path, monkeypatch, capsys) -> None:
    # the harness reads the files of its thousands of tasks first, which takes longer than everything else
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    write_tasks(tmp_path)
    line = [
        "lm_eval", "--model", "ironhorse", "--tasks", "choosing", "--device", "cpu", "--batch_size", "4",
        "--limit", "6", "--include_path", tmp_path, "--output_path", tmp_path / "out",
        "--model_args", f"pretrained={folders['gpt2']},dtype=float32,threads=1",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", list(map(str, line)))
    assert main() == 0
    (report,) = (tmp_path / "out").rglob("results_*.json")
    report = json.loads(report.read_text())
    assert report["n-samples"]["choosing"] == {"original": 18, "effective": 6}
    assert report["config"]["model"] == "ironhorse" and report["config"]["model_dtype"] == "f32"
    assert 0 <= report["results"]["choosing"]["acc,none"] <= 1
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "pretrained=no-such-folder"])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: no-such-folder")


def test_what_cannot_be_done_is_named(folders, pairs, tmp_path: Path) -> None:
    folder = str(folders["gpt2"])
    for options, says in (
        ({"pretrained": "no-such-folder"}, "no-such-folder"),
        ({"pretrained": folder, "device": "gpu"}, "gpu"),
        ({"pretrained": folder, "device": "cpu", "dtype": "tf32"}, "cpu engine computes in f32 and bf16"),
        ({"pretrained": folder, "dtype": "float16"}, "float16"),
        ({"pretrained": folder, "batch_size": "many"}, "batch_size is 'many'"),
        ({"pretrained": folder, "tokenizer": "no-such-tokenizer"}, "no-such-tokenizer"),
        ({"pretrained": folder, "tokenizer": "gpt2"}, "the tokenizer has 50257 tokens"),
    ):
        with pytest.raises(IronhorseError, match=says) as caught:
            IronhorseLM(**options)
        assert "\n" not in str(caught.value)
    (_, ours), long = pairs["gpt2"], list(range(CONTEXT + 1))
    with pytest.raises(InvalidValueError, match=f"a continuation has {CONTEXT + 1} tokens"):
        ours._loglikelihood_tokens([(None, [1], long)])
    with pytest.raises(InvalidValueError, match="text 0: token 1 is 100000"):
        ours._loglikelihood_tokens([(None, [1], [100000])])
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folders["gpt2"] / name).read_bytes())
    with pytest.raises(InvalidValueError, match="has no tokenizer beside it"):
        IronhorseLM(pretrained=str(bare), device="cpu").tok_encode("text")


def test_generation_settings() -> None:
    assert parse({}, 7).tokens == 7
    asked = parse({"until": "x", "max_new_tokens": 3, "do_sample": True, "temperature": 0.7, "top_p": 0.9}, 7)
    assert (asked.until, asked.tokens, asked.temperature, asked.top_p, asked.top_k) == (["x"], 3, 0.7, 0.9, None)
    assert parse({"temperature": 0.7, "do_sample": False, "num_beams": 1}, 7).temperature == 0
    for given, says in (({"until": 3}, "until is 3"), ({"num_beams": 4}, "num_beams is not supported")):
        with pytest.raises(InvalidValueError, match=says):
            parse(given, 7)


def test_samples_are_drawn_by_their_seed(pairs) -> None:
    _, ours = pairs["gpt2"]
    model, prompt = ours._model, ours.tok_encode("the sun")
    texts = [model.write(prompt, 12, [], temperature=1.5, top_k=50, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
