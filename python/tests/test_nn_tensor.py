"""ironhorse.nn.tensor: every method against numpy, ownership of memory, types, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from ironhorse.errors import InvalidValueError
from ironhorse.nn.tensor import DType, Tensor
from nn_cases import normal

A, B = normal(2, 3, 4), normal(2, 3, 4, seed=1)


def same(found: Tensor, want: np.ndarray) -> None:
    assert isinstance(found, Tensor) and found.shape == np.shape(want)
    assert found.data.flags.c_contiguous
    np.testing.assert_allclose(found.data, want, rtol=2e-6, atol=1e-7)


def test_types_have_the_names_and_types_of_numpy():
    assert [DType.F32.value, DType.F16.value, DType.I32.value, DType.I64.value] == [
        "float32", "float16", "int32", "int64",
    ]  # fmt: skip
    assert DType.F32.to_numpy() == np.float32 and DType.F16.to_numpy() == np.float16
    assert DType.I32.to_numpy() == np.int32 and DType.I64.to_numpy() == np.int64
    assert DType.BF16.value == "bfloat16" and DType.BF16.to_numpy() == np.float32


def test_made_with_shape_type_and_values():
    assert Tensor.zeros((2, 3)).data.tolist() == [[0] * 3] * 2
    assert Tensor.ones([3], DType.I32).data.dtype == np.int32
    made = Tensor.zeros((2, 3, 4), DType.F16)
    assert (made.shape, made.dtype, made.numel, len(made)) == ((2, 3, 4), DType.F16, 24, 2)
    assert Tensor.zeros((0, 3)).numel == 0
    assert repr(made) == "Tensor(shape=(2, 3, 4), dtype=F16)"


def test_random_numbers_are_normal_and_seeded():
    one = Tensor.randn((200, 200), seed=1)
    assert abs(one.data.mean()) < 0.03 and abs(one.data.std() - 1) < 0.03 and one.data.dtype == np.float32
    assert abs(Tensor.randn_std((200, 200), std=0.5, seed=2).data.std() - 0.5) < 0.02
    assert abs(Tensor.randn_std((200, 200), DType.F32, 0.25).data.std() - 0.25) < 0.02
    assert (one.data == Tensor.randn((200, 200), seed=1).data).all()
    np.random.seed(7)
    first = Tensor.randn((5,)).data
    second = Tensor.randn((5,)).data
    np.random.seed(7)
    assert (Tensor.randn((5,)).data == first).all() and (first != second).any()


def test_memory_is_its_own():
    array = np.ones((2, 2), np.float32)
    tensor = Tensor.from_numpy(array)
    array[0, 0] = 5
    assert tensor.data[0, 0] == 1
    copy = tensor.clone()
    tensor._data[0, 1] = 9
    assert copy.data[0, 1] == 1 and tensor.data[0, 1] == 9 and tensor.data is tensor._data
    flat = tensor.reshape((4,))
    flat.data[0] = 3
    assert tensor.data[0, 0] == 1
    ids = Tensor.from_numpy(np.array([[1, 2]]))  # as a program that makes token numbers writes it
    assert ids.dtype is DType.F32 and Tensor.from_numpy(np.array([1]), DType.I64).data.dtype == np.int64


def test_elementwise_and_operators():
    a, b = Tensor.from_numpy(A), Tensor.from_numpy(B)
    for found, want in [
        (a.add(b), A + B), (a + b, A + B), (a + 2, A + 2), (2 + a, A + 2), (a.sub(b), A - B), (a - b, A - B),
        (1 - a, 1 - A), (a.mul(b), A * B), (a * b, A * B), (a * 3, A * 3), (3 * a, A * 3), (a.div(b), A / B),
        (a / b, A / B), (a / 2, A / 2), (1 / a, 1 / A), (a.scale(-1.5), A * -1.5), (a.neg(), -A), (-a, -A),
        (a.exp(), np.exp(A)), ((a * a).log(), np.log(A * A)), ((a * a).sqrt(), np.abs(A)), (a**2, A**2),
        ((a * a).pow(1.5), (A * A) ** 1.5),
        (a.silu(), A / (1 + np.exp(-A))), (a * Tensor.from_numpy(B[0, 0]), A * B[0, 0]),
        (a * B, A * B), (B * a, A * B),
    ]:  # fmt: skip
        same(found, want)


def test_reductions_and_shapes():
    a = Tensor.from_numpy(A)
    for axis, keep in [(None, False), (0, False), (1, True), (-1, False), ((0, 2), False)]:
        same(a.sum(axis, keep), A.sum(axis, keepdims=keep))
        same(a.mean(axis=axis, keepdims=keep), A.mean(axis, keepdims=keep))
        same(a.max(axis=axis, keepdims=keep), A.max(axis, keepdims=keep))
    assert float(a.sum()) == pytest.approx(float(A.sum()), rel=1e-6)
    assert a.argmax().data.tolist() == A.argmax(-1).tolist() and a.argmax(axis=0).dtype is DType.I64
    same(a.transpose(), A.transpose())
    same(a.transpose((0, 2, 1)), A.transpose(0, 2, 1))
    same(a.reshape((6, -1)), A.reshape(6, -1))
    for axis in (-1, 0, 1):
        want = np.exp(A) / np.exp(A).sum(axis, keepdims=True)
        same(a.softmax(axis), want)


def test_products():
    a, b = Tensor.from_numpy(A), Tensor.from_numpy(B)
    same(a[0] @ b[0].transpose(), A[0] @ B[0].T)
    same(a.matmul(b.transpose((0, 2, 1))), A @ B.transpose(0, 2, 1))
    same(a @ Tensor.from_numpy(B[0].T), A @ B[0].T)
    with pytest.raises(InvalidValueError, match="gemm"):
        a[0] @ b[0]


def test_indexing():
    a = Tensor.from_numpy(A)
    same(a[1], A[1])
    same(a[:, 1:, ::2], A[:, 1:, ::2])
    assert a[1, 2, 3] == A[1, 2, 3] and not isinstance(a[1, 2, 3], Tensor)
    a[0, 0] = 7
    assert (a.data[0, 0] == 7).all()
    assert np.asarray(a).shape == (2, 3, 4) and np.allclose(a, a.data)


def test_halves_and_whole_numbers():
    half = Tensor.from_numpy(A, DType.F16)
    assert (half + half).dtype is DType.F16 and half.silu().data.dtype == np.float16
    whole = Tensor.from_numpy(np.array([3, 5]), DType.I32)
    assert (whole * 2).data.tolist() == [6, 10] and (whole * 2).dtype is DType.I32


def test_what_is_refused():
    a = Tensor.from_numpy(A)
    with pytest.raises(InvalidValueError, match="add: operands could not be broadcast"):
        a + Tensor.zeros((5,))
    with pytest.raises(ValueError, match="reshape: cannot reshape"):
        a.reshape((5, 5))
    with pytest.raises(ValueError, match="sum: axis 7"):
        a.sum(axis=7)
    with pytest.raises(ValueError, match="softmax"):
        Tensor.from_numpy(np.float32(1)).softmax()


def test_arrays_and_lists_are_operands():
    a = Tensor.from_numpy(A[0])
    for found, want in [
        (a @ B[0].T, A[0] @ B[0].T), (B[0] @ a.transpose(), B[0] @ A[0].T), (a @ B[0].T.tolist(), A[0] @ B[0].T),
        (B[0].tolist() @ a.transpose(), B[0] @ A[0].T), (a * [1, 2, 3, 4], A[0] * [1, 2, 3, 4]),
        ([1, 2, 3, 4] * a, A[0] * [1, 2, 3, 4]), (a + [1, 2, 3, 4], A[0] + [1, 2, 3, 4]),
        ([1, 2, 3, 4] - a, [1, 2, 3, 4] - A[0]), ([1, 2, 3, 4] / a, [1, 2, 3, 4] / A[0]),
        (B[0] / a, B[0] / A[0]), (B[0] - a, B[0] - A[0]), ((a * a) ** [1, 2, 3, 4], (A[0] ** 2) ** [1, 2, 3, 4]),
    ]:  # fmt: skip
        same(found, want)


@pytest.mark.parametrize("wrong", ["x", None, [[1, 2], [3]], 1j, object(), ["a"]])
def test_operands_that_are_no_numbers_are_refused(wrong: object):
    a = Tensor.from_numpy(A[0])
    for name in ("add", "sub", "mul", "div", "pow", "matmul", "scale", "__mul__", "__rsub__", "__rtruediv__"):
        with pytest.raises(InvalidValueError):
            getattr(a, name)(wrong)
    for make in (lambda: Tensor(wrong), lambda: wrong @ a, lambda: a.__setitem__(0, wrong)):
        with pytest.raises(InvalidValueError):
            make()


def test_types_by_name():
    for name in ("float32", "F32"):
        assert Tensor(A, name).dtype is Tensor.zeros((2,), name).dtype is DType.F32
    assert Tensor.from_numpy([1], "int64").data.dtype == np.int64 and Tensor.ones((1,), "I32").dtype is DType.I32
    for wrong in ("float", None, 3, "f32 "):
        with pytest.raises(InvalidValueError, match="dtype is .*; expected one of float32, float16, bfloat16, int32"):
            Tensor(A, wrong)


def test_whole_numbers_are_never_cut_off():
    for dtype in (DType.I32, DType.I64):
        whole = Tensor([[3, 4], [1, 2]], dtype)
        W = whole.data
        for found, want in [
            (whole / 2, W / 2), (1 / whole, 1 / W), (whole.div(whole), W / W), (whole.mean(), W.mean()),
            (whole.mean(axis=0), W.mean(0)), (whole.exp(), np.exp(W)), (whole.sqrt(), np.sqrt(W)),
            (whole.log(), np.log(W)), (whole * 0.5, W * 0.5), (whole.scale(0.5), W * 0.5), (whole + 0.5, W + 0.5),
            (whole - 0.5, W - 0.5), (0.5 - whole, 0.5 - W), (whole**0.5, W**0.5), (whole.silu(), W / (1 + np.exp(-W))),
            (whole.softmax(), np.exp(W) / np.exp(W).sum(-1, keepdims=True)),
            (whole @ np.array([[0.5], [1]]), W @ np.array([[0.5], [1]])),
            (np.array([[0.5, 1]]) @ whole, np.array([[0.5, 1]]) @ W),
        ]:  # fmt: skip
            assert found.dtype is DType.F32
            same(found, want)
        for found, want in [(whole + 1, W + 1), (whole.sum(), W.sum()), (whole.max(0), W.max(0)), (whole @ W, W @ W)]:
            assert found.dtype is dtype
            same(found, want)
        with pytest.raises(InvalidValueError, match="0.5 does not fit int"):
            whole[0, 0] = 0.5
        with pytest.raises(InvalidValueError, match="pow"):
            whole**-1
    with pytest.raises(InvalidValueError, match="4294967294 does not fit int32"):
        Tensor([2**31 - 1] * 2, DType.I32).sum()


@pytest.mark.parametrize("dtype", [DType.I32, DType.I64])
def test_whole_numbers_do_not_wrap(dtype: DType):
    low, high = np.iinfo(dtype.to_numpy()).min, np.iinfo(dtype.to_numpy()).max
    half = Tensor([3, high // 2 + 1], dtype)
    for op, work, value in [
        ("add", lambda: half + half, high + 1), ("mul", lambda: half.mul(half), None),
        ("sub", lambda: Tensor([0, low], dtype) - Tensor([0, 1], dtype), low - 1),
        ("sub", lambda: np.array([0], half.data.dtype) - Tensor([low], dtype), -low),
        ("neg", lambda: -Tensor([1, low], dtype), -low), ("pow", lambda: half**2, None),
        ("pow", lambda: Tensor([2], dtype) ** 10**9, None), ("matmul", lambda: half @ half, None),
        ("sum", lambda: Tensor([high, 1, 1], dtype).sum(), high + 2),
        ("scale", lambda: Tensor([low], dtype).scale(np.array(-1, half.data.dtype)[()]), -low),
    ]:  # fmt: skip
        says = "does not fit int" if value is None else f"{value} does not fit int"
        with pytest.raises(InvalidValueError, match=f"^(?:{op}|Tensor): .*{says}"):
            work()
    for found, want in [  # to the very limits
        (half + high // 2, [high // 2 + 3, high]), (Tensor([low + 1], dtype) - 1, [low]),
        (-1 - Tensor([low], dtype), [high]), (Tensor([low // 2], dtype) * 2, [low]), (-Tensor([high], dtype), [-high]),
        (Tensor([-1, 0, 1], dtype) ** (10**9 + 1), [-1, 0, 1]), (Tensor([high, 1, -1], dtype).sum(), high),
        (Tensor([high, 1, -1], dtype) @ np.array([1, 1, 1], half.data.dtype), high),
        (Tensor([low // 2, 5], dtype).mul(Tensor([2, 0], dtype)), [low, 0]), (Tensor([], dtype) * 2, []),
    ]:  # fmt: skip
        assert found.data.tolist() == want and found.dtype is dtype


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.5, DType.I32), (np.nan, DType.I32), (np.inf, DType.I64), (2**31, DType.I32), (-(2**31) - 1, DType.I32),
        (2.0**31, DType.I32), (2.0**63, DType.I64), (np.uint64(2**63), DType.I64), (2**70, DType.I64),
        (1e39, DType.F32), (70000.0, DType.F16), (1 + 1j, DType.F32), ("1", DType.F32),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(value: object, dtype: DType):
    with pytest.raises(InvalidValueError):
        Tensor.from_numpy(np.array([1, value]) if not isinstance(value, str) else [value], dtype)


def test_values_that_fit_are_taken():
    for value, dtype in [
        (2**31 - 1, DType.I32), (-(2**31), DType.I32), (-(2.0**31), DType.I32), (-(2.0**63), DType.I64),
        (np.inf, DType.F16), (0.1, DType.F16), (65504, DType.F16), (True, DType.I32), (np.uint8(200), DType.I32),
    ]:  # fmt: skip
        assert Tensor([value], dtype).data[0] == dtype.to_numpy().type(value)
    assert np.isnan(Tensor([np.nan]).data[0]) and Tensor([]).shape == (0,) and Tensor(3).shape == ()


def test_shapes_that_are_none_are_refused():
    for make in (
        lambda: Tensor.zeros((-1,)), lambda: Tensor.ones("x"), lambda: Tensor.randn((2.5,)),
        lambda: Tensor.ones((4,)).reshape("x"), lambda: Tensor.randn((2,), seed=-1),
    ):  # fmt: skip
        with pytest.raises(InvalidValueError):
            make()
