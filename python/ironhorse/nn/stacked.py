"""The weights of all experts in one array for gate, up and down each, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidValueError
from .layers import F32, Linear, SwiGLU
from .tensor import Tensor

_PARTS = ("gate", "up", "down")


class Stacked:
    """Keeps the weights of experts as views of `stacks`: entry 3e + part is that of expert e.

    A weight is recognised by the identity of its tensor's array, which is cheap to compare. A weight that is another
    array now is copied into the stack and becomes a view of it.
    """

    def __init__(self, stacks: list[F32], experts: Sequence[SwiGLU] = ()) -> None:
        """`experts`, if given, are already views of the stacks; otherwise the first call of `weights` copies them."""
        self._stacks = stacks
        self._grads: list[F32] = []
        self._grad_views: list[F32] = []
        self._tensors = [linear.weight for expert in experts for linear in (expert.gate, expert.up, expert.down)]
        self._views: list[F32 | None] = [tensor._data for tensor in self._tensors]
        if not experts:
            self._views = [None] * (3 * len(stacks[0]))

    def weights(self, experts: Sequence[Any]) -> list[F32]:
        """The stacks (experts, out, in) of gate, up and down, after a look whether anything was replaced."""
        if not self._unchanged(experts):
            self._take(_linears(experts, self._stacks))
        return self._stacks

    def _unchanged(self, experts: Sequence[Any]) -> bool:
        views = self._views
        if 3 * len(experts) != len(views):
            return False
        i = 0
        for expert in experts:
            if type(expert) is not SwiGLU:
                return False
            for linear in (expert.gate, expert.up, expert.down):
                if type(linear) is not Linear or linear.bias is not None or linear.weight._data is not views[i]:
                    return False
                i += 1
        return True

    def _take(self, linears: list[Linear]) -> None:
        tensors = [linear.weight for linear in linears]
        # Experts may have changed places: all is read before anything is written.
        moved = [(i, t._data.copy()) for i, t in enumerate(tensors) if t._data is not self._views[i]]
        staying = {id(tensor) for tensor in tensors}
        for tensor, view in zip(self._tensors, self._views, strict=False):
            if id(tensor) not in staying and tensor._data is view:  # replaced: it gets a copy of its own
                tensor._data = tensor._data.copy()
                tensor.grad = None if tensor.grad is None else tensor.grad.clone()
        for i, values in moved:
            view = self._stacks[i % 3][i // 3]
            view[...] = values
            tensors[i]._data = self._views[i] = view
        self._tensors = tensors

    def grads(self) -> list[F32]:
        """The gradients of all experts, with those of each expert as views."""
        if not self._grads:
            self._grads = [np.zeros_like(stack) for stack in self._stacks]
            self._grad_views = [self._grads[i % 3][i // 3] for i in range(len(self._tensors))]
        pairs = list(zip(self._tensors, self._grad_views, strict=True))
        moved = [(t, view) for t, view in pairs if t.grad is None or t.grad._data is not view]
        values = [None if t.grad is None else t.grad._data.copy() for t, _ in moved]
        for (tensor, view), value in zip(moved, values, strict=True):
            view[...] = 0 if value is None else value
            if tensor.grad is None:
                tensor.grad = Tensor._wrap(view)
            tensor.grad._data = view
        return self._grads


def _linears(experts: Sequence[Any], stacks: list[F32]) -> list[Linear]:
    """Gate, up and down of each expert; refuses experts that do not fit the stacks."""
    if len(experts) != len(stacks[0]):
        raise InvalidValueError(f"MoELayer: there are {len(experts)} experts, expected {len(stacks[0])}")
    found: list[Linear] = []
    for e, expert in enumerate(experts):
        if type(expert) is not SwiGLU:  # a subclass may compute something else, which would be ignored
            raise InvalidValueError(f"MoELayer: expert {e} is of type {type(expert).__name__}, expected SwiGLU")
        for name, linear, stack in zip(_PARTS, (expert.gate, expert.up, expert.down), stacks, strict=True):
            where = f"MoELayer: `{name}` of expert {e}"
            if type(linear) is not Linear:
                raise InvalidValueError(f"{where} is of type {type(linear).__name__}, expected Linear")
            if linear.bias is not None:
                raise InvalidValueError(f"{where} has a bias; experts have none")
            if not isinstance(linear.weight, Tensor):
                raise InvalidValueError(f"{where} has a weight of type {type(linear.weight).__name__}, expected Tensor")
            if linear.weight.shape != stack.shape[1:]:
                sizes = f"{list(linear.weight.shape)}, expected {list(stack.shape[1:])}"
                raise InvalidValueError(f"{where} has a weight that is {sizes}")
            found.append(linear)
    if len({id(linear.weight) for linear in found}) < len(found):
        raise InvalidValueError("MoELayer: two experts have the same weight; give each its own, as by copy.deepcopy")
    return found
