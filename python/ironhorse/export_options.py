"""What `ironhorse.export` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig
from .errors import IronhorseError


@dataclass(frozen=True)
class Options:
    """What to export; the names of the flags."""

    kind: str
    out: str
    model: str | None = None
    hf: str | None = None
    init: str | None = None
    batch: int = 4
    seq: int = 64
    seed: int = 0
    dropout: float = 0.0
    ignored: float = 0.0
    steps: int = 10
    optimizer: str = "adamw"
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    stem: str = "gpt2"
    no_acts: bool = False
    no_bf16: bool = False
    json: str | None = None
    reference: str = "ironhorse"


def check_length(seq: int, config: ModelConfig) -> None:
    """A sequence cannot be longer than the model's positions."""
    if seq > config.max_seq_len:
        raise IronhorseError(
            f"--seq is {seq}, but max_seq_len of this model is {config.max_seq_len}; choose --seq at most that"
        )
