"""``mergepipe replay``: an output made again from its manifest and the sources alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError
from mergepipe.cli.options import SIZE
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.session import Session
from mergepipe.cli.tables import duration, fact, plain
from mergepipe.errors import CancelledError
from mergepipe.units import budget_words, format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.replay_report import ReplayReport

_EXAMPLES = (
    ("mergepipe replay build/assistant --check", "is it what its manifest says?"),
    ("mergepipe replay build/assistant --out again", "make it once more"),
    ("mergepipe replay mergepipe.json --source math=/models/math", "a source is elsewhere"),
    ("mergepipe replay mergepipe.json --base-dir ~/project", "relative paths start there"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("manifest", metavar="MANIFEST")
@click.option("--out", metavar="DIR", help="Put the output here.  [default: replayed/NAME]")
@click.option("--check", is_flag=True, help="Compare only; write no output.")
@click.option("--source", "sources", metavar="NAME=PATH", multiple=True, help="Read this source from PATH; repeatable.")
@click.option("--base-dir", metavar="DIR", help="Relative paths of sources start here, where the Mergefile was.")
@click.option("--operators", "code", metavar="DIR", help="The files of custom operators are here.")
@click.option("--force", is_flag=True, help="Replace a directory that holds something else.")
@click.option(
    "-j", "--workers", type=click.IntRange(min=1), metavar="N", help="Threads.", show_default="one per processor"
)
@click.option("--memory", type=SIZE, help="Limit the memory for weights in flight, such as '2 GiB'.")
@click.pass_obj
def replay(
    session: Session,
    manifest: str,
    out: str | None,
    check: bool,
    sources: tuple[str, ...],
    base_dir: str | None,
    code: str | None,
    force: bool,
    workers: int | None,
    memory: int | None,
) -> None:
    """Make an output again from its manifest and the sources alone, and compare.

    MANIFEST is a `mergepipe.json` or the directory that it is in. No Mergefile, lock or cache is needed or used. Every
    source tensor is compared with the manifest as it is read; nothing is published unless every tensor, block and shard
    has the digest that the manifest states.

    The work is done beside the output (with --check in the folder for temporary files), or in --cache-dir, in a folder
    that is removed at the end; it takes the room of the output and of the outputs that it is made from.
    """
    if check and out is not None:
        raise UsageError("`--check` writes no output, and `--out` says where to put it", hint="give one of them")
    options, console = session.options, session.console
    scratch = options.cache_directory()
    given = _sources(sources)
    # The pipeline takes its time to import, which `--help` must not.
    from mergepipe.project.replay import ReplayOptions
    from mergepipe.project.replay import replay as run
    from mergepipe.project.replay_plan import Places

    places = Places(
        base_dir=_folder("--base-dir", base_dir),
        sources=given,
        code=_folder("--operators", code),
        allow_custom=options.allow_custom,
    )
    how = ReplayOptions(
        out=None if out is None else _path(out),
        check=check,
        force=force,
        scratch=None if scratch is None else _path(scratch),
        workers=workers,
        memory=memory,
    )
    with make_reporter(console, options) as reporter:
        try:
            report = run(_path(manifest), places, how, reporter)
        except KeyboardInterrupt:
            raise CancelledError("interrupted", hint="nothing was published") from None
        for warning in _warnings(report):
            reporter.warn(warning)
    if options.json_output:
        console.json(report.as_json())
    else:
        console.result(_lines(report, verbose=options.verbose))


def _path(text: str) -> Path:
    """Return a path as a user writes it; the shell leaves ``~`` alone in ``math=~/models``."""
    if "\0" in text or not text:
        raise UsageError(f"`{plain(text)}` is not a path", hint="give the path of a file or a folder")
    return Path(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111 - links and unknown users stay


def _folder(option: str, text: str | None) -> Path | None:
    if text is None:
        return None
    path = _path(text)
    if not path.is_dir():
        raise UsageError(f"`{option}`: there is no directory `{path}`", hint="give a directory", path=str(path))
    return path


def _sources(given: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UsageError(f"`--source {text}` names no source and path", hint="write `--source NAME=PATH`")
        if name in found:
            raise UsageError(f"`--source {name}=...` is given twice", hint="give one path for each source", source=name)
        found[name] = _path(path)
    return found


def _warnings(report: ReplayReport) -> Iterator[str]:
    """Yield what is not as it was beside the weights, which are."""
    if missing := report.side_files["missing"]:
        yield f"the sources lack files that the output had beside its weights: {', '.join(missing)}"
    if extra := report.side_files["extra"]:
        yield f"left out, because the output did not have them: {', '.join(extra)}"
    if report.generated:
        yield f"what is written about the output itself differs, its weights do not: {', '.join(report.generated)}"


def _lines(report: ReplayReport, *, verbose: bool) -> Iterator[str]:
    name, state = click.style(plain(report.name), bold=True), click.style("equal", fg="green")
    yield f"{name} ({plain(report.operator)}): {state} in {duration(report.seconds)}"
    yield from fact("path", [plain(report.path) if report.path is not None else "none: compared only"])
    sources = format_count(len(report.sources), "source")
    tensors, blocks = format_count(report.inputs, "tensor"), format_count(report.input_blocks, "block")
    yield from fact("inputs", [f"{sources} with the digests of the manifest: {tensors}, {blocks}"])
    if verbose:
        for name, digest in report.sources.items():
            yield from fact("", [f"{plain(name)} {digest}"])
    if report.stages:
        yield from fact("stages", [plain(name) for name in report.stages])
    counts = [format_count(report.tensors, "tensor"), format_count(report.blocks, "block")]
    yield from fact("result", [f"equal in {counts[0]}", counts[1], format_count(report.shards, "shard")])
    equal = report.side_files["equal"]
    yield from fact("files", [f"{format_count(len(equal), 'file')} beside the weights: equal" if equal else "none"])
    if report.budget != "full":
        yield from fact("budget", [f"{plain(budget_words(report.budget))}: the blocks that were read then"])
    reads = [f"{label} {format_bytes(report.bytes[label])}" for label in ("experts", "base", "index")]
    yield from fact("read", reads)
    yield from fact("digest", [report.digest])
