"""`gpt2_tokenizer.bin`: the bytes of every token, in order of its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import _native
from ..errors import FormatError
from .header import header_bytes

MAGIC = 20240328
VERSION = 2


@dataclass(frozen=True)
class Tokenizer:
    """`tokens[i]` are the bytes of token i; `eot` is the end-of-text token's number."""

    tokens: tuple[bytes, ...]
    eot: int

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of a token sequence."""
        return b"".join(self.tokens[i] for i in ids)


def write_tokenizer(path: Path | str, tokenizer: Tokenizer) -> None:
    """Each token is a length byte and its bytes, so it has 1 to 255 bytes."""
    for number, token in enumerate(tokenizer.tokens):
        if not 0 < len(token) <= 255:
            raise FormatError(f"{path}: token {number} is {len(token)} bytes, expected 1 to 255")
    if not 0 <= tokenizer.eot < len(tokenizer.tokens):
        count = len(tokenizer.tokens)
        raise FormatError(f"{path}: end-of-text token is {tokenizer.eot}, expected one of the {count} tokens")
    body = b"".join(bytes([len(token)]) + token for token in tokenizer.tokens)
    Path(path).write_bytes(header_bytes(MAGIC, VERSION, len(tokenizer.tokens), tokenizer.eot) + body)


def read_tokenizer(path: Path | str) -> Tokenizer:
    """Reads a version 2 tokenizer; a truncated or overlong file is an error."""
    tokens, eot = _native.file_tokenizer(path)
    return Tokenizer(tuple(tokens), eot)
