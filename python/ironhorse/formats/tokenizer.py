"""`gpt2_tokenizer.bin`: the bytes of every token, in order of its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import FormatError
from .header import HEADER_BYTES, header_bytes, read_header

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
    """Each token is a length byte and its bytes, so none may be longer than 255 bytes."""
    for number, token in enumerate(tokenizer.tokens):
        if len(token) > 255:
            raise FormatError(f"token {number} is {len(token)} bytes; the format holds at most 255")
    _check_eot(str(path), tokenizer)
    body = b"".join(bytes([len(token)]) + token for token in tokenizer.tokens)
    Path(path).write_bytes(header_bytes(MAGIC, VERSION, len(tokenizer.tokens), tokenizer.eot) + body)


def read_tokenizer(path: Path | str) -> Tokenizer:
    """Reads a version 2 tokenizer; a truncated or overlong file is an error."""
    path = Path(path)
    header = read_header(path, "tokenizer", {MAGIC: (VERSION,)})
    count, eot = int(header[2]), int(header[3])
    body = path.read_bytes()[HEADER_BYTES:]
    tokens: list[bytes] = []
    at = 0
    for number in range(count):
        if at >= len(body) or at + 1 + body[at] > len(body):
            raise FormatError(f"{path}: ends inside token {number} of {count}")
        tokens.append(body[at + 1 : at + 1 + body[at]])
        at += 1 + body[at]
    if at != len(body):
        raise FormatError(f"{path}: {len(body) - at} bytes left over after token {count - 1}")
    tokenizer = Tokenizer(tuple(tokens), eot)
    _check_eot(str(path), tokenizer)
    return tokenizer


def _check_eot(where: str, tokenizer: Tokenizer) -> None:
    if not 0 <= tokenizer.eot < len(tokenizer.tokens):
        raise FormatError(
            f"{where}: end-of-text token {tokenizer.eot} is not one of the {len(tokenizer.tokens)} tokens"
        )
