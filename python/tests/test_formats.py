"""The .bin formats: exact bytes of headers and layout, round trips without loss, and refusal of damaged files."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from ironhorse.config import GPT2Config
from ironhorse.errors import FormatError
from ironhorse.formats.bf16 import from_bf16, to_bf16
from ironhorse.formats.llmc import (
    DebugState,
    read_debug_state,
    read_model,
    write_debug_state,
    write_model,
)
from ironhorse.formats.shards import read_shard, write_shard
from ironhorse.formats.tokenizer import Tokenizer, read_tokenizer, write_tokenizer
from ironhorse.params import param_shapes

CONFIG = GPT2Config(max_seq_len=5, vocab_size=130, n_layer=2, n_head=2, n_embd=6)


def random_params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in param_shapes(CONFIG).items()}


def random_state() -> DebugState:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 130, (2, 3, 4), dtype=np.int32)
    return DebugState(tokens[0], tokens[1], rng.standard_normal((3, 4, 130), np.float32), 4.875, random_params(2))


def ints(path, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}i", path.read_bytes()[: 4 * count])


@pytest.mark.parametrize(("dtype", "version", "width"), [("f32", 3, 4), ("bf16", 5, 2)])
def test_model_header_size_and_round_trip(tmp_path, dtype: str, version: int, width: int):
    path, again = tmp_path / "a.bin", tmp_path / "b.bin"
    write_model(path, CONFIG, random_params(), dtype)
    assert ints(path, 256) == (20240326, version, 5, 130, 2, 2, 6, 256) + (0,) * 248
    # wte 256*6, wpe 5*6, a layer: 2*6 + 18*6+18 + 6*6+6 + 2*6 + 24*6+24 + 6*24+6, ln_f 2*6
    assert path.stat().st_size == 1024 + width * (256 * 6 + 30 + 2 * (12 + 126 + 42 + 12 + 168 + 150) + 12)
    file = read_model(path)
    assert (file.config, file.dtype) == (CONFIG, dtype)
    write_model(again, file.config, file.params, file.dtype)
    assert path.read_bytes() == again.read_bytes()
    if dtype == "f32":
        assert all(np.array_equal(file.params[name], value) for name, value in random_params().items())


def test_model_tensor_order_stacks_layers(tmp_path):
    path = tmp_path / "a.bin"
    params = random_params()
    write_model(path, CONFIG, params)
    flat = np.frombuffer(path.read_bytes()[1024:], "<f4")
    assert np.array_equal(flat[: 130 * 6].reshape(130, 6), params["wte.weight"])
    assert not flat[130 * 6 : 256 * 6].any()  # rows V..Vp are zero
    at = 256 * 6
    assert np.array_equal(flat[at : at + 30].reshape(5, 6), params["wpe.weight"])
    at += 30
    # ln1w of both layers come before ln1b of the first
    expected = np.concatenate([params[f"h.{layer}.ln_1.{part}"] for part in ("weight", "bias") for layer in (0, 1)])
    assert np.array_equal(flat[at : at + 24], expected)
    at += 24
    assert np.array_equal(flat[at : at + 108].reshape(18, 6), params["h.0.attn.c_attn.weight"])
    assert np.array_equal(flat[-12:-6], params["ln_f.weight"])
    assert np.array_equal(flat[-6:], params["ln_f.bias"])


def test_debug_state_bytes_and_round_trip(tmp_path):
    path, again = tmp_path / "a.bin", tmp_path / "b.bin"
    state = random_state()
    write_debug_state(path, CONFIG, state)
    assert ints(path, 256) == (20240327, 2, 3, 4) + (0,) * 252
    raw = path.read_bytes()[1024:]
    assert raw[:48] == state.x.tobytes() and raw[48:96] == state.y.tobytes()
    logits_end = 96 + 3 * 4 * 130 * 4
    assert raw[96:logits_end] == state.logits.tobytes()
    assert struct.unpack("<f", raw[logits_end : logits_end + 4]) == (4.875,)
    grads = np.frombuffer(raw[logits_end + 4 :], "<f4")
    assert np.array_equal(grads[: 130 * 6], state.grads["wte.weight"].ravel()) and not grads[780:1536].any()
    write_debug_state(again, CONFIG, read_debug_state(path, CONFIG))
    assert path.read_bytes() == again.read_bytes()


def test_bf16_rounds_as_torch_does():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)  # every kind of number
    special = np.array([0, -0.0, np.inf, -np.inf, 1.00390625, 1.01171875, 3.4e38, 1e-45], np.float32)
    values = np.concatenate([values, special])
    ours, theirs = from_bf16(to_bf16(values)), torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(np.isnan(ours), np.isnan(values))
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(to_bf16(ours)[~np.isnan(ours)], to_bf16(values)[~np.isnan(values)])


def test_tokenizer_bytes_and_round_trip(tmp_path):
    path = tmp_path / "t.bin"
    tokenizer = Tokenizer((b"a", b"\x00\xff", "é".encode(), b"x" * 255, b"<|endoftext|>"), 4)
    write_tokenizer(path, tokenizer)
    assert ints(path, 256) == (20240328, 2, 5, 4) + (0,) * 252
    assert path.read_bytes()[1024:1032] == b"\x01a\x02\x00\xff\x02\xc3\xa9"
    assert read_tokenizer(path) == tokenizer
    assert tokenizer.decode([0, 2]) == b"a\xc3\xa9"
    with pytest.raises(FormatError, match="expected 1 to 255"):
        write_tokenizer(path, Tokenizer((b"x" * 256,), 0))
    for cut in (1, 14, 200):
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(FormatError, match="whole tokens, expected exactly 5 tokens"):
            read_tokenizer(path)
        write_tokenizer(path, tokenizer)
    path.write_bytes(path.read_bytes() + b"?")
    with pytest.raises(FormatError, match="5 whole tokens and 1 bytes more"):
        read_tokenizer(path)


def test_shards_bytes_and_round_trip(tmp_path):
    narrow, wide = tmp_path / "n.bin", tmp_path / "w.bin"
    write_shard(narrow, np.array([1, 50256, 65535]))
    assert ints(narrow, 256) == (20240520, 1, 3) + (0,) * 253
    assert narrow.read_bytes()[1024:] == b"\x01\x00\x50\xc4\xff\xff"
    write_shard(wide, np.array([1, 65536]))
    assert ints(wide, 256) == (20240801, 7, 2) + (0,) * 253
    assert wide.read_bytes()[1024:] == b"\x01\x00\x00\x00\x00\x00\x01\x00"
    assert read_shard(narrow).tolist() == [1, 50256, 65535] and read_shard(narrow).dtype == np.uint16
    assert read_shard(wide).tolist() == [1, 65536] and read_shard(wide).dtype == np.uint32
    write_shard(wide, np.array([3]), wide=True)
    assert read_shard(wide).dtype == np.uint32
    write_shard(narrow, np.zeros(0, np.int64))
    assert read_shard(narrow).size == 0
    for tokens in ([-1], [2**32], [0.5], [[1]]):
        with pytest.raises(FormatError):
            write_shard(narrow, np.array(tokens))
    with pytest.raises(FormatError, match="0 to 65535"):
        write_shard(narrow, np.array([70000]), wide=False)


READERS = {
    "model": read_model,
    "state": lambda path: read_debug_state(path, CONFIG),
    "tokenizer": read_tokenizer,
    "shard": read_shard,
}


@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_refused(tmp_path, kind: str):
    path = tmp_path / "f.bin"
    {
        "model": lambda: write_model(path, CONFIG, random_params()),
        "state": lambda: write_debug_state(path, CONFIG, random_state()),
        "tokenizer": lambda: write_tokenizer(path, Tokenizer((b"a", b"b"), 1)),
        "shard": lambda: write_shard(path, np.arange(9)),
    }[kind]()
    good = path.read_bytes()
    bad_version = good[:4] + struct.pack("<i", 99) + good[8:]
    for damaged in (b"", good[:1000], good[:-1], good + b"\0", b"\0" * len(good), bad_version):
        path.write_bytes(damaged)
        with pytest.raises(FormatError) as caught:
            READERS[kind](path)
        assert "\n" not in str(caught.value)
    with pytest.raises(FormatError, match="cannot read"):
        READERS[kind](tmp_path / "missing.bin")


def test_model_with_impossible_sizes_is_refused(tmp_path):
    path = tmp_path / "f.bin"
    write_model(path, CONFIG, random_params())
    good = path.read_bytes()
    for field, value in ((2, -1), (3, 0), (4, 2**31 - 1), (5, 5), (6, 2**30), (7, 130)):
        path.write_bytes(good[: 4 * field] + struct.pack("<i", value) + good[4 * field + 4 :])
        with pytest.raises(FormatError):
            read_model(path)


def test_writers_check_shapes(tmp_path):
    params = random_params()
    params["h.1.mlp.c_fc.bias"] = np.zeros(23, np.float32)
    with pytest.raises(FormatError, match=r"h.1.mlp.c_fc.bias is \[23\], expected \[24\]"):
        write_model(tmp_path / "a.bin", CONFIG, params)
    del params["ln_f.bias"], params["h.1.mlp.c_fc.bias"]
    with pytest.raises(FormatError, match="missing"):
        write_model(tmp_path / "a.bin", CONFIG, params)
