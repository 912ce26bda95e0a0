"""The two output streams: results on stdout, everything else on stderr, in colour or not, as text or as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Iterable
from typing import Any, TextIO

import click

from mergepipe.cli.options import GlobalOptions
from mergepipe.cli.tables import plain_lines
from mergepipe.errors import CollectedErrors, MergepipeError, fail_storage, redacted
from mergepipe.units import format_count

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan", "hint": "cyan"}


class Console:
    """Writes for a command, as its global options ask.

    A result that cannot be written is an error. A message that cannot be written is dropped: a build must not fail
    because nobody reads along any more.
    """

    def __init__(self, options: GlobalOptions) -> None:
        self._options = options
        self._said: set[str] = set()

    def result(self, lines: Iterable[str]) -> None:
        """Print a result for people."""
        if not self._options.quiet and not self._options.json_output:
            self._write_out("\n".join(lines))

    def help(self, text: str) -> None:
        """Print what was asked for, whatever the options say."""
        self._write_out(text)

    def json(self, value: Any) -> None:
        """Print a result for scripts, on one line."""
        self._write_out(_json_text(value))

    def note(self, message: str) -> None:
        """Say something worth knowing, once."""
        if not self._options.json_output:
            self._say("note", message)

    def warn(self, message: str) -> None:
        """Say something that the user should look at, once; with ``--json`` as a line of JSON."""
        self._say("warning", message)

    def progress(self, line: str) -> None:
        """Print a line about long work."""
        _write_quietly(sys.stderr, line)

    def error(self, error: MergepipeError) -> None:
        """Print an error."""
        if self._options.json_output:
            _write_quietly(sys.stderr, _json_text({"error": error.as_json()}))
        else:
            _write_quietly(sys.stderr, self._shown(sys.stderr, "\n".join(error_lines(error))))

    def _say(self, kind: str, message: str) -> None:
        if self._options.quiet or message in self._said:
            return
        self._said.add(message)
        if self._options.json_output:
            _write_quietly(sys.stderr, _json_text({kind: {"message": message}}))
        else:
            _write_quietly(sys.stderr, self._shown(sys.stderr, labelled(kind, message)))

    def _write_out(self, text: str) -> None:
        if not text or sys.stdout is None:
            return
        try:
            sys.stdout.write(self._shown(sys.stdout, text) + "\n")
            sys.stdout.flush()
        except OSError as error:
            discard(sys.stdout)
            if isinstance(error, BrokenPipeError):
                raise
            fail_storage(error, "standard output", "write to")

    def _shown(self, stream: TextIO, text: str) -> str:
        text = redacted(text)
        return text if self.has_colour(stream) else click.unstyle(text)

    def has_colour(self, stream: TextIO) -> bool:
        """Return whether a stream is written in colour: as asked, else on a terminal unless ``NO_COLOR`` is set."""
        if self._options.color != "auto":
            return self._options.color == "always"
        if os.environ.get("NO_COLOR"):
            return False
        return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that understands more than plain text."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def error_lines(error: MergepipeError) -> list[str]:
    """Return an error for people: each of several in turn, then how many there are."""
    if not isinstance(error, CollectedErrors):
        hint = [labelled("hint", error.hint)] if error.hint else []
        return [labelled("error", error.message), *hint]
    lines = []
    for member in error.errors:
        lines += [*error_lines(member), ""]
    return [*lines, f"{format_count(len(error.errors), 'problem')} found"] if len(error.errors) > 1 else lines[:-1]


def labelled(kind: str, message: str) -> str:
    """Return ``kind: message`` with the further lines of the message indented."""
    first, _, rest = plain_lines(message).partition("\n")
    label = click.style(f"{kind}:", fg=_COLOURS[kind], bold=kind == "error" or None)
    return f"{label} {first}" + ("\n" + textwrap.indent(textwrap.dedent(rest), "  ") if rest else "")


def _write_quietly(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            stream.write(text + "\n")
            stream.flush()


def discard(stream: TextIO) -> None:
    """Let what a failed stream still holds go nowhere, or the interpreter complains about it at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _json_text(value: Any) -> str:
    return redacted(json.dumps(_finite(value), allow_nan=False, default=str))


def _finite(value: Any) -> Any:
    """Return JSON-ready data without the numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(member) for key, member in value.items()}
    return [_finite(member) for member in value] if isinstance(value, list | tuple) else value
