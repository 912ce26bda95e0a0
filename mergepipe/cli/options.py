"""The options that every command takes, before its name or after it, and the types of option values."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from mergepipe.units import parse_age, parse_size
from mergepipe.values import dataclass

CACHE_VARIABLE = "MERGEPIPE_CACHE_DIR"


@dataclass(slots=True)
class GlobalOptions:
    """What the global options say.

    The one value here that changes: options fill it in as they are parsed, so that an error in the middle of the
    command line is shown as asked for by what stands before.
    """

    directory: str | None = None
    file: str | None = None
    cache_dir: str | None = None
    json_output: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    debug: bool = False
    allow_custom: bool = False

    def cache_directory(self) -> str | None:
        """Return the cache directory that the command line asks for, else the environment."""
        named = self.cache_dir or os.environ.get(CACHE_VARIABLE)
        return os.path.expanduser(named) if named else None  # noqa: PTH111 - as the Mergefile does it


class GlobalOption(click.Option):
    """An option that sets a field of `GlobalOptions`; the later of two on one command line wins."""

    def __init__(self, *declarations: str, **attributes: Any) -> None:
        super().__init__(declarations, expose_value=False, is_eager=True, callback=_store, **attributes)


def _store(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    options = getattr(context.find_root().obj, "options", None)
    # A flag that is absent is False: it takes nothing back.
    if options is not None and value not in (None, False):
        setattr(options, str(parameter.name), value)


def global_options() -> list[click.Parameter]:
    """Return the global options, new ones for each command."""
    return [
        GlobalOption("-C", "directory", metavar="DIR", help="Work as if started in DIR."),
        GlobalOption("-f", "--file", metavar="FILE", help="Use this Mergefile.  [default: the nearest Mergefile.toml]"),
        GlobalOption("--cache-dir", metavar="DIR", help=f"Keep the cache here.  [env: {CACHE_VARIABLE}]"),
        GlobalOption("--json", "json_output", is_flag=True, help="Print one JSON object; errors are JSON too."),
        GlobalOption("-q", "--quiet", is_flag=True, help="Print errors only."),
        GlobalOption("-v", "--verbose", is_flag=True, help="Print more."),
        GlobalOption(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            metavar="WHEN",
            help="Colour the output: auto, always or never.  [default: auto]",
        ),
        GlobalOption(
            "--allow-custom", is_flag=True, help="Run the code of custom operators.  [env: MERGEPIPE_ALLOW_CUSTOM]"
        ),
        GlobalOption("--debug", is_flag=True, help="Print the traceback of an error."),
    ]


if TYPE_CHECKING:
    _SizeType = click.ParamType[int]
    _AgeType = click.ParamType[float]
else:
    _SizeType = _AgeType = click.ParamType  # not generic before click 8.5


class _Size(_SizeType):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes of ``512 MiB``."""
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()


class _Age(_AgeType):
    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds of ``12h``."""
        try:
            return parse_age(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


AGE = _Age()
