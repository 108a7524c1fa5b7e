"""`ironhorse serve` with the `openai` client and the harness's `local-completions`; `ironhorse chat` through pipes."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="the openai client is not installed")
pytest.importorskip("transformers")

import cli  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from cli import ironhorse  # noqa: E402
from lm_models import CONTEXT, sentence, write_model  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
KEY = "a-key-of-the-test"


class Server(cli.Server):
    """`ironhorse serve`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__("serve", folder, "--device", "cpu", *flags)

    def client(self, key: str = KEY) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder, "--rows", "4", "--name", "small", "--api-key", KEY)
    yield made
    assert made.end() == 0, "SIGTERM ends it in order"


def test_models_and_errors(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.AuthenticationError):
        server.client("another-key").models.list()
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="small", prompt=list(range(10)) * CONTEXT, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="small", prompt="a", temperature=9)


def test_completions_are_those_of_transformers(server: Server, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(sentence(1, 6))["input_ids"]
    want = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = server.client().completions.create(
        model="small", prompt=ids, max_tokens=12, temperature=0, logprobs=2, echo=True, extra_body={"ignore_eos": True}
    )
    told = answer.choices[0].logprobs
    logits = model(want).logits[0].log_softmax(-1)
    for at, token in enumerate(want[0].tolist()):
        if at == 0:
            assert told.token_logprobs[0] is None
            continue
        assert told.token_logprobs[at] == pytest.approx(logits[at - 1, token].item(), abs=1e-4), at
    assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"


def test_streams_are_the_whole_and_seeds_repeat(server: Server) -> None:
    client = server.client()
    asked: dict[str, Any] = {
        "model": "small",
        "messages": [{"role": "user", "content": sentence(2, 5)}],
        "max_tokens": 14,
        "seed": 5,
        "temperature": 1.5,
    }
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].usage == whole.usage
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == whole.choices[0].finish_reason
    assert client.chat.completions.create(**{**asked, "seed": 6}).choices[0].message.content != text


def test_sixteen_clients_get_what_each_gets_alone(server: Server) -> None:
    def ask(number: int) -> str:
        answer = server.client().completions.create(
            model="small", prompt=sentence(number, 1 + number % 7), max_tokens=5 + number, seed=number, stop=["\n"]
        )
        return answer.choices[0].text

    alone = [ask(number) for number in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_health_metrics_and_page(server: Server) -> None:
    def get(path: str, key: str | None = None) -> tuple[int, str]:
        request = urllib.request.Request(server.url + path)
        if key:
            request.add_header("authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert get("/health") == (200, '{"status":"ok"}')
    status, page = get("/")
    assert status == 200 and "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert get("/metrics")[0] == 401
    status, text = get("/metrics", KEY)
    assert status == 200 and "ironhorse_completion_tokens_total" in text
    assert get("/../../etc/passwd")[0] == 404


def test_the_harness_gives_the_native_scores(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity", reason="what the harness's API models need is not installed")
    from ironhorse.lm_eval import IronhorseLM
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    server = Server(folder, "--name", "small")
    try:
        remote = LocalCompletionsAPI(
            model="small",
            base_url=f"{server.url}/v1/completions",
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            batch_size=4,
            max_length=CONTEXT,
            add_bos_token=True,  # as the native model does for a Llama
        )
        native = IronhorseLM(pretrained=str(folder), device="cpu", batch_tokens=200)
        texts = [(sentence(i, 4), " " + sentence(i + 50, 3)) for i in range(8)]
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]
        for got, want in zip(remote.loglikelihood(asked), native.loglikelihood(asked), strict=True):
            assert got[0] == pytest.approx(want[0], abs=1e-3)
            assert got[1] == want[1]
    finally:
        assert server.end() == 0


def test_chat_through_pipes(folder: Path, tmp_path: Path) -> None:
    flags = ["chat", str(folder), "--device", "cpu", "--tokens", "8", "--greedy"]

    def talk(said: str) -> subprocess.CompletedProcess[bytes]:
        binary = os.environ["IRONHORSE_BIN"]
        return subprocess.run([binary, *flags], input=said.encode(), capture_output=True, timeout=120, check=True)

    saved = tmp_path / "talk.jsonl"
    first = talk(f"sun sea\n/save {saved}\n")
    first.stdout.decode("utf-8")  # no character is split
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"] == first.stdout.decode().strip("\n").rstrip()
    # a new conversation answers as the first did; one that goes on has the first part in its prompt
    again = talk("sun sea\n/reset\nsun sea\n").stdout.decode()
    assert again == first.stdout.decode() * 2
    told = talk("/nonsense\n/help\n/system Be red.\nsun sea\n")
    assert b"/nonsense is not a command" in told.stderr and b"/reset" in told.stdout
    refused = ironhorse("chat", str(folder), "--device", "cpu", "--template", str(tmp_path / "none.jinja"))
    assert refused.returncode == 2 and "template" in refused.stderr
