"""``mergepipe plan``."""

from __future__ import annotations

import click

from mergepipe.cli.command import Command
from mergepipe.cli.options import SIZE
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.render_plan import plan_lines
from mergepipe.cli.session import Session, shown_path

_EXAMPLES = (
    ("mergepipe plan", "what a build of all outputs would read and write"),
    ("mergepipe plan assistant -v", "one output, with blocks by expert and more of the tensors that lose most"),
    ("mergepipe plan --memory '2 GiB'", "the memory that `build --memory '2 GiB'` takes"),
    ("mergepipe plan --json", "the same for scripts"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("outputs", metavar="[OUTPUT]...", nargs=-1)
@click.option(
    "-j", "--workers", type=click.IntRange(min=1), metavar="N", help="Threads.", show_default="one per processor"
)
@click.option("--memory", type=SIZE, help="The limit that the build is given, such as '2 GiB'.")
@click.pass_obj
def plan(session: Session, outputs: tuple[str, ...], workers: int | None, memory: int | None) -> None:
    """Show what a build reads, writes and decides, and what it takes.

    Reads the headers of the checkpoints, no weights; but for an output with a budget the lengths of its deltas are
    measured once, and kept. What is planned does not depend on the cache; what of it the next build still has to read
    does, and is shown beside it.
    """
    options, console = session.options, session.console
    with make_reporter(console, options) as reporter:
        project = session.open_project(reporter, workers=workers, memory=memory)
        report = project.plan(outputs)
    if options.json_output:
        console.json(report.as_json())
    else:
        console.result(plan_lines(report, shown_path(project.mergefile.root), verbose=options.verbose))
