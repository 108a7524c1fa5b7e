"""Wrong arguments to ironhorse.jit: an error of ours that says what was expected, never a raw one of Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ironhorse import jit
from ironhorse.errors import InvalidValueError, NotAvailableError
from jit_fixtures import ARCH, compiles

pytestmark = pytest.mark.usefixtures("cache")

S = "__global__ void s(const float* x, float* y, long n) {}"
SIZED = "__global__ void s(const float* x, float* y, int k) {}"
X = np.ones(3, np.float32)


def op(**options: Any) -> jit.Op:
    return jit.op(S, **{"forward": "s", "cpu": lambda x: x} | options)


CALLS = {
    "source is of type int; expected CUDA source": lambda: jit.op(5, forward="s"),
    "source is of type bytes": lambda: jit.compile(b"x", arch=ARCH),
    "<string>: the source is 5; expected text": lambda: jit.source(5),
    "<string>: the source is None": lambda: jit.source(None),
    "<string>: the source is of type bytes": lambda: jit.source(b"x"),
    "the source has a NUL byte": lambda: jit.source("a\0b"),
    "surrogates, which cannot be encoded": lambda: jit.source("// \ud800"),
    "name is 5; expected text": lambda: jit.source(S, name=5),
    "flags is 5; expected text, or a list": lambda: jit.source(S, flags=5),
    r"flags\[0\] is 5": lambda: jit.source(S, flags=[5]),
    "flags is '-g'; expected a list": lambda: jit.source(S, flags="-g"),
    "include is 5; expected a folder": lambda: jit.source(S, include=5),
    r"include\[1\] is None; expected a path": lambda: jit.source(S, include=[".", None]),
    "include folder nowhere does not exist": lambda: jit.source(S, include="nowhere"),
    "defines is of type list; expected a dict": lambda: jit.source(S, defines=["A"]),
    "defines: the name 5 is 5; expected text": lambda: jit.source(S, defines={5: 1}),
    "defines: '1A' is not an identifier of C": lambda: jit.source(S, defines={"1A": 1}),
    r"defines: A is \[1\]; expected a number or text": lambda: jit.source(S, defines={"A": [1]}),
    "source has no option `nothing`; expected one of name": lambda: jit.source(S, nothing=5),
    "load: path is 5; expected a path": lambda: jit.load(5),
    "load: path has a NUL byte": lambda: jit.load("a\0b.cu"),
    "load has no option `x`": lambda: jit.load("a.cu", x=1),
    "forward is 5; expected text, or a list": lambda: op(forward=5),
    r"forward\[0\] is 5": lambda: op(forward=[5]),
    "forward names no kernel": lambda: op(forward=[]),
    "backward is 5": lambda: op(backward=5),
    "sizes is 5; expected a dict by name": lambda: op(sizes=5),
    "zero is 5": lambda: op(zero=5),
    r"zero\[0\] is of type list": lambda: op(zero=[[]]),
    "defaults is 5": lambda: op(defaults=5),
    "cpu is of type int; expected a function": lambda: op(cpu=5),
    "name is 5": lambda: op(name=5),
    "op name 'a b' is not an identifier": lambda: op(name="a b"),
    "jit has no option `wrong`": lambda: op(wrong=5),
    "`flags` belongs to the source": lambda: jit.op(jit.source(S), forward="s", flags=["-g"]),
    "like is 5": lambda: op(out=jit.like(5)),
    r"out of `y` is \(1.5,\); expected sizes": lambda: op(out=(1.5,))(X),
    r"out of `y` is \(-1,\)": lambda: op(out=(-1,))(X),
    r"out of `y` is \('a',\)": lambda: op(out=("a",))(X),
    "out of `y` is None": lambda: op(out=lambda x: None)(X),
    "out of `y` is like `z`; expected one of x": lambda: op(out="z")(X),
    "out of `y` asks for `q`": lambda: op(out=lambda q: 3)(X),
    "size `k` is .*; expected sizes of 0 or more": lambda: jit.op(
        SIZED, forward="s", sizes={"k": 1.5}, cpu=lambda x: x
    )(X),
    "kernel is 5; expected text": lambda: jit.source(S).kernel(5),
    "signature is 5": lambda: jit.source(S).kernel("s", signature=5),
    "give grid=": lambda: jit.source(S)["s"].launch(X, X, 3),
    "arch is 5": lambda: jit.compile(S, arch=5),
    r"names\[0\] is 5": lambda: jit.compile(S, 5, arch=ARCH),
    "device is 'x'; expected the number of a GPU": lambda: jit.source(S).arch("x"),
    "device is -1": lambda: jit.source(S).arch(-1),
    "device is True": lambda: jit.source(S).arch(True),
    "check: op is of type int": lambda: jit.check(5),
    r"check: sizes is \['a'\]": lambda: jit.check(op(), torch.ones(3), sizes=["a"]),
    "check: an example is not an array": lambda: jit.check(op(), [1, "a"]),
    "a masked array, and kernels ignore masks": lambda: op()(np.ma.masked_array(X, mask=[0, 1, 0])),
}


@pytest.mark.parametrize("says", CALLS)
def test_wrong_arguments(says: str):
    with pytest.raises(InvalidValueError, match=says) as caught:
        CALLS[says]()
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path):
    with pytest.raises(NotAvailableError, match="there is no such file"):
        jit.load(tmp_path / "none.cu")
    with pytest.raises(InvalidValueError, match="Is a directory"):
        jit.load(tmp_path)
    (tmp_path / "latin.cu").write_bytes(b"// \xe9\n")
    with pytest.raises(InvalidValueError, match="latin.cu: .*utf-8"):
        jit.load(tmp_path / "latin.cu")


MARKED = "__global__ void s(float* y) { y[0] = 1; }\n"


@compiles
def test_a_byte_order_mark(tmp_path: Path):
    """Editors put one at the start of a file; NVRTC takes it for a mistake."""
    path = tmp_path / "marked.cu"
    path.write_text(MARKED, encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    plain, marked = jit.source(MARKED, name="a"), jit.source("\ufeff" + MARKED, name="a")
    assert marked.kernels == plain.kernels == jit.load(path).kernels
    assert marked.compile(arch=ARCH).cubin == plain.compile(arch=ARCH).cubin
    assert jit.load(path).compile(arch=ARCH).cubin
    included = jit.source('\ufeff#include "marked.cu"\n', include=tmp_path)
    with pytest.raises(InvalidValueError, match="marked.cu: starts with a byte-order mark.*save it as UTF-8 without"):
        included.compile(arch=ARCH)
    path.write_text(MARKED)
    assert included.compile("s", arch=ARCH).cubin
