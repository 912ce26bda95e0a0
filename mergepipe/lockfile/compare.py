"""What differs between two locks, fact by fact, in a stable order.

Two locks have no differences exactly if they have the same text (the order of tensors aside, which is that of their
names unless somebody moved lines). Sources come first, then what outputs declare, then what came out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from mergepipe.digest import format_digest
from mergepipe.lockfile.pins import repinned
from mergepipe.lockfile.records import (
    LOCATION_KEYS,
    UNKNOWN_DIGEST,
    LockedOutput,
    LockedRule,
    LockedSlice,
    LockedSource,
    Lockfile,
)
from mergepipe.lockfile.writer import bound_texts, expert_text, key_text, levels_text, tensor_text, value_text
from mergepipe.signatures import ParamValue
from mergepipe.units import format_count
from mergepipe.values import dataclass

Facts = dict[str, str]
T = TypeVar("T")


class DifferenceKind(enum.Enum):
    """Which part of a lock a difference lies in; in the order of listing."""

    GEOMETRY = "geometry"
    SOURCE = "source"
    LAYOUT = "layout"
    """The files that a source lies in: its content is the same, so no result can differ for it."""
    DECLARED = "declared"
    RESULT = "result"
    TENSOR = "tensor"


_GROUPS = {
    DifferenceKind.GEOMETRY: 0,
    DifferenceKind.SOURCE: 1,
    DifferenceKind.LAYOUT: 1,
    DifferenceKind.DECLARED: 2,
    DifferenceKind.RESULT: 3,
    DifferenceKind.TENSOR: 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact that two locks do not share.

    Attributes
    ----------
    entry
        Its key path, such as ``sources.math.digest`` or ``outputs.assistant.experts[1].weight``.
    old, new
        Its value in either lock, as text; None where it is absent.
    reason
        What that means, in words.
    kind
        The part of the lock.
    tensor
        The tensor's name, for `DifferenceKind.TENSOR`.
    owner
        The name of the source or the output that the entry belongs to; None for what belongs to neither.
    """

    entry: str
    old: str | None
    new: str | None
    reason: str
    kind: DifferenceKind
    tensor: str | None = None
    owner: str | None = None

    @property
    def key(self) -> str:
        """The entry without its owner's table: ``digest`` of ``sources.math.digest``."""
        name = key_text(self.owner or "")
        return self.entry.partition(".")[2].removeprefix(name).removeprefix(".") if self.owner else self.entry

    def as_json(self) -> dict[str, str | None]:
        """Return entry, old, new and reason as JSON-ready data."""
        return {"entry": self.entry, "old": self.old, "new": self.new, "reason": self.reason}


def compare_locks(old: Lockfile | None, new: Lockfile) -> tuple[Difference, ...]:
    """Return every difference; no old lock is an empty one."""
    return _compare(old, new, results=True)


def declared_differences(old: Lockfile | None, new: Lockfile) -> tuple[Difference, ...]:
    """Return the differences that are known before anything is merged: geometry, sources, declarations.

    Results are not compared, so ``new`` may hold any. A digest in ``new`` that is not known yet is `UNKNOWN_DIGEST`,
    and is not compared either.
    """
    return _compare(old, _with_known_digests(old, new), results=False)


def _with_known_digests(old: Lockfile | None, new: Lockfile) -> Lockfile:
    """Return ``new`` with the old lock's digests where it has unknown ones, so that they compare as equal."""
    if old is None:
        return new
    sources = []
    for source in new.sources:
        before = old.source(source.name)
        unknown = source.digest == UNKNOWN_DIGEST and before is not None
        sources.append(dataclasses.replace(source, digest=before.digest) if unknown and before else source)
    outputs = []
    for output in new.outputs:
        known = old.output(output.name)
        digests = {
            name: known.sources.get(name, digest) if known and digest == UNKNOWN_DIGEST else digest
            for name, digest in output.sources.items()
        }
        outputs.append(dataclasses.replace(output, sources=digests))
    return dataclasses.replace(new, sources=tuple(sources), outputs=tuple(outputs))


def _compare(old: Lockfile | None, new: Lockfile, *, results: bool) -> tuple[Difference, ...]:
    found: list[Difference] = []
    if old is not None:
        before, after = {"geometry": str(old.geometry)}, {"geometry": str(new.geometry)}
        found += _facts_differences("", before, after, DifferenceKind.GEOMETRY, lambda _: "blocks are cut differently")
    old_sources = {source.name: source for source in old.sources} if old else {}
    for name, source, new_source in _pairs(old_sources, {source.name: source for source in new.sources}):
        found += _owned(name, _source_differences(f"sources.{key_text(name)}", source, new_source))
    old_outputs = {output.name: output for output in old.outputs} if old else {}
    for name, output, new_output in _pairs(old_outputs, {output.name: output for output in new.outputs}):
        found += _owned(name, _output_differences(f"outputs.{key_text(name)}", output, new_output, results=results))
    # The sort is stable: what belongs to one source or output stays together.
    return tuple(sorted(found, key=lambda difference: _GROUPS[difference.kind]))


def _owned(owner: str, differences: Iterator[Difference]) -> Iterator[Difference]:
    return (dataclasses.replace(difference, owner=owner) for difference in differences)


def _pairs(old: Mapping[str, T], new: Mapping[str, T]) -> Iterator[tuple[str, T | None, T | None]]:
    """Yield (name, old, new) in name order."""
    for name in sorted({*old, *new}):
        yield name, old.get(name), new.get(name)


def _source_differences(entry: str, old: LockedSource | None, new: LockedSource | None) -> Iterator[Difference]:
    if old is None or new is None:
        old_text, new_text = (None if side is None else _digest_text(side.digest) for side in (old, new))
        yield _presence(entry, old_text, new_text, DifferenceKind.SOURCE)
        return
    yield from _facts_differences(entry, _source_facts(old), _source_facts(new), DifferenceKind.SOURCE, _source_reason)
    yield from _list_differences(
        f"{entry}.files",
        {file.name: format_count(file.bytes, "byte") for file in old.files},
        {file.name: format_count(file.bytes, "byte") for file in new.files},
        same=old.files == new.files,
        kind=DifferenceKind.LAYOUT,
        reason="the same tensors lie in other files" if old.digest == new.digest else "its files changed",
    )


def _source_facts(source: LockedSource) -> Facts:
    facts = {key: value_text(source.location[key]) for key in LOCATION_KEYS if key in source.location}
    facts["digest"] = _digest_text(source.digest)
    facts["tensors"] = str(source.tensors)
    facts["bytes"] = str(source.bytes)
    return facts


def _source_reason(key: str) -> str:
    return {"digest": "its content changed", "tensors": "its size changed", "bytes": "its size changed"}.get(
        key, "its location changed"
    )


def _output_differences(
    entry: str, old: LockedOutput | None, new: LockedOutput | None, *, results: bool
) -> Iterator[Difference]:
    if old is None or new is None:
        old_text, new_text = (None if side is None else value_text(side.operator) for side in (old, new))
        yield _presence(entry, old_text, new_text, DifferenceKind.DECLARED)
        return
    declared = DifferenceKind.DECLARED
    yield from _facts_differences(entry, _declared_facts(old), _declared_facts(new), declared, _declared_reason)
    yield from _expert_differences(f"{entry}.experts", old, new)
    slices = _slices_facts(old), _slices_facts(new)
    yield from _facts_differences(f"{entry}.slices", *slices, declared, _declared_reason)
    rules = _rules_facts(old.rules), _rules_facts(new.rules)
    yield from _facts_differences(f"{entry}.rules", *rules, declared, _declared_reason)
    if results:
        yield from _result_differences(entry, old, new)


def _declared_facts(output: LockedOutput) -> Facts:
    facts = {
        **({"publish": "false"} if output.path is None else {"path": value_text(output.path)}),
        "operator": value_text(output.operator),
        "operator_version": str(output.operator_version),
        "numerics": value_text(output.numerics),
    }
    facts |= {f"code.{key_text(name)}": _digest_text(output.code[name]) for name in sorted(output.code)}
    if output.base is not None:
        facts["base"] = value_text(output.base)
    facts |= _param_facts("params.", output.params)
    facts["budget"] = value_text(output.budget)
    if output.levels_version is not None:
        facts["levels_version"] = str(output.levels_version)
    facts |= _param_facts("write.", output.write)
    facts |= {f"sources.{key_text(name)}": _digest_text(output.sources[name]) for name in sorted(output.sources)}
    return facts


def _declared_reason(key: str) -> str:
    if key.rpartition(".")[2] == "operator_version":
        return "this mergepipe computes the operator differently"
    if key == "levels_version":
        return "this mergepipe codes deltas in another way, or the budget buys whole blocks on one side"
    if key.startswith("code."):
        return "the code of the custom operator changed"
    if key.startswith("sources."):
        return "it was made from other content of this source"
    if key == "publish":
        return "only outputs that are published have a path"
    return "declared differently"


def _param_facts(prefix: str, params: Mapping[str, ParamValue]) -> Facts:
    return {prefix + key_text(key): value_text(params[key]) for key in sorted(params)}


def _expert_differences(entry: str, old: LockedOutput, new: LockedOutput) -> Iterator[Difference]:
    """Yield the differences of the experts: of their list, and of the parameters of each that is in both lists."""
    old_names, new_names = ([expert.source for expert in side.experts] for side in (old, new))
    if old_names == new_names:
        partners = dict(enumerate(old.experts))
    else:
        texts = {"": ", ".join(old_names)}, {"": ", ".join(new_names)}
        yield from _facts_differences(entry, *texts, DifferenceKind.DECLARED, _declared_reason)
        by_name = {expert.source: expert for expert in reversed(old.experts)}
        partners = {index: by_name[name] for index, name in enumerate(new_names) if name in by_name}
    for index, partner in partners.items():
        facts = _param_facts("", partner.params), _param_facts("", new.experts[index].params)
        yield from _facts_differences(f"{entry}[{index}]", *facts, DifferenceKind.DECLARED, _declared_reason)


def _slices_facts(output: LockedOutput) -> Facts:
    facts: Facts = {}
    for index, part in enumerate(output.slices):
        facts |= {f"[{index}].{key}": text for key, text in _slice_facts(part).items()}
    return facts


def _slice_facts(part: LockedSlice) -> Facts:
    facts = {"layers": value_text(part.layers)}
    for key in ("operator", "operator_version", "base", "base_layers"):
        value = getattr(part, key)
        facts |= {} if value is None else {key: value_text(value)}
    facts |= {f"experts[{index}]": expert_text(expert) for index, expert in enumerate(part.experts)}
    facts |= _param_facts("params.", part.params)
    return facts | {f"rules{key}": text for key, text in _rules_facts(part.rules).items()}


def _rules_facts(rules: Sequence[LockedRule]) -> Facts:
    facts: Facts = {}
    for index, rule in enumerate(rules):
        facts |= {f"[{index}].{key}": text for key, text in _rule_facts(rule).items()}
    return facts


def _rule_facts(rule: LockedRule) -> Facts:
    facts = {"match": "[" + ", ".join(map(value_text, rule.match)) + "]"}
    if rule.layers is not None:
        facts["layers"] = value_text(rule.layers)
    facts |= _param_facts("params.", rule.params)
    for name in sorted(rule.experts):
        key = f"experts.{key_text(name)}"
        facts |= _param_facts(f"{key}.", rule.experts[name]) or {key: "{}"}
    return facts


def _result_differences(entry: str, old: LockedOutput, new: LockedOutput) -> Iterator[Difference]:
    result = DifferenceKind.RESULT
    reason = "the result differs"
    yield from _facts_differences(entry, _result_facts(old), _result_facts(new), result, lambda _: reason)
    yield from _list_differences(
        f"{entry}.shards",
        *({s.name: f"{_digest_text(s.digest)}, {format_count(s.bytes, 'byte')}" for s in o.shards} for o in (old, new)),
        same=old.shards == new.shards,
        kind=result,
        reason=reason,
    )
    yield from _list_differences(
        f"{entry}.side_files",
        *({file.name: _digest_text(file.digest) for file in output.side_files} for output in (old, new)),
        same=old.side_files == new.side_files,
        kind=result,
        reason=reason,
    )
    yield from _list_differences(
        f"{entry}.tensors",
        *({tensor.name: tensor_text(tensor) for tensor in output.tensors} for output in (old, new)),
        same=True,  # their order follows from their names
        kind=DifferenceKind.TENSOR,
        reason=reason,
    )
    yield from _list_differences(
        f"{entry}.levels",
        *({t.name: levels_text(t.levels) for t in output.tensors if t.levels is not None} for output in (old, new)),
        same=True,
        kind=DifferenceKind.TENSOR,
        reason="its blocks are read at other levels",
    )


def _result_facts(output: LockedOutput) -> Facts:
    return {
        "expert_bytes_full": str(output.expert_bytes_full),
        "expert_bytes_planned": str(output.expert_bytes_planned),
        **{f"bound.{key}": text for key, text in bound_texts(output.bound).items()},
        "digest": _digest_text(output.digest),
    }


def _digest_text(digest: bytes) -> str:
    return "unknown" if digest == UNKNOWN_DIGEST else format_digest(digest)


def _facts_differences(
    prefix: str, old: Facts, new: Facts, kind: DifferenceKind, reason: Callable[[str], str]
) -> Iterator[Difference]:
    """Yield a difference for every key whose text differs, in the order of ``new``, then what only ``old`` has."""
    for key in dict.fromkeys((*new, *old)):
        before, after = old.get(key), new.get(key)
        if before != after:
            joint = "." if prefix and key and not key.startswith("[") else ""
            why = repinned(before, after) or reason(key)
            yield Difference(entry=prefix + joint + key, old=before, new=after, reason=why, kind=kind)


def _list_differences(
    entry: str, old: Facts, new: Facts, *, same: bool, kind: DifferenceKind, reason: str
) -> Iterator[Difference]:
    """Yield the differences of a list of named things; its order is one fact more."""
    found = False
    for name in dict.fromkeys((*new, *old)):
        before, after = old.get(name), new.get(name)
        if before != after:
            found = True
            tensor = name if kind is DifferenceKind.TENSOR else None
            yield Difference(
                entry=f"{entry}.{key_text(name)}", old=before, new=after, reason=reason, kind=kind, tensor=tensor
            )
    if not same and not found:
        yield Difference(
            entry=entry, old=", ".join(old), new=", ".join(new), reason="they come in another order", kind=kind
        )


def _presence(entry: str, old: str | None, new: str | None, kind: DifferenceKind) -> Difference:
    reason = "is not in the lock" if old is None else "is no longer part of what is built"
    return Difference(entry=entry, old=old, new=new, reason=reason, kind=kind)
