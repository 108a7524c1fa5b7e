"""Answer keys of the families people fine-tune, for machines without transformers and PEFT:

    python python/tests/family_keys.py FOLDER

Writes FOLDER/NAME.key.safetensors for every model of test_families (transformers, f32 and bf16), `lora-NAME` for every
set of adapters of test_lora (PEFT, f32 and bf16), `dpo-NAME` for every set of pairs of test_dpo (plain PyTorch, f32).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import test_dpo
import test_families
import test_lora
from test_moe_export import export


def family(name: str, folder: Path) -> Path:
    model, batch, seq, *flags = test_families.MODELS[name]
    return export(folder / name, model, batch, seq, "--reference", "transformers", "--steps", "2", *flags)[1]


def write(folder: Path) -> list[Path]:
    """Every key, in a folder that is made."""
    makers: list[tuple[str, Iterable[str], Callable[[str, Path], Path]]] = [
        ("", test_families.MODELS, family),
        ("lora-", test_lora.MODELS, lambda name, aside: test_lora.write_key(name, aside, bf16=True)),
        ("dpo-", test_dpo.MODELS, test_dpo.write_key),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for prefix, names, make in makers:
        with tempfile.TemporaryDirectory() as aside:
            for name in names:
                written.append(folder / f"{prefix}{name}.key.safetensors")
                written[-1].write_bytes(make(name, Path(aside)).read_bytes())
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    print(f"{len(write(Path(sys.argv[1])))} keys in {sys.argv[1]}")
