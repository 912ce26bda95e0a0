"""``mergepipe status``."""

from __future__ import annotations

import click

from mergepipe.cli.command import Command
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.render import status_lines
from mergepipe.cli.session import Session, shown_path

_EXAMPLES = (
    ("mergepipe status", "all outputs, and the lock"),
    ("mergepipe status assistant", "one output"),
    ("mergepipe -C ../other status --json", "another project, for scripts"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("outputs", metavar="[OUTPUT]...", nargs=-1)
@click.pass_obj
def status(session: Session, outputs: tuple[str, ...]) -> None:
    """Show which outputs are up to date, and why others are not.

    Reads no weights. An output is up to date if a build would leave it as it is, stale if something that it is made of
    changed, and unbuilt if it was never built here.
    """
    options, console = session.options, session.console
    with make_reporter(console, options) as reporter:
        project = session.open_project(reporter)
        report = project.status(outputs)
    if options.json_output:
        console.json(report.as_json())
    else:
        console.result(status_lines(report, shown_path(project.mergefile.root)))
