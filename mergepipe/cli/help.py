"""``mergepipe help``: the manual page of a command."""

from __future__ import annotations

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError, suggestion
from mergepipe.cli.session import Session

_EXAMPLES = (
    ("mergepipe help", "what commands there are"),
    ("mergepipe help build", "the manual of one, as `mergepipe build --help`"),
    ("mergepipe help cache prune", "the manual of a command of a command"),
)


@click.command("help", cls=Command, examples=_EXAMPLES)
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def help_(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the manual of a command: options, exit codes, files, environment, examples.

    Without a command, says which there are.
    """
    session = context.find_object(Session)
    assert session is not None, "the command line has one"
    found = _found(context.find_root(), words)
    text = found.get_help()
    if session.options.json_output:
        session.console.json({"command": found.command_path, "help": click.unstyle(text)})
    else:
        session.console.help(text)


def _found(context: click.Context, words: tuple[str, ...]) -> click.Context:
    """Return a context of the command that the words name, below the one of ``context``.

    Raises
    ------
    UsageError
        If there is no such command.
    """
    for word in words:
        command = context.command
        known = command.commands if isinstance(command, click.Group) else {}
        if word not in known:
            raise UsageError(
                f"no such command: `{context.command_path} {word}`",
                hint=suggestion(word, known) or (f"commands are: {', '.join(known)}" if known else None),
            )
        context = click.Context(known[word], info_name=word, parent=context)
    return context
