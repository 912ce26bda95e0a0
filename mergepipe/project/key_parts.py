"""The parts that a tensor's action key is made of, kept in the record of a build so that what changed can be named.

The key itself is one digest and says only that something differs. Beside it the record keeps what went into it, part
by part: the operator, its code, the resolved parameters, the content of each input, the access set, the block geometry
and the form of the result. `first_change` returns the first part that differs, in that order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import format_digest, is_sampled_pin, sampled_pin
from mergepipe.graph.inputs import slot_digest
from mergepipe.plan.access import EXACT, OMITTED
from mergepipe.plan.values import Decision, OutputPlan, TensorPlan
from mergepipe.signatures import Scalar
from mergepipe.units import format_count
from mergepipe.values import dataclass

_SHOWN_MOVES = 3  # changes of levels that are told apart
_WHOLE, _SAMPLED = "read whole", "known by samples"
_DIGEST = re.compile(r"((?:sample:)?b3:[0-9a-f]{12})[0-9a-f]{52}")


class ParamSet(msgspec.Struct, frozen=True):
    """Resolved parameters: those of the output, and those of each expert by its source and place among the experts."""

    values: dict[str, Scalar]
    experts: list[tuple[str, dict[str, Scalar]]]


class TensorParts(msgspec.Struct, frozen=True, array_like=True):
    """The parts of one tensor's action key.

    ``params`` is a place in `BuildParts.params`; ``inputs`` are a role (``base`` or ``expert``), a source, and the
    digest of its tensor, in slot order; where blocks are never read the digest of what is known of it, as a pin that is
    a fingerprint. ``access`` is empty where every block is read; ``form`` is dtype, shape and work dtype of the result
    in words. ``levels`` are those that ``access`` is the digest of (`mergepipe.plan.access.TensorAccess`); none in the
    records of earlier versions, and where every block is read.
    """

    operator: str
    code: bytes
    params: int
    inputs: list[tuple[str, str, bytes]]
    access: bytes
    form: str
    levels: list[bytes | None] = msgspec.field(default_factory=list)


class BuildParts(msgspec.Struct, frozen=True):
    """The parts of the keys of all tensors of an output."""

    geometry: int
    params: list[ParamSet]
    tensors: dict[str, TensorParts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A part of an action key that is another one than before.

    Attributes
    ----------
    part
        ``operator``, ``code``, ``parameter``, ``input``, ``access``, ``samples``, ``geometry``, ``form``; ``samples``
        where an input is known by samples and was read whole before, or the other way round, so that its content cannot
        be compared; ``unknown`` for an input whose content is not known any more; ``recipe`` where the inputs come in
        another order; ``none`` where nothing differs; ``first`` where there is nothing to compare with.
    subject
        What it is about: a source, a parameter, or None.
    before, after
        The part then and now, in words; digests as ``b3:<hex>``. None where there was, or is, no such part.
    detail
        Of an access set in words what became of the blocks, as far as that is known: nobody can look up its digest.
    """

    part: str
    subject: str | None = None
    parameter: str | None = None
    before: str | None = None
    after: str | None = None
    detail: str | None = None

    def text(self) -> str:
        """Return the change in words; names are not escaped."""
        return "".join(self._words())

    def _words(self) -> Iterator[str]:
        if self.part == "first":
            yield "first build"
            return
        if self.part == "none":
            yield "nothing that it is made from changed"
            return
        if self.part == "unknown":
            yield f"input `{self.subject}`: it changed on disk, or was not read before"
            return
        if self.part == "samples":
            yield f"the budget changed: input `{self.subject}` was {self.before}, and is {self.after} now"
            return
        yield self._what()
        if self.part == "access" and self.before and self.after:
            yield f": {self.detail}" if self.detail else ""
            return
        before, after = shortened(self.before), shortened(self.after)
        if before is not None and after is not None:
            yield f": {before} -> {after}" if self.part != "parameter" else f" {before} -> {after}"
        elif after is not None:
            yield f" is new: {after}" if self.part != "access" else ": now some are left out"
        elif before is not None:
            yield " is gone" if self.part != "access" else ": now all are read"

    def _what(self) -> str:
        if self.part == "parameter":
            return f"{self.parameter} of `{self.subject}`" if self.subject is not None else f"`{self.parameter}`"
        return {
            "operator": "operator changed",
            "code": "code of the operator changed",
            "input": f"input `{self.subject}`" + (" changed" if self.before and self.after else ""),
            "access": "blocks that the budget reads changed",
            "geometry": "blocks are cut differently",
            "form": "form of the result changed",
        }.get(self.part, "its recipe changed")

    def as_json(self) -> dict[str, str | None]:
        """Return the JSON form."""
        return {
            "part": self.part,
            "subject": self.subject,
            "parameter": self.parameter,
            "before": self.before,
            "after": self.after,
            "text": self.text(),
        }


FIRST = Change(part="first")
UNCHANGED = Change(part="none")


def shortened(text: str | None) -> str | None:
    """Return a digest, or the fingerprint of samples, with its first digits alone; any other text as it is."""
    found = _DIGEST.fullmatch(text or "")
    return text if found is None else found[1]


def build_parts(plan: OutputPlan, index: SourceIndex) -> BuildParts:
    """Return the parts of the keys of an output's tensors; the digest of an input that is not known is empty."""
    sets: dict[bytes, int] = {}
    params: list[ParamSet] = []
    tensors: dict[str, TensorParts] = {}
    for tensor in plan.tensors:
        found = _param_set(plan, tensor)
        number = sets.setdefault(msgspec.msgpack.encode(found), len(params))
        if number == len(params):
            params.append(found)
        tensors[tensor.name] = TensorParts(
            operator=_operator(tensor),
            code=tensor.operator.code if tensor.decision is Decision.MERGE else b"",
            params=number,
            inputs=_inputs(plan, tensor, index),
            access=b"" if tensor.access is None else tensor.access.digest(),
            form=_form(tensor),
            levels=[] if tensor.access is None else list(tensor.access.levels),
        )
    return BuildParts(geometry=plan.geometry.id, params=params, tensors=tensors)


def _param_set(plan: OutputPlan, tensor: TensorPlan) -> ParamSet:
    if tensor.decision is not Decision.MERGE:
        return ParamSet(values={}, experts=[])
    sources = [member.source for member in plan.parts[tensor.part].experts]
    own = [dict(values) for values in tensor.params.experts]
    return ParamSet(values=dict(tensor.params.values), experts=list(zip(sources, own, strict=True)))


def _operator(tensor: TensorPlan) -> str:
    if tensor.decision is not Decision.MERGE:
        return "copy"
    return f"{tensor.operator.signature.name} (version {tensor.operator.version})"


def _form(tensor: TensorPlan) -> str:
    shape = " x ".join(map(str, tensor.shape)) or "a scalar"
    common = "" if tensor.common_rows is None else f", {tensor.common_rows} rows merged"
    return f"{tensor.dtype} {shape}, computed in {tensor.work}{common}"


def _inputs(plan: OutputPlan, tensor: TensorPlan, index: SourceIndex) -> list[tuple[str, str, bytes]]:
    members = [member.source for member in plan.parts[tensor.part].experts]
    found = []
    for slot, ref in enumerate(tensor.slots):
        if ref is None or (slot == 0 and tensor.anchored and tensor.common_rows is None and tensor.access is None):
            continue
        digest = slot_digest(ref, index) or b""
        if digest and ref.levels is not None:
            digest = sampled_pin(digest)
        found.append(("expert", members[slot - 1], digest) if slot else ("base", ref.source, digest))
    return found


def first_change(old: BuildParts | None, new: BuildParts, tensor: str) -> Change:
    """Return the first part of a tensor's key that differs from that of an earlier build."""
    before, after = (old.tensors.get(tensor) if old is not None else None), new.tensors[tensor]
    if old is None or before is None:
        return FIRST
    return next(_changes(old, before, new, after), UNCHANGED)


def _changes(old: BuildParts, before: TensorParts, new: BuildParts, after: TensorParts) -> Iterator[Change]:
    if before.operator != after.operator:
        yield Change(part="operator", before=before.operator, after=after.operator)
    if before.code != after.code:
        yield Change(part="code", before=_digest(before.code), after=_digest(after.code))
    yield from _param_changes(old.params[before.params], new.params[after.params])
    yield from _input_changes(before, after)
    if before.access != after.access:
        digests = _digest(before.access), _digest(after.access)
        yield Change(part="access", before=digests[0], after=digests[1], detail=_moved(before.levels, after.levels))
    yield from _pin_changes(before, after)
    if old.geometry != new.geometry:
        yield Change(part="geometry", before=str(old.geometry), after=str(new.geometry))
    if before.form != after.form:
        yield Change(part="form", before=before.form, after=after.form)


def _moved(before: list[bytes | None], after: list[bytes | None]) -> str | None:
    """Return how many blocks are read at other levels than before, in words, the commonest changes first."""
    moved: Counter[tuple[int, int]] = Counter()
    if len(before) != len(after):
        return None
    for then, now in zip(before, after, strict=True):
        if then is None and now is None:
            continue
        then, now = (row if row is not None else bytes([EXACT]) * len(then or now or b"") for row in (then, now))
        if len(then) != len(now):
            return None
        moved.update(pair for pair in zip(then, now, strict=True) if pair[0] != pair[1])
    common = sorted(moved.items(), key=lambda item: (-item[1], item[0]))
    counts = [format_count(common[0][1], "block"), *(f"{count:,}" for _, count in common[1:])] if common else []
    parts = [
        f"{count} from {_level_words(then)} to {_level_words(now)}"
        for count, ((then, now), _) in zip(counts[:_SHOWN_MOVES], common, strict=False)
    ]
    others = sum(count for _, count in common[_SHOWN_MOVES:])
    return ", ".join([*parts, *([f"{others:,} otherwise"] if others else [])]) or None


def _level_words(level: int) -> str:
    return {OMITTED: "left out", EXACT: "exact"}.get(level, f"level {level}")


def _digest(digest: bytes) -> str | None:
    return format_digest(digest) if digest else None


def _param_changes(old: ParamSet, new: ParamSet) -> Iterator[Change]:
    yield from _mapping_changes(None, old.values, new.values)
    earlier = dict(reversed(old.experts))
    for source, values in new.experts:
        if source in earlier:
            yield from _mapping_changes(source, earlier[source], values)


def _mapping_changes(subject: str | None, old: Mapping[str, Scalar], new: Mapping[str, Scalar]) -> Iterator[Change]:
    for key in dict.fromkeys((*sorted(new), *sorted(old))):
        if old.get(key) != new.get(key):
            before, after = (scalar_text(side[key]) if key in side else None for side in (old, new))
            yield Change(part="parameter", subject=subject, parameter=key, before=before, after=after)


def scalar_text(value: Scalar) -> str:
    """Return a parameter's value as people write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _input_changes(before: TensorParts, after: TensorParts) -> Iterator[Change]:
    """Yield the inputs that are others, by role and source; then an order that is another."""
    old, new = _by_place(before), _by_place(after)
    for place in dict.fromkeys((*new, *old)):
        then, now = old.get(place, b""), new.get(place, b"")
        if (place in old, then) != (place in new, now) and _comparable(then, now, before.access == after.access):
            part = "unknown" if place in new and not now else "input"
            yield Change(part=part, subject=place[1], before=_digest(then), after=_digest(now))
    if old == new and before.inputs != after.inputs:
        order = [", ".join(source for _, source, _ in side.inputs) for side in (before, after)]
        yield Change(part="recipe", before=order[0], after=order[1])


def _by_place(parts: TensorParts) -> dict[tuple[str, str], bytes]:
    return {(role, source): digest for role, source, digest in parts.inputs}


def _comparable(then: bytes, now: bytes, same_blocks: bool) -> bool:
    """Return whether two digests that differ tell of other content.

    A digest of all content and one of a part do not; nor do those of different parts.
    """
    if not then or not now:
        return True
    kinds = is_sampled_pin(then), is_sampled_pin(now)
    return same_blocks if all(kinds) else not any(kinds)


def _pin_changes(before: TensorParts, after: TensorParts) -> Iterator[Change]:
    """Yield the inputs of which other things are known than before: all, or samples and the blocks that are read."""
    old = _by_place(before)
    for place, now in _by_place(after).items():
        then = old.get(place, b"")
        if then and now and is_sampled_pin(then) != is_sampled_pin(now):
            words = [_SAMPLED if is_sampled_pin(pin) else _WHOLE for pin in (then, now)]
            yield Change(part="samples", subject=place[1], before=words[0], after=words[1])
