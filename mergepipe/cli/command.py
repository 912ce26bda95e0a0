"""What our commands have in common: global options, the sections of their manual, completion, and ``-C``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import click

from mergepipe.cli.completing import complete_parameters
from mergepipe.cli.errors import UsageError, suggestion
from mergepipe.cli.help_facts import VARIABLES, manual_of
from mergepipe.cli.options import GlobalOption, global_options
from mergepipe.cli.session import Session

Examples = Sequence[tuple[str, str]]
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 82}


class Command(click.Command):
    """A command with the global options.

    Parameters
    ----------
    examples
        Command lines with what they do, shown by ``--help``.
    """

    def __init__(self, *arguments: Any, examples: Examples = (), **attributes: Any) -> None:
        super().__init__(*arguments, **_with_common(attributes))
        complete_parameters(self.params)
        self.examples = examples

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command in the directory that ``-C`` names."""
        with _entered(ctx.find_object(Session)):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, then the global ones."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the further sections of the manual."""
        _write_manual(ctx, self.examples, formatter)


class Group(click.Group):
    """Commands under one name, with the global options; without a command it shows its help."""

    def __init__(self, *arguments: Any, examples: Examples = (), **attributes: Any) -> None:
        attributes = _with_common(attributes) | {"invoke_without_command": True, "subcommand_metavar": "COMMAND"}
        super().__init__(*arguments, **attributes)
        complete_parameters(self.params)
        self.examples = examples

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name.

        Raises
        ------
        UsageError
            If there is no such command.
        """
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            raise UsageError(
                f"no such command: `{name}`",
                hint=suggestion(name, self.commands) or f"commands are: {', '.join(self.commands)}",
            )
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which people need them."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with the whole first sentence of each."""
        rows = [(name, self.commands[name].get_short_help_str(limit=1000)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the further sections of the manual."""
        _write_manual(ctx, self.examples, formatter)


def show_help_if_alone(context: click.Context) -> None:
    """Show the help of a group that was called without a command.

    Raises
    ------
    UsageError
        With ``--json``, which help is not.
    """
    session = context.find_object(Session)
    if session is None or context.invoked_subcommand is not None:
        return
    if session.options.json_output:
        raise UsageError("no command is given", hint=f"see `{context.command_path} --help`")
    session.console.help(context.get_help())


def _with_common(attributes: dict[str, Any]) -> dict[str, Any]:
    parameters = [*(attributes.pop("params", None) or ()), *global_options()]
    return attributes | {"params": parameters, "context_settings": _SETTINGS}


@contextlib.contextmanager
def _entered(session: Session | None) -> Iterator[None]:
    directory = session.options.directory if session else None
    with contextlib.ExitStack() as stack:
        if directory is not None:
            try:
                stack.enter_context(contextlib.chdir(directory))
            except OSError as error:
                raise UsageError(f"cannot work in `{directory}`: {error.strerror}", path=directory) from None
        yield


def _write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    own: list[tuple[str, str]] = []
    common: list[tuple[str, str]] = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None and isinstance(parameter, click.Option):
            shared = isinstance(parameter, GlobalOption) or parameter.opts[-1] in ("--help", "--version")
            (common if shared else own).append(record)
    for title, records in (("Options", own), ("Global options", common)):
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def _write_manual(ctx: click.Context, examples: Examples, formatter: click.HelpFormatter) -> None:
    manual = manual_of(ctx.command_path.partition(" ")[2])
    sections = (
        ("Exit codes", manual.codes()),
        ("Files", manual.files),
        ("Environment", [(name, VARIABLES[name]) for name in manual.environment]),
        ("Examples", examples),
    )
    for title, rows in sections:
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows, col_max=46)
    if manual.see_also:
        with formatter.section("See also"):
            for line in manual.see_also:  # as they are: a wrapped command or path is none
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")
