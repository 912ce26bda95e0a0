"""The packs in the cache that hold an output's shards: those that a build would use again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path

import msgspec

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.errors import FormatError, MergepipeError
from mergepipe.fsio.reading import open_regular
from mergepipe.lockfile.manifest_records import Manifest
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.records import LockedOutput, LockedShard
from mergepipe.mergefile.schema import Mergefile
from mergepipe.project.facts import known_output
from mergepipe.project.stages import record_place
from mergepipe.project.verify_directory import DirectoryCheck, expected_tensors
from mergepipe.project.verify_report import PackCounts, Problem
from mergepipe.project.verify_shards import CheckedShard, ExpectedTensor, ShardToCheck, unreadable
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEntry:
    """What the catalog has on record of an output: its entry in the lock, and block digests where it keeps them."""

    output: LockedOutput
    blocks: dict[str, bytes]


@dataclass(slots=True)
class PackCheck:
    """The packs of one output.

    Attributes
    ----------
    shards
        Those that must be hashed.
    linked
        By pack the published file that has the same bytes, as an index into the directory's shards.
    """

    counts: PackCounts
    shards: list[ShardToCheck] = field(default_factory=list)
    linked: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def recorded_entry(catalog: Catalog, mergefile: Mergefile, name: str) -> RecordedEntry | None:
    """Return what is on record of an output, None where nothing is or it cannot be read."""
    output = mergefile.outputs[name]
    try:
        known = known_output(catalog, record_place(mergefile, output))
        if known is None:
            return None
        (entry,) = parse_lock(known.record.lock, mergefile.path).outputs
    except (MergepipeError, msgspec.MsgspecError, ValueError):
        return None  # the cache is no authority: a build finds out what is wrong with it
    return RecordedEntry(output=entry, blocks=known.record.blocks)


def packs_of(
    layout: CacheLayout,
    manifest: Manifest | None,
    recorded: RecordedEntry | None,
    directory: DirectoryCheck | None,
    shown: str,
) -> PackCheck | None:
    """Return which packs hold an output's shards, by its manifest, else by what is on record.

    Parameters
    ----------
    directory
        Where the output is published: packs that are the same files need not be hashed again.
    shown
        How messages name the cache.
    """
    entry = manifest.output if manifest else recorded.output if recorded else None
    if entry is None:
        return None
    found = PackCheck(PackCounts())
    known = expected_tensors(manifest) if manifest else [None] * len(entry.shards)
    absent = 0
    for number, (shard, tensors) in enumerate(zip(entry.shards, known, strict=True)):
        name = shard.digest.hex()
        path = layout.packs / f"{name}.safetensors"
        if not os.path.lexists(path):
            absent += 1
        elif manifest and directory and _same_file(path, directory.path / shard.name):
            found.linked[name] = number
        else:
            where = os.path.join(shown, "packs", path.name)
            _add(found, path, where, shard, tensors, recorded)
    found.counts = PackCounts(checked=len(found.shards), linked=len(found.linked), absent=absent)
    return found


def _add(
    found: PackCheck,
    path: Path,
    where: str,
    shard: LockedShard,
    tensors: tuple[ExpectedTensor, ...] | None,
    recorded: RecordedEntry | None,
) -> None:
    hint = f"remove `{where}`; the next build makes what it needs of it again"
    if tensors is None and recorded is not None:
        try:
            tensors = _as_recorded(path, recorded)
        except FileNotFoundError:
            return  # it was pruned meanwhile
        except OSError as error:
            found.problems.append(unreadable(where, error, missing=hint, damaged=hint))
        except (FormatError, KeyError):
            what = "its header is not what was written"
            found.problems.append(Problem(kind="pack", where=where, what=what, hint=hint))
    if tensors is not None:
        found.shards.append(
            ShardToCheck(
                path=path, where=where, kind="pack", shard=shard, tensors=tensors, hint=hint, missing=hint
            )
        )


def _as_recorded(path: Path, recorded: RecordedEntry) -> tuple[ExpectedTensor, ...]:
    """Return the tensors of a pack without a manifest: its own header says where they are, the record what they hold.

    Raises
    ------
    FormatError, KeyError
        If its header is damaged, or names a tensor that the output does not have.
    """
    digests = {tensor.name: tensor.digest for tensor in recorded.output.tensors}
    fd = open_regular(path)
    try:
        header = read_header(fd, path, os.fstat(fd).st_size, label="pack")
    finally:
        os.close(fd)
    return tuple(
        ExpectedTensor(
            name=info.name,
            dtype=info.dtype,
            shape=info.shape,
            digest=digests[info.name],
            blocks=recorded.blocks.get(info.name),
        )
        for info in header.tensors
    )


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def check_packs(
    check: PackCheck, cached: Sequence[CheckedShard], published: Sequence[ShardToCheck], shards: Sequence[CheckedShard]
) -> Iterator[Problem]:
    """Yield what is wrong with an output's packs: those that were hashed, and those that are published files.

    Nothing keeps a build or `cache prune` from removing a pack meanwhile: what is not there any more is no problem.
    """
    yield from check.problems
    gone = [not os.path.lexists(expected.path) for expected in check.shards]
    for shard, is_gone in zip(cached, gone, strict=True):
        yield from () if is_gone else shard.problems
    counts, lost = check.counts, sum(gone)
    check.counts = replace(counts, checked=counts.checked - lost, absent=counts.absent + lost)
    for name, number in check.linked.items():
        if number < len(shards) and shards[number].problems:
            what = f"the pack {name[:16]}… is the same file as `{published[number].shard.name}`, and differs like it"
            hint = "a build finds that out when the published file is removed"
            yield Problem(kind="pack", where=published[number].where, what=what, hint=hint, facts={"pack": name})
