"""GGUF files of `ironhorse convert`, read by the package `gguf`: every key, the tokenizer, every tensor bit for bit.
Needs IRONHORSE_BIN.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import assert_could_not_run, convert
from cli import ironhorse as command
from gguf_models import FAMILIES, LINEAR, TEMPLATE, Made, make
from safetensors.torch import load_file, save_file

gguf = pytest.importorskip("gguf", reason="reads the files that are tested")

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
HEADS, HEAD = 4, 32  # heads, and how wide they are where the model does not say


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("gguf")
    return {name: make(name, folder / name) for name in FAMILIES}


def written(source: Path, target: Path, kind: str) -> gguf.GGUFReader:
    run = convert(source, target, "--type", kind)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{target}: ") and run.stdout.endswith(f" parameters as {kind}\n")
    return gguf.GGUFReader(target)


def values(reader: gguf.GGUFReader) -> dict[str, object]:
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def expected_tensors(made: Made) -> dict[str, np.ndarray]:
    """The weights under the names of the package `gguf`, q and k of its architecture `llama` with rows in pairs."""
    config, stored = made.model.config, load_file(made.folder / "model.safetensors")
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == made.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    expected: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(stored.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        array = tensor.float().numpy()
        if made.arch == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
            array = array.T
        if made.arch == "llama" and re.search(r"\.[qk]_proj\.weight$", name):
            array = array.reshape(-1, 2, HEAD // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        merged = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if "block_sparse_moe.experts" in merged:  # the map has these names without the prefix
            merged = merged.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
        theirs = names.get_name(merged, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        expected.setdefault(theirs, []).append(np.ascontiguousarray(array))
    return {name: np.stack(parts) if "_exps" in name else parts[0] for name, parts in expected.items()}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_is_there_bit_for_bit(made: dict[str, Made], name: str, kind: str, tmp_path: Path):
    one = made[name]
    found = {tensor.name: tensor for tensor in written(one.folder, tmp_path / "m.gguf", kind).tensors}
    expected = expected_tensors(one)
    if name == "llama3":
        # what their own rotation divides its frequencies by
        plain = 5000.0 ** -(np.arange(0, HEAD, 2) / HEAD)
        factors = found.pop("rope_freqs.weight")
        assert factors.tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_allclose(plain / one.model.model.rotary_emb.inv_freq.numpy(), factors.data, rtol=1e-6)
        assert {1, 8} < set(factors.data.tolist())  # and some in between
    assert found.keys() == expected.keys()
    for tensor_name, array in expected.items():
        tensor = found[tensor_name]
        plain = array.ndim == 1 or "ffn_gate_inp" in tensor_name or "position_embd" in tensor_name
        which = gguf.GGMLQuantizationType["F32" if plain else TYPES[kind]]
        assert tensor.tensor_type == which, tensor_name
        assert tensor.shape.tolist() == list(array.shape[::-1])
        assert tensor.data_offset % 32 == 0
        bits = gguf.quants.quantize(array, which)
        assert tensor.data.tobytes() == bits.tobytes(), tensor_name


def expected_keys(made: Made, kind: str) -> dict[str, object]:
    config, arch = made.model.config, made.arch
    keys = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": made.folder.name,
        "general.file_type": gguf.LlamaFileType[FILE_TYPES[kind]].value,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        f"{arch}.vocab_size": config.vocab_size,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": 64,
        f"{arch}.block_count": 2,
        f"{arch}.attention.head_count": HEADS,
    }
    if arch == "gpt2":
        more = {"attention.head_count_kv": HEADS, "feed_forward_length": 256, "attention.layer_norm_epsilon": 1e-5}
    else:
        rope = config.rope_parameters
        more = {
            "attention.head_count_kv": 2,
            "feed_forward_length": 96,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
            "rope.freq_base": rope["rope_theta"],
        }
        if rope["rope_type"] == "linear":
            more |= {"rope.scaling.type": "linear", "rope.scaling.factor": LINEAR["factor"]}
        if hasattr(config, "num_experts_per_tok"):
            more |= {"expert_count": 4, "expert_used_count": 2}
        if arch == "qwen3moe":
            more |= {"expert_feed_forward_length": 96}
    return keys | {f"{arch}.{key}": value for key, value in more.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_and_the_tokenizer(made: dict[str, Made], name: str, tmp_path: Path):
    one = made[name]
    found = values(written(one.folder, tmp_path / "m.gguf", "q8_0"))
    tokenizer = {key: found.pop(key) for key in list(found) if key.startswith("tokenizer.")}
    expected = expected_keys(one, "q8_0")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), key

    description = json.loads(one.tokenizer.to_str())
    assert tokenizer.pop("tokenizer.chat_template") == TEMPLATE
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in tokenizer.items()}
    is_pieces = one.cut == "pieces"
    assert (own.pop("model"), own.pop("pre")) == (("llama", "default") if is_pieces else ("gpt2", one.cut))
    config = one.model.config
    assert (own.pop("bos_token_id"), own.pop("eos_token_id")) == (config.bos_token_id, config.eos_token_id)
    assert (own.pop("add_bos_token"), own.pop("add_eos_token")) == (is_pieces, False)

    tokens, types = own.pop("tokens"), own.pop("token_type")
    size = one.tokenizer.get_vocab_size()
    assert len(tokens) == len(types) == config.vocab_size == size + 5
    added = {token["id"]: token for token in description["added_tokens"]}
    for id in range(size):
        text = one.tokenizer.id_to_token(id)
        assert tokens[id] == text
        kind = gguf.TokenType.NORMAL
        if is_pieces and text == "<unk>":
            kind = gguf.TokenType.UNKNOWN
        elif id in added:
            kind = gguf.TokenType.CONTROL if added[id]["special"] else gguf.TokenType.USER_DEFINED
        elif is_pieces and text.startswith("<0x"):
            kind = gguf.TokenType.BYTE
        assert types[id] == kind, text
    assert types[size:] == [gguf.TokenType.UNUSED] * 5 and len(set(tokens)) == len(tokens)
    merges = [tuple(merge) for merge in description["model"]["merges"]]
    if is_pieces:
        scores = own.pop("scores")
        results = [scores[one.tokenizer.token_to_id(left + right)] for left, right in merges]
        assert results == sorted(results, reverse=True) and len(scores) == len(tokens)
        assert own.pop("add_space_prefix") is True
    else:
        assert own.pop("merges") == [" ".join(merge) for merge in merges]
    assert own == {}


def test_blocks_of_q8_0_where_rounding_is_hard(made: dict[str, Made], tmp_path: Path):
    """Halves of a step, numbers of all magnitudes, blocks of zeros and of one number: the bits of ggml's reference."""
    rng = np.random.default_rng(7)
    tensors = load_file(made["qwen2"].folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"].numpy()
    rows = rng.standard_normal(table.shape).astype(np.float32) * 10.0 ** rng.integers(-30, 6, (len(table), 1))
    rows[:50] = rng.integers(-127, 127, (50, table.shape[1])) + 0.5
    rows[:50, ::32] = 127
    rows[50:60] = 0
    rows[60] = -3e-42
    rows[61:80] *= rng.integers(0, 2, (19, table.shape[1]))
    rows = rows.astype(np.float32)
    folder = tmp_path / "hard"
    folder.mkdir()
    for file in made["qwen2"].folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    changed = {**tensors, "model.embed_tokens.weight": torch.from_numpy(rows)}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    found = {tensor.name: tensor for tensor in written(folder, tmp_path / "hard.gguf", "q8_0").tensors}
    keep = np.arange(len(rows)) != 60  # its scale has no reciprocal in f32, so that the reference's bytes are undefined
    ours = found["token_embd.weight"].data.reshape(len(rows), -1)
    theirs = gguf.quants.quantize(rows[keep], gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(ours[keep], theirs)
    assert not gguf.quants.dequantize(ours[60:61], gguf.GGMLQuantizationType.Q8_0).any()


def test_a_run_becomes_a_file_without_a_detour(tmp_path: Path):
    run = command(
        *("train", "--model", "n_layer=1,n_head=2,n_embd=32,vocab=256,context=16", "--batch", 2, "--seq", 16),
        *("--steps", 1, "--sample-tokens", 0, "--out", tmp_path / "run"),
    )
    assert run.returncode == 0, run.stderr
    reader = written(tmp_path / "run", tmp_path / "run.gguf", "bf16")
    found = values(reader)
    assert len(found["tokenizer.ggml.tokens"]) == 256 and found["general.name"] == "run"
    assert found["tokenizer.ggml.eos_token_id"] == 0
    assert {tensor.name for tensor in reader.tensors} >= {"position_embd.weight", "blk.0.attn_qkv.bias"}


def test_bad_input_is_one_line_and_leaves_nothing(made: dict[str, Made], tmp_path: Path):
    folder, target = made["qwen3"].folder, tmp_path / "m.gguf"

    def refused(*arguments: object) -> str:
        run = command("convert", *arguments)
        assert_could_not_run(run)
        assert not target.exists() and not [file for file in tmp_path.iterdir() if file.name.startswith(".m.")]
        return run.stderr

    run = command(
        *("train", "--model", "kind=llama,C=24,L=1,NH=2,HD=12,F=20,V=256,maxT=16", "--batch", 1, "--seq", 16),
        *("--steps", 1, "--sample-tokens", 0, "--out", tmp_path / "odd"),
    )
    assert run.returncode == 0, run.stderr
    width = "width of `token_embd.weight` is 24, expected a multiple of 32 for q8_0, or another type"
    assert width in refused(tmp_path / "odd", target, "--type", "q8_0")
    assert "takes --type, not --dtype" in refused(folder, target, "--dtype", "bf16")
    assert "only a .gguf takes --type" in refused(folder, tmp_path / "hf", "--type", "f16")
    assert "possible values: f32, f16, bf16, q8_0" in command("convert", folder, target, "--type", "q4_0").stderr

    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": {"type": "Unigram", "vocab": []}}))
    assert 'its model is "Unigram", expected BPE' in refused(other, target)
    tokenizer["model"]["vocab"]["beyond"] = 100_000
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has the id 100000" in refused(other, target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    done = convert(other, target)
    assert done.returncode == 0 and done.stdout.endswith(
        " parameters as f16; without a tokenizer, because there is none beside the weights\n"
    )
    assert values(gguf.GGUFReader(target))["tokenizer.ggml.model"] == "none"

    read = command("convert", target, tmp_path / "back")
    assert_could_not_run(read)
    assert "kind of file is a GGUF file, which is written and not read" in read.stderr
