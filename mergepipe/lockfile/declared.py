"""What a Mergefile alone says that its lock must say: all that can be compared without opening a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from mergepipe.dtypes import DTYPES
from mergepipe.lockfile.compare import Difference, compare_locks
from mergepipe.lockfile.records import (
    LockedExpert,
    LockedOutput,
    LockedRule,
    LockedSlice,
    LockedSource,
    Lockfile,
)
from mergepipe.mergefile.schema import ExpertRef, Mergefile, Output, Rule, Slice, Source

T = TypeVar("T")


def mergefile_differences(lock: Lockfile, mergefile: Mergefile, versions: Mapping[str, int]) -> tuple[Difference, ...]:
    """Return where a lock says something else than its Mergefile; reads nothing.

    What follows from the content of sources, results among it, is taken from the lock: only a build can tell whether
    it still is so.

    Parameters
    ----------
    versions
        The versions of the operators that are known, by name. Those of others are taken from the lock.
    """
    outputs = [_output(output, lock.output(output.name), versions) for output in mergefile.outputs.values()]
    used = {name for output in outputs for name in output.sources}
    used |= {source.on for name, source in mergefile.sources.items() if name in used and source.on is not None}
    sources = [_source(source, lock.source(name)) for name, source in mergefile.sources.items() if name in used]
    declared = Lockfile(geometry=lock.geometry, sources=tuple(sources), outputs=tuple(outputs))
    return compare_locks(lock, declared)


def _source(source: Source, locked: LockedSource | None) -> LockedSource:
    found = source.location
    if locked is None:
        return LockedSource(name=source.name, location=found, digest=b"", tensors=0, bytes=0)
    if source.revision is None and "revision" in locked.location:
        found["revision"] = locked.location["revision"]  # pinned when the hub was asked
    return dataclasses.replace(locked, location=found)


def _output(output: Output, locked: LockedOutput | None, versions: Mapping[str, int]) -> LockedOutput:
    known = locked or _nothing(output)
    tokenizer = output.write.tokenizer or known.write.get("tokenizer")
    write: dict[str, str | int] = {"shard_size": output.write.shard_size}
    write |= {} if tokenizer is None else {"tokenizer": tokenizer}
    if output.write.dtype is not None:
        write["dtype"] = DTYPES[output.write.dtype].long_name or output.write.dtype
    return dataclasses.replace(
        known,
        path=output.path if output.publish else None,
        operator=output.operator,
        operator_version=versions.get(output.operator, known.operator_version),
        numerics=str(output.params.get("numerics", "float32")),
        base=output.base,
        experts=_kept(tuple(map(_expert, output.experts)), known.experts),
        params=_kept(dict(output.params), known.params),
        slices=_kept(
            tuple(_slice(part, known, index, versions) for index, part in enumerate(output.slices or ())), known.slices
        ),
        rules=_kept(tuple(map(_rule, output.rules)), known.rules),
        budget="full" if output.budget is None else output.budget.text(),
        write=write,
    )


def _kept(declared: T, known: T) -> T:
    """Return what the lock has if it is equal: without an operator's signature, 1 and 1.0 are not told apart."""
    return known if declared == known else declared


def _nothing(output: Output) -> LockedOutput:
    names = {name for name in (output.base, *output.expert_sources) if name is not None}
    return LockedOutput(
        name=output.name, path=None, operator="", operator_version=0, numerics="", base=None, experts=(), params={},
        rules=(), budget="", write={}, sources=dict.fromkeys(names, b""), expert_bytes_full=0, expert_bytes_planned=0,
        bound={}, digest=b"", shards=(), side_files=(), tensors=(),
    )  # fmt: skip


def _expert(expert: ExpertRef) -> LockedExpert:
    return LockedExpert(source=expert.source, params=dict(expert.params), layers=_range(expert.layers))


def _rule(rule: Rule) -> LockedRule:
    experts = {name: dict(params) for name, params in rule.experts.items()}
    return LockedRule(match=rule.match, layers=_range(rule.layers), params=dict(rule.params), experts=experts)


def _slice(part: Slice, known: LockedOutput, index: int, versions: Mapping[str, int]) -> LockedSlice:
    before = known.slices[index].operator_version if index < len(known.slices) else None
    return LockedSlice(
        layers=_range(part.layers) or "",
        operator=part.operator,
        operator_version=None if part.operator is None else versions.get(part.operator, before or 0),
        base=part.base,
        base_layers=_range(part.base_layers),
        experts=tuple(map(_expert, part.experts)),
        params=dict(part.params),
        rules=tuple(map(_rule, part.rules)),
    )


def _range(layers: tuple[int, int] | None) -> str | None:
    return None if layers is None else f"{layers[0]}..{layers[1]}"
