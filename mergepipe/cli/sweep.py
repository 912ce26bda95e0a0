"""``mergepipe sweep``: what budgets come to for one output, as a table, CSV, a picture and a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError
from mergepipe.cli.options import SIZE
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.session import Session
from mergepipe.cli.tables import plain
from mergepipe.errors import CancelledError

if TYPE_CHECKING:
    from mergepipe.project.sweep_report import SweepReport

_BUDGETS = "0,5,10,25,50,75,100"
_EXAMPLES = (
    ("mergepipe sweep assistant", "bytes, blocks and bound of some budgets"),
    ("mergepipe sweep assistant --measure", "and how far each merge really is"),
    ("mergepipe sweep assistant --budgets '0,5,...,100,2 GB'", "in percent and bytes"),
    ("mergepipe sweep assistant --html sweep.html", "a page to look at"),
    ("mergepipe sweep assistant --eval 'python eval.py'", "figures of each model"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("output")
@click.option("--budgets", default=_BUDGETS, metavar="LIST", help=f"Percentages and sizes.  [default: {_BUDGETS}]")
@click.option("--measure", is_flag=True, help="Compute how far each merge is from the full read; writes no output.")
@click.option("--precision", type=click.Choice(["blocks", "levels"]), help="One of them alone.  [default: both]")
@click.option("--eval", "command", metavar="CMD", help="Build each model, run CMD on it, add the figures it prints.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write the table as CSV.")
@click.option("--plot", "plot_file", metavar="FILE", help="Draw the errors, as .png or .svg; needs matplotlib.")
@click.option("--html", "html_file", metavar="FILE", help="Write a page: curves, what is read first, what loses most.")
@click.option(
    "-j", "--workers", type=click.IntRange(min=1), metavar="N", help="Threads.", show_default="one per processor"
)
@click.option("--memory", type=SIZE, help="Limit the memory for weights in flight, such as '2 GiB'.")
@click.pass_obj
def sweep(
    session: Session,
    output: str,
    budgets: str,
    measure: bool,
    precision: str | None,
    command: str | None,
    csv_file: str | None,
    plot_file: str | None,
    html_file: str | None,
    workers: int | None,
    memory: int | None,
) -> None:
    """Show what budgets come to for OUTPUT: bytes, blocks, bounds and errors.

    The budget that the Mergefile gives it does not matter, and nothing is published. Each budget buys whole blocks,
    and beside that levels of them. The first sweep reads all weights once, to measure and code the deltas; --measure
    and --eval read them again.

    CMD gets the directory of a model in the place of {}, or behind it. The last line that it prints counts: a JSON
    object of numbers, `name value` pairs, or one number.
    """
    _check_files(csv_file, plot_file, html_file)
    from mergepipe.project.evaluate import Command as Evaluation

    evaluation = Evaluation.parse(command, Path.cwd()) if command is not None else None
    options, console = session.options, session.console
    with make_reporter(console, options) as reporter:
        project = session.open_project(reporter, workers=workers, memory=memory)
        try:
            report = project.sweep(
                output,
                budgets.split(","),
                measure=measure,
                mapped=html_file is not None,
                command=evaluation,
                precision=precision,
            )
        except KeyboardInterrupt:
            raise CancelledError("interrupted", hint="what was measured is kept for the next sweep") from None
    written = _write_files(report, csv_file, plot_file, html_file)
    if options.json_output:
        console.json(report.as_json())
        return
    from mergepipe.cli.pages.columns import sweep_lines

    console.result([*sweep_lines(report, verbose=options.verbose), *(f"wrote {plain(path)}" for path in written)])


def _check_files(csv_file: str | None, plot_file: str | None, html_file: str | None) -> None:
    """Check what can be checked of the files before anything is read.

    Raises
    ------
    UsageError
        If one could not be written.
    """
    if plot_file is not None:
        from mergepipe.cli.pages.picture import check_picture

        check_picture(plot_file)
    for path in filter(None, (csv_file, plot_file, html_file)):
        folder = Path(path).parent
        if not folder.is_dir() or Path(path).is_dir():
            what = f"`{folder}` is no directory" if not folder.is_dir() else "it is a directory"
            raise UsageError(f"`{path}` cannot be written: {what}", hint="give the path of a file", path=path)


def _write_files(
    report: SweepReport, csv_file: str | None, plot_file: str | None, html_file: str | None
) -> list[str]:
    """Write the files that were asked for, each whole or not at all, and return their paths."""
    from mergepipe.cli.pages.columns import csv_text
    from mergepipe.fsio.durable import replace_file

    written = []
    if csv_file is not None:
        replace_file(Path(csv_file), csv_text(report).encode())
        written.append(csv_file)
    if plot_file is not None:
        from mergepipe.cli.pages.picture import picture

        replace_file(Path(plot_file), picture(report, Path(plot_file).suffix[1:].lower()))
        written.append(plot_file)
    if html_file is not None:
        from mergepipe.cli.pages.page import page

        replace_file(Path(html_file), page(report).encode())
        written.append(html_file)
    return written
