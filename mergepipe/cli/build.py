"""``mergepipe build``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.options import SIZE
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.render import build_lines
from mergepipe.cli.session import Session, shown_path
from mergepipe.errors import CancelledError

if TYPE_CHECKING:
    from mergepipe.project.signing import Signer

_EXAMPLES = (
    ("mergepipe build", "build all outputs"),
    ("mergepipe build assistant", "build one"),
    ("mergepipe build --locked", "in CI: fail if the lock would change"),
    ("mergepipe build -j 4 --memory '2 GiB'", "use less of the machine"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("outputs", metavar="[OUTPUT]...", nargs=-1)
@click.option("--locked", is_flag=True, help="Fail with exit code 3 if Mergefile.lock would change.")
@click.option("--force", is_flag=True, help="Replace output directories that mergepipe did not make.")
@click.option("--sign", "key", metavar="KEY", help="Sign the output directories with this private key.")
@click.option(
    "-j",
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads, or processes of a large build.",
    show_default="one per processor",
)
@click.option("--memory", type=SIZE, help="Limit the memory for weights in flight, such as '2 GiB'.")
@click.pass_obj
def build(
    session: Session,
    outputs: tuple[str, ...],
    locked: bool,
    force: bool,
    key: str | None,
    workers: int | None,
    memory: int | None,
) -> None:
    """Build outputs and update Mergefile.lock.

    Builds the outputs that are named, or all. Reads and computes only what changed since the last build; the previous
    output stays in its place until the next one is complete.
    """
    options, console = session.options, session.console
    with make_reporter(console, options) as reporter:
        signing = {} if key is None else {"signer": _signer(key)}
        project = session.open_project(reporter, workers=workers, memory=memory)
        try:
            report = project.build(outputs, locked=locked, force=force, **signing)
        except KeyboardInterrupt:
            raise CancelledError("interrupted", hint="the next `mergepipe build` goes on from here") from None
    if options.json_output:
        console.json(report.as_json())
        return
    for output in report.outputs.values():
        if options.verbose or output.state != "unchanged":
            for decision in output.decisions:
                console.note(decision)
    console.result(build_lines(report, shown_path(project.mergefile.root), verbose=options.verbose))


def _signer(key: str) -> Signer:
    """Return what signs with a key, so that one that cannot be used is refused before anything is built."""
    from mergepipe.project.signing import PASSWORD_VARIABLE, Signer

    return Signer(Path(key), os.environ.get(PASSWORD_VARIABLE))
