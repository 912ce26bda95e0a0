"""Whether a plan, and then a result, is what a manifest says: every difference by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergepipe.errors import MergepipeError, PlanError
from mergepipe.lockfile.assemble import declared_output
from mergepipe.lockfile.manifest_records import Manifest, ManifestTensor
from mergepipe.lockfile.records import LockedOutput
from mergepipe.plan.values import OutputPlan, TensorPlan
from mergepipe.project.stages import tokenizer_of

_DECLARED = (
    "operator", "operator_version", "numerics", "base", "experts", "params", "slices", "rules", "budget",
    "levels_version", "write", "code", "expert_bytes_full",
)  # fmt: skip
NAMED = 10
"""How many tensors errors name, in all."""


def plan_errors(plan: OutputPlan, record: LockedOutput, tensors: Sequence[ManifestTensor]) -> list[MergepipeError]:
    """Return an error for each way in which a plan is not what the manifest says of its output."""
    name = record.name
    errors = [_error(name, f"`{key}` would be {now!r}, and was {was!r}") for key, was, now in _declared(plan, record)]
    named = {tensor.name: tensor for tensor in tensors}
    planned = {tensor.name: tensor for tensor in plan.tensors}
    for tensor in [*planned.keys() - named.keys(), *named.keys() - planned.keys()]:
        what = "would be made, and was not" if tensor in planned else "was made, and would not be"
        errors.append(_error(name, f"tensor `{tensor}` {what}", tensor=tensor))
    for tensor, was in named.items():
        if tensor in planned:
            now = planned[tensor]
            found = [f"tensor `{tensor}`: {text}" for text in _tensor_differences(now, was)]
            errors += [_error(name, text, tensor=tensor) for text in found]
    errors = sorted(errors, key=lambda error: error.message)
    return errors[:NAMED] + [_error(name, f"and {len(errors) - NAMED:,} more differences")] * (len(errors) > NAMED)


def layout_errors(plan: OutputPlan, manifest: Manifest) -> list[MergepipeError]:
    """Return an error for each shard that would not hold what it held; known before anything is read."""
    output = manifest.output
    errors: list[MergepipeError] = []
    if [shard.name for shard in plan.layout.shards] != [shard.name for shard in output.shards]:
        what = f"it would have {len(plan.layout.shards):,} shards, and had {len(output.shards):,}, or of other names"
        return [_error(output.name, what)]
    for planned, shard, tensors in zip(plan.layout.shards, output.shards, manifest.shard_tensors, strict=True):
        if [slot.name for slot in planned.tensors] != list(tensors):
            errors.append(_error(output.name, f"`{shard.name}` would hold other tensors, or in another order"))
        elif planned.size != shard.bytes:
            errors.append(
                _error(output.name, f"`{shard.name}` would have {planned.size:,} bytes, and had {shard.bytes:,}")
            )
    return errors


def _error(output: str, what: str, **facts: Any) -> MergepipeError:
    return PlanError(
        f"output `{output}` cannot be made again as it was: {what}",
        hint="are these the sources that it was made from, and was it made with this version of mergepipe?",
        output=output,
        **facts,
    )


def _declared(plan: OutputPlan, record: LockedOutput) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, recorded, planned) of what is declared for an output and differs."""
    declared = declared_output(plan, tokenizer_of(plan), None)
    for key in _DECLARED:
        was, now = getattr(record, key), getattr(declared, key)
        if _canonical(was) != _canonical(now):
            yield key, was, now


def _tensor_differences(now: TensorPlan, was: ManifestTensor) -> Iterator[str]:
    for what, old, new in (
        ("dtype", was.dtype, now.dtype),
        ("shape", list(was.shape), list(now.shape)),
        ("decision", was.decision, now.decision.value),
    ):
        if old != new:
            yield f"its {what} would be {new}, and was {old}"
    if was.parameters is None:
        yield "the manifest states no parameters"
    else:
        yield from _parameter_differences("", was.parameters.params, now.params.values)
        if len(was.parameters.experts) != len(now.params.experts):
            yield f"it would have {len(now.params.experts)} experts, and had {len(was.parameters.experts)}"
        pairs = zip(was.parameters.experts, now.params.experts, strict=False)
        for number, (old_params, new_params) in enumerate(pairs):
            yield from _parameter_differences(f" of expert {number}", old_params, new_params)
    before = [(given.source, given.tensor or was.name) for given in was.inputs]
    after = [(ref.source, ref.info.name) for slot in now.slots if slot is not None for ref in slot.stored]
    for source, tensor in dict.fromkeys([*before, *after]):
        if ((source, tensor) in before) != ((source, tensor) in after):
            verb = "would not be" if (source, tensor) in before else "would be"
            yield f"`{tensor}` of source `{source}` {verb} one of its inputs"
    if set(before) == set(after) and before != after:
        yield "its inputs would come in another order"


def _parameter_differences(whose: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*was, *now}):
        old, new = was.get(name), now.get(name)
        if _canonical(old) != _canonical(new):
            yield f"`{name}`{whose} would be {new!r}, and was {old!r}"


def _canonical(value: Any) -> Any:
    """Return a value in a form that is equal for equal ones alone: 1, 1.0 and true are three; tables have no order."""
    if isinstance(value, Mapping):
        return [(key, _canonical(value[key])) for key in sorted(value)]
    if isinstance(value, tuple | list):
        return [_canonical(item) for item in value]
    if dataclasses.is_dataclass(value):
        return [_canonical(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return type(value).__name__, value
