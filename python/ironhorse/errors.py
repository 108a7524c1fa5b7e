"""The one error type a user is meant to read."""

from __future__ import annotations


class IronhorseError(Exception):
    """A bad input. The text is one line: what is wrong, where, and what to do about it."""


class ConfigError(IronhorseError):
    """A model description that does not describe a model."""


class FormatError(IronhorseError):
    """A file that is not what its name or its header claims."""
