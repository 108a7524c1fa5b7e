"""GGUF files of `ironhorse convert`, run by llama.cpp: logits and ids beside those of transformers.

llama-cpp-python is compiled when it is installed, which takes minutes, so it is not a requirement of the tests:

    .venv/bin/pip install llama-cpp-python
    IRONHORSE_BIN=target/release/ironhorse .venv/bin/python -m pytest -s python/tests/test_gguf_llama_cpp.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli import convert
from gguf_models import FAMILIES, TEXT, Made, make

llama_cpp = pytest.importorskip("llama_cpp", reason="compiled by hand: see the first lines of this file")

# The error of one number relative to the numbers around it. llama.cpp rounds weights and the inputs of products to the
# type; a block of q8_0 is rounded to 1/127 of its largest number, which is about 2.2 times the root mean square of the
# block, evenly within half a step.
UNITS = {"f32": 2.0**-23, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 2.2 / 127 / 12**0.5}
# Two layers of four products and the head, each with two rounded operands whose errors add up like random numbers, and
# twice that for what softmax and norms make of it. f32 has sums in another order instead: a unit for each term.
STEPS = {"f32": 100.0, "f16": 2 * (9 * 2) ** 0.5, "bf16": 2 * (9 * 2) ** 0.5, "q8_0": 2 * (9 * 2) ** 0.5}
# A mixture can choose another expert because of these errors, which then differs by all of its output.
MIXTURES = ("mixtral", "qwen3_moe")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("llama_cpp")
    return {name: make(name, folder / name) for name in FAMILIES}


def opened(one: Made, kind: str, folder: Path) -> llama_cpp.Llama:
    target = folder / f"{kind}.gguf"
    run = convert(one.folder, target, "--type", kind)
    assert run.returncode == 0, run.stderr
    # keys and values of the cache in f32: what is compared are the weights
    return llama_cpp.Llama(
        str(target), n_ctx=128, logits_all=True, n_threads=1, verbose=False, type_k=0, type_v=0, flash_attn=False
    )


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(made: dict[str, Made], name: str, kind: str, tmp_path: Path):
    one = made[name]
    ids = one.tokenizer.encode(TEXT, add_special_tokens=False).ids[:80]
    with torch.no_grad():
        expected = one.model(torch.tensor([ids])).logits[0].float().numpy()
    llm = opened(one, kind, tmp_path)
    llm.eval(ids)
    found = np.array(llm.scores[: len(ids)])
    llm.close()
    assert found.shape == expected.shape
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    limit = UNITS[kind] * STEPS[kind]
    print(f"{name:10} {kind:5} error {np.median(errors):.1e}, largest {errors.max():.1e}, limit {limit:.1e}")
    assert np.median(errors) <= limit
    if name not in MIXTURES or kind == "f32":
        assert errors.max() <= 2 * limit


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_tokenizer(made: dict[str, Made], name: str, tmp_path: Path):
    one = made[name]
    llm = opened(one, "f16", tmp_path)
    text = TEXT + "Don't 12345 <|im_start|>user\nhi<|im_end|>  x\t\ty 'LL it'S\n"
    expected = one.tokenizer.encode(text).ids
    found = llm.tokenize(text.encode(), add_bos=True, special=True)
    assert found == expected
    assert llm.metadata["tokenizer.chat_template"].startswith("{% for m in messages %}")
    llm.close()
