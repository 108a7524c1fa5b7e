"""The chat page of `ironhorse serve` in a real browser. Needs IRONHORSE_BIN; skipped without Chromium (browser.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="the openai client is not installed")
pytest.importorskip("transformers")

from browser import Browser  # noqa: E402
from lm_models import write_model  # noqa: E402
from test_serve import KEY, TEMPLATE, Server  # noqa: E402


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


def test_a_question_is_answered_and_a_key_is_asked_for(browser: Browser, tmp_path: Path):
    write_model(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    server = Server(tmp_path, "--rows", "2", "--name", "small", "--api-key", KEY)
    said = "[...document.querySelectorAll('.said.{}')].map(one => one.textContent)"
    try:
        browser.look(390, 844)
        browser.go(server.url + "/")
        browser.wait(said.format("error") + ".some(text => text.includes('no API key'))")
        browser.evaluate(f"at('key').value = {KEY!r}; at('tokens').value = 3; at('text').value = '<b>'")
        browser.evaluate("at('form').requestSubmit()")
        browser.wait("running === null && " + said.format("assistant") + ".length === 1")
        assert browser.evaluate(said.format("user")) == ["<b>"], "as text, not as markup"
        first = browser.evaluate(said.format("assistant"))[0]
        assert first and browser.evaluate("messages.length") == 2
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.evaluate("at('text').value = 'moon'; at('form').requestSubmit()")
        browser.wait("running === null && " + said.format("assistant") + ".length === 2")
        browser.evaluate("at('reset').click()")
        assert browser.evaluate("messages.length === 0 && document.querySelectorAll('.said').length === 0")
        assert [one for one in browser.problems() if "401" not in one] == []
    finally:
        assert server.end() == 0
