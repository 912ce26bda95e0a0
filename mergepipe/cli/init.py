"""``mergepipe init``: a Mergefile for the checkpoints that are there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError, suggestion
from mergepipe.cli.session import MERGEFILE, Session
from mergepipe.cli.tables import plain, rows
from mergepipe.errors import MergefileError, MergepipeError, raise_collected
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.cli.candidates import Candidate, Finding
    from mergepipe.cli.console import Console

_EXAMPLES = (
    ("mergepipe init", "use the checkpoints found here"),
    ("mergepipe init models/*", "use these"),
    ("mergepipe init math code --base ../qwen", "name their base"),
)
_NO_BASE = """\
which one the others were trained from is not known, so the output is an average of all
for task arithmetic, name it: `mergepipe init --force --base NAME`"""
_ALONE = """\
`{}` is the only checkpoint, so that the output is no more than a copy of it
add others under `[sources]`, and name them in `experts`"""


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("checkpoints", metavar="[CHECKPOINT]...", nargs=-1)
@click.option("--base", metavar="NAME_OR_DIR", help="The checkpoint that the others were trained from.")
@click.option("--force", is_flag=True, help="Replace a Mergefile that is there.")
@click.pass_obj
def init(session: Session, checkpoints: tuple[str, ...], base: str | None, force: bool) -> None:
    """Write a commented Mergefile for checkpoints.

    Takes the checkpoints that are named, or looks for them below the current directory, three folders deep. The base is
    guessed: the folder called `base`, or the one that a LoRA adapter beside it was trained on. Adapters that fit the
    base are experts, too.
    """
    # What reads checkpoints takes its time to import, which `--help` must not.
    from mergepipe.cli.candidates import is_adapter, open_candidates, search
    from mergepipe.fsio.durable import replace_file
    from mergepipe.mergefile.template import render_template

    console, target = session.console, Path(session.options.file or MERGEFILE)
    _check_target(target, force=force)
    named = _distinct(checkpoints)
    finding = None if named else search(Path())
    adapters = list(filter(is_adapter, named)) if finding is None else list(finding.adapters)
    paths = named if finding is None else list(finding.checkpoints)
    if len(adapters) < len(named):  # else there is nothing but adapters, and the error says what they need
        paths = [path for path in named if path not in adapters]
    extra = _outside(base, paths)
    found, errors = open_candidates([*extra, *paths])
    raise_collected(error for path, error in errors if finding is None or path in extra)
    if finding is not None:
        _report_search(console, finding, [error for _, error in errors], any_found=len(found) > len(extra))
    chosen, fitting = _base_and_adapters(console, found, base, adapters)
    found = (*sorted(found, key=lambda candidate: candidate.name != chosen), *fitting)
    sources = {candidate.name: _written_path(candidate.path, target) for candidate in found}
    lora = {candidate.name: sources[candidate.name] for candidate in fitting}
    whole = {name: path for name, path in sources.items() if name not in lora}
    replace_file(target, render_template(whole, chosen, lora).encode())
    if session.options.json_output:
        console.json({"mergefile": str(target), "base": chosen, "sources": sources, "adapters": list(lora)})
        return
    console.result(_lines(target, found, sources, chosen))
    if len(found) == 1:
        console.note(_ALONE.format(found[0].name))
    elif chosen is None:
        console.note(_NO_BASE)


def _check_target(target: Path, *, force: bool) -> None:
    if target.is_dir():
        raise MergefileError(f"`{target}` is a directory", hint="give the path of the file", path=str(target))
    if os.path.lexists(target) and not force:
        raise MergefileError(f"`{target}` exists already", hint="`--force` replaces it", path=str(target))


def _distinct(texts: Sequence[str]) -> list[Path]:
    """Return the paths of the command line; one place that is named twice is one checkpoint."""
    places = {os.path.realpath(text): Path(text) for text in reversed(texts)}
    return list(reversed(places.values()))


def _outside(base: str | None, paths: Sequence[Path]) -> list[Path]:
    """Return the path of a base that is not among the checkpoints already; nothing if there is no such path."""
    from mergepipe.cli.candidates import folder_name

    if base is None or not Path(base).exists():
        return []
    known = any(base == folder_name(path) or _same_place(base, path) for path in paths)
    return [] if known else [Path(base)]


def _same_place(text: str, path: Path) -> bool:
    return os.path.realpath(text) == os.path.realpath(path)


def _report_search(console: Console, finding: Finding, errors: Sequence[MergepipeError], *, any_found: bool) -> None:
    """Say which folders are left out, and why.

    Raises
    ------
    MergepipeError
        If nothing is left: what is wrong with the folders that might be checkpoints, else where was looked.
    """
    from mergepipe.cli.candidates import DEPTH, open_candidates

    if not any_found:
        _, others = open_candidates((*finding.foreign, *finding.adapters))
        raise_collected((*errors, *(error for _, error in others)))
        raise UsageError(
            f"no checkpoints in `{Path.cwd()}`, {DEPTH} folders deep",
            hint="name them: `mergepipe init DIR...`",
            path=str(Path.cwd()),
        )
    for error in errors:
        console.warn(f"left out: {error.message}")
    for folder in finding.foreign:
        console.note(f"left out: `{folder}` has no safetensors weights")


def _base_and_adapters(
    console: Console, found: Sequence[Candidate], wanted: str | None, folders: Sequence[Path]
) -> tuple[str | None, tuple[Candidate, ...]]:
    """Return the name of the base, None if it is not known, and the adapters that fit it; say which are left out.

    A checkpoint that is alone with adapters that fit it is their base.
    """
    from mergepipe.cli.candidates import open_adapters

    chosen = _base_name(found, wanted, folders)
    on = found[0] if chosen is None and len(found) == 1 else next((c for c in found if c.name == chosen), None)
    if on is None:
        for folder in folders:
            console.note(f'left out: `{folder}` is a LoRA adapter; a source of its own with `on = "NAME"` adds it')
        return chosen, ()
    fitting, errors = open_adapters(folders, on, [candidate.name for candidate in found])
    for _, error in errors:
        console.warn(f"left out: {error.message}")
    return chosen if chosen is not None or not fitting else on.name, fitting


def _base_name(found: Sequence[Candidate], wanted: str | None, adapters: Sequence[Path]) -> str | None:
    """Return the name of the base, None if it is not known.

    Raises
    ------
    UsageError
        If the one that is wanted is not there.
    """
    from mergepipe.cli.candidates import guess_base

    if wanted is None:
        guess = guess_base(found, adapters)
        return guess.name if guess else None
    names = [candidate.name for candidate in found]
    if wanted in names:
        return wanted
    for candidate in found:
        if _same_place(wanted, candidate.path):
            return candidate.name
    raise UsageError(
        f"`{wanted}` is neither one of the checkpoints nor the path of another",
        hint=suggestion(wanted, names) or f"the checkpoints are: {', '.join(names)}",
    )


def _written_path(path: Path, target: Path) -> str:
    """Return a path as the Mergefile has it: relative, unless it was given as an absolute one elsewhere."""
    root = target.parent.absolute()
    if path.is_absolute() and not path.is_relative_to(root):
        return path.as_posix()
    text = Path(os.path.relpath(path, root)).as_posix()
    return f"./{text}" if text.startswith("~") else text


def _lines(target: Path, found: Sequence[Candidate], sources: Mapping[str, str], base: str | None) -> list[str]:
    table = []
    for candidate in found:
        stored = candidate.checkpoint.stored
        size = f"{format_bytes(candidate.checkpoint.nbytes)}, {format_count(len(stored), 'tensor')}"
        role = "adapter" if candidate.on is not None else "base" if candidate.name == base else "expert"
        table.append((role, plain(candidate.name), plain(sources[candidate.name]), size))
    return [f"wrote {plain(str(target))}", *rows(table, indent="  "), *next_steps(target)]


def next_steps(target: Path) -> list[str]:
    """Return how to go on with a Mergefile that was written."""
    at_hand = target.name == MERGEFILE and target.parent == Path()
    command = "mergepipe" if at_hand else f"mergepipe -f {plain(shlex.quote(str(target)))}"
    return [
        "",
        "look through it, then run",
        f"  {command} plan    to see what a build reads and writes",
        f"  {command} build   to build it",
    ]
