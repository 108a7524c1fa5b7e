"""What can go wrong, as one family of exceptions: catch `IronhorseError`, look at its `code`, print its text."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """The codes of the C library, which Python raises as exceptions."""

    SUCCESS = 0
    NOT_AVAILABLE = -1
    INVALID_VALUE = -2
    LAUNCH_FAILED = -3
    OUT_OF_MEMORY = -4


class IronhorseError(Exception):
    """Something a user can act on. The text is one line: what is wrong, where, and what to do about it."""

    code: Code = Code.INVALID_VALUE


class InvalidValueError(IronhorseError, ValueError):
    """An argument of the wrong type, shape, size, layout or value."""

    code = Code.INVALID_VALUE


class NotAvailableError(IronhorseError, RuntimeError):
    """What was asked for does not exist here: no GPU, no driver, not in this version."""

    code = Code.NOT_AVAILABLE


class LaunchFailedError(IronhorseError, RuntimeError):
    """The work was started and failed."""

    code = Code.LAUNCH_FAILED


class OutOfMemoryError(IronhorseError, MemoryError):
    """There is not enough memory on the device or the host."""

    code = Code.OUT_OF_MEMORY


class ConfigError(IronhorseError):
    """A model description that does not describe a model."""


class FormatError(IronhorseError):
    """A file that is not what its name or its header claims."""
