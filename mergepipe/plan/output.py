"""Planning one output: from a Mergefile entry and checkpoint headers to everything but the weights' content.

Pure: no file is opened and the cache is not asked, so two machines with the same inputs make the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.heads import is_head, ties_embeddings
from mergepipe.checkpoints.quantised import quantisation
from mergepipe.digest import record_digest
from mergepipe.errors import MergepipeError, PlanError, raise_collected
from mergepipe.mergefile.resolve import unmatched_rules
from mergepipe.mergefile.schema import Output
from mergepipe.operators.contract import Operator
from mergepipe.plan.layout import TensorSlot, lay_out
from mergepipe.plan.tensors import Family, plan_tensors
from mergepipe.plan.values import OutputPlan

_NAMED = 3


def plan_output(
    output: Output, operator: Operator, checkpoints: Mapping[str, Checkpoint], geometry: Geometry
) -> OutputPlan:
    """Plan an output.

    Parameters
    ----------
    checkpoints
        At least the sources that the output names, by source name.

    Raises
    ------
    PlanError
        If the sources do not fit together; several problems are raised as one `CollectedErrors`.
    """
    family = _family(output, operator, checkpoints)
    raise_collected(_refuse_quantised(family))
    tensors, notes, errors = plan_tensors(family)
    dropped, head_errors = _extra_tensors(family)
    raise_collected([*head_errors, *errors, *_useless_rules(family), *_overreaching_rules(family)])
    layout = lay_out(
        [TensorSlot(name=t.name, dtype=t.dtype, shape=t.shape, nbytes=t.nbytes) for t in tensors],
        output.write.shard_size,
    )
    plan = OutputPlan(
        output=output,
        operator=operator,
        geometry=geometry,
        tensors=tensors,
        sources=family.checkpoints,
        definer=family.definer,
        layout=layout,
        decisions=(*dropped, *notes),
        notes=tuple(_checkpoint_notes(family)),
        expert_bytes=0,
        base_bytes=0,
        expert_blocks=0,
    )
    return _with_costs(plan)


def _family(output: Output, operator: Operator, checkpoints: Mapping[str, Checkpoint]) -> Family:
    experts = [expert.source for expert in output.experts]
    base = None if operator.ignores_base else output.base
    names = dict.fromkeys([*([base] if base else []), *experts])
    return Family(
        output=output,
        operator=operator,
        definer=base or experts[0],
        checkpoints={name: checkpoints[name] for name in names},
    )


def _refuse_quantised(family: Family) -> Iterable[MergepipeError]:
    for source, checkpoint in family.checkpoints.items():
        scheme = quantisation(checkpoint)
        if scheme is not None:
            yield PlanError(
                f"source `{source}` is quantised: {scheme}",
                hint="merge the checkpoint that it was quantised from (float16, bfloat16 or float32), and quantise the"
                " result",
                source=source,
            )


def _extra_tensors(family: Family) -> tuple[list[str], list[MergepipeError]]:
    """Return notes on expert tensors that the output drops, and errors for heads that must not be dropped."""
    reference = family.checkpoints[family.definer]
    notes: list[str] = []
    errors: list[MergepipeError] = []
    for source, checkpoint in family.checkpoints.items():
        extra = [name for name in checkpoint.tensors if name not in reference.tensors]
        shares = len(checkpoint.tensors) - len(extra)
        heads = [name for name in extra if _is_own_head(checkpoint, reference, name)] if shares else []
        errors += [_head_error(family.definer, source, name) for name in heads]
        if extra and not heads:
            named = ", ".join(f"`{name}`" for name in extra[:_NAMED])
            more = f" and {len(extra) - _NAMED:,} more" if len(extra) > _NAMED else ""
            plural = "tensor" if len(extra) == 1 else "tensors"
            notes.append(
                f"{source}: {len(extra):,} extra {plural} that `{family.definer}` lacks, dropped ({named}{more})"
            )
    return notes, errors


def _is_own_head(checkpoint: Checkpoint, reference: Checkpoint, name: str) -> bool:
    """Return whether a tensor is an output head that the checkpoint trained and the reference ties."""
    return is_head(name) and ties_embeddings(reference.config) and not ties_embeddings(checkpoint.config)


def _head_error(definer: str, source: str, name: str) -> PlanError:
    return PlanError(
        f"expert `{source}` has a head of its own, `{name}`, which `{definer}` ties to its embeddings",
        hint=f"save `{definer}` with an untied head (a copy of its embeddings, `tie_word_embeddings` false), or the"
        " expert with a tied one",
        tensor=name,
        source=source,
    )


def _useless_rules(family: Family) -> Iterable[MergepipeError]:
    reference = family.checkpoints[family.definer]
    layers = reference.layers()
    for rule in unmatched_rules(family.output, tuple(reference.tensors), layers):
        if rule.layers is not None and rule.layers[1] > layers.count:
            continue  # reported as that
        number = family.output.rules.index(rule)
        wanted = f"`match` {', '.join(rule.match)}" if rule.match else ""
        ranged = f"`layers` {rule.layers[0]}..{rule.layers[1]}" if rule.layers else ""
        yield PlanError(
            f"outputs.{family.output.name}.rules[{number}] matches no tensor: "
            f"{' and '.join(part for part in (wanted, ranged) if part)}",
            hint=f"`{family.definer}` has {layers.count} layers and names such as `{_a_name(reference)}`",
            output=family.output.name,
            rule=number,
        )


def _overreaching_rules(family: Family) -> Iterable[MergepipeError]:
    count = family.checkpoints[family.definer].layers().count
    for number, rule in enumerate(family.output.rules):
        if rule.layers is not None and rule.layers[1] > count:
            yield PlanError(
                f"outputs.{family.output.name}.rules[{number}]: layers {rule.layers[0]}..{rule.layers[1]} reach beyond"
                f" the model, which has {count} layers",
                hint=f"the end is excluded: the last layer is in `{rule.layers[0]}..{count}`",
                output=family.output.name,
                rule=number,
                layers=count,
            )


def _a_name(checkpoint: Checkpoint) -> str:
    return max(checkpoint.tensors, key=lambda name: name.count("."))


def _checkpoint_notes(family: Family) -> list[str]:
    return [f"{source}: {note}" for source, checkpoint in family.checkpoints.items() for note in checkpoint.notes]


def _with_costs(plan: OutputPlan) -> OutputPlan:
    pairs = [(tensor, slot) for tensor in plan.tensors for slot in tensor.slots if slot is not None]
    expert = [plan.expert_cost(tensor, slot) for tensor, slot in pairs]
    return replace(
        plan,
        expert_bytes=sum(nbytes for nbytes, _ in expert),
        base_bytes=sum(plan.base_cost(tensor, slot) for tensor, slot in pairs),
        expert_blocks=sum(blocks for _, blocks in expert),
    )


def plan_digest(plan: OutputPlan) -> bytes:
    """Return the digest of all that a plan decides; access is full: every (expert, block) at the exact level."""
    entries = [
        (
            tensor.name,
            tensor.recipe,
            tuple((slot.source, slot.info.name) if slot else None for slot in tensor.slots),
        )
        for tensor in plan.tensors
    ]
    headers = [shard.header for shard in plan.layout.shards]
    return record_digest("plan", plan.output.name, plan.geometry.block_elements, "full", entries, headers)
