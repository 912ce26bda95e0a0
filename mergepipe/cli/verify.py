"""``mergepipe verify``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.session import Session, find_mergefile
from mergepipe.cli.tables import duration, fact, plain
from mergepipe.errors import MergefileError
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.verify import VerifyOptions
    from mergepipe.project.verify_report import Problem, VerifiedOutput, VerifiedSource, VerifyReport
    from mergepipe.reporting import Reporter

_SHOWN = 20  # problems of one output
_EXAMPLES = (
    ("mergepipe verify", "all outputs, the lock and the cached packs"),
    ("mergepipe verify assistant --full", "one output, and its sources"),
    ("mergepipe verify ./copy-of-assistant", "a directory alone, on any machine"),
    ("mergepipe verify --rebuild-sample 5%", "make some blocks again, too"),
)


if TYPE_CHECKING:
    _PercentType = click.ParamType[float]
    _PlaceType = click.ParamType[tuple[str, Path]]
else:
    _PercentType = _PlaceType = click.ParamType  # not generic before click 8.5


class _Percent(_PercentType):
    name = "P"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the percentage of ``5%`` or ``5``."""
        try:
            percent = float(str(value).strip().removesuffix("%"))
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            self.fail(f"`{value}` is not a percentage: it must be more than 0 and at most 100, such as 5%", param, ctx)
        return percent


class _Place(_PlaceType):
    name = "NAME=PATH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        """Return name and path of ``math=/models/math``."""
        name, equals, path = str(value).partition("=")
        if not (name and equals and path):
            self.fail(f"`{value}` names no source and path: write NAME=PATH", param, ctx)
        return name, Path(path)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("targets", metavar="[OUTPUT|DIR]...", nargs=-1)
@click.option("--full", is_flag=True, help="Hash the sources too, and compare them with the lock.")
@click.option("--rebuild-sample", type=_Percent(), help="Make P% of the blocks again from the sources.")
@click.option("--source", "sources", type=_Place(), multiple=True, help="Make them from NAME at PATH; repeatable.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Choose these blocks by N.")
@click.option("--signature", is_flag=True, help="Verify the signatures of the directories.")
@click.option(
    "--public-key",
    metavar="FILE",
    envvar="MERGEPIPE_PUBLIC_KEY",
    help="The key to verify signatures with.  [env: MERGEPIPE_PUBLIC_KEY]",
)
@click.option(
    "-j", "--workers", type=click.IntRange(min=1), metavar="N", help="Threads.", show_default="one per processor"
)
@click.pass_context
def verify(
    context: click.Context,
    targets: tuple[str, ...],
    full: bool,
    rebuild_sample: float | None,
    sources: tuple[tuple[str, Path], ...],
    seed: int | None,
    signature: bool,
    public_key: str | None,
    workers: int | None,
) -> None:
    """Check every byte of outputs against what was written.

    Hashes the files of outputs and compares them with their manifests; in a project also the lock and the cached packs.
    A name is that of an output; what has a slash in it, or is no output, is a directory with a `mergepipe.json`, which
    needs nothing else. Names what differs, changes nothing, and ends with exit code 1 if anything does.
    """
    session: Session = context.obj
    _check_sample_options(rebuild_sample, sources, seed)
    from mergepipe.project.verify import VerifyOptions

    options = VerifyOptions(
        full=full,
        sample=rebuild_sample,
        seed=seed,
        public_key=_key(public_key, signature=signature),
        sources=dict(sources),
        allow_custom=session.options.allow_custom,
    )
    with make_reporter(session.console, session.options) as reporter:
        report = _run(session, targets, options, reporter, workers)
    if session.options.json_output:
        session.console.json(report.as_json())
    else:
        session.console.result(_lines(report, verbose=session.options.verbose))
        _show_problems(session, report)
    if not report.ok:
        context.exit(1)


def _check_sample_options(sample: float | None, sources: Sequence[tuple[str, Path]], seed: int | None) -> None:
    """Refuse what says how blocks are made again where none are, and a source that is in two places."""
    if sample is None and (sources or seed is not None):
        option = "--source" if sources else "--seed"
        what = "says where blocks are made again from" if sources else "chooses the blocks that are made again"
        raise UsageError(f"`{option}` {what}, and none are", hint="add `--rebuild-sample P%`")
    names = [name for name, _ in sources]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"`--source {name}=...` is given twice", hint="give one path for each source", source=name)


def _key(public_key: str | None, *, signature: bool) -> Path | None:
    """Return the key to verify with; None where no signature is to be verified."""
    if not signature:
        named = click.get_current_context().get_parameter_source("public_key")
        if named is click.core.ParameterSource.COMMANDLINE:
            raise UsageError("`--public-key` verifies signatures, which is not asked for", hint="add `--signature`")
        return None
    if public_key is None:
        raise UsageError("`--signature` needs a key to verify with", hint="name it with `--public-key FILE`")
    from mergepipe.project.signing import check_public_key

    check_public_key(Path(public_key))
    return Path(public_key)


def _run(
    session: Session, targets: Sequence[str], options: VerifyOptions, reporter: Reporter, workers: int | None
) -> VerifyReport:
    """Verify outputs through their project, and directories alone where no output can be meant."""
    from mergepipe.project.verify import is_path, verify_directories

    named = [target for target in targets if not is_path(target)]
    if named or not targets:
        if named and session.options.file is None and not _has_project() and all(map(os.path.lexists, named)):
            named = []
        else:
            # Nothing but making blocks again takes the code of custom operators.
            project = session.open_project(reporter, workers=workers, load_custom=options.sample is not None)
            return project.verify(targets, options)
    return verify_directories(targets, options, reporter=reporter, workers=workers)


def _has_project() -> bool:
    try:
        find_mergefile(Path.cwd())
    except MergefileError:
        return False
    return True


# --- what is printed --------------------------------------------------------------------------------------------------


def _lines(report: VerifyReport, *, verbose: bool) -> Iterator[str]:
    for output in report.outputs:
        yield from _output(output, verbose=verbose)
    for source in report.sources:
        yield from _source(source, verbose=verbose)
    if report.lock is not None:
        yield f"{plain(report.lock.path)}: {_state(len(report.lock.problems))}"
    rate = f", {format_bytes(int(report.bytes / report.seconds))}/s" if report.seconds > 0 else ""
    yield f"{format_bytes(report.bytes)} in {duration(report.seconds)}{rate}"


def _state(problems: int) -> str:
    if problems:
        return click.style(format_count(problems, "problem"), fg="red")
    return click.style("verified", fg="green")


def _output(output: VerifiedOutput, *, verbose: bool) -> Iterator[str]:
    name = click.style(plain(output.name or output.path or ""), bold=True)
    yield f"{name}: {_state(len(output.problems))}"
    yield from fact("path", [plain(output.path) if output.path is not None else "not published"])
    if output.path is not None and output.digest is not None:
        files = [format_count(output.shards, "shard"), format_count(output.tensors, "tensor")]
        yield from fact("checked", [*files, format_count(output.blocks, "block"), _beside(output)])
    if output.packs is not None:
        packs = output.packs
        counts = ((packs.linked, "linked"), (packs.checked, "checked"), (packs.absent, "not in the cache"))
        yield from fact("packs", [f"{count:,} {word}" for count, word in counts if count] or ["none"])
    if output.sample is not None:
        sample = output.sample
        blocks = f"{sample.blocks:,} of {format_count(sample.total, 'block')}"
        yield from fact("rebuilt", [f"{blocks} ({format_bytes(sample.bytes)})", f"seed {sample.seed}"])
    if output.signature != "absent":
        shown = {"unchecked": "there, not checked: `--signature` does"}.get(output.signature, output.signature)
        yield from fact("signature", [shown])
    if verbose and output.digest is not None:
        yield from fact("digest", [plain(output.digest)])


def _beside(output: VerifiedOutput) -> str:
    text = format_count(output.files, "other file")
    return text if not output.others else f"{text} ({output.others:,} of yours left alone)"


def _source(source: VerifiedSource, *, verbose: bool) -> Iterator[str]:
    name = click.style(plain(source.name), bold=True)
    yield f"{name} (source): {_state(len(source.problems))}"
    by_sample = source.pinned_by == "sample"
    yield from fact("checked", [format_bytes(source.bytes), *(["which the lock pins by samples"] if by_sample else [])])
    if (verbose or by_sample) and source.digest is not None:
        yield from fact("digest", [plain(source.digest)])


def _show_problems(session: Session, report: VerifyReport) -> None:
    """Print every problem, the first ones of each part where there are many."""
    most = None if session.options.verbose else _SHOWN
    for problems in report.parts:
        for problem in problems[:most]:
            session.console.error(_as_error(problem))
        more = len(problems[most:]) if most is not None else 0
        if more:
            session.console.note(f"{format_count(more, 'more problem')}: `--verbose` shows all")


def _as_error(problem: Problem) -> MergefileError:
    return MergefileError(problem.message, hint=problem.hint)
