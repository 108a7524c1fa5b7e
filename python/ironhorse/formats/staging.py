"""Writing several files as one act: a failure before the first rename leaves nothing new behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ..errors import FormatError, IronhorseError


class Staging:
    """`with Staging(folder) as staging: write(staging.path("a.bin"))`.

    Each file is written beside its destination under a temporary name, flushed to disk and, once all of them are,
    renamed. If anything fails, in the block or after it, the temporary files, and the folders this made if they are
    empty, are removed. Every file is complete under its name. Only a rename that fails (or a machine that stops)
    between the first and the last of them can leave some names new and the others as they were.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._made: list[Path] = []
        self._names: list[str] = []

    def __enter__(self) -> Staging:
        self._made = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except BaseException:
            self._clean_up()
            raise
        return self

    def path(self, name: str) -> Path:
        """Where to write the file that will be called `name`, which may be in a folder below: `a/b.bin`."""
        if name not in self._names:
            self._names.append(name)
        path = self._temporary(name)
        missing = [folder for folder in path.parents if not folder.exists()]
        self._made = [*missing, *self._made]
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _temporary(self, name: str) -> Path:
        path = self.folder / name
        return path.with_name(f".{path.name}.{os.getpid()}-{id(self):x}.tmp")  # other processes and threads have others

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._publish()
        except BaseException:
            self._clean_up()
            raise
        if kind is not None:
            self._clean_up()

    def _publish(self) -> None:
        for name in self._names:
            with open(self._temporary(name), "rb+") as file:
                os.fsync(file.fileno())
        for name in self._names:
            os.replace(self._temporary(name), self.folder / name)

    def _clean_up(self) -> None:
        """Best effort: what cannot be removed must not hide the error that brought us here."""
        for name in self._names:
            try:
                self._temporary(name).unlink(missing_ok=True)
            except OSError:
                continue
        for folder in self._made:
            try:
                folder.rmdir()
            except FileNotFoundError:  # mkdir stopped before it
                continue
            except OSError:  # something is in it by now
                break


class StagedFolder:
    """`with StagedFolder(path, owned) as folder: write(folder / "a")`: the whole folder or what was there before.

    Written beside under a temporary name, flushed to disk and renamed. An earlier folder is replaced only if it holds
    nothing except files whose names are `owned`; if the machine stops between the two renames, it is found beside under
    `.NAME.old-*`.
    """

    def __init__(self, path: Path | str, owned: Callable[[str], bool]) -> None:
        self.path = Path(path).resolve()  # a link stays a link
        self._owned = owned
        self._temporary = self.path.with_name(f".{self.path.name}.tmp-{os.getpid()}-{id(self):x}")

    def __enter__(self) -> Path:
        if self.path.exists() and not self.path.is_dir():
            raise FormatError(f"{self.path}: is a file; expected a folder or nothing")
        if self.path.is_dir():
            other = [entry.name for entry in self.path.iterdir() if not self._owned(entry.name)]
            if other:
                raise FormatError(f"{self.path}: not replaced because it holds {other[0]}; give a new folder")
        self._temporary.mkdir()
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _publish(self) -> None:
        for entry in self._temporary.iterdir():
            with open(entry, "rb+") as file:
                os.fsync(file.fileno())
        if not self.path.exists():
            os.rename(self._temporary, self.path)
            return
        old = self._temporary.with_name(self._temporary.name.replace(".tmp-", ".old-"))
        os.rename(self.path, old)
        try:
            os.rename(self._temporary, self.path)
        except BaseException:
            os.rename(old, self.path)
            raise
        shutil.rmtree(old, ignore_errors=True)


def check_writable_file(path: Path | str, option: str, will_be_made: Path | str | None = None) -> None:
    """Raises IronhorseError unless a file may be put at `path`; touches nothing. For before long work.

    `will_be_made` is a folder the work makes first, with its parents.
    """
    path = Path(path)
    made = Path(will_be_made).resolve() if will_be_made is not None else None
    coming = (made, *made.parents) if made is not None else ()
    if path.is_dir() or path.resolve() in coming:
        raise IronhorseError(f"{option} {path} is a folder; give a file")
    if path.parent.is_dir():
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise IronhorseError(f"{option} {path}: cannot write in {path.parent}")
    elif path.parent.resolve() not in coming:
        raise IronhorseError(f"{option} {path}: no folder {path.parent}; make it first")


def write_json(path: Path | str, report: object) -> None:
    """The whole file or, on an error, what was there before. A device or a pipe is written to, not replaced."""
    text = json.dumps(report, indent=2) + "\n"
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays a link
    with Staging(path.parent) as staging:
        staging.path(path.name).write_text(text, encoding="utf-8")
