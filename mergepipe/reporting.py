"""How long work tells the outside what it does; the command line draws it, a notebook may ignore it."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives progress and messages. All methods may be called from the thread that started the work only."""

    def begin(self, phase: str, total_bytes: int) -> None:
        """A phase such as "merging assistant" starts; it will handle ``total_bytes`` bytes."""

    def advance(self, count: int) -> None:
        """``count`` more bytes of the current phase are done."""

    def end(self) -> None:
        """The current phase is over."""

    def note(self, message: str) -> None:
        """Something worth knowing, such as dropped tensors."""

    def warn(self, message: str) -> None:
        """Something that the user should look at, such as a damaged cache entry that was recomputed."""


class SilentReporter:
    """Drops everything; the default of the Python API."""

    def begin(self, phase: str, total_bytes: int) -> None:
        """Ignore it."""

    def advance(self, count: int) -> None:
        """Ignore it."""

    def end(self) -> None:
        """Ignore it."""

    def note(self, message: str) -> None:
        """Ignore it."""

    def warn(self, message: str) -> None:
        """Ignore it."""
