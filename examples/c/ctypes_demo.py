"""Calls the C library from Python with ctypes only:

cargo build --release -p ironhorse-capi
python3 examples/c/ctypes_demo.py target/release/libironhorse.so
"""

import ctypes
import math
import sys
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p

if len(sys.argv) != 2:
    sys.exit(f"usage: python3 {sys.argv[0]} target/release/libironhorse.so (built by cargo build -r -p ironhorse-capi)")
lib = ctypes.CDLL(sys.argv[1])
lib.ih_version.restype = c_char_p
lib.ih_last_error.restype = c_char_p
floats = POINTER(c_float)
lib.cuda_silu.argtypes = [floats, floats, c_int64, c_void_p]
lib.cuda_softmax.argtypes = [floats, floats, c_int, c_int, c_void_p]
lib.cuda_gemm.argtypes = [floats, floats, floats, c_int, c_int, c_int, c_float, c_float, c_void_p]
lib.cuda_sample.argtypes = [floats, POINTER(c_int32), POINTER(c_uint64), c_int, c_int, c_float, c_void_p]


def array(values):
    return (c_float * len(values))(*values)


def check(code):
    if code != 0:
        raise RuntimeError(f"error {code}: {lib.ih_last_error().decode()}")


print("ironhorse", lib.ih_version().decode())

x, out = array([0.0, 1.0, -1.0, 2.0]), array([0.0] * 4)
check(lib.cuda_silu(x, out, 4, None))
assert all(abs(o - v / (1 + math.exp(-v))) < 1e-6 for v, o in zip(x, out, strict=True))

check(lib.cuda_softmax(x, out, 2, 2, None))
assert abs(sum(out) - 2) < 1e-6

c = array([0.0] * 4)
check(lib.cuda_gemm(array([1, 2, 3, 4]), array([5, 6, 7, 8]), c, 2, 2, 2, 1.0, 0.0, None))
assert list(c) == [19, 22, 43, 50]

token = (c_int32 * 1)()
check(lib.cuda_sample(x, token, (c_uint64 * 1)(7), 1, 4, 1.0, None))
assert 0 <= token[0] < 4

try:
    check(lib.cuda_silu(None, out, 4, None))
except RuntimeError as error:
    assert "`x` is null" in str(error), error
else:
    raise AssertionError("null was accepted")
print("ok")
