"""``mergepipe plan``."""

from __future__ import annotations

import click

from mergepipe.cli.command import Command
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.render import plan_lines
from mergepipe.cli.session import Session, shown_path

_EXAMPLES = (
    ("mergepipe plan", "what a build of all outputs would read and write"),
    ("mergepipe plan assistant -v", "one output, with the bytes of each expert"),
    ("mergepipe plan --json", "the same for scripts"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("outputs", metavar="[OUTPUT]...", nargs=-1)
@click.pass_obj
def plan(session: Session, outputs: tuple[str, ...]) -> None:
    """Show what a build would read, write and decide.

    Reads the headers of the checkpoints, no weights; but for an output with a budget the lengths of its deltas are
    measured once, and kept. A plan does not depend on the cache: what is cached already makes the build cheaper than
    shown.
    """
    options, console = session.options, session.console
    with make_reporter(console, options) as reporter:
        project = session.open_project(reporter)
        report = project.plan(outputs)
    if options.json_output:
        console.json(report.as_json())
    else:
        console.result(plan_lines(report, shown_path(project.mergefile.root), verbose=options.verbose))
