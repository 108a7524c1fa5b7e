"""Fixtures of several test files: one small odd model, exported once, files of every kind, what ironhorse.jit needs."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ironhorse.config import GPT2Config
from ironhorse.export import main as export_main

if TYPE_CHECKING:
    from jit_cases import Stand

try:
    import torch
except ImportError:  # the tests of ops and of the wheel run without; those that import it say so
    pass
else:
    torch.set_num_threads(1)  # tiny models; the machine may be shared

# What a shell runs in the background ignores SIGINT, and Python then leaves it so: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No two sizes equal, none a power of two, max_seq_len longer than the batch's T: a swapped size cannot hide.
SMALL = "n_layer=2,n_head=3,n_embd=12,vocab_size=131,max_seq_len=11"
SMALL_CONFIG = GPT2Config(11, 131, 2, 3, 12)
SMALL_BATCH, SMALL_SEQ = 2, 7


@dataclass(frozen=True)
class Exported:
    """The four files of an export and its --json report."""

    folder: Path
    report: dict

    @property
    def model(self) -> Path:
        return self.folder / "gpt2_custom.bin"

    @property
    def model_bf16(self) -> Path:
        return self.folder / "gpt2_custom_bf16.bin"

    @property
    def state(self) -> Path:
        return self.folder / "gpt2_custom_debug_state.bin"

    @property
    def key(self) -> Path:
        return self.folder / "gpt2_custom.key.safetensors"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--in-full", action="store_true", help="also the tests marked in_full, which take long")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "in_full: takes long; only with --in-full (cargo xtask test --all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what is marked in_full: the last line of pytest counts it, and cargo xtask test says so."""
    if not config.getoption("--in-full"):
        left_out = [item for item in items if item.get_closest_marker("in_full")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def export(folder: Path, model: str, batch: int, seq: int, *extra: str) -> Exported:
    """Runs `python -m ironhorse.export gpt2` in this process; it must succeed."""
    report = folder.with_suffix(".report.json")
    arguments = ["gpt2", "--model", model, "--batch", str(batch), "--seq", str(seq), "--out", str(folder)]
    assert export_main([*arguments, "--json", str(report), *extra]) == 0
    return Exported(folder, json.loads(report.read_text()))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The small model, exported with everything on; tests must not change its files."""
    folder = tmp_path_factory.mktemp("small") / "out"
    return export(folder, SMALL, SMALL_BATCH, SMALL_SEQ, "--seed", "3", "--weight-decay", "0.1")


# What is below is made by modules that need torch, imported where a test asks for it.


@pytest.fixture(scope="module")
def hf(small: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as transformers writes it: the folders `one`, `many` and `bf16`."""
    from load_save_files import write_hf_folders

    folder = tmp_path_factory.mktemp("hf")
    write_hf_folders(small, folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that `ironhorse train` wrote."""
    from load_save_files import trained_checkpoint

    return trained_checkpoint(tmp_path_factory.mktemp("train") / "run")


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of each of the module's KINDS, as transformers saves it."""
    from lm_models import write_model

    made = {kind: tmp_path_factory.mktemp(kind) for kind in request.module.KINDS}
    for kind, folder in made.items():
        write_model(folder, kind)
    return made


@pytest.fixture
def files(small: Exported, tmp_path: Path) -> dict[str, Path]:
    """A file of each kind that is one file."""
    from load_save_files import write_files

    return write_files(small, tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of compiled kernels of the test's own."""
    monkeypatch.setenv("IRONHORSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """A stand-in for the GPU, for ironhorse.jit."""
    from jit_fixtures import stand_for_gpu

    return stand_for_gpu(monkeypatch)
