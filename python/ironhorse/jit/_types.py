"""Types of kernel arguments, by their names in C and in numpy and torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ..errors import InvalidValueError

# Codes are numpy's letters, and "bf2": one per element type.
DTYPES = {
    "f2": "float16", "bf2": "bfloat16", "f4": "float32", "f8": "float64", "?": "bool",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
}  # fmt: skip
CODES = {name: code for code, name in DTYPES.items()}
# The C names of element types, for template arguments.
SPELLED = {
    "f4": "float", "f8": "double", "?": "bool", "i1": "signed char", "i2": "short", "i4": "int", "i8": "long long",
    "u1": "unsigned char", "u2": "unsigned short", "u4": "unsigned int", "u8": "unsigned long long",
}  # fmt: skip

_NAMED = {
    "float": "f4", "double": "f8", "half": "f2", "__half": "f2", "f16": "f2", "bf16": "bf2", "__nv_bfloat16": "bf2",
    "bool": "?", "size_t": "u8", "ssize_t": "i8", "ptrdiff_t": "i8", "intptr_t": "i8", "uintptr_t": "u8",
}  # fmt: skip
_VECTOR = re.compile(r"(float|double|u?char|u?short|u?int|u?longlong|u?long)([1-4])$")
_SIXTEEN = {"half2": ("f2", 2), "__half2": ("f2", 2), "__nv_bfloat162": ("bf2", 2)}
_INTEGER_WORDS = {"signed", "unsigned", "char", "short", "int", "long"}


# A kernel as Rust reads it: the fields of Signature, with those of Template and of Param.
Read = tuple[str, int, bool, list[tuple[str, str, str]], list[tuple[str, str, int, bool]]]


def size_of(code: str) -> int:
    """Bytes of an element."""
    return 1 if code == "?" else int(code[-1])


def same_bits(found: str, wanted: str) -> bool:
    """Whether an array of one type can be given for another: the same, or an integer of the same size, because torch
    has hardly any unsigned tensors."""
    return found == wanted or (found[0] in "iu" and wanted[0] in "iu" and found[1:] == wanted[1:])


@cache
def element(base: str) -> tuple[str, int] | None:
    """Code and lanes of a C type: `float4` is ("f4", 4); None for a type that arrays do not have."""
    base = base.removeprefix("std::").removeprefix("cuda::")
    if base in _NAMED:
        return _NAMED[base], 1
    if base in _SIXTEEN:
        return _SIXTEEN[base]
    if sized := re.fullmatch(r"(u?)int(8|16|32|64)_t", base):
        return f"{'u' if sized[1] else 'i'}{int(sized[2]) // 8}", 1
    if vector := _VECTOR.fullmatch(base):
        name = vector[1].replace("longlong", "long long")
        plain = element("unsigned " + name[1:] if name[0] == "u" else name)
        return (plain[0], int(vector[2])) if plain else None
    words = base.split()
    if words and set(words) <= _INTEGER_WORDS:
        size = 1 if "char" in words else 2 if "short" in words else 8 if "long" in words else 4
        return f"{'u' if 'unsigned' in words else 'i'}{size}", 1
    return None


@dataclass(frozen=True)
class Param:
    """An argument of a kernel."""

    name: str
    base: str
    stars: int
    constant: bool

    @cached_property
    def is_array(self) -> bool:
        return self.stars == 1

    @cached_property
    def is_output(self) -> bool:
        """What a kernel may write: a pointer that is not const."""
        return self.is_array and not self.constant

    @property
    def type(self) -> str:
        return f"{'const ' if self.constant else ''}{self.base}{'*' * self.stars}"

    @cached_property
    def kind(self) -> str | None:
        """The code by which a value is packed for the launch; None if Python cannot pass this type."""
        if self.stars:
            return "P"
        found = element(self.base)
        return found[0] if found and found[1] == 1 else None

    def __str__(self) -> str:
        return f"{self.type} {self.name}".rstrip()


@dataclass(frozen=True)
class Template:
    """A template parameter."""

    kind: str  # "class" for a type
    name: str
    default: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" = {self.default}" if self.default else "")


@dataclass(frozen=True)
class Signature:
    """A kernel as its source declares it."""

    name: str
    line: int
    c_linkage: bool
    template: tuple[Template, ...]
    params: tuple[Param, ...]

    @classmethod
    def of(cls, read: Read) -> Signature:
        name, line, c_linkage, template, params = read
        return cls(name, line, c_linkage, tuple(Template(*t) for t in template), tuple(Param(*p) for p in params))

    def __str__(self) -> str:
        template = f"<{', '.join(map(str, self.template))}>" if self.template else ""
        return f"{self.name}{template}({', '.join(map(str, self.params))})"

    def bind(self, arguments: list[str]) -> dict[str, str]:
        """Template parameters by name, for arguments given in order."""
        if len(arguments) > len(self.template):
            expected = len(self.template)
            raise InvalidValueError(f"kernel {self.name}: {len(arguments)} template arguments, expected {expected}")
        given = dict(zip((t.name for t in self.template), arguments, strict=False))
        for parameter in self.template[len(arguments) :]:
            if not parameter.default:
                like = ", ".join("float" if t.kind == "class" else "4" for t in self.template)
                text = f"kernel {self.name} is a template: template argument `{parameter}` is missing"
                raise InvalidValueError(f'{text}; write "{self.name}<{like}>"')
            given[parameter.name] = parameter.default
        return given

    def bound(self, given: dict[str, str]) -> tuple[Param, ...]:
        """The arguments with template parameters replaced."""
        return tuple(replace(p, base=substitute(p.base, given)) for p in self.params)


def substitute(text: str, given: dict[str, str]) -> str:
    """`Vec<T>` with T given."""
    if text in given:
        return given[text]
    return re.sub(r"[A-Za-z_]\w*", lambda word: given.get(word[0], word[0]), text)


def split_expression(expression: str) -> tuple[str, list[str] | None]:
    """`scale<float, 4>` as its name and arguments; None where it has no brackets."""
    name, bracket, rest = expression.strip().partition("<")
    if not bracket:
        return name.strip(), None
    if not rest.endswith(">"):
        raise InvalidValueError(f"kernel {expression}: expected `name<arguments>`")
    parts, depth = [""], 0
    for letter in rest[:-1]:
        depth += (letter in "<([") - (letter in ">)]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return name.strip(), [part.strip() for part in parts if part.strip()]
