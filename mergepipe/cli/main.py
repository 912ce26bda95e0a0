"""The command ``mergepipe``: its group of commands, and how each run of it ends.

Nothing here, or imported from here at start, imports numpy, networkx, torch, rich or msgspec: `--help` and `--version`
take no longer than click does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

import click

from mergepipe._version import __version__
from mergepipe.cli.build import build
from mergepipe.cli.cache import cache
from mergepipe.cli.command import Group, show_help_if_alone
from mergepipe.cli.completion import VARIABLE as COMPLETION
from mergepipe.cli.completion import completion
from mergepipe.cli.console import discard
from mergepipe.cli.diff import diff
from mergepipe.cli.errors import as_mergepipe_error
from mergepipe.cli.explain import explain
from mergepipe.cli.git import git
from mergepipe.cli.help import help_
from mergepipe.cli.import_ import import_
from mergepipe.cli.init import init
from mergepipe.cli.options import GlobalOptions
from mergepipe.cli.pack import pack
from mergepipe.cli.plan import plan
from mergepipe.cli.replay import replay
from mergepipe.cli.report import report
from mergepipe.cli.session import Session
from mergepipe.cli.status import status
from mergepipe.cli.sweep import sweep
from mergepipe.cli.verify import verify

_EXAMPLES = (
    ("mergepipe init", "write a Mergefile for the checkpoints found here"),
    ("mergepipe plan", "see what a build would read"),
    ("mergepipe build", "build all outputs"),
    ("mergepipe help build", "read about one command"),
)


@click.group(cls=Group, examples=_EXAMPLES)
@click.version_option(__version__, prog_name="mergepipe", message="%(prog)s %(version)s")
@click.pass_context
def mergepipe(context: click.Context) -> None:
    """Build merged model checkpoints from a Mergefile, rereading and recomputing only what changed."""
    show_help_if_alone(context)


_COMMANDS = (
    init, import_, build, plan, sweep, status, explain, report,
    diff, verify, replay, pack, git, cache, completion, help_,
)  # fmt: skip
for command in _COMMANDS:
    mergepipe.add_command(command)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Parameters
    ----------
    argv
        The arguments after the program's name; those of the process by default.
    """
    if COMPLETION in os.environ:
        mergepipe.main(prog_name="mergepipe", obj=Session(GlobalOptions()))
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    Whatever ends the command is shown on stderr as `error: ...`; 0 done, 1 failed, 2 the input is wrong, 3 the lock
    differs, 130 interrupted.
    """
    _write_any_name()
    # An error in the command line itself is found before its options are handled.
    given = itertools.takewhile(lambda argument: argument != "--", argv)
    session = Session(GlobalOptions(json_output="--json" in given))
    try:
        with mergepipe.make_context("mergepipe", list(argv), obj=session) as context:
            mergepipe.invoke(context)
    except click.exceptions.Exit as done:  # `--help` and `--version`
        return done.exit_code
    except BrokenPipeError:
        discard(sys.stdout)
        return 1  # whoever read our output has left: there is nobody to tell
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last place where it can be told in words
        return _fail(session, error)
    return 0


def _fail(session: Session, error: BaseException) -> int:
    debug = session.options.debug
    shown = as_mergepipe_error(error, debug=debug)
    if debug:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    session.console.error(shown)
    return shown.exit_status


def _write_any_name() -> None:
    """Escape what a stream's encoding lacks, instead of failing over the name of a file."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
