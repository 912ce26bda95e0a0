"""From whatever ends a command to an error with a message, a hint and an exit code."""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Iterable

import click

from mergepipe._version import __version__
from mergepipe.errors import (
    CancelledError,
    InternalError,
    MergepipeError,
    StorageError,
    fail_storage,
)

_QUOTED = re.compile(r"'([^']*)'")


class UsageError(MergepipeError):
    """The command line is wrong: an unknown command or option, or a value that does not fit."""

    exit_status = 2


def as_mergepipe_error(error: BaseException, *, debug: bool) -> MergepipeError:
    """Return the error to show for anything that ended a command."""
    if isinstance(error, InternalError):
        return _internal(error.message, debug=debug, hint=error.hint, **error.facts)
    if isinstance(error, MergepipeError):
        return error
    if isinstance(error, click.ClickException):
        return usage_error(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return CancelledError("interrupted")
    if isinstance(error, OSError) and error.errno is not None:
        return _storage_error(error)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _internal(message, debug=debug)


def _internal(message: str, *, debug: bool, hint: str | None = None, **facts: object) -> InternalError:
    """Return an error of ours with what a report of it needs."""
    versions = {"version": __version__, "python": platform.python_version()}
    where_to = "please report this, with the traceback above" if debug else "run with `--debug` for the traceback"
    return InternalError(
        f"internal error: {message}\nmergepipe {versions['version']}, Python {versions['python']}",
        hint=hint or where_to,
        **{**facts, **versions},
    )


def _storage_error(error: OSError) -> StorageError:
    try:
        if error.filename is None:
            return StorageError(f"the operating system refused: {error.strerror}", errno=error.errno)
        fail_storage(error, error.filename, "use")
    except StorageError as storage:
        return storage


def usage_error(error: click.ClickException) -> UsageError:
    """Return click's error in our words: literals in backticks, no full stop, a hint."""
    if isinstance(error, click.NoSuchOption):
        return UsageError(
            f"no such option: `{error.option_name}`",
            hint=_misplaced(error) or suggestion(error.option_name, _option_names(error.ctx)) or _see_help(error),
        )
    text = _QUOTED.sub(r"`\1`", error.format_message()).rstrip(".")
    text = text.replace("is not a valid integer range", "is not a whole number")
    return UsageError(text[:1].lower() + text[1:], hint=_see_help(error))


def _misplaced(error: click.NoSuchOption) -> str | None:
    """Return which command an option given before the command belongs to, if it is one's."""
    context = error.ctx
    if context is None or not isinstance(context.command, click.Group):
        return None
    owners = [
        name
        for name, command in context.command.commands.items()
        if any(error.option_name in parameter.opts for parameter in command.params)
    ]
    return f"it belongs after its command: `{context.command_path} {owners[0]} {error.option_name}`" if owners else None


def _option_names(context: click.Context | None) -> list[str]:
    parameters = context.command.get_params(context) if context else []
    return [name for parameter in parameters for name in parameter.opts if name.startswith("-")]


def _see_help(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"see `{context.command_path if context else 'mergepipe'} --help`"


def suggestion(word: str, known: Iterable[str]) -> str | None:
    """Return ``did you mean ...?`` if one of the known words is near, else None."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean `{near[0]}`?" if near else None
