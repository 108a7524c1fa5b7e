"""What ironhorse.ops refuses, and that it refuses it with a clear exception."""

from __future__ import annotations

import gc
import pickle
import threading

import ironhorse
import numpy as np
import pytest
from ironhorse import ops
from ironhorse.ops import Code, IronhorseError


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def refused(text: str, op, *args, **kwargs) -> None:
    with pytest.raises(IronhorseError) as caught:
        op(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code is Code.INVALID_VALUE == -2
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def read_only(*shape: int) -> np.ndarray:
    array = f32(*shape)
    array.flags.writeable = False
    return array


def misaligned(n: int) -> np.ndarray:
    return np.frombuffer(bytearray(4 * n + 1), np.uint8)[1:].view(np.float32)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, ">f4", bool, object, "M8[s]", np.complex64])
def test_other_types_are_refused(dtype):
    x = np.zeros(4, dtype)
    refused("silu: `x` is ", ops.silu, x)
    refused("expected float32", ops.silu, x, f32(4))
    refused("silu: `out` is ", ops.silu, f32(4), x)


def test_byte_swapped_is_said():
    refused("`x` is >f4 (byte-swapped), expected float32", ops.silu, f32(3).astype(">f4"))
    refused("`targets` is >i4", ops.cross_entropy_forward, f32(2, 3), np.zeros(2, ">i4"))


@pytest.mark.parametrize("thing", [[1.0, 2.0], 1.0, None, "abc", b"abcd", np.float32(3), object(), f32])
def test_only_arrays(thing):
    refused("expected a numpy array of float32", ops.silu, thing)
    if thing is not None:
        refused("expected a numpy array of float32", ops.silu, f32(2), thing)


@pytest.mark.parametrize(
    "out, text",
    [
        (f32(50), "`out` is [50], expected [100]"),
        (f32(200), "`out` is [200], expected [100]"),
        (f32(10, 10), "`out` is [10, 10], expected [100]"),
        (f32(0), "`out` is [0], expected [100]"),
        (f32(200)[::2], "`out` is not C-contiguous, and an output is used in place"),
        (read_only(100), "`out` is read-only"),
        (misaligned(100), "`out` is not aligned"),
    ],
)
def test_outputs_are_used_as_they_are_or_refused(out, text):
    before = out.copy()
    refused(text, ops.silu, f32(100), out)
    np.testing.assert_array_equal(out, before)


def test_inputs_of_any_layout():
    data = np.random.default_rng(0).standard_normal((10, 12)).astype(np.float32)
    want = ops.silu(data.copy())
    views = {
        "steps": (data[::2, ::3], want[::2, ::3]),
        "transposed": (data.T, want.T),
        "backwards": (data[::-1, ::-1], want[::-1, ::-1]),
        "fortran": (np.asfortranarray(data), want),
        "broadcast": (np.broadcast_to(data[0], (4, 12)), np.broadcast_to(want[0], (4, 12))),
    }
    for name, (view, expected) in views.items():
        np.testing.assert_array_equal(ops.silu(view), expected, err_msg=name)
        out = f32(view.size)
        ops.silu(view, out)
        np.testing.assert_array_equal(out, np.ascontiguousarray(expected).ravel(), err_msg=name)
    odd = misaligned(5)
    odd[:] = 2
    np.testing.assert_array_equal(ops.silu(odd), ops.silu(np.full(5, 2, np.float32)))
    locked = read_only(3)
    assert ops.silu(locked).shape == (3,)


def test_no_dimensions_and_no_elements():
    x = np.array(1.5, np.float32)
    assert ops.silu(x).shape == () and ops.silu(x) == ops.silu(x.reshape(1))[0]
    assert ops.scale(x, 2.0) == 3
    refused("softmax: `x` is [], expected [rows, cols]", ops.softmax, x)
    assert ops.softmax(f32(3, 0)).shape == (3, 0) and ops.softmax(f32(0, 3)).shape == (0, 3)
    assert ops.gemm(f32(2, 0), f32(0, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert ops.rmsnorm(f32(3, 0), f32(0)).shape == (3, 0) and ops.rmsnorm(f32(0, 3), f32(3)).shape == (0, 3)
    assert ops.layernorm(f32(3, 0), f32(0), f32(0)).shape == (3, 0)
    assert ops.argmax(f32(0, 3)).shape == (0,)
    assert ops.zero_grad(f32(0)).size == 0
    with pytest.raises(IronhorseError):
        ops.argmax(f32(3, 0))


def test_overlaps():
    whole = f32(100)
    want = ops.add(whole[:50], whole[50:])
    np.testing.assert_array_equal(ops.add(whole[:50], whole[50:], whole[:50]), want)
    refused(
        "silu: `out` overlaps `x` in part, expected the same array or a separate one", ops.silu, whole[:50], whole[1:51]
    )
    refused("`out` overlaps `x` in part", ops.softmax, whole[:50], whole[49:99])
    square = f32(8, 8)
    refused("gemm: `c` overlaps `a`, expected a separate array", ops.gemm, square, f32(8, 8), square)
    refused("`v` overlaps `m`, expected a separate array", ops.adamw_step, f32(9), f32(9), whole[:9], whole[:9], 0.1)
    out = f32(2, 3)
    refused("`residual_out` overlaps `out`", ops.rmsnorm_residual, out.copy(), out.copy(), f32(3), out, out)
    with pytest.raises(IronhorseError):
        ops.rope_qk(f32(1, 1, 2, 4), f32(1, 1, 2, 4), ops.rope_freqs(1, 4), whole[:8], whole[4:12])


@pytest.mark.parametrize(
    "text, op, args",
    [
        ("`b` is [3], expected [4]", ops.add, (f32(4), f32(3))),
        ("`b` is [2, 2], expected [4]", ops.mul, (f32(4), f32(2, 2))),
        ("`up` is [1], expected [0]", ops.swiglu, (f32(0), f32(1))),
        ("`x` is [10], expected the elements of [3, 4]", ops.softmax, (f32(10), f32(10), 3, 4)),
        ("expected the elements of [-2, -5]", ops.softmax, (f32(10), f32(10), -2, -5)),
        ("expected the elements of [9223372036854775807, 2]", ops.softmax, (f32(10), f32(10), 2**63 - 1, 2)),
        ("expected the elements of [9223372036854775807, 1]", ops.softmax, (f32(10), f32(10), 2**70, 1)),
        ("give all of rows, cols, or none of them", ops.softmax, (f32(10), f32(10), 10)),
        ("`k` is 0, expected 1 to `cols`", ops.softmax_topk, (f32(3, 4), 0)),
        ("`k` is 5, expected at most `cols`, 4", ops.softmax_topk, (f32(3, 4), 5)),
        ("`weight` is [5], expected [4]", ops.rmsnorm, (f32(3, 4), f32(5))),
        ("`bias` is [3], expected [4]", ops.layernorm, (f32(3, 4), f32(4), f32(3))),
        ("`b` is [4, 5], expected [3, n]", ops.gemm, (f32(2, 3), f32(4, 5))),
        ("`a` is [6], expected [m, k]", ops.gemm, (f32(6), f32(6))),
        ("`a` is [6], expected the elements of [2, -3]", ops.gemm, (f32(6), f32(6), f32(4), 2, 2, -3)),
        ("give all of m, n, k, or none of them", ops.gemm, (f32(6), f32(6), f32(4), 2)),
        ("`c` is [2, 3], expected [3, 2]", ops.gemm, (f32(3, 4), f32(4, 2), f32(2, 3))),
        ("`b` is [3, 4, 5], expected [2, 4, n]", ops.gemm_batched, (f32(2, 3, 4), f32(3, 4, 5))),
        (
            "`freqs` is [10, 2], expected the elements of [at least 8 + 3, 2]",
            ops.rope_forward,
            (f32(12), f32(10, 2), None, 1, 3, 1, 4, 8),
        ),
        ("`offset` is -1, expected at least 0", ops.rope_forward, (f32(12), f32(10, 2), None, 1, 3, 1, 4, -1)),
        ("expected [batch, seq, heads, 4]", ops.rope_forward, (f32(3, 4), f32(10, 2))),
        ("head_dim", ops.rope_freqs, (4, 3)),
        ("`max_seq` is -1, expected at least 0", ops.rope_freqs, (-1, 4)),
        ("expected [batch, seq, heads, head_dim]", ops.attention, (f32(2, 3), f32(2, 3), f32(2, 3))),
        ("`v` is [1, 3, 1, 4], expected", ops.attention, (f32(1, 2, 1, 4), f32(1, 2, 1, 4), f32(1, 3, 1, 4))),
        ("`kv_heads` is 2, expected a", ops.attention, (f32(1, 2, 3, 4), f32(1, 2, 2, 4), f32(1, 2, 2, 4))),
        ("`targets` is [3], expected [2]", ops.cross_entropy_forward, (f32(2, 5), i32(0, 0, 0))),
        ("`targets` is int64, expected int32", ops.cross_entropy_forward, (f32(2, 5), np.zeros(2, np.int64))),
        ("`targets[1]` is 5, expected an index in 0..5", ops.cross_entropy_forward, (f32(2, 5), i32(0, 5))),
        ("`targets[0]` is -1", ops.cross_entropy_backward, (f32(2, 5), i32(-1, 0))),
        ("`vocab` is 0, expected at least 1", ops.cross_entropy_forward, (f32(2, 0), i32(0, 0))),
        ("`vocab` is 0, expected at least 1", ops.cross_entropy_backward, (f32(2, 0), i32(0, 0))),
        ("`loss` is [2], expected []", ops.cross_entropy_forward, (f32(2, 5), i32(0, 0), f32(2))),
        ("`idx[0]` is 9, expected an index in 0..9", ops.scatter_add, (f32(1, 3), i32(9), f32(9, 3))),
        ("`grad_weight` is [9, 4], expected [rows, 3]", ops.scatter_add, (f32(1, 3), i32(0), f32(9, 4))),
        ("expected the elements of [2, 2]", ops.aux_loss, (f32(2, 5), i32(0, 0, 0), None, None, None, 2, 5, 2)),
        ("`grad` is [8], expected [9]", ops.adamw_step, (f32(9), f32(8), f32(9), f32(9), 0.1)),
        ("step", ops.adamw_step, (f32(9), f32(9), f32(9), f32(9), 0.1, 0.9, 0.9, 1e-8, 0.0, 0)),
        ("beta1", ops.adamw_step, (f32(9), f32(9), f32(9), f32(9), 0.1, 1.0, 0.9, 1e-8, 0.0, 1)),
        ("`n` is 10, expected 0 to 9, the elements of `grad`", ops.zero_grad, (f32(9), 10)),
        ("`n` is -1", ops.zero_grad, (f32(9), -1)),
        ("clip", ops.grad_clip, (f32(9), None, None, -1.0)),
        ("`seeds` is [3], expected [2]", ops.sample, (f32(2, 4), None, np.zeros(3, np.uint64))),
        ("`seeds` is int64, expected uint64", ops.sample, (f32(2, 4), None, np.zeros(2, np.int64))),
        ("temperature", ops.sample, (f32(2, 4), None, None, None, None, -1.0)),
        ("`k` is 0", ops.topk_sample, (f32(2, 4), None, None, None, None, 0)),
        ("`p` is 0", ops.topp_sample, (f32(2, 4), None, None, None, None, 0.0)),
        ("`p` is NaN", ops.topp_sample, (f32(2, 4), None, None, None, None, float("nan"))),
        ("NaN", ops.sample, (np.full((2, 4), np.nan, np.float32),)),
        ("unknown device `gpu`: expected auto, cpu, cuda or cuda:N", lambda x: ops.silu(x, device="gpu"), (f32(1),)),
        ("needs a `c`", lambda: ops.gemm(f32(1, 1), f32(1, 1), beta=1.0), ()),
    ],
)
def test_wrong_arguments(text, op, args):
    refused(text, op, *args)


def test_python_types_of_numbers():
    for call in (
        lambda: ops.scale(f32(3), "2"),
        lambda: ops.scale(f32(3)),
        lambda: ops.rmsnorm(f32(2, 3), f32(3), eps="small"),
        lambda: ops.softmax(f32(6), None, 2.5, 3),
        lambda: ops.silu(),
        lambda: ops.silu(f32(3), None, "cpu"),
    ):
        with pytest.raises(TypeError):
            call()


def test_devices():
    assert ops.cuda_available() in (False, True)
    assert ops.silu(f32(3), device="cpu").tolist() == ops.silu(f32(3), device="auto").tolist()
    if not ops.cuda_available():
        with pytest.raises(IronhorseError) as caught:
            ops.silu(f32(3), device="cuda")
        assert caught.value.code is Code.NOT_AVAILABLE and not isinstance(caught.value, ValueError)


def test_too_large_a_result_is_out_of_memory():
    with pytest.raises(IronhorseError) as caught:
        ops.rope_freqs(2**40, 2**18)
    assert caught.value.code in (Code.OUT_OF_MEMORY, Code.INVALID_VALUE)


def test_errors_are_one_family():
    assert [int(code) for code in Code] == [0, -1, -2, -3, -4]
    assert ironhorse.IronhorseError is IronhorseError and issubclass(ops.OutOfMemoryError, MemoryError)
    with pytest.raises(ValueError) as caught:
        ops.silu(f32(3), f32(4))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.code) == (type(caught.value), str(caught.value), Code.INVALID_VALUE)


def test_many_threads_at_once():
    x = np.random.default_rng(0).standard_normal((400, 500)).astype(np.float32)
    want = ops.softmax(x)
    wrong = []

    def work():
        for _ in range(20):
            if ops.softmax(x).tobytes() != want.tobytes():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_arrays_live_while_a_call_runs():
    x = np.full((2000, 1000), 0.5, np.float32)
    box, results = [x], []
    del x

    def work():
        results.append(ops.silu(box.pop()))  # the only reference is the call's

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        gc.collect()
        np.full((2000, 1000), 9, np.float32)  # would reuse memory that was freed
    assert (results[0] == ops.silu(np.array([0.5], np.float32))[0]).all()


def test_the_interpreter_runs_during_a_long_call():
    a = f32(1500, 1500)
    done, ticks = threading.Event(), 0

    def work():
        for _ in range(3):
            ops.gemm(a, a)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        ticks += 1
        done.wait(0.001)
    thread.join()
    assert ticks > 3


def test_nothing_is_leaked():
    import sys

    x, out = f32(16), f32(16)
    before = sys.getrefcount(x), sys.getrefcount(out)
    for _ in range(100):
        ops.silu(x, out)
        ops.silu(x)
        with pytest.raises(ValueError):
            ops.silu(x, f32(3))
    assert (sys.getrefcount(x), sys.getrefcount(out)) == before


@pytest.mark.parametrize("name", ["gelu", "softmax"])
def test_masked_arrays_are_refused(name: str):
    """The ops would compute with what the mask hides, and return an array without it."""
    x = np.ma.masked_array(np.ones((2, 3), np.float32), mask=[[True, False, False], [False] * 3])
    function = getattr(ops, name)
    says = "`x` is a masked array, and the ops ignore masks; x.filled"
    with pytest.raises(ops.InvalidValueError, match=says):
        function(x)
    with pytest.raises(ops.InvalidValueError, match="`out` is a masked array"):
        function(np.ones((2, 3), np.float32), np.ma.masked_array(np.ones((2, 3), np.float32)))
    assert np.array_equal(function(x.filled(1)), function(np.ones((2, 3), np.float32)))

    class Named(np.ndarray):
        """Any other subclass is its numbers."""

    assert np.array_equal(function(np.ones((2, 3), np.float32).view(Named)), function(x.filled(1)))
