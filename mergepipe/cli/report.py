"""``mergepipe report``: a page for each built output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError
from mergepipe.cli.options import SIZE
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.session import Session, shown_path
from mergepipe.cli.tables import plain
from mergepipe.errors import CancelledError, PublishError, fail_storage, raise_collected

if TYPE_CHECKING:
    from mergepipe.project import Project
    from mergepipe.project.report_page import OutputReports

SUFFIX = ".report.html"
_HEAD_BYTES = 1024  # a page of ours says that it is one within so many
_EXAMPLES = (
    ("mergepipe report", "a page for each output, beside the Mergefile"),
    ("mergepipe report assistant -o out.html", "one output, written to a file"),
    ("mergepipe report assistant --json", "the figures for scripts; writes no page"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("outputs", metavar="[OUTPUT]...", nargs=-1)
@click.option("-o", "--output", "target", metavar="FILE", help="Write the page of one output to FILE.")
@click.option("--force", is_flag=True, help="Replace a file that is no page of a report.")
@click.option(
    "-j", "--workers", type=click.IntRange(min=1), metavar="N", help="Threads.", show_default="one per processor"
)
@click.option("--memory", type=SIZE, help="Limit the memory for weights in flight, such as '2 GiB'.")
@click.pass_obj
def report(
    session: Session, outputs: tuple[str, ...], target: str | None, force: bool, workers: int | None, memory: int | None
) -> None:
    """Write a page for each output: sources, parameters, bound, maps by layer and module, tensors, the last build.

    A page is one HTML file that needs no network, called OUTPUT.report.html, beside the Mergefile. Outputs must be
    built. What experts contributed is measured once from the weights, and kept in the cache.

    Needs matplotlib: `pip install 'mergepipe[report]'`. With --json, nothing is written unless -o says where.
    """
    options, console = session.options, session.console
    writes = not options.json_output or target is not None
    if writes:
        from mergepipe.cli.pages.maps import check_library

        check_library()
    with make_reporter(console, options) as reporter:
        project = session.open_project(reporter, workers=workers, memory=memory)
        places = _places(project, outputs, target, force=force) if writes else {}
        try:
            found = project.report(outputs)
        except KeyboardInterrupt:
            raise CancelledError("interrupted", hint="what was measured is kept for the next time") from None
    _write(found, places)
    if options.json_output:
        console.json(found.as_json())
        return
    shown = shown_path(project.mergefile.root) if target is None else str
    console.result(f"wrote {plain(shown(place.name if target is None else target))}" for place in places.values())


def _places(project: Project, outputs: tuple[str, ...], target: str | None, *, force: bool) -> dict[str, Path]:
    """Return by output where its page goes, and check that it may be written there before anything is read.

    Raises
    ------
    UsageError
        If a file is given for several pages, or cannot be one.
    PublishError
        For each file that is there and is no page of a report, unless ``force``.
    """
    names = [name for name in project.mergefile.outputs if not outputs or name in outputs]
    if target is not None and len(names) != 1:
        raise UsageError(
            f"`{target}` cannot hold the pages of {len(names)} outputs",
            hint="name one output, or leave out `--output`",
            path=target,
        )
    root = project.mergefile.root
    places = {name: root / f"{name}{SUFFIX}" if target is None else Path(target) for name in names}
    for place in places.values():
        if not place.parent.is_dir() or place.is_dir() or str(target).endswith("/"):
            what = f"`{place.parent}` is no directory" if not place.parent.is_dir() else "it is a directory"
            raise UsageError(f"`{place}` cannot be written: {what}", hint="give the path of a file", path=str(place))
    raise_collected(
        PublishError(
            f"`{place}` is there, and is no page of a report",
            hint="choose another name with `-o`, or replace it with `--force`",
            output=name,
            path=str(place),
        )
        for name, place in places.items()
        if not force and not _is_ours(place)
    )
    return places


def _is_ours(place: Path) -> bool:
    """Return whether a page may be written there: nothing is, or a page of an earlier report."""
    from mergepipe.cli.pages.report import GENERATOR

    try:
        with place.open("rb") as file:
            return GENERATOR.encode() in file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return not place.is_symlink()
    except OSError as error:
        fail_storage(error, place, "read")


def _write(found: OutputReports, places: dict[str, Path]) -> None:
    from mergepipe.fsio.durable import replace_file

    if not places:
        return
    from mergepipe.cli.pages.report import page

    pages = {name: page(found.outputs[name]).encode("utf-8") for name in places}
    for name, place in places.items():
        replace_file(place, pages[name])
