"""Writing several files as one act: all of them appear, complete, or none does."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType


class Staging:
    """`with Staging(folder) as staging: write(staging.path("a.bin"))`.

    Each file is written beside its destination under a temporary name and renamed when the block ends well;
    if the block raises, the temporary files, and the folder if this made it, are removed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._made: list[Path] = []
        self._names: list[str] = []

    def __enter__(self) -> Staging:
        missing = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._made = missing
        return self

    def path(self, name: str) -> Path:
        """Where to write the file that will be called `name`."""
        if name not in self._names:
            self._names.append(name)
        return self._temporary(name)

    def _temporary(self, name: str) -> Path:
        return self.folder / f".{name}.{os.getpid()}.tmp"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            for name in self._names:
                with open(self._temporary(name), "rb+") as file:
                    os.fsync(file.fileno())
            for name in self._names:
                os.replace(self._temporary(name), self.folder / name)
            return
        for name in self._names:
            self._temporary(name).unlink(missing_ok=True)
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:  # someone else's file is in it by now
                break
