"""The families of models that people use, with random weights and odd shapes: answers of `transformers` against the
command, decoding, and folders that go there and back. Needs IRONHORSE_BIN.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ironhorse
import pytest
import torch
from activations import activation_names
from cli import assert_could_not_run, convert, one_changed, rewrite_key, verify
from cli import ironhorse as command
from ironhorse.config import MoEConfig, from_hf_dict
from ironhorse.errors import ConfigError
from ironhorse.formats.hf_files import INDEX
from ironhorse.formats.safetensors import read_safetensors
from ironhorse.formats.tokenizer import Tokenizer
from ironhorse.params import param_shapes
from test_moe_export import export

transformers = pytest.importorskip("transformers", minversion="5.0", reason="the keys are made by transformers 5")

LLAMA3 = "rope_type=llama3,rope_factor=8,rope_original=16,rope_base=500"
MODELS = {  # name: model, B, T, further flags
    "llama-tied": ("kind=llama,C=24,L=2,NH=6,NKV=3,HD=10,F=20,V=99,maxT=40,tied=true", 2, 17, "--weight-decay", "0.1"),
    "llama3": (f"kind=llama,C=24,L=2,NH=6,NKV=2,HD=16,F=20,V=99,maxT=40,{LLAMA3}", 2, 33),
    "linear": ("kind=llama,C=24,L=1,NH=2,HD=12,F=20,V=99,maxT=40,rope_type=linear,rope_factor=2.5", 1, 33),
    "mistral": ("kind=mistral,C=18,L=2,NH=3,NKV=1,HD=6,F=20,V=99,maxT=16", 3, 11),
    "mistral-window": ("kind=mistral,C=24,L=2,NH=6,NKV=2,HD=10,F=20,V=99,maxT=80,window=9", 2, 71),
    "mistral-last": ("kind=mistral,C=18,L=1,NH=3,NKV=1,HD=6,F=20,V=99,maxT=16,window=1", 2, 5),
    "qwen2": ("kind=qwen2,C=24,L=2,NH=6,NKV=2,HD=4,F=20,V=99,maxT=16,tied=true", 2, 13, "--weight-decay", "0.1"),
    "qwen2-one-token": ("kind=qwen2,C=20,L=1,NH=5,NKV=1,HD=4,F=7,V=31,maxT=4", 1, 1),
    "qwen2-window": ("kind=qwen2,C=24,L=3,NH=6,NKV=2,HD=4,F=20,V=99,maxT=40,window=7,window_from=1", 2, 33),
    "qwen3": ("kind=qwen3,C=24,L=2,NH=6,NKV=3,HD=10,F=20,V=99,maxT=16,tied=true,rms_eps=1e-6", 2, 13),
    "qwen3-hd128": ("kind=qwen3,C=16,L=1,NH=4,NKV=2,HD=128,F=20,V=99,maxT=40,rope_base=1e6", 2, 9),
    "qwen3_moe": ("kind=qwen3_moe,C=24,L=2,NH=6,NKV=2,HD=6,E=5,K=2,F=14,V=99,maxT=16,aux_alpha=0.2", 3, 7),
    "qwen3_moe-window": ("kind=qwen3_moe,C=24,L=1,NH=6,NKV=2,HD=6,E=3,K=2,F=14,V=99,maxT=40,window=16", 1, 37),
    "mixtral-window": ("kind=moe,C=24,L=1,NH=6,NKV=2,HD=6,E=3,K=2,F=14,V=99,maxT=16,window=4", 2, 11),
    "gemma3": (
        "kind=gemma3_text,C=24,L=3,NH=6,NKV=2,HD=10,F=20,V=99,maxT=40,tied=true,window=7,window_every=2,"
        "rope_base=1e6,rope_local=100,query_scalar=12,rms_eps=1e-6",
        2,
        33,
        "--weight-decay",
        "0.1",
    ),
    "gemma3-linear": (
        "kind=gemma3_text,C=18,L=2,NH=3,NKV=1,HD=6,F=7,V=31,maxT=40,window=40,window_every=2,rope_base=500,"
        "rope_type=linear,rope_factor=8",
        1,
        37,
    ),
    "gemma3-hd256": (  # the heads of published Gemma 3, for which the GPU has kernels of its own
        "kind=gemma3_text,C=40,L=2,NH=2,NKV=1,HD=256,F=96,V=300,maxT=80,tied=true,window=32,window_every=2",
        1,
        65,
    ),
    "gemma3-one-token": ("kind=gemma3_text,C=20,L=1,NH=5,NKV=1,HD=4,F=7,V=31,maxT=4", 1, 1),
    "mixtral-tied": ("kind=moe,C=24,L=1,NH=6,NKV=2,HD=6,E=3,K=2,F=14,V=99,maxT=16,tied=true", 2, 5),
}
BY_TRANSFORMERS = ("--reference", "transformers", "--steps", "2", "--no-bf16")
KINDS = ("llama-tied", "llama3", "mistral", "mistral-window", "qwen2", "qwen2-window", "qwen3", "qwen3_moe", "gemma3")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whose every number is transformers'."""
    folder = tmp_path_factory.mktemp("families")
    return {name: export(folder / name, *case, *BY_TRANSFORMERS)[1] for name, case in MODELS.items()}


def config_of(name: str) -> MoEConfig:
    return MoEConfig.parse(MODELS[name][0])


def folder_of(key: Path) -> Path:
    """The weights beside a key."""
    return key.with_name(key.name.removesuffix(".key.safetensors"))


@pytest.mark.parametrize("name", MODELS)
def test_the_command_agrees_with_transformers(keys: dict[str, Path], name: str, tmp_path: Path):
    outcome = verify(tmp_path, "--key", keys[name])
    assert outcome.code == 0 and outcome.failing() == [], outcome.text
    config, compared = config_of(name), {tensor["name"] for tensor in outcome.report["tensors"]}
    acts = {act for act in activation_names(config) if not act.endswith((".qkv_rope", ".probs"))}
    assert {f"act.{act}" for act in acts} <= compared
    assert {f"{kind}.{param}" for kind in ("grad", "after") for param in param_shapes(config)} <= compared
    assert {"logits", "loss", "losses"} <= compared
    assert ("lm_head.weight" in param_shapes(config)) != config.tied


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2", "qwen3", "qwen3_moe", "gemma3"])
def test_recomputing_gives_the_same(keys: dict[str, Path], name: str):
    report = ironhorse.verify(keys[name], recompute="full")
    assert report, str(report)


@pytest.mark.parametrize("name", ["llama3", "linear", "mistral-window", "qwen2", "qwen2-window", "qwen3_moe", "gemma3"])
def test_the_reference_agrees_with_transformers(keys: dict[str, Path], name: str, tmp_path: Path):
    """Our plain PyTorch, which also shows what they do not: rotated q and k, probabilities."""
    case = MODELS[name]
    _, ours = export(tmp_path / "ours", *case, "--steps", "1", "--no-bf16")
    theirs, mine = read_safetensors(keys[name]).tensors, read_safetensors(ours).tensors
    for tensor in ("logits", *(f"grad.{param}" for param in param_shapes(config_of(name)))):
        a, b = (torch.from_numpy(file[tensor].copy()) for file in (theirs, mine))
        assert (a - b).norm() <= 1e-5 * b.norm(), tensor  # what `verify` allows
    assert ironhorse.verify(ours)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3", "act.layers.1.qk_norm"),
        ("qwen3", "grad.model.layers.0.self_attn.k_norm.weight"),
        ("qwen2", "grad.model.layers.1.self_attn.v_proj.bias"),
        ("llama-tied", "grad.model.embed_tokens.weight"),
        ("gemma3", "grad.model.embed_tokens.weight"),
        ("gemma3", "grad.model.layers.2.post_feedforward_layernorm.weight"),
        ("gemma3", "act.layers.0.qk_norm"),
    ],
)
def test_a_changed_number_is_found(keys: dict[str, Path], name: str, tensor: str, tmp_path: Path):
    was = read_safetensors(keys[name]).tensors[tensor]
    rewrite_key(keys[name], tmp_path / "changed.key.safetensors", {tensor: one_changed(was, (0,) * was.ndim)})
    report = ironhorse.verify(tmp_path / "changed.key.safetensors")
    assert [wrong.name for wrong in report.wrong] == [tensor]


# ---- decoding --------------------------------------------------------------------------------------------------


def tiny(kind: str, seed: int = 11) -> torch.nn.Module:
    """A small model of transformers' own making, with a context for 200 tokens more than the prompt."""
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
        intermediate_size=20, vocab_size=95, max_position_embeddings=256, initializer_range=0.4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    llama3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
    config = {
        "llama-tied": lambda: transformers.LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=True),
        "llama3": lambda: transformers.LlamaConfig(**sizes, rope_parameters=llama3),
        "mistral": lambda: transformers.MistralConfig(**sizes, rope_parameters=rope, sliding_window=None),
        "mistral-window": lambda: transformers.MistralConfig(**sizes, rope_parameters=rope, sliding_window=13),
        "qwen2": lambda: transformers.Qwen2Config(**sizes, rope_parameters=rope, tie_word_embeddings=True),
        "qwen2-window": lambda: transformers.Qwen2Config(
            **sizes, rope_parameters=rope, use_sliding_window=True, sliding_window=40, max_window_layers=1
        ),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, rope_parameters=rope),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**sizes, rope_parameters=rope, **experts),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **sizes | dict(num_hidden_layers=7), sliding_window=13, query_pre_attn_scalar=12
        ),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    spread = 2.0 if kind == "gemma3" else 0.2  # a scaled embedding that is the head too repeats its token otherwise
    with torch.no_grad():
        for param in model.parameters():  # what starts at 0 or 1 would hide a mistake
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * spread)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_is_theirs_for_200_tokens(kind: str, tmp_path: Path):
    end, text = 0, "Hm"
    tokenizer = Tokenizer([bytes([32 + i]) for i in range(95)], end)  # printable
    prompt = [end, *(byte - 32 for byte in text.encode())]  # the token between texts comes first
    first = {"llama-tied": 4, "llama3": 1, "mistral": 1, "gemma3": 3}.get(kind, 0)  # where the search ends at once
    for seed in range(first, first + 20):  # until a text goes on and is not of one token
        model = tiny(kind, seed)
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=200, do_sample=False, pad_token_id=0, eos_token_id=end
            )
        theirs = out[0, len(prompt) :].tolist()
        if len(theirs) == 200 and end not in theirs and len(set(theirs)) > 5:
            break
    else:
        pytest.fail("no seed gives a text of 200 tokens")
    model.save_pretrained(tmp_path / "model")
    ironhorse.save(tmp_path / "model" / "tokenizer.bin", tokenizer)
    report = tmp_path / "report.json"
    run = command("generate", "--model", tmp_path / "model", "--prompt", text, "--tokens", 200, "--greedy",
                  "--device", "cpu", "--json", report)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(report.read_text())["tokens"] == theirs


# ---- folders ---------------------------------------------------------------------------------------------------


def settings(folder: Path) -> dict:
    """The configuration that transformers makes of a folder, without where it lies and the precision."""
    table = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {key: value for key, value in table.items() if key not in ("_name_or_path", "dtype", "transformers_version")}


@pytest.mark.parametrize("kind", KINDS)
def test_folders_go_there_and_back(kind: str, tmp_path: Path):
    model, theirs = tiny(kind), tmp_path / "theirs"
    model.save_pretrained(theirs, max_shard_size="20KB")
    kept = {
        "generation_config.json": b'{"temperature": 0.5}',
        "chat_template.jinja": b"{{ messages }}",
        "tokenizer_config.json": b'{"chat_template": "x"}',
    }
    for name, content in kept.items():
        (theirs / name).write_bytes(content)
    assert (theirs / INDEX).exists()
    for target, flags in (("one", ()), ("many", ("--shard-size", "20KB"))):
        run = convert(theirs, tmp_path / target, *flags)
        assert run.returncode == 0, run.stderr
        assert settings(tmp_path / target) == settings(theirs)
        assert all((tmp_path / target / name).read_bytes() == content for name, content in kept.items())
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / target, output_loading_info=True)
        assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    assert convert(tmp_path / "many", tmp_path / "again").returncode == 0
    for name in os.listdir(tmp_path / "one"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name


def test_f16_is_read(tmp_path: Path):
    model = tiny("qwen3").half()
    model.save_pretrained(tmp_path / "half")
    assert convert(tmp_path / "half", tmp_path / "whole").returncode == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    for name, value in model.state_dict().items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], value.float()), name


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("qwen3", {"model_type": "mamba"}, 'model_type is "mamba", expected "gpt2", "mixtral", "llama"'),
        ("qwen3", {"logit_scale": 3}, "logit_scale is 3, expected no such field in a qwen3"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected null or from 1 to"),
        ("qwen2-window", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is ["),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is false, expected true"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0], expected [] or null"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1"),
        ("llama3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type is "yarn", expected'),
        ("llama3", {"num_attention_heads": 12}, "shape of `model.layers.0.self_attn.q_proj.weight` is [48, 24]"),
        ("qwen2", {"model_type": "llama"}, "expected no such field in a llama"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, expected null"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, expected null"),
        ("gemma3", {"hidden_activation": "gelu"}, 'hidden_activation is "gelu", expected "gelu_pytorch_tanh"'),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true, expected false"),
        ("gemma3", {"attention_bias": True}, "attention_bias is true, expected false"),
        ("qwen3", {"num_hidden_layers": 3}, "number of tensors is 25, expected at least 11 for each of 3 layers"),
    ],
)
def test_what_is_not_computed_is_refused(kind: str, change: dict, says: str, tmp_path: Path):
    folder = tmp_path / "model"
    tiny(kind).save_pretrained(folder)
    table = json.loads((folder / "config.json").read_text()) | change
    if "num_hidden_layers" in change:
        table.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(table))
    run = convert(folder, tmp_path / "out")
    assert_could_not_run(run)
    assert says in run.stderr, run.stderr
    assert not (tmp_path / "out").exists()


def test_a_bias_that_a_family_has_not_is_named(tmp_path: Path):
    folder = tmp_path / "model"
    tiny("qwen2").save_pretrained(folder)
    table = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"
    tiny("mistral").save_pretrained(other)
    shutil.copy(other / "config.json", folder / "config.json")
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True})
    )
    run = convert(folder, tmp_path / "out")
    assert_could_not_run(run)
    assert "_proj.bias`, expected only those of MistralForCausalLM" in run.stderr
    with pytest.raises(ConfigError, match="hidden_act is 'gelu'|hidden_act is \"gelu\""):
        from_hf_dict(table | {"hidden_act": "gelu"}, "here")
