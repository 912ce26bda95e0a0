"""The lock against what vouches for it: the manifests of the outputs, what the cache has on record, and its own form.

A lock has one text. What the outputs vouch for is put in the place of what it says, and the text of that is compared
line by line with the file: so a byte that was flipped anywhere is found, in a comment too, and its line is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mergepipe.digest import source_digest
from mergepipe.errors import LockError
from mergepipe.fsio.reading import read_regular
from mergepipe.lockfile.manifest_records import OUTPUT_KEY, Manifest
from mergepipe.lockfile.reader import LARGEST_LOCK, parse_lock
from mergepipe.lockfile.records import UNKNOWN_DIGEST, LockedOutput, LockedSource, Lockfile
from mergepipe.lockfile.writer import key_text, render_lock
from mergepipe.mergefile.schema import Mergefile
from mergepipe.project.verify_report import Problem
from mergepipe.units import format_count
from mergepipe.values import dataclass

RESTORE = "restore it from version control, or delete it and run `mergepipe build` to write it anew"
_AGAIN = "`mergepipe build` brings the lock up to date; or restore it from version control"
_MOST_LINES = 20
_SHOWN = 160  # characters of a line in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Voucher:
    """What is known of an output without the lock.

    Attributes
    ----------
    output
        Its entry.
    sources
        The records of its sources, as far as they are known; other outputs are not among them.
    complete
        Whether shards and side files are known too.
    """

    output: LockedOutput
    sources: tuple[LockedSource, ...] = ()
    complete: bool = True


def vouchers_of(manifest: Manifest) -> Iterator[Voucher]:
    """Yield what a manifest says of its output and of the outputs that this one was made from."""
    yield Voucher(output=manifest.output, sources=_stored(manifest.sources))
    for stage in manifest.stages:
        if stage.output.digest != UNKNOWN_DIGEST:
            yield Voucher(output=stage.output, sources=_stored(stage.sources), complete=False)


def _stored(sources: Iterable[LockedSource]) -> tuple[LockedSource, ...]:
    return tuple(source for source in sources if OUTPUT_KEY not in source.location)


def check_lock(
    path: Path, shown: str, vouchers: Sequence[Voucher], mergefile: Mergefile, geometry: int, names: Sequence[str]
) -> list[Problem]:
    """Return what is wrong with a lock.

    Parameters
    ----------
    shown
        How messages name it.
    geometry
        The id of the block geometry.
    names
        The outputs that are verified: each must have an entry.
    """
    try:
        data = read_regular(path, LARGEST_LOCK)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = "there is no lock" if missing else f"cannot be read: {error.strerror or type(error).__name__}"
        return [Problem(kind="lock", where=shown, what=what, hint="`mergepipe build` writes it" if missing else None)]
    try:
        lock = parse_lock(data, Path(shown))
    except LockError as error:
        line = error.facts.get("line")
        where = shown if line is None else f"{shown}:{line}"
        what = error.message.removeprefix(f"{where}: ").removeprefix(f"{shown}: ")
        facts = {} if line is None else {"line": line}
        return [Problem(kind="lock", where=where, what=what, hint=error.hint or RESTORE, facts=facts)]
    text = _without_line_ends(data.decode("utf-8-sig"))
    problems = list(_entries(lock, shown, text, vouchers, mergefile, names))
    expected = render_lock(_vouched(lock, vouchers, mergefile, geometry))
    return [*problems, *_lines(shown, text, expected, _AGAIN if render_lock(lock) == text else RESTORE)]


def _without_line_ends(text: str) -> str:
    """Return a text in which all lines end as on Windows, where git may have made it so, with plain line ends."""
    lines = text.count("\n")
    return text.replace("\r\n", "\n") if lines and text.count("\r\n") == lines else text


# --- entries that are there, or not -----------------------------------------------------------------------------------


def _entries(
    lock: Lockfile, shown: str, text: str, vouchers: Sequence[Voucher], mergefile: Mergefile, names: Sequence[str]
) -> Iterator[Problem]:
    """Yield entries that are missing, and entries of what there is not."""
    have = {output.name for output in lock.outputs}
    for name in names:
        if name not in have:
            yield Problem(kind="lock", where=shown, what=f"has no entry for output `{name}`", hint=_AGAIN)
    for output in lock.outputs:
        if output.name not in mergefile.outputs:
            what = f"has an entry for `{output.name}`, which is no output of `{mergefile.path.name}`"
            yield _at_header(shown, text, f"outputs.{key_text(output.name)}", what)
        elif source_digest((tensor.name, tensor.digest) for tensor in output.tensors) != output.digest:
            what = f"the digest of output `{output.name}` is not that of its tensors"
            yield _at_header(shown, text, f"outputs.{key_text(output.name)}", what)
    sources = {source.name for source in lock.sources}
    used = {name for output in lock.outputs for name in output.sources}
    for source in lock.sources:
        if source.name not in used:
            what = f"has an entry for `{source.name}`, from which no output is made"
            yield _at_header(shown, text, f"sources.{key_text(source.name)}", what)
    wanted = {source.name for voucher in vouchers if voucher.output.name in have for source in voucher.sources}
    for name in sorted(wanted - sources):
        yield Problem(kind="lock", where=shown, what=f"has no entry for source `{name}`", hint=_AGAIN)


def _at_header(shown: str, text: str, table: str, what: str) -> Problem:
    lines = text.splitlines()
    line = lines.index(f"[{table}]") + 1 if f"[{table}]" in lines else None
    where = shown if line is None else f"{shown}:{line}"
    return Problem(kind="lock", where=where, what=what, hint=_AGAIN, facts={} if line is None else {"line": line})


# --- what the lock should say -----------------------------------------------------------------------------------------


def _vouched(lock: Lockfile, vouchers: Sequence[Voucher], mergefile: Mergefile, geometry: int) -> Lockfile:
    """Return a lock in which everything that somebody vouches for is as it should be."""
    by_name: dict[str, list[Voucher]] = {}
    for voucher in sorted(vouchers, key=lambda voucher: not voucher.complete):
        by_name.setdefault(voucher.output.name, []).append(voucher)
    return Lockfile(
        geometry=geometry if vouchers else lock.geometry,
        sources=tuple(_source(source, vouchers, mergefile) for source in lock.sources),
        outputs=tuple(_output(output, by_name.get(output.name, [])) for output in lock.outputs),
    )


def _output(entry: LockedOutput, vouchers: Sequence[Voucher]) -> LockedOutput:
    """Return the entry that is vouched for; where there are several, which builds of different times left, any."""
    found = [voucher.output for voucher in vouchers if voucher.complete] or [
        replace(voucher.output, shards=entry.shards, side_files=entry.side_files)
        for voucher in vouchers
        if voucher.output.digest == entry.digest  # else the other was made from an earlier one
    ]
    return entry if entry in found or not found else found[0]


def _source(entry: LockedSource, vouchers: Sequence[Voucher], mergefile: Mergefile) -> LockedSource:
    """Return the entry of a source: of what an output was made from, and where the Mergefile or an output has it."""
    records = [source for voucher in vouchers for source in voucher.sources if source.name == entry.name]
    declared = mergefile.sources.get(entry.name)
    places: list[Mapping[str, str]] = [source.location for source in records]
    if declared is not None:
        places.insert(0, declared.location)
    location = entry.location if not places or entry.location in places else places[0]
    contents = [(source.digest, source.tensors, source.bytes) for source in records]
    content = (entry.digest, entry.tensors, entry.bytes)
    if contents and content not in contents:
        content = max(contents, key=lambda other: sum(a == b for a, b in zip(content, other, strict=True)))
    elif not contents:
        digests = [v.output.sources[entry.name] for v in vouchers if entry.name in v.output.sources]
        content = (entry.digest if not digests or entry.digest in digests else digests[0], *content[1:])
    return replace(entry, location=location, digest=content[0], tensors=content[1], bytes=content[2])


# --- line by line -----------------------------------------------------------------------------------------------------


def _lines(shown: str, text: str, expected: str, hint: str) -> Iterator[Problem]:
    """Yield the lines of a text that are not those that are expected."""
    if not text.endswith("\n"):
        last = text.count("\n") + 1
        what = "the newline at the end is missing"
        yield Problem(kind="lock", where=f"{shown}:{last}", what=what, hint=RESTORE, facts={"line": last})
        text += "\n"
    if text == expected:
        return
    found, wanted = text.split("\n"), expected.split("\n")
    if len(found) != len(wanted):
        start = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
        yield _line(shown, min(start, len(found) - 1), found, wanted, hint)
        return
    differing = [i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
    for index in differing[:_MOST_LINES]:
        yield _line(shown, index, found, wanted, hint)
    if len(differing) > _MOST_LINES:
        what = f"{format_count(len(differing) - _MOST_LINES, 'more line')} are not what was written"
        yield Problem(kind="lock", where=shown, what=what, hint=hint)


def _line(shown: str, index: int, found: Sequence[str], wanted: Sequence[str], hint: str) -> Problem:
    got, expected = (lines[index] if index < len(lines) else "" for lines in (found, wanted))
    start = next((at for at, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), 0)
    what = f"is {_shown(got, start)} and should be {_shown(expected, start)}"
    facts = {"line": index + 1, "got": got, "expected": expected}
    return Problem(kind="lock", where=f"{shown}:{index + 1}", what=what, hint=hint, facts=facts)


def _shown(line: str, start: int) -> str:
    """Return a line as messages show it: of a long one the part in which it begins to differ."""
    if not line:
        return "an empty line"
    first = 0 if start < _SHOWN // 2 else start - _SHOWN // 2
    dots = "..." if first else "", "..." if len(line) > first + _SHOWN else ""
    return f"`{dots[0]}{line[first : first + _SHOWN]}{dots[1]}`"
