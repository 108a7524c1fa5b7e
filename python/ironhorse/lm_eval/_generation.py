"""What a task asks for when it wants text written: the harness's `generation_kwargs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidValueError

# Names of the most tokens to write, the first that is given counts; the other libraries' names are the harness's too.
_MOST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Settings that change nothing: those of one beam, of a cache, of no penalty.
_NO_CHANGE: Mapping[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True}


@dataclass(frozen=True)
class Generation:
    """How to continue a prompt."""

    until: list[str]
    tokens: int
    temperature: float  # 0 takes the most likely token
    top_k: int | None
    top_p: float | None
    seed: int


def parse(given: Mapping[str, Any], most: int) -> Generation:
    """Reads `generation_kwargs`; without a number of tokens in it, `most` are written. What is not known is refused."""
    rest = dict(given)
    until = rest.pop("until", None) or []
    if isinstance(until, str):
        until = [until]
    if not isinstance(until, list) or not all(isinstance(text, str) for text in until):
        raise InvalidValueError(f"generation_kwargs: until is {until!r}, expected a text or a list of texts")
    asked = [rest.pop(name, None) for name in _MOST]
    tokens = int(next((number for number in asked if number is not None), most))
    do_sample = rest.pop("do_sample", None)
    temperature = float(rest.pop("temperature", 0.0) or 0.0)
    top_k, top_p, seed = rest.pop("top_k", None), rest.pop("top_p", None), rest.pop("seed", None)
    for name, same in _NO_CHANGE.items():
        if rest.get(name) == same:
            del rest[name]
    if rest:
        known = "until, max_gen_toks, do_sample, temperature, top_k, top_p, seed"
        raise InvalidValueError(f"generation_kwargs: {next(iter(rest))} is not supported, expected {known}")
    return Generation(
        until=until,
        tokens=tokens,
        temperature=0.0 if do_sample is False else temperature,
        top_k=int(top_k) if top_k else None,
        top_p=float(top_p) if top_p is not None else None,
        seed=int(seed or 0),
    )
