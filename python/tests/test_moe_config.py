"""Sizes of a mixture of experts: every way to write them down, the parameter table, what is said of wrong ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import prod

import pytest
from ironhorse.config import NAMED, MoEConfig, aliases, from_hf_dict, to_hf_config
from ironhorse.errors import ConfigError
from ironhorse.params import active_params, decays, param_shapes, total_params

TEXT = "C=24,L=3,NH=6,NKV=2,HD=10,E=5,K=2,F=28,V=99,maxT=37,rope_base=5000,rope_alpha=2.5,rms_eps=1e-6,aux_alpha=0.03"
ODD = MoEConfig(24, 3, 6, 2, 10, 5, 2, 28, 99, 37, 5000.0, 2.5, 1e-6, 0.03)
DENSE = replace(ODD, n_experts=0, top_k=0)


def test_named_sizes():
    assert MoEConfig.parse("moe-6.9b") == MoEConfig(768, 30, 12, 1, 64, 16, 4, 6144, 32000, 32768, 10000.0, 8.0)
    assert MoEConfig.parse("moe-tiny") == MoEConfig(64, 2, 4, 1, 16, 4, 2, 256, 1000, 512, 10000.0, 1.0, 1e-5, 0.01)
    assert NAMED["moe-6.9b"].kind == NAMED["moe-tiny"].validate().kind == "moe"
    assert ODD.name == "custom" and DENSE.validate().kind == "llama"


def test_parameters_of_the_large_one():
    config = NAMED["moe-6.9b"]
    attention = 2 * 768 * 768 + 2 * 768 * 64
    expert, layer = 3 * 768 * 6144, attention + 2 * 768 + 16 * 768
    rest = 2 * 32000 * 768 + 768
    assert total_params(config) == rest + 30 * (layer + 16 * expert) == 6_882_678_528
    assert active_params(config) == rest + 30 * (layer + 4 * expert) == 1_786_599_168
    assert active_params(DENSE) == total_params(DENSE)


def test_the_table():
    names = list(param_shapes(ODD))
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layer = [name.removeprefix("model.layers.1.") for name in names if name.startswith("model.layers.1.")]
    moe = "block_sparse_moe"
    assert layer == [
        "input_layernorm.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        "post_attention_layernorm.weight",
        f"{moe}.gate.weight",
        *(f"{moe}.experts.{expert}.{part}.weight" for expert in range(5) for part in ("w1", "w3")),
        *(f"{moe}.experts.{expert}.w2.weight" for expert in range(5)),
    ]
    shapes = param_shapes(ODD)
    assert shapes["model.layers.2.self_attn.q_proj.weight"] == (60, 24)
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == (20, 24)
    assert shapes["model.layers.2.self_attn.o_proj.weight"] == (24, 60)
    assert shapes["model.layers.2.block_sparse_moe.experts.4.w2.weight"] == (24, 28)
    assert {name for name, shape in shapes.items() if not decays(shape)} == {
        name for name in names if "norm" in name
    }  # fmt: skip
    dense = [name for name in param_shapes(DENSE) if "layers.0.mlp" in name]
    assert dense == [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert sum(prod(shape) for shape in param_shapes(DENSE).values()) == total_params(DENSE)


def test_texts_and_files(tmp_path):
    assert MoEConfig.parse(TEXT) == MoEConfig.parse(f" kind=moe, {TEXT},") == ODD
    values = asdict(ODD)
    assert list(aliases("moe")) == list(values)
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    for field, names in aliases("moe").items():
        for alias in names:
            text = ",".join(f"{alias if key == field else key}={value}" for key, value in words.items())
            assert MoEConfig.parse(text) == ODD, alias
    (tmp_path / "odd.toml").write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    (tmp_path / "odd.json").write_text(json.dumps({"kind": "moe", **values}))
    assert MoEConfig.parse(str(tmp_path / "odd.toml")) == MoEConfig.parse(str(tmp_path / "odd.json")) == ODD
    short = MoEConfig.parse("C=12,L=1,NH=3,F=7")
    assert short == MoEConfig(12, 1, 3, 1, 4, 0, 0, 7, 32000, 32768) and short.kind == "llama"
    (tmp_path / "whole.toml").write_text("C = 12\nL = 1\nNH = 3\nF = 7\nrope_base = 10000\n")
    assert MoEConfig.parse(str(tmp_path / "whole.toml")) == short  # 10000 is 10000.0


def test_ntk_alpha():
    config = NAMED["moe-6.9b"]
    assert config.rope_theta == pytest.approx(10000 * 8 ** (64 / 62))
    # the slowest pair turns alpha times slower, the fastest as before
    assert config.rope_theta ** (-62 / 64) == pytest.approx(10000 ** (-62 / 64) / 8)
    assert replace(config, rope_alpha=1.0).rope_theta == 10000
    assert replace(config, head_dim=2).validate().rope_theta == 10000


def test_hugging_face():
    for config in (ODD, DENSE, NAMED["moe-6.9b"], NAMED["moe-tiny"]):
        table = to_hf_config(config)
        assert table["rope_theta"] == config.rope_theta
        same = replace(config, rope_base=config.rope_theta, rope_alpha=1.0)
        if not config.n_experts:
            same = replace(same, aux_alpha=0.01)  # Llama has no name for it
        assert from_hf_dict(table, "x") == same
        theta = table.pop("rope_theta")  # as transformers 5 writes it
        assert from_hf_dict(table | {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}, "x") == same


def test_settings_that_change_nothing():
    table = to_hf_config(ODD)
    same = from_hf_dict(table, "x")
    for change in (
        {"rope_scaling": {"rope_type": "default"}},
        {"quantization_config": None, "attention_dropout": 0, "transformers_version": "5.0.0"},
        {"num_key_value_heads": ODD.n_kv_head, "dtype": "bfloat16"},
    ):
        assert from_hf_dict(table | change, "x") == same
    assert from_hf_dict(table | {"sliding_window": ODD.max_seq_len}, "x").computes_as(same)
    assert from_hf_dict(table | {"num_key_value_heads": None}, "x").n_kv_head == ODD.n_head
    del table["num_key_value_heads"]  # then transformers takes 8
    with pytest.raises(ConfigError, match="num_key_value_heads is 8, expected a divisor of num_attention_heads, 6"):
        from_hf_dict(table, "x")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "no such field in a gpt2"),
        ({"model_type": "qwen3"}, "no such field in a qwen3"),
        ({"model_type": "rwkv"}, 'model_type is "rwkv", expected "gpt2", "mixtral", "llama"'),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": "all"}, 'sliding_window is "all"'),
        ({"num_local_experts": 0, "num_experts_per_tok": 0}, "num_local_experts is 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "much"}}, "rope_parameters.rope_theta is"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected from 1 to num_local_experts, 5"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_local_experts": 0}, "num_local_experts is 0, expected at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"max_position_embeddings": None}, "max_position_embeddings is null"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta is null"),
    ],
)
def test_hugging_face_config_of_another_model(change: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        from_hf_dict(to_hf_config(ODD) | change, "x")


@pytest.mark.parametrize("config", [ODD, DENSE])
def test_a_hugging_face_config_that_does_not_say(config: MoEConfig):
    table = to_hf_config(config)
    for key in ("max_position_embeddings", "vocab_size"):
        del table[key]
    found = from_hf_dict(table, "x")
    assert (found.max_seq_len, found.vocab_size) == (131072 if config.n_experts else 2048, 32000)  # as transformers
    # one of two tables may leave the base to the other, or to what is said outside; places that disagree are refused
    two = {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {"type": "default"}}
    assert from_hf_dict(table | two, "x").rope_base == 7.0
    with pytest.raises(ConfigError, match="rope_parameters.rope_theta is 7.0, expected 5.0, as rope_theta says"):
        from_hf_dict(table | two | {"rope_theta": 5.0}, "x")
    del table["model_type"]
    with pytest.raises(ConfigError, match="x: model_type is missing, expected"):
        from_hf_dict(table, "x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("moe-big", "unknown model `moe-big`"),
        ("C=24,L=3,NH=6,F=28,E=4,K=5", "top_k is 5, expected from 1 to n_experts, 4"),
        ("C=24,L=3,NH=6,F=28,E=4,K=0", "top_k is 0, expected from 1 to n_experts"),
        ("C=24,L=3,NH=6,F=28,E=4", "top_k is 0"),
        ("C=24,L=3,NH=6,F=28,K=2", "top_k is 2, expected 0 in a model without experts"),
        ("C=24,L=3,NH=6,F=28,NKV=4", "n_kv_head is 4, expected a divisor of n_head, 6"),
        ("C=24,L=3,NH=6,F=28,NKV=0", "n_kv_head is 0"),
        ("C=24,L=3,NH=6,F=28,HD=5", "head_dim is 5, expected an even number"),
        ("C=25,L=3,NH=6,F=28", "n_head is 6, expected a divisor of hidden, 25, or a head_dim"),
        ("C=24,L=3,NH=6", "ffn|ffn_dim|intermediate_size|F is missing"),
        ("C=24,L=3,NH=6,F=28,layers=3", "n_layer|n_layers|layers|depth|L is given twice"),
        ("C=24,L=3,NH=6,F=28,size=3", "unknown key `size`"),
        ("C=24,L=3,NH=0,F=28", "n_head is 0"),
        ("C=24,L=3,NH=6,F=2.5", 'F is "2.5", expected a whole number'),
        ("C=24,L=3,NH=6,F=28,rope_base=x", 'rope_base is "x", expected a number'),
        ("C=24,L=3,NH=6,F=28,rope_base=0", "rope_base is 0, expected a number above 0"),
        ("C=24,L=3,NH=6,F=28,rope_alpha=-1", "rope_alpha is -1, expected a number above 0"),
        ("C=24,L=3,NH=6,F=28,rms_eps=0", "rms_eps is 0, expected"),
        ("C=24,L=3,NH=6,F=28,aux_alpha=-0.1", "aux_alpha is -0.1, expected a number of at least 0"),
        ("C=24,L=3,NH=6,F=28,aux_alpha=1e999", "aux_alpha is inf"),
        ("C=24,L=3,NH=6,F=99999999999", "ffn is 99999999999, expected at most 2147483519"),
        ("C=24,L=3,NH=6,F=28,kind=gpt2", 'kind is "gpt2", expected moe, llama, mistral'),
        ("C=24,8", "expected KEY=NUMBER"),
        ("missing.toml", "cannot read"),
        ("missing.json", "cannot read"),
    ],
)
def test_bad_text(text: str, says: str):
    with pytest.raises(ConfigError) as caught:
        MoEConfig.parse(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_bad_values():
    for change in ({"hidden": True}, {"n_layer": 1.0}, {"rope_base": "1"}, {"rms_eps": float("nan")}):
        with pytest.raises(ConfigError):
            replace(ODD, **change).validate()
