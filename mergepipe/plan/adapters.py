"""What an output reads of an adapter: factors, whole tensors, or tensors of the checkpoint that it applies to.

==================  =========================================  ===============================================
the adapter ...     its delta is used                          its value is used
==================  =========================================  ===============================================
adds a product      the factors                                the factors, and the tensor they apply to
holds the tensor    the stored tensor, as of any expert        the stored tensor
leaves it alone     nothing: a zero delta                      the tensor of the checkpoint that it applies to
==================  =========================================  ===============================================

The delta is used where the operator works on deltas and the adapter applies to the output's own base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mergepipe.checkpoints.checkpoint import Adapter, Checkpoint
from mergepipe.errors import MergepipeError, PlanError
from mergepipe.plan.parts import Member, Part, Wanted
from mergepipe.plan.values import InputRef, LoraRef


def input_ref(checkpoint: Checkpoint, name: str, *, delta: bool = False) -> InputRef | None:
    """Return what is read for a tensor of a checkpoint.

    Parameters
    ----------
    name
        One of `Checkpoint.tensors`.
    delta
        Whether an adapter's delta is needed instead of its value. None then means that there is none.
    """
    adapter, info = checkpoint.adapter, checkpoint.tensors[name]
    if adapter is None:
        coded = checkpoint.standalone is not None and checkpoint.standalone.is_coded(name)
        return InputRef(source=checkpoint.label, info=info, coded_only=coded)
    pair, whole = adapter.low_rank.get(name), adapter.replaced.get(name)
    below = InputRef(source=adapter.on.label, info=adapter.on.tensors[name])
    if whole is not None:
        below = InputRef(source=checkpoint.label, info=whole)
    if pair is None:
        return None if delta and whole is None else below
    return InputRef(
        source=checkpoint.label,
        info=info,
        lora=LoraRef(
            a=InputRef(source=checkpoint.label, info=pair.a),
            b=InputRef(source=checkpoint.label, info=pair.b),
            scaling=pair.scaling,
            transposed=pair.transposed,
            on=None if delta and whole is None else below,
        ),
    )


def value_ref(part: Part, member: Member, wanted: Wanted) -> InputRef:
    """Return what is read for the value of a member's tensor."""
    ref = input_ref(part.checkpoints[member.source], part.source_name(member, wanted))
    assert ref is not None, "only a delta may be nothing at all"
    return ref


def expert_ref(part: Part, member: Member, wanted: Wanted) -> InputRef | None:
    """Return what is read for an expert's tensor; None where that is a zero delta."""
    checkpoint, name = part.checkpoints[member.source], part.source_name(member, wanted)
    return input_ref(checkpoint, name, delta=_applies_to_base(part, checkpoint.adapter, name, wanted))


def _applies_to_base(part: Part, adapter: Adapter | None, name: str, wanted: Wanted) -> bool:
    """Return whether the base of the part is what an adapter's tensor applies to, and deltas are what is used."""
    base = part.base
    if adapter is None or base is None or not part.uses_base:
        return False
    return adapter.on.label == base.source and part.source_name(base, wanted) == name


def with_bases(sources: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Return these checkpoints, and behind them those that adapters among them apply to."""
    found = dict(sources)
    for checkpoint in sources.values():
        if checkpoint.adapter is not None:
            found.setdefault(checkpoint.adapter.on.label, checkpoint.adapter.on)
    return found


def adapter_notes(sources: Mapping[str, Checkpoint]) -> list[str]:
    """Return in words what each adapter changes."""
    return [
        f"{source}: an adapter on `{checkpoint.adapter.on.label}`: {_changes(checkpoint.adapter)} of"
        f" {len(checkpoint.tensors):,} tensors"
        for source, checkpoint in sources.items()
        if checkpoint.adapter is not None
    ]


def _changes(adapter: Adapter) -> str:
    added = f"adds to {len(adapter.low_rank):,}" if adapter.low_rank else ""
    replaced = f"replaces {len(adapter.replaced):,}" if adapter.replaced else ""
    return " and ".join(part for part in (added, replaced) if part)


def resized(parts: Sequence[Part]) -> Iterator[MergepipeError]:
    """Yield an error for each tensor that an adapter holds in another shape, where the adapter defines the output."""
    definers = {part.definer.source: part.checkpoints[part.definer.source] for part in parts}
    for source, checkpoint in definers.items():
        if checkpoint.adapter is not None:
            yield from _resized(source, checkpoint, checkpoint.adapter.on.tensors.keys())


def _resized(source: str, checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[MergepipeError]:
    assert checkpoint.adapter is not None, "only an adapter stands on another checkpoint"
    on = checkpoint.adapter.on
    for name in names:
        ours, theirs = checkpoint.tensors[name].shape, on.tensors[name].shape
        if ours != theirs:
            yield PlanError(
                f"tensor `{name}` has shape {list(ours)} in adapter `{source}` and {list(theirs)} in `{on.label}`,"
                " whose config the output would take",
                hint=f"resize `{on.label}` first; or list the adapter as an expert of an output with `{on.label}` as"
                ' its base and `rows = "common"`',
                tensor=name,
                source=source,
                expected=list(theirs),
                got=list(ours),
            )
