"""One kernel of an op: its template arguments and its launch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import InvalidValueError
from ._module import Module
from ._types import DTYPES, Param, Signature


def by_name(what: str, given: Any, values: Mapping[str, Any]) -> Any:
    """The value itself; if it is a function, its result for the arguments that it names."""
    if not callable(given):
        return given
    parameters = inspect.signature(given).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given(**values)
    missing = [p.name for p in parameters if p.name not in values and p.default is p.empty]
    if missing:
        raise InvalidValueError(f"{what} asks for `{missing[0]}`; expected one of {', '.join(values)}")
    return given(**{p.name: values[p.name] for p in parameters if p.name in values})


def elements(shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    return math.prod(shape)


@dataclass(frozen=True)
class Step:
    """One kernel of an op."""

    signature: Signature
    arguments: list[str] | None  # of the template; one that is the parameter's own name is found from the arrays
    grid: Any
    block: Any
    shared: Any

    @property
    def name(self) -> str:
        return self.signature.name

    @cached_property
    def outputs(self) -> list[Param]:
        return [p for p in self.signature.params if p.is_output]

    @cached_property
    def arrays(self) -> list[Param]:
        return [p for p in self.signature.params if p.is_array and p.constant]

    @cached_property
    def scalars(self) -> list[Param]:
        return [p for p in self.signature.params if not p.stars]

    def bind(self, module: Module, codes: Mapping[str, str | None], known: Mapping[str, str]) -> dict[str, str]:
        """Template parameters from the element types of arrays; those that no array tells, from `known`."""
        bound: dict[str, str] = {}
        for at, parameter in enumerate(self.signature.template):
            given = self.arguments[at] if self.arguments and at < len(self.arguments) else parameter.name
            if given != parameter.name:
                bound[parameter.name] = given
                continue
            told = {p.name: codes[p.name] for p in self.signature.params if p.base == given and codes.get(p.name)}
            if len(set(told.values())) > 1:
                words = " and ".join(f"`{name}` is {DTYPES[code]}" for name, code in told.items() if code)
                raise InvalidValueError(f"kernel {self.name}: {words}, but both are {given}")
            for code in told.values():
                bound[given] = module.spell(code or "")
            value = bound.get(given) or known.get(given) or parameter.default
            if not value:
                text = f"kernel {self.name}: no input tells template parameter `{parameter}`"
                names = ", ".join(t.name for t in self.signature.template)
                raise InvalidValueError(f'{text}; write it: "{self.name}<{names}>"')
            bound[given] = value
        return bound

    def expression(self, bound: Mapping[str, str]) -> str:
        if not self.signature.template:
            return self.name
        return f"{self.name}<{', '.join(bound[t.name] for t in self.signature.template)}>"
