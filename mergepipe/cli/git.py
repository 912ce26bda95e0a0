"""``mergepipe git``: drivers for the lock, and the check of a hook."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command, Group, show_help_if_alone
from mergepipe.cli.errors import UsageError
from mergepipe.cli.session import MERGEFILE, Session, find_mergefile
from mergepipe.cli.tables import plain
from mergepipe.errors import MergefileError, MergepipeError, raise_collected

if TYPE_CHECKING:
    from mergepipe.project.git_setup import SetupReport

_EXAMPLES = (
    ("mergepipe git setup", "show and merge locks with mergepipe"),
    ("mergepipe git check", "does the lock go with the Mergefile?"),
)
_SETUP_EXAMPLES = (
    ("mergepipe git setup", "register the drivers in this repository"),
    ("mergepipe git setup --check", "are they registered?"),
    ("mergepipe git setup --remove", "take them out again"),
)
_CHECK_EXAMPLES = (
    ("mergepipe git check", "this project"),
    ("mergepipe git check Mergefile.lock", "as a hook calls it"),
)
_DIFF_EXAMPLES = (
    ("mergepipe git diff-driver --help", "git calls it with seven arguments"),
    ("mergepipe diff HEAD~1", "what to use by hand"),
)
_MERGE_EXAMPLES = (
    ("mergepipe git merge-driver --help", "git calls it with four arguments"),
    ("mergepipe build", "what to use by hand: it writes the lock anew"),
)
_UNMERGED = 1  # arguments that git gives for a path with a conflict


@click.group(cls=Group, examples=_EXAMPLES)
@click.pass_context
def git(context: click.Context) -> None:
    """Let git show and merge locks, and check them."""
    show_help_if_alone(context)


@git.command("setup", cls=Command, examples=_SETUP_EXAMPLES)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if something is missing.")
@click.option("--remove", is_flag=True, help="Undo it.")
@click.pass_context
def setup(context: click.Context, check: bool, remove: bool) -> None:
    """Register a diff driver and a merge driver for Mergefile.lock.

    Writes the configuration of this clone (`git config --local`) and a line of .gitattributes, which is to be
    committed. Whoever clones the repository runs it, too; without it git treats the lock as any text.
    """
    if check and remove:
        raise UsageError("`--check` and `--remove` exclude each other", hint="give one of them")
    session: Session = context.obj
    from mergepipe.project import git_setup

    directory, lock_name = _place(session)
    if check:
        report = git_setup.check_setup(directory, lock_name)
    elif remove:
        report = git_setup.remove_setup(directory)
    else:
        report = git_setup.set_up(directory, lock_name)
    if session.options.json_output:
        session.console.json(report.as_json())
    else:
        session.console.result(_setup_lines(report, removed=remove))
    if report.missing:
        context.exit(1)


def _place(session: Session) -> tuple[Path, str]:
    """Return the folder of the Mergefile, or the current one if there is none yet, and the name of the lock."""
    try:
        path = Path(session.options.file) if session.options.file else find_mergefile(Path.cwd())
    except MergefileError:
        path = Path(MERGEFILE)
    return path.absolute().parent, path.with_suffix(".lock").name


def _setup_lines(report: SetupReport, *, removed: bool) -> Iterator[str]:
    root = plain(str(report.root))
    for key in report.changed:
        yield f"{'removed' if removed else 'set'} {plain(key)}"
    for key in report.missing:
        yield f"missing {plain(key)}"
    if removed:
        yield f"git treats locks in `{root}` as text{'' if report.changed else ': there was nothing to remove'}"
    elif not report.missing:
        yield f"git shows and merges locks in `{root}` with mergepipe"
    elif report.changed:
        yield "another line of .gitattributes is in the way"
    else:
        yield "`mergepipe git setup` registers what is missing"


@git.command("check", cls=Command, examples=_CHECK_EXAMPLES)
@click.argument("files", metavar="[FILE]...", nargs=-1)
@click.pass_obj
def check(session: Session, files: tuple[str, ...]) -> None:
    """Check that a lock goes with its Mergefile; opens no checkpoint.

    FILEs are Mergefiles or their locks; by default the project's. Whether the sources still have the content that the
    lock says, only `mergepipe build --locked` can tell.
    """
    if session.options.file and files:
        raise UsageError("`--file` and FILE exclude each other", hint="give one of them")
    mergefiles: list[Path | None] = list(dict.fromkeys(Path(file).with_suffix(".toml") for file in files))
    errors: list[MergepipeError] = []
    checked = []
    for path in mergefiles or (None,):
        try:
            checked.append(_check(session, path))
        except MergepipeError as error:
            errors.append(error)
    raise_collected(errors)
    if session.options.json_output:
        session.console.json({"checked": checked})
    else:
        session.console.result([f"{plain(path)} goes with its Mergefile" for path in checked])


def _check(session: Session, mergefile: Path | None) -> str:
    from mergepipe.project.git_check import check_lock, refuse

    if mergefile is None:
        mergefile = Path(session.options.file) if session.options.file else find_mergefile(Path.cwd())
    found = check_lock(mergefile)
    shown = str(found.path)
    refuse(found, shown)
    return shown


@git.command("diff-driver", cls=Command, examples=_DIFF_EXAMPLES)
@click.argument("arguments", metavar="PATH OLD HEX MODE NEW HEX MODE", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def diff_driver(session: Session, arguments: tuple[str, ...]) -> None:
    """Show the difference of two locks to git, which calls this."""
    if len(arguments) == _UNMERGED:
        session.console.help(f"* Unmerged path {plain(arguments[0])}")
        return
    if len(arguments) < 7:
        raise UsageError(f"expected 7 arguments, got {len(arguments)}", hint="git calls this; use `mergepipe diff`")
    from mergepipe.cli.diff_text import diff_lines
    from mergepipe.project.git_diff import compare_files

    report, is_coloured = compare_files(arguments, is_terminal=_is_seen())
    if is_coloured and session.options.color == "auto":
        session.options.color = "always"
    session.console.help("\n".join(diff_lines(report, verbose=session.options.verbose)))


def _is_seen() -> bool:
    """Return whether somebody looks: at a terminal, or through git's pager."""
    return bool(sys.stdout and sys.stdout.isatty()) or os.environ.get("GIT_PAGER_IN_USE") in ("1", "true")


@git.command("merge-driver", cls=Command, examples=_MERGE_EXAMPLES)
@click.argument("base")
@click.argument("ours")
@click.argument("theirs")
@click.argument("name", metavar="PATH")
@click.pass_context
def merge_driver(context: click.Context, base: str, ours: str, theirs: str, name: str) -> None:
    """Merge two locks for git, which calls this.

    Entries that one side changed are taken from it. If both changed one, or the result would contradict itself, the
    lock gets conflict marks and the exit code is 1: a build writes it anew.
    """
    from mergepipe.project.git_merge import merge_lock_files

    session: Session = context.obj
    problems = merge_lock_files(Path(base), Path(ours), Path(theirs), name)
    if problems:
        session.console.warn(_how_to_resolve(name, problems))
        context.exit(1)


def _how_to_resolve(name: str, problems: Sequence[str]) -> str:
    mergefile = Path(name).with_suffix(".toml")
    shown = [*problems[:5], *([f"and {len(problems) - 5:,} more"] if len(problems) > 5 else [])]
    steps = (
        f"resolve `{mergefile}` if it has a conflict, then write the lock anew:",
        f"rm {shlex.quote(name)} && mergepipe build && git add {shlex.quote(name)}",
    )
    return "\n".join((f"`{name}` cannot be merged", *(f"  {line}" for line in (*shown, *steps))))
