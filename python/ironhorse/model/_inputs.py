"""What users give as tokens and element types."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidValueError

Tokens = NDArray[np.int64]
Messages: TypeAlias = Sequence[Mapping[str, Any]]

# Names of element types in PyTorch and numpy.
_DTYPES = {"float32": "f32", "bfloat16": "bf16"}


def dtype_name(dtype: object) -> str | None:
    """An element type, also torch's or numpy's, by our name; `None` leaves the choice to the device."""
    if dtype is None or dtype == "auto":
        return None
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    return _DTYPES.get(name, name)


def tokens(call: str, name: str, given: Any) -> Tokens:
    """Token ids in any form (lists, numpy, torch) as a contiguous array of one or two dimensions."""
    if hasattr(given, "detach"):  # a tensor of torch, which may be on a GPU
        given = given.detach().cpu().numpy()
    if _is_text(given):
        raise InvalidValueError(f"{call}: `{name}` is a text, expected token ids: model.{call}(model.encode(text))")
    if isinstance(given, np.ma.MaskedArray):
        raise InvalidValueError(f"{call}: `{name}` is a masked array; x.filled(value) gives a plain one")
    try:
        array = np.asarray(given)
    except (ValueError, TypeError, OverflowError):
        array = np.asarray(given, dtype=object)
    if array.dtype == object:
        raise InvalidValueError(
            f"{call}: `{name}` is not a table of token ids; rows of different lengths need padding at their ends, "
            "with labels of -100 there"
        )
    if array.ndim not in (1, 2) or array.size == 0:
        raise InvalidValueError(
            f"{call}: `{name}` is {list(array.shape)}, expected [tokens] or [rows, tokens], at least one"
        )
    if array.dtype.kind not in "iu":
        raise InvalidValueError(f"{call}: `{name}` is {array.dtype}, expected integers")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise InvalidValueError(f"{call}: `{name}` has {array.max()}, which is no token")
    return np.ascontiguousarray(array, dtype=np.int64)


def _is_text(given: object) -> bool:
    """Whether this is a text, or a list of texts."""
    if isinstance(given, (list, tuple)):
        return len(given) > 0 and all(isinstance(item, (str, bytes)) for item in given)
    return isinstance(given, (str, bytes))


def data_paths(call: str, name: str, data: object) -> list[str] | None:
    """Files of data, of which one may stand alone."""
    if data is None:
        return None
    given = [data] if isinstance(data, (str, os.PathLike)) or not isinstance(data, Iterable) else list(data)
    if isinstance(data, Mapping) or any(isinstance(item, Mapping) for item in given):
        raise InvalidValueError(
            f"{call}: `{name}` are samples in memory, expected files: write each as a line of JSON, such as "
            "json.dumps(sample), to chat.jsonl and give its path"
        )
    paths = []
    for item in given:
        if not isinstance(item, (str, os.PathLike)):
            found = type(item).__name__
            raise InvalidValueError(f"{call}: `{name}` holds a value of type {found}, expected paths of files")
        paths.append(os.fspath(item))
    return paths


def one_row(call: str, name: str, given: Any, vocab: int) -> list[int]:
    """One sequence of tokens that the model has."""
    row = tokens(call, name, given)
    if row.ndim == 2 and len(row) == 1:
        row = row[0]
    if row.ndim != 1:
        raise InvalidValueError(f"{call}: `{name}` is {list(row.shape)}, expected one sequence: [tokens]")
    wrong = np.flatnonzero((row < 0) | (row >= vocab))
    if len(wrong):
        raise InvalidValueError(f"{call}: {name}[{wrong[0]}] is {row[wrong[0]]}, expected 0 to {vocab - 1}")
    return [int(token) for token in row]


def are_messages(prompt: object) -> bool:
    """Whether this is a conversation, not tokens."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(isinstance(m, Mapping) for m in prompt)


def messages_json(call: str, messages: Messages) -> str:
    """Messages as the lines of chat data hold them."""
    try:
        return json.dumps([dict(message) if isinstance(message, Mapping) else message for message in messages])
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"{call}: the messages are not what JSON can hold ({error})") from None
