"""``mergepipe diff``."""

from __future__ import annotations

from pathlib import Path

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError, as_mergepipe_error
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.session import Session, find_mergefile
from mergepipe.errors import InternalError, MergepipeError

_EXAMPLES = (
    ("mergepipe diff", "the committed lock and the one on disk"),
    ("mergepipe diff main HEAD", "two revisions"),
    ("mergepipe diff --format markdown main", "a comment for a pull request"),
    ("mergepipe diff build/a build/b --tensors", "two outputs, with their weights"),
)
_DIFFERS = 1


class _InternalDiffError(MergepipeError):
    """A promise of ours was broken, in a command whose exit code 1 says something else."""

    exit_status = 2

    @classmethod
    def kind(cls) -> str:
        """Return the kind of every such error."""
        return InternalError.kind()


def _store_format(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
    options = getattr(context.find_root().obj, "options", None)
    if value == "json" and options is not None:
        options.json_output = True  # errors, too
    return value


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("old", metavar="[OLD", required=False)
@click.argument("new", metavar="[NEW]]", required=False)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "json"]),
    metavar="FORM",
    is_eager=True,
    callback=_store_format,
    help="Print text, markdown or json.  [default: text]",
)
@click.option("--tensors", is_flag=True, help="Add the distances of the weights that differ.")
@click.option("--rev", "revisions", is_flag=True, help="Take OLD and NEW as git revisions, whatever files there are.")
@click.pass_context
def diff(
    context: click.Context, old: str | None, new: str | None, form: str | None, tensors: bool, revisions: bool
) -> None:
    """Show what differs between two locks, and why.

    OLD and NEW are lockfiles, manifests, output directories or git revisions (`main`, `HEAD~1`,
    `v1:sub/Mergefile.lock`); alone, also a range such as `main...HEAD`. A path that exists is a path; write
    `rev:NAME` for the revision. By default, the lock
    that HEAD has is compared with the one on disk.
    """
    session: Session = context.obj
    if session.options.json_output and form not in (None, "json"):
        raise UsageError(f"`--json` and `--format {form}` exclude each other", hint="give one of them")
    try:
        differs = _run(session, old, new, form, tensors=tensors, revisions=revisions)
    except BrokenPipeError:
        raise
    except Exception as error:  # 1 says that there are differences: no error may end with it
        raise _not_compared(error, debug=session.options.debug) from error
    if differs:
        context.exit(_DIFFERS)


def _not_compared(error: Exception, *, debug: bool) -> MergepipeError:
    """Return an error that says that nothing was compared: its exit code is 2 at least."""
    shown = as_mergepipe_error(error, debug=debug)
    if isinstance(shown, InternalError):
        return _InternalDiffError(shown.message, hint=shown.hint, **shown.facts)
    shown.exit_status = max(shown.exit_status, _InternalDiffError.exit_status)  # type: ignore[misc]
    return shown


def _run(
    session: Session, old: str | None, new: str | None, form: str | None, *, tensors: bool, revisions: bool
) -> bool:
    options, console = session.options, session.console
    # Commands start quickly: what compares is imported by the command that compares.
    from mergepipe.project.diff import diff as compare

    def mergefile() -> Path:
        return Path(options.file) if options.file else find_mergefile(Path.cwd())

    cache = options.cache_directory()
    with make_reporter(console, options) as reporter:
        report = compare(
            old,
            new,
            mergefile=mergefile,
            revisions=revisions,
            tensors=tensors,
            cache_dir=Path(cache) if cache is not None else None,
            reporter=reporter,
        )
    if options.json_output:
        console.json(report.as_json())
    elif form == "markdown":
        from mergepipe.cli.diff_markdown import diff_markdown

        console.result([diff_markdown(report)])
    else:
        from mergepipe.cli.diff_text import diff_lines

        console.result(diff_lines(report, verbose=options.verbose))
    return not report.diff.is_empty
