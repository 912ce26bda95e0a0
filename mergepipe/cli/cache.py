"""``mergepipe cache``: what the cache holds, and removing what is not needed."""

from __future__ import annotations

import click

from mergepipe.cli.command import Command, Group, show_help_if_alone
from mergepipe.cli.options import SIZE
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.render import cache_info_lines, prune_lines
from mergepipe.cli.session import Session

_EXAMPLES = (
    ("mergepipe cache info", "where it is, and how large"),
    ("mergepipe cache prune --max-size '20 GB'", "keep the packs that were used last"),
)
_INFO_EXAMPLES = (
    ("mergepipe cache info", "the cache of this project"),
    ("mergepipe cache info --json", "the same for scripts"),
)
_PRUNE_EXAMPLES = (
    ("mergepipe cache prune", "remove what killed builds left"),
    ("mergepipe cache prune --max-size '20 GB'", "keep the packs that were used last"),
    ("mergepipe cache prune --max-age 30", "remove packs unused for 30 days"),
    ("mergepipe cache prune --max-size 0", "remove all packs"),
)


@click.group(cls=Group, examples=_EXAMPLES)
@click.pass_context
def cache(context: click.Context) -> None:
    """Show what the cache holds, or make it smaller.

    The cache can be removed at any time: outputs keep their bytes, and the next build reads all sources again.
    """
    show_help_if_alone(context)


@cache.command(cls=Command, examples=_INFO_EXAMPLES)
@click.pass_obj
def info(session: Session) -> None:
    """Show where the cache is and what it holds."""
    with make_reporter(session.console, session.options) as reporter:
        report = session.open_project(reporter).cache_info()
    if session.options.json_output:
        session.console.json(report.as_json())
    else:
        session.console.result(cache_info_lines(report))


@cache.command(cls=Command, examples=_PRUNE_EXAMPLES)
@click.option("--max-size", type=SIZE, help="Remove the packs unused for longest until the rest is within SIZE.")
@click.option("--max-age", type=click.FloatRange(min=0), metavar="DAYS", help="Remove packs unused for DAYS.")
@click.pass_obj
def prune(session: Session, max_size: int | None, max_age: float | None) -> None:
    """Remove packs that are not needed, and what killed builds left.

    Published outputs keep their bytes.
    """
    with make_reporter(session.console, session.options) as reporter:
        report = session.open_project(reporter).cache_prune(max_bytes=max_size, max_age_days=max_age)
    if session.options.json_output:
        session.console.json(report.as_json())
    else:
        session.console.result(prune_lines(report))
