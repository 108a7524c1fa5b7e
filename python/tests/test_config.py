"""Every way to write a model's sizes down, and what is said when they are wrong."""

from __future__ import annotations

import json

import pytest
from ironhorse.config import NAMED, GPT2Config, aliases
from ironhorse.errors import ConfigError

ODD = GPT2Config(max_seq_len=37, vocab_size=1003, n_layer=3, n_head=5, n_embd=80)


def test_named_sizes():
    assert GPT2Config.parse("d12") == GPT2Config(1024, 50257, 12, 12, 768)
    published = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}
    for name, sizes in published.items():
        assert (NAMED[name].n_layer, NAMED[name].n_head, NAMED[name].n_embd) == sizes
    assert {config.kind for config in NAMED.values()} >= {"gpt2", "moe"}
    assert all(config.validate().name == name for name, config in NAMED.items())
    for name, alias in (("d12", "gpt2"), ("d24", "gpt2-medium"), ("d36", "gpt2-large"), ("d48", "gpt2-xl")):
        assert GPT2Config.parse(alias) == NAMED[name]


@pytest.mark.parametrize(("vocab", "padded"), [(50257, 50304), (128, 128), (129, 256), (1, 128), (1003, 1024)])
def test_padded_vocab_size(vocab: int, padded: int):
    assert GPT2Config(8, vocab, 1, 1, 4).padded_vocab_size == padded


def test_inline():
    assert GPT2Config.parse("n_layer=3, n_head=5,n_embd=80,vocab_size=1003,max_seq_len=37") == ODD
    assert ODD.name == "custom"
    assert GPT2Config.parse("L=12,NH=12,C=768").name == "d12"  # V and maxT are GPT-2's unless given


def test_every_alias_means_its_size():
    values = {"max_seq_len": 37, "vocab_size": 1003, "n_layer": 3, "n_head": 5, "n_embd": 80, "act": "gelu"}
    spellings = aliases("gpt2")
    assert spellings.pop("padded_vocab_size") == ("padded_vocab_size", "Vp")
    assert set(spellings) == set(values)
    for field, names in spellings.items():
        for alias in names:
            text = ",".join(f"{alias if key == field else key}={value}" for key, value in values.items())
            assert GPT2Config.parse(text) == ODD, alias


def test_toml_and_json_files(tmp_path):
    toml = tmp_path / "odd.toml"
    toml.write_text("layers = 3\nheads = 5\nwidth = 80 # C\nvocab = 1003\ncontext = 37\n")
    assert GPT2Config.parse(str(toml)) == ODD
    plain = tmp_path / "odd.json"
    plain.write_text(json.dumps({"depth": 3, "NH": 5, "d_model": 80, "V": 1003, "maxT": 37}))
    assert GPT2Config.parse(str(plain)) == ODD


def test_the_texts_of_the_rust_side(tmp_path):
    """What crates/train/src/model/config.rs accepts and refuses, in its tests' own words."""
    assert GPT2Config.parse("kind=gpt2, L=1, NH=1, C=2,").vocab_size == 50257
    for padded in ("padded_vocab_size", "Vp"):
        assert GPT2Config.parse(f"L=3,NH=5,C=80,V=1003,maxT=37,{padded}=1024") == ODD
    toml = tmp_path / "odd.toml"
    toml.write_text('kind = "gpt2"\nL = 3\nNH = 5\nC = 80\nV = 1_003\nmaxT = 37\npadded_vocab_size = 1024\n')
    assert GPT2Config.parse(str(toml)) == ODD
    plain = tmp_path / "odd.json"
    plain.write_text(json.dumps({"kind": "gpt2", **ODD.to_dict()}))
    assert GPT2Config.parse(str(plain)) == ODD


def hf_table(**changes: object) -> dict:
    sizes = {"n_layer": 3, "n_head": 5, "n_embd": 80, "vocab_size": 1003, "n_positions": 37, "n_ctx": 37}
    rest = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1}
    return {**sizes, **rest, "n_inner": None, "tie_word_embeddings": True, **changes}


def test_hugging_face_config_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf_table()))
    assert GPT2Config.parse(str(path)) == ODD


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"activation_function": "relu"}, "activation_function"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"n_inner": 100}, "n_inner"),
        ({"model_type": "bert"}, "model_type"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"n_ctx": 38}, "n_ctx is 38, expected 37, as n_positions says"),
        ({"n_positions": 0, "n_ctx": 0}, "json: n_positions is 0"),
    ],
)
def test_hugging_face_config_of_another_model(tmp_path, change: dict, says: str):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf_table(**change)))
    with pytest.raises(ConfigError, match=says):
        GPT2Config.parse(str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("d13", "unknown model `d13`, expected d12"),
        ("n_layer=1,n_head=3,n_embd=8", "n_head is 3, expected a divisor of n_embd, 8"),
        ("n_layer=1,n_head=1,n_embd=8,size=4", "unknown key `size`"),
        ("n_layer=1,n_head=1", "n_embd.* is missing"),
        ("n_layer=0,n_head=1,n_embd=8", "n_layer is 0"),
        ("n_layer=-1,n_head=1,n_embd=8", 'n_layer is "-1"'),
        ("n_layer=1,n_head=1,n_embd=8,vocab_size=99999999999", "vocab_size is 99999999999"),
        ("n_layer=two,n_head=1,n_embd=8", "whole number"),
        ("n_layer=1,n_head=1,n_embd=8,depth=2", "n_layer.* is given twice"),
        ("n_layer=1,n_head=1,n_embd=8,depth=1", "n_layer.* is given twice"),
        ("n_layer=1,n_head=1,n_embd=8,Vp=50304,padded_vocab_size=50304", "padded_vocab_size.* is given twice"),
        ("n_layer=1,n_head=1,n_embd=8,padded_vocab_size=50257", "expected 50304"),
        ("n_layer=1,n_head=1,n_embd=8,vocab_size=128,Vp=256", "expected 128"),
        ("n_layer=1,n_head=1,n_embd=8,kind=moe", 'kind is "moe", expected gpt2'),
        ("n_layer=1_0,n_head=1,n_embd=8", "whole number"),
        ("n_layer=1,8", "expected KEY=NUMBER"),
        ("moe-tiny", "moe-tiny, a moe, expected a gpt2"),
        ("missing.toml", "cannot read"),
        ("missing.json", "cannot read"),
    ],
)
def test_bad_text(text: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        GPT2Config.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.toml", "n_layer = ", "not TOML"),
        ("a.toml", "n_layer = 1.5\nn_head = 1\nn_embd = 8", "whole number"),
        ("a.toml", "n_layer = true\nn_head = 1\nn_embd = 8", "whole number"),
        ("a.toml", "kind = 1\nn_layer = 1\nn_head = 1\nn_embd = 8", "kind is 1, expected gpt2"),
        (
            "a.toml",
            "padded_vocab_size = 50304.0\nn_layer = 1\nn_head = 1\nn_embd = 8",
            "padded_vocab_size is 50304.0, expected a whole number",
        ),
        ("a.json", "{", "not valid"),
        ("a.json", "[1]", "JSON object"),
        ("a.json", '{"n_layer": "1", "n_head": 1, "n_embd": 8}', "whole number"),
        ("a.json", b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_bad_files(tmp_path, name: str, content: str | bytes, says: str):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=says):
        GPT2Config.parse(str(path))
