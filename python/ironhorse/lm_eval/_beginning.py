"""The token that a tokenizer puts before every text, which the files beside it describe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FormatError


class Beginning(NamedTuple):
    """What stands before a text."""

    token: str | None  # the token's text; None if the tokenizer has none
    always: bool  # whether every text that is encoded begins with it


def beginning(folder: Path) -> Beginning:
    """As transformers decides it: `tokenizer_config.json` first, then the template of `tokenizer.json`."""
    config = _read(folder / "tokenizer_config.json")
    template = _first_of(_read(folder / "tokenizer.json").get("post_processor"))
    named = config.get("bos_token")
    token = named.get("content") if isinstance(named, Mapping) else named
    always = config.get("add_bos_token")
    return Beginning(token or template, bool(template) if always is None else bool(always) and bool(token or template))


def _first_of(processor: Any) -> str | None:
    """The special token with which a template begins."""
    if not isinstance(processor, Mapping):
        return None
    if processor.get("type") == "Sequence":
        return next(filter(None, map(_first_of, processor.get("processors", []))), None)
    if processor.get("type") != "TemplateProcessing" or not processor.get("single"):
        return None
    first = processor["single"][0].get("SpecialToken")
    return str(first["id"]) if first else None


def _read(path: Path) -> Mapping[str, Any]:
    """A JSON object; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: is not JSON ({error})") from error
    if not isinstance(found, Mapping):
        raise FormatError(f"{path}: is {type(found).__name__}, expected a JSON object")
    return found
