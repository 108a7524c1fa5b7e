"""The error of a source that does not compile, with the lines that are wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import Code, IronhorseError


@dataclass(frozen=True)
class Diagnostic:
    """One message of the compiler."""

    file: str
    line: int  # 0 for a message about the whole file
    severity: str  # "error" or "warning"
    text: str
    source: str = ""  # the line, and below it a caret

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        said = f"{where}: {self.severity}: {self.text}"
        return f"{said}\n{self.source}" if self.source else said


class CompileError(IronhorseError, ValueError):
    """CUDA source that does not compile. `diagnostics` has each message with its line, `log` all the compiler said."""

    code = Code.INVALID_VALUE

    def __init__(self, file: str, arch: str, log: str) -> None:
        self.file, self.arch, self.log = file, arch, log
        self.diagnostics = read_log(log)
        errors = [said for said in self.diagnostics if said.severity == "error"]
        said = "\n" + "\n".join(map(str, errors)) if errors else f": {log}"
        super().__init__(f"{file} does not compile for {arch}{said}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str, str]]:
        return CompileError, (self.file, self.arch, self.log)


_SAID = re.compile(
    r"^(?P<file>.+)\((?P<line>\d+)\): (?P<what>(?:catastrophic )?error|warning)(?: #[\w-]+)?: (?P<text>.*)$"
)
# NVRTC compiles the names of template kernels in a file of its own.
_NAMES = "__nv_name_map"
_NAME = re.compile(r"#pragma nv_mangled_name (.*)")


def read_log(log: str) -> tuple[Diagnostic, ...]:
    """The compiler's messages, each with its line of source and the caret that it drew below."""
    found: list[Diagnostic] = []
    lines = log.splitlines()
    for at, line in enumerate(lines):
        said = _SAID.match(line)
        if not said:
            continue
        shown: list[str] = []
        for below in lines[at + 1 :]:
            if not below.startswith("  ") or len(shown) == 6:
                break
            shown.append(below)
            if below.strip() == "^":
                break
        file, number, source, text = said["file"], int(said["line"]), "\n".join(shown), said["text"]
        asked = _NAME.search(source)
        if file == _NAMES and asked:
            if "name expression" in text or any(known.file == f"kernel {asked[1]}" for known in found):
                continue  # a second message about the same name
            file, number, source = f"kernel {asked[1]}", 0, ""
        severity = "error" if "error" in said["what"] else "warning"
        found.append(Diagnostic(file, number, severity, _advice(text), source))
    return tuple(found)


def _advice(text: str) -> str:
    if "open source file" in text:
        return text + "; give its folder as include=, the toolkit's headers are found in CUDA_HOME"
    return text


def compile_error(file: str, arch: str, log: str) -> CompileError:
    """Makes the exception; called by the native module."""
    return CompileError(file, arch, log)
