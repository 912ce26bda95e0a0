"""What a shell offers while a command line is typed: outputs of the Mergefile, files and folders.

The Mergefile is looked at for names alone: nothing is checked, nothing is imported that takes time, and whatever is
wrong there means that no names are offered.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from mergepipe.cli.session import Session, find_mergefile
from mergepipe.errors import MergepipeError

_FILES = frozenset({"FILE", "MERGEFILE", "MANIFEST", "LOCK", "OLD", "NEW", "KEY", "PATH"})
_FOLDERS = frozenset({"DIR", "DIRECTORY", "CHECKPOINT"})
_OUTPUTS = frozenset({"OUTPUT", "OUTPUTS"})
_LIMIT = 1 << 20


class Completed(StringParamType):
    """A text for which a shell offers what its placeholder (``[OUTPUT]...``, ``FILE``) stands for."""

    def __init__(self, placeholder: str) -> None:
        self._words = frozenset(re.findall(r"[A-Z]+", placeholder.upper()))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return what begins with what was typed; files and folders are left to the shell."""
        items = []
        if self._words & _FILES:
            items.append(CompletionItem(incomplete, type="file"))
        elif self._words & _FOLDERS:
            items.append(CompletionItem(incomplete, type="dir"))
        if self._words & _OUTPUTS:
            taken = _given(ctx, param)
            items += [CompletionItem(n) for n in output_names(ctx) if n.startswith(incomplete) and n not in taken]
        if "COMMAND" in self._words:
            items += [CompletionItem(name) for name in _commands(ctx, param) if name.startswith(incomplete)]
        return items


def complete_parameters(parameters: list[click.Parameter]) -> None:
    """Let a shell offer something for every parameter that takes a text and does not say itself what to offer."""
    for parameter in parameters:
        if type(parameter.type) is StringParamType:
            placeholder = parameter.metavar or (parameter.name or "" if isinstance(parameter, click.Argument) else "")
            parameter.type = Completed(placeholder)


def output_names(context: click.Context) -> list[str]:
    """Return the names of the outputs in the Mergefile that the command line is about, in the file's order."""
    import tomllib  # for completion alone

    session = context.find_object(Session)
    folder = Path((session.options.directory if session else None) or ".")
    try:
        named = session.options.file if session else None
        path = folder / named if named else find_mergefile(folder.absolute())
        with (folder / path).open("rb") as file:
            outputs = tomllib.loads(file.read(_LIMIT).decode()).get("outputs")
    except (OSError, ValueError, RecursionError, MergepipeError):
        return []
    names = outputs if isinstance(outputs, dict) else {}
    return [name for name in names if name.isprintable() and not re.search(r"\s", name)]


def _commands(context: click.Context, parameter: click.Parameter) -> list[str]:
    """Return the commands below the one that the words so far name."""
    command = context.find_root().command
    for word in context.params.get(parameter.name or "") or ():
        command = command.commands.get(word, context.command) if isinstance(command, click.Group) else context.command
    return list(command.commands) if isinstance(command, click.Group) else []


def _given(context: click.Context, parameter: click.Parameter) -> frozenset[str]:
    """Return what stands on the command line for this parameter already."""
    value: Any = context.params.get(parameter.name or "")
    return frozenset((value,) if isinstance(value, str) else value or ())
