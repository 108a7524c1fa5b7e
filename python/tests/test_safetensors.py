"""Our safetensors against the safetensors package, both ways, and against malformed files."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from ironhorse.errors import FormatError
from ironhorse.formats.bf16 import to_bf16
from ironhorse.formats.safetensors import read_safetensors, write_safetensors


def test_exact_bytes(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"b": np.array([1, 2], np.int32), "a": np.float32(1.5)}, {"k": "v"})
    header = (
        b'{"__metadata__":{"k":"v"},"b":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[],"data_offsets":[8,12]}}'
    )
    header += b" " * (-len(header) % 8)
    assert path.read_bytes() == struct.pack("<Q", len(header)) + header + struct.pack("<iif", 1, 2, 1.5)


def test_the_package_reads_ours(tmp_path):
    path = tmp_path / "a.safetensors"
    rng = np.random.default_rng(0)
    tensors = {f"t.{dtype}": (rng.standard_normal((3, 5)) * 9).astype(dtype)
               for dtype in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?")}  # fmt: skip
    tensors |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float32), 'é "q"': np.ones(1)}
    tensors["fortran"] = np.asfortranarray(rng.standard_normal((4, 3)))
    write_safetensors(path, tensors, {"note": "ü\n"})
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype and np.array_equal(loaded[name], value), name
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"note": "ü\n"}


def test_bf16_is_raw_bits(tmp_path):
    path = tmp_path / "a.safetensors"
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    write_safetensors(path, {"odd": np.ones(3, np.uint8), "w": to_bf16(values.numpy())}, dtypes={"w": "BF16"})
    assert torch.equal(safetensors.torch.load_file(path)["w"], values.bfloat16())
    assert read_safetensors(path).dtypes == {"w": "BF16", "odd": "U8"}  # wider first, so aligned
    with pytest.raises(FormatError, match="cannot be written as BF16"):
        write_safetensors(path, {"w": values.numpy()}, dtypes={"w": "BF16"})


def test_we_read_the_packages(tmp_path):
    path = tmp_path / "a.safetensors"
    values = {"a": torch.randn(3), "b": torch.randn(2, 2).bfloat16(), "c": torch.tensor(7)}
    safetensors.torch.save_file(values, path, {"x": "y"})
    file = read_safetensors(path)
    assert file.metadata == {"x": "y"} and file.tensors["c"].shape == ()
    assert np.array_equal(file.tensors["a"], values["a"].numpy())
    assert np.array_equal(file.tensors["b"], values["b"].view(torch.uint16).numpy())


def test_round_trip_is_identical(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    tensors = {
        "z": np.arange(3, dtype=np.float32),
        "a": np.arange(4, dtype=np.uint16),
        "m": np.arange(2, dtype=np.int32),
    }
    write_safetensors(one, tensors, {"b": "1", "a": "2"}, {"a": "BF16"})
    file = read_safetensors(one)
    write_safetensors(two, file.tensors, file.metadata, file.dtypes)
    assert one.read_bytes() == two.read_bytes()


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry()}, 7, "size of the data is 7 bytes, expected 8 bytes"),
        ({"a": entry()}, 9, "size of the data is 9 bytes, expected 8 bytes"),
        ({"a": entry(shape=[3])}, 8, "expected 12 bytes apart for F32"),
        ({"a": entry(shape=[2**40, 2**40])}, 8, "expected fewer than 2\\^64 bytes"),
        ({"a": entry(shape=[-2])}, 8, "invalid value: integer `-2`"),
        ({"a": entry(shape=[True, 2])}, 8, "invalid type: boolean `true`"),
        ({"a": entry(dtype="F33")}, 8, "dtype of `a` is F33, expected BOOL"),
        ({"a": entry(offsets=[8, 0])}, 8, "expected 8 bytes apart"),
        ({"a": entry(offsets=[0])}, 8, "invalid length 1"),
        ({"a": 5}, 8, "invalid type: integer `5`"),
        ({"a": entry(), "b": entry()}, 8, "expected to begin at 8, where the tensor before ends"),
        ({"a": entry(), "b": entry(offsets=[12, 20])}, 20, "expected to begin at 8, where the tensor before ends"),
        ({"__metadata__": {"k": 1}, "a": entry()}, 8, "invalid type: integer `1`, expected a string"),
        ([], 0, "first byte of the header is 91"),
    ],
)
def test_malformed_headers(tmp_path, header: object, data: int, says: str):
    path = tmp_path / "a.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    with pytest.raises(FormatError, match=says):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "file size is 0 bytes, expected at least 8 bytes"),
        (b"\x05\0\0", "file size is 3 bytes, expected at least 8 bytes"),
        (struct.pack("<Q", 2**60), "header length is 1152921504606846976"),
        (struct.pack("<Q", 100) + b"{}", "header length is 100, expected 2 to 2"),
        (struct.pack("<Q", 2) + b"{]", "header is not valid"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "first byte of the header is 255"),
        (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "missing field `dtype`"),
    ],
)
def test_malformed_files(tmp_path, raw: bytes, says: str):
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=says):
        read_safetensors(path)
