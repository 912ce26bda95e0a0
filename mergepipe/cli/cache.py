"""``mergepipe cache``: what the cache holds, removing what is not needed, and checking it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command, Group, show_help_if_alone
from mergepipe.cli.errors import UsageError
from mergepipe.cli.options import AGE, SIZE
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.render import cache_info_lines
from mergepipe.cli.session import Session
from mergepipe.cli.tables import duration, fact, plain
from mergepipe.errors import CacheError
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.caches_report import CacheCheck
    from mergepipe.project.reports import PruneReport

_DAY = 86_400
_SHOWN = 20  # problems
_EXAMPLES = (
    ("mergepipe cache info", "where it is, and how large"),
    ("mergepipe cache prune --max-size '20 GB'", "keep the packs that were used last"),
    ("mergepipe cache verify", "check every byte of it"),
)
_INFO_EXAMPLES = (
    ("mergepipe cache info", "the cache of this project"),
    ("mergepipe cache info --json", "the same for scripts"),
)
_PRUNE_EXAMPLES = (
    ("mergepipe cache prune", "remove what killed builds left"),
    ("mergepipe cache prune --max-size '20 GB'", "keep the packs that were used last"),
    ("mergepipe cache prune --max-age 12h", "remove packs unused for 12 hours"),
    ("mergepipe cache prune --unreferenced --dry-run", "show which packs no lock names"),
    ("mergepipe cache prune --max-size 0", "remove all packs"),
)
_VERIFY_EXAMPLES = (
    ("mergepipe cache verify", "take out of use what is damaged"),
    ("mergepipe cache verify --dry-run", "show what is damaged"),
)
_REASONS = {
    "unknown": "that no result lies in",
    "unreferenced": "that no lock and no output needs",
    "age": "unused for too long",
    "size": "to come within the size",
}
_CODE_REASONS = {**_REASONS, "unreferenced": "of content that no source has any more"}


@click.group(cls=Group, examples=_EXAMPLES)
@click.pass_context
def cache(context: click.Context) -> None:
    """Show what the cache holds, make it smaller, or check it.

    The cache can be removed at any time: outputs keep their bytes, and the next build reads all sources again. These
    commands need no Mergefile that can be read, only the cache.
    """
    show_help_if_alone(context)


@cache.command(cls=Command, examples=_INFO_EXAMPLES)
@click.pass_obj
def info(session: Session) -> None:
    """Show where the cache is and what it holds."""
    with make_reporter(session.console, session.options) as reporter:
        report = session.open_cache(reporter).info()
    if session.options.json_output:
        session.console.json(report.as_json())
    else:
        session.console.result(cache_info_lines(report))


@cache.command(cls=Command, examples=_PRUNE_EXAMPLES)
@click.option("--max-size", type=SIZE, help="Remove codes, then packs, unused for longest, until SIZE is left.")
@click.option("--max-age", type=AGE, help="Remove packs and codes unused for AGE: 30d, 12h, 90min; a number is days.")
@click.option("--unreferenced", is_flag=True, help="Remove packs that no lock, and no published output, needs.")
@click.option(
    "--keep", metavar="LOCK", multiple=True, help="With --unreferenced: keep what LOCK names, too; repeatable."
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be removed.")
@click.pass_obj
def prune(
    session: Session,
    max_size: int | None,
    max_age: float | None,
    unreferenced: bool,
    keep: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Remove packs that are not needed, and what killed builds left.

    Published outputs keep their bytes. A build that runs is waited for. What is needed is what the lock of this project
    names, the locks of other projects that build with this cache, and the outputs published from it that still exist.
    Codes of deltas are needed as long as the sources have the content that they follow from.
    """
    if keep and not unreferenced:
        raise UsageError("`--keep` goes with `--unreferenced`", hint="add `--unreferenced`")
    with make_reporter(session.console, session.options) as reporter:
        report = session.open_cache(reporter).prune(
            max_size,
            None if max_age is None else max_age / _DAY,
            unreferenced=unreferenced,
            keep=keep,
            dry_run=dry_run,
        )
    if session.options.json_output:
        session.console.json(report.as_json())
    else:
        session.console.result(_prune_lines(report, verbose=session.options.verbose))


@cache.command(cls=Command, examples=_VERIFY_EXAMPLES)
@click.option("--dry-run", is_flag=True, help="Take nothing out of use; show what is damaged.")
@click.option(
    "-j", "--workers", type=click.IntRange(min=1), metavar="N", help="Threads.", show_default="one per processor"
)
@click.pass_context
def verify(context: click.Context, dry_run: bool, workers: int | None) -> None:
    """Check every byte of the cache, and take out of use what is damaged.

    Hashes all packs and codes, and checks every row of the catalog. What is damaged goes to `quarantine`, damaged rows
    are dropped; the next build makes anew what it needs of them. Ends with exit code 1 if anything was damaged.
    """
    session: Session = context.obj
    with make_reporter(session.console, session.options) as reporter:
        report = session.open_cache(reporter, workers=workers).verify(dry_run=dry_run)
    if session.options.json_output:
        session.console.json(report.as_json())
    else:
        session.console.result(_verify_lines(report))
        _show_problems(session, report)
    if not report.ok:
        context.exit(1)


# --- what is printed --------------------------------------------------------------------------------------------------


def _prune_lines(report: PruneReport, *, verbose: bool) -> Iterator[str]:
    """Yield what was removed from the cache."""
    verb = "would remove" if report.dry_run else "removed"
    if report.removed or report.codes or report.removed_bytes:
        found = ((report.removed, "pack"), (len(report.codes), "code"))
        counts = " and ".join(format_count(count, noun) for count, noun in found if count)
        size = format_bytes(report.removed_bytes)
        yield f"{verb} {counts}, {size} in all" if counts else f"{verb} {size}"
    else:
        yield "nothing to remove"
    yield from _pruned_lines("packs", "pack", _REASONS, report.packs, verbose=verbose)
    yield from _pruned_lines("codes", "code", _CODE_REASONS, report.codes, verbose=verbose)
    if report.linked_bytes:
        yield from fact("shared", [f"{format_bytes(report.linked_bytes)} of that stay on the disk, in outputs"])
    if report.statistic_bytes:
        yield from fact("numbers", [f"{format_bytes(report.statistic_bytes)} of statistics"])
    if report.leftover_bytes:
        yield from fact("scraps", [f"{format_bytes(report.leftover_bytes)} that killed builds or damage left"])
    for label, locks in (("locks", report.locks), ("gone", report.missing_locks)):
        if locks:
            yield from fact(label, [plain(lock) for lock in locks])
    kept = [f"{format_bytes(count)} of {what}" for what, count in report.kept.items() if count]
    yield f"{', '.join(kept) or 'nothing'} {'would be left' if report.dry_run else 'left'}"


def _pruned_lines(
    label: str, noun: str, reasons: Mapping[str, str], removed: Sequence[tuple[str, int, str]], *, verbose: bool
) -> Iterator[str]:
    """Yield why files were removed, and which."""
    for reason, words in reasons.items():
        files = [(file, nbytes) for file, nbytes, why in removed if why == reason]
        if files:
            size = format_bytes(sum(nbytes for _, nbytes in files))
            yield from fact(label, [f"{format_count(len(files), noun)} {words}", size])
        if verbose:
            yield from (f"    {plain(file)} ({format_bytes(nbytes)})" for file, nbytes in files)


def _verify_lines(report: CacheCheck) -> Iterator[str]:
    packs, codes, rows = report.packs, report.codes, report.rows
    if report.ok:
        state = click.style("sound", fg="green") if packs.checked or codes.checked or rows else "empty"
    else:
        state = click.style(format_count(len(report.problems), "problem"), fg="red")
        state += ", nothing changed" if report.dry_run else ", repaired"
    yield f"cache {plain(report.path)}: {state}"
    unknown = "unknown: `cache prune` removes them" if packs.unknown != 1 else "unknown: `cache prune` removes it"
    found = [
        (packs.damaged, "damaged"), (packs.missing, "missing"), (packs.unknown, unknown),
        (packs.foreign, "not of mergepipe, left alone"),
    ]  # fmt: skip
    parts = [f"{packs.checked:,} checked ({format_bytes(packs.bytes)})"]
    yield from fact("packs", [*parts, *(f"{count:,} {word}" for count, word in found if count)])
    if codes.checked or codes.foreign:
        found = [(codes.damaged, "damaged"), (codes.foreign, "not of mergepipe, left alone")]
        parts = [f"{codes.checked:,} checked ({format_bytes(codes.bytes)})"]
        yield from fact("codes", [*parts, *(f"{count:,} {word}" for count, word in found if count)])
    if report.catalog in ("sound", "repaired"):
        words = (("files", "source file"), ("results", "result"), ("published", "output"))
        counts = [format_count(rows[table], word) for table, word in words]
        yield from fact("catalog", [*counts, f"{format_count(sum(rows.values()), 'row')} in all"])
    else:
        words_of = {"older": "of an earlier mergepipe", "damaged": "damaged", "missing": "not there"}
        yield from fact("catalog", [words_of[report.catalog]])
    nbytes = packs.bytes + codes.bytes
    rate = f", {format_bytes(int(nbytes / report.seconds))}/s" if report.seconds > 0 else ""
    yield f"{format_bytes(nbytes)} in {duration(report.seconds)}{rate}"


def _show_problems(session: Session, report: CacheCheck) -> None:
    """Print every problem, the first ones where there are many."""
    most = None if session.options.verbose else _SHOWN
    for problem in report.problems[:most]:
        repair = f"`cache verify` without `--dry-run`: {problem.repair}" if report.dry_run else problem.repair
        session.console.error(CacheError(problem.message, hint=repair))
    more = len(report.problems) - _SHOWN if most is not None else 0
    if more > 0:
        session.console.note(f"{format_count(more, 'more problem')}: `--verbose` shows all")
