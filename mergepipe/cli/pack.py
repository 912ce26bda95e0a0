"""``mergepipe pack``: an expert as a progressive checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError
from mergepipe.cli.options import SIZE
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.session import Session, find_mergefile
from mergepipe.cli.tables import duration, fact, figures, plain, share
from mergepipe.errors import CancelledError, MergefileError
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.pack import PackReport

_EXAMPLES = (
    ("mergepipe pack math --base base --out math-progressive", "sources of the Mergefile"),
    ("mergepipe pack ./math --base ./qwen --out packed", "checkpoints, without a Mergefile"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("source", metavar="SOURCE")
@click.option("--base", required=True, metavar="BASE", help="The checkpoint that SOURCE was trained from.")
@click.option("--out", required=True, metavar="DIR", help="Put the progressive checkpoint here.")
@click.option("--force", is_flag=True, help="Replace the weights in a directory that is no progressive checkpoint.")
@click.option(
    "-j", "--workers", type=click.IntRange(min=1), metavar="N", help="Threads.", show_default="one per processor"
)
@click.option("--memory", type=SIZE, help="Limit the memory for weights in flight, such as '2 GiB'.")
@click.pass_obj
def pack(
    session: Session, source: str, base: str, out: str, force: bool, workers: int | None, memory: int | None
) -> None:
    """Write an expert as a progressive checkpoint, which can be merged from a part of its bytes.

    SOURCE and BASE are names of sources in the Mergefile, if there is one, or paths of checkpoints. Both are read once.
    Another machine that has the base declares the directory as a source (`progressive = "DIR"`), and its budgets decide
    how much of it is read; it does not need SOURCE.
    """
    options, console = session.options, session.console
    target = _path(out)
    # What packs takes its time to import, which `--help` must not.
    from mergepipe.project.pack import PackOptions
    from mergepipe.project.pack import pack as run

    how = PackOptions(force=force, workers=workers, memory=memory)
    with make_reporter(console, options) as reporter:
        try:
            report = run(source, base, target, how, reporter, _mergefile(session))
        except KeyboardInterrupt:
            raise CancelledError("interrupted", hint="nothing was written") from None
    if options.json_output:
        console.json(report.as_json())
    else:
        console.result(_lines(report, out))


def _path(text: str) -> Path:
    if "\0" in text or not text:
        raise UsageError(f"`{plain(text)}` is not a path", hint="give the path of a directory")
    return Path(os.path.normpath(os.path.abspath(os.path.expanduser(text))))  # noqa: PTH100, PTH111 - links stay


def _mergefile(session: Session) -> Path | None:
    """Return the Mergefile that the options name, else the nearest one, None if there is none."""
    if session.options.file:
        return Path(session.options.file)
    try:
        return find_mergefile(Path.cwd())
    except MergefileError:
        return None


def _lines(report: PackReport, out: str) -> Iterator[str]:
    yield f"{click.style(plain(out), bold=True)}: {click.style('packed', fg='green')} in {duration(report.seconds)}"
    counts = [f"{format_count(report.coded, 'tensor')} as codes", f"{report.exact:,} exactly"]
    yield from fact("tensors", counts)
    total = f"{format_bytes(report.total_bytes)}, {share(report.total_bytes, report.expert_bytes)} of the expert"
    yield from fact("size", [total])
    rows = [
        [
            f"{one.bits} bit" if one.bits == 1 else f"{one.bits} bits",
            format_bytes(one.bytes),
            share(one.bytes, report.expert_bytes),
            "none" if one.error is None else f"{one.error:.2%}",
        ]
        for one in report.levels
    ]
    yield from figures("levels", ["bytes", "share", "missing"], rows)
    yield from fact("base", [report.base])
    yield from fact("expert", [report.expert])
    yield from fact("use", [f'`progressive = "{plain(out)}"` in the place of the `path` of a source'])
