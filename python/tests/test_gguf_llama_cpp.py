"""GGUF files of `ironhorse convert`, run by llama.cpp: logits and ids beside those of transformers.

llama-cpp-python is compiled when it is installed, which takes minutes, so it is not a requirement of the tests:

    .venv/bin/pip install llama-cpp-python
    IRONHORSE_BIN=target/release/ironhorse .venv/bin/python -m pytest -s python/tests/test_gguf_llama_cpp.py
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import convert
from gguf_models import FAMILIES, TEXT, Made, make

gguf = pytest.importorskip("gguf", reason="rounds weights as its types do")
llama_cpp = pytest.importorskip("llama_cpp", reason="compiled by hand: see the first lines of this file")

# Sums of at most 256 products in another order than torch's: a unit of f32 for each of some of them.
FLOOR = 100 * 2.0**-23
# A sum that is next to the middle of two numbers of f16 can take the other entry of the table of GELU.
OTHER_ENTRY = 2.0**-11
# A mixture can choose another expert because weights are rounded, and then differs by all of that expert's output.
MIXTURES = ("mixtral", "qwen3_moe")
KINDS = ("f32", "f16", "bf16", "q8_0")


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


def logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def rounded(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    """The model with the weights that a file of this type has, by the package `gguf`."""
    copy, which = deepcopy(model), gguf.GGMLQuantizationType[kind.upper()]
    for name, param in copy.named_parameters():
        if param.ndim == 1 or name.endswith((".gate.weight", "wpe.weight")):
            continue
        is_turned = model.config.model_type == "gpt2" and ".h." in name  # (in, out)
        array = (param.data.T if is_turned else param.data).contiguous().numpy()
        values = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, which), which).copy())
        param.data = (values.T if is_turned else values).contiguous()
    return copy


class TableGelu(torch.nn.Module):
    """llama.cpp looks GELU up in a table of f16, in files of any type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x >= 10, x, torch.where(x <= -10, torch.zeros_like(x), table))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(made: dict[str, Made], name: str, kind: str, tmp_path: Path):
    """As near as the type allows: llama.cpp also rounds the inputs of products, which adds as much as the rounding
    of the weights does, so that both together make 1.4 times as much; 2 leaves room for what is random in it.
    """
    one = made[name]
    ids = one.tokenizer.encode(TEXT, add_special_tokens=False).ids[:80]
    model = deepcopy(one.model)
    if name == "gpt2":
        for layer in model.transformer.h:
            layer.mlp.act = TableGelu()
    expected = logits(model, ids)
    llm = opened(one, kind, tmp_path)
    llm.eval(ids)
    found = np.array(llm.scores[: len(ids)])
    llm.close()
    assert found.shape == expected.shape

    def error(other: np.ndarray) -> np.ndarray:
        return np.linalg.norm(other - expected, axis=1) / np.linalg.norm(expected, axis=1)

    errors, own = error(found), error(logits(rounded(model, kind), ids))
    told = f"error {np.median(errors):.1e}, largest {errors.max():.1e}"
    print(f"{name:10} {kind:5} {told}; of the type alone {np.median(own):.1e}, {own.max():.1e}")
    assert np.median(errors) <= FLOOR + 2 * np.median(own)
    if name not in MIXTURES or kind == "f32":
        floor = OTHER_ENTRY if name == "gpt2" else FLOOR
        assert errors.max() <= floor + 2 * own.max()


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
