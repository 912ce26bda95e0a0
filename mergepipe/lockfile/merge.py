"""Merging two locks that came from one: entry by entry, and only if the whole is consistent.

A source or an output is taken from the side that changed it. Where both changed the same one differently, or where the
entries that are left do not fit together (an output that was made from other content than its source's entry says),
there is no merged lock: only a build can tell what is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from mergepipe.digest import is_sampled_pin
from mergepipe.lockfile.records import LockedOutput, LockedSource, Lockfile
from mergepipe.values import dataclass

_OWN_FILES = ("config.json", "model.safetensors.index.json")
T = TypeVar("T")
E = TypeVar("E", bound=LockedSource | LockedOutput)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedLock:
    """What a merge came to: a lock, or why there is none, in words."""

    lock: Lockfile | None
    problems: tuple[str, ...] = ()


def merge_locks(base: Lockfile | None, ours: Lockfile, theirs: Lockfile) -> MergedLock:
    """Merge two locks; without a base, both were written anew."""
    if ours == theirs:
        return MergedLock(lock=ours)  # what both sides say is not for a merge to doubt
    if ours.geometry != theirs.geometry:
        return MergedLock(lock=None, problems=("the two sides cut tensors into blocks in different ways",))
    problems: list[str] = []
    sources = _merged("source", base.sources if base else (), ours.sources, theirs.sources, problems)
    outputs = _merged("output", base.outputs if base else (), ours.outputs, theirs.outputs, problems)
    if not problems:
        lock = Lockfile(geometry=ours.geometry, sources=sources, outputs=outputs)
        problems += inconsistencies(lock)
        problems += _not_vouched_for(lock, ours, theirs)
        if not problems:
            return MergedLock(lock=lock)
    return MergedLock(lock=None, problems=tuple(problems))


def _merged(what: str, base: Sequence[E], ours: Sequence[E], theirs: Sequence[E], problems: list[str]) -> tuple[E, ...]:
    before = {entry.name: entry for entry in base}
    left = {entry.name: entry for entry in ours}
    right = {entry.name: entry for entry in theirs}
    found = []
    for name in sorted({*left, *right}):
        entry, agreed = _merged_entry(before.get(name), left.get(name), right.get(name))
        if not agreed:
            problems.append(_conflict(what, name, left, right))
        elif entry is not None:
            found.append(entry)
    return tuple(found)


def _merged_entry(base: T | None, ours: T | None, theirs: T | None) -> tuple[T | None, bool]:
    """Return what three versions of an entry come to, and whether they come to anything."""
    if ours == theirs or theirs == base:
        return ours, True
    return (theirs, True) if ours == base else (None, False)


def _conflict(what: str, name: str, ours: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    if name in ours and name in theirs:
        return f"both sides changed {what} `{name}`"
    return f"one side changed {what} `{name}`, the other took it out"


def _not_vouched_for(lock: Lockfile, *sides: Lockfile) -> Iterator[str]:
    """Yield pins that cannot be compared, a fingerprint and a digest of all content, and that no side has together."""
    for output in lock.outputs:
        for name, pin in output.sources.items():
            source = lock.source(name)
            if source is None or is_sampled_pin(source.digest) or not is_sampled_pin(pin):
                continue
            if not any(side.source(name) == source and side.output(output.name) == output for side in sides):
                yield f"output `{output.name}` may have been made from other content of source `{name}`"


def inconsistencies(lock: Lockfile) -> Iterator[str]:
    """Yield in words where the entries of a lock do not fit together.

    Every output says which content it was made from. It must be that of the source's entry, or of the output that it
    was made from; and what it was made from must be in the lock. A fingerprint and a digest of all content cannot be
    compared; but a source's entry is its digest where any output reads it whole, and its fingerprint where none does.
    One operator has one code and one version, and one tokenizer the same files, since one build made all of it.
    """
    yield from _other_content(lock)
    yield from _other_operators(lock)
    yield from _other_tokenizers(lock)
    used = {name for output in lock.outputs for name in output.sources}
    yield from (f"no output was made from source `{s.name}`" for s in lock.sources if s.name not in used)


def _other_content(lock: Lockfile) -> Iterator[str]:
    """Yield outputs that were made from other content than the lock or another output says."""
    digests = {entry.name: ("source", entry.digest) for entry in lock.sources}
    for output in lock.outputs:
        digests.setdefault(output.name, ("output", output.digest))
    for output in lock.outputs:
        for name, digest in sorted(output.sources.items()):
            kind, known = digests.get(name, ("source", None))
            if known is None:
                yield f"output `{output.name}` was made from `{name}`, which the lock does not have"
            elif is_sampled_pin(known) == is_sampled_pin(digest) and known != digest:
                yield f"output `{output.name}` was made from other content of {kind} `{name}`"
    for name, (kind, known) in digests.items():
        pins = {output.name: output.sources[name] for output in lock.outputs if name in output.sources}
        whole = [output for output, pin in pins.items() if not is_sampled_pin(pin)]
        if kind == "source" and is_sampled_pin(known):
            yield from (f"output `{o}` reads source `{name}` whole, whose entry is of samples alone" for o in whole)
            continue
        if kind == "source" and pins and not whole:
            yield f"the entry of source `{name}` is of all its content, and no output reads it whole"
        sampled = {output: pin for output, pin in pins.items() if is_sampled_pin(pin)}
        yield from _unlike(sampled, f"were made from other content of {kind} `{name}`")


def _other_operators(lock: Lockfile) -> Iterator[str]:
    """Yield outputs of which one build cannot have made both: their code, versions or arithmetic are not the same."""
    code: dict[str, dict[str, bytes]] = {}
    versions: dict[str, dict[str, int | None]] = {}
    for output in lock.outputs:
        versions.setdefault(output.operator, {})[output.name] = output.operator_version
        for part in output.slices:
            if part.operator is not None:
                own = versions.setdefault(part.operator, {})
                if own.setdefault(output.name, part.operator_version) != part.operator_version:
                    yield f"output `{output.name}` was made with different versions of operator `{part.operator}`"
        for name, digest in output.code.items():
            code.setdefault(name, {})[output.name] = digest
    for name, digests in sorted(code.items()):
        yield from _unlike(digests, f"were made with different code of operator `{name}`")
    for name, found in sorted(versions.items()):
        yield from _unlike(found, f"were made with different versions of operator `{name}`")
    levels = {output.name: output.levels_version for output in lock.outputs if output.levels_version is not None}
    yield from _unlike(levels, "were made with different versions of the progressive code")
    # Where an output says nothing of it, it has what the mergepipe that made it had by default.
    default = {output.name: output.numerics for output in lock.outputs if "numerics" not in output.params}
    yield from _unlike(default, "were made with different arithmetic (`numerics`)")


def _other_tokenizers(lock: Lockfile) -> Iterator[str]:
    """Yield published outputs that have other files beside their weights though they come from one source.

    The config is each output's own, and so is the index of its shards.
    """
    found: dict[str | int, dict[str, dict[str, bytes]]] = {}
    for output in lock.outputs:
        if output.path is not None and "tokenizer" in output.write:
            files = {file.name: file.digest for file in output.side_files if file.name not in _OWN_FILES}
            found.setdefault(output.write["tokenizer"], {})[output.name] = files
    for source, files_of in sorted(found.items(), key=lambda entry: str(entry[0])):
        yield from _unlike(files_of, f"were made with different tokenizer files of `{source}`")


def _unlike(values: Mapping[str, object], what: str) -> Iterator[str]:
    """Yield a problem of each output whose value is not that of the first one."""
    first = next(iter(values), "")
    yield from (f"outputs `{first}` and `{name}` {what}" for name, own in values.items() if own != values[first])
