"""Every error that mergepipe raises on purpose, with its exit status and hint.

::

    MergepipeError                 1
    ├── CollectedErrors            the highest of its members'
    ├── MergefileError             2   the Mergefile (or a command-line argument) is wrong
    ├── SourceError                2   a source is missing, incomplete or not a checkpoint
    │   ├── FormatError            2   a safetensors file breaks its format's rules
    │   └── SourceChangedError     1   a source changed while it was being read
    ├── PlanError                  2   the sources do not fit together
    ├── OperatorError              1   the numbers of a merge are not usable
    ├── CacheError                 1   the cache directory cannot be used
    ├── PackError                  1   a progressive pack is damaged
    ├── StorageError               1   the operating system refused a read or a write
    ├── LockError                  2   Mergefile.lock cannot be read
    │   └── LockDiffersError       3   ``--locked`` and the lock would change
    ├── PublishError               2   the output directory must not be overwritten
    ├── ReplayError                1   an output that was made again is another one than before
    ├── InternalError              1   a promise of ours was broken: a bug
    └── CancelledError           130   the user interrupted

Libraries raise facts; the command line owns the prose around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Who a URL is asked as, parameters that are as good as a password, and tokens as hubs give them out.
_SECRETS = (
    (re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{1,20}:/{1,2})[^/\s@`\"'<>\\]+@"), r"\1***@"),
    (
        re.compile(
            r"([?&](?:[\w-]*token|key|[\w-]*api[_-]?key|auth|authorization|password|secret|sig|[\w-]*signature"
            r"|[\w-]*credential)=)[^&\s`\"'<>#\\]+",
            re.IGNORECASE,
        ),
        r"\1***",
    ),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_***"),
)


def redacted(text: str) -> str:
    """Return the text without passwords and tokens of URLs, for whatever is shown or kept.

    Examples
    --------
    >>> redacted("https://me:hf_abc@example.org/model?token=abc&x=1")
    'https://***@example.org/model?token=***&x=1'
    """
    if ":/" in text or "=" in text or "hf_" in text:
        for pattern, instead in _SECRETS:
            text = pattern.sub(instead, text)
    return text


def _on_one_line(message: str, facts: Mapping[str, Any]) -> str:
    """Return the message with the line breaks in names escaped: no name may begin a line of its own."""
    for name in facts.values():
        if isinstance(name, str) and "\n" in name:
            message = message.replace(f"`{name}`", "`{}`".format(name.replace("\n", "\\n")))
    return message


def _redacted_fact(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_redacted_fact, value))
    return redacted(value) if isinstance(value, str) else value


class MergepipeError(Exception):
    """Base of all errors of mergepipe.

    Parameters
    ----------
    message
        What is wrong and where, one or more lines; the first is a sentence without a full stop.
    hint
        What the user can do about it.
    facts
        Machine-readable details (file, tensor, source, expected, got), shown by ``--json``.
    """

    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        message = redacted(_on_one_line(message, facts))
        super().__init__(message)
        self.message = message
        self.hint = None if hint is None else redacted(hint)
        self.facts = {key: _redacted_fact(value) for key, value in facts.items()}

    @classmethod
    def kind(cls) -> str:
        """Return the stable name that ``--json`` prints, such as ``source_changed``."""
        return _WORD_BOUNDARY.sub("_", cls.__name__.removesuffix("Error")).lower()

    def as_json(self) -> dict[str, Any]:
        """Return the error as JSON-ready data: kind, message, hint and facts."""
        return {"kind": self.kind(), "message": self.message, "hint": self.hint, **self.facts}


class CollectedErrors(MergepipeError):  # noqa: N818 - it holds errors
    """Several errors found together, reported in one go."""

    def __init__(self, errors: Sequence[MergepipeError]) -> None:
        super().__init__("\n".join(error.message for error in errors))
        self.errors = tuple(errors)
        self.exit_status = max(error.exit_status for error in errors)  # type: ignore[misc]

    def as_json(self) -> dict[str, Any]:
        """Return the first error's kind with all members under ``errors``."""
        return {
            "kind": self.errors[0].kind(),
            "message": self.message,
            "hint": self.errors[0].hint,
            "errors": [error.as_json() for error in self.errors],
        }


class MergefileError(MergepipeError):
    """The Mergefile, or an argument that refers to it, is wrong."""

    exit_status = 2


class SourceError(MergepipeError):
    """A source is missing, incomplete, or not a checkpoint that can be read."""

    exit_status = 2


class FormatError(SourceError):
    """A safetensors file breaks a rule of its format; ``rule`` names which one."""

    def __init__(self, message: str, *, rule: str, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message, hint=hint, rule=rule, **facts)
        self.rule = rule


class SourceChangedError(SourceError):
    """A source file changed while it was being read; nothing read from it was recorded."""

    exit_status = 1


class PlanError(MergepipeError):
    """The sources do not fit together, or not with what the Mergefile asks for."""

    exit_status = 2


class OperatorError(MergepipeError):
    """The numbers that went into or came out of an operator are not usable."""


class CacheError(MergepipeError):
    """The cache directory cannot be used."""


class PackError(MergepipeError):
    """A progressive pack, or a piece of one, is damaged or made by another version."""


class StorageError(MergepipeError):
    """The operating system refused to read, write, rename or link a file."""


class LockError(MergepipeError):
    """``Mergefile.lock`` cannot be read."""

    exit_status = 2


class LockDiffersError(LockError):
    """The build was asked to keep the lock and would have changed it."""

    exit_status = 3


class PublishError(MergepipeError):
    """An output directory must not be overwritten, or lies where it must not."""

    exit_status = 2


class ReplayError(MergepipeError):
    """What was made again from a manifest is not what the manifest says; nothing was published."""


class InternalError(MergepipeError):
    """A promise of mergepipe's own was broken; always a bug."""


class CancelledError(MergepipeError):
    """The user interrupted the command."""

    exit_status = 130


def raise_collected(errors: Iterable[MergepipeError]) -> None:
    """Raise what was collected: nothing, the only error, or all of them as one.

    Raises
    ------
    MergepipeError
        If ``errors`` is not empty.
    """
    flat: list[MergepipeError] = []
    for error in errors:
        flat.extend(error.errors if isinstance(error, CollectedErrors) else (error,))
    if len(flat) == 1:
        raise flat[0]
    if flat:
        raise CollectedErrors(flat)


def fail_storage(error: OSError, path: object, action: str) -> NoReturn:
    """Raise a `StorageError` for ``error``, naming the path and what was being done to it."""
    reason = error.strerror or type(error).__name__
    hints = {
        28: "free some space there, or point the output or `--cache-dir` at another disk",
        122: "the disk quota is used up: free some space, or use another disk",
        27: "a limit on the size of one file is in force (`ulimit -f`)",
        13: "check the permissions of the path",
        30: "the file system is mounted read-only",
    }
    raise StorageError(
        f"cannot {action} `{path}`: {reason}",
        hint=hints.get(error.errno or 0),
        path=str(path),
        errno=error.errno,
    ) from error
