"""Planning one output: from a Mergefile entry and checkpoint headers to everything but the weights' content.

Pure: no file is opened and the cache is not asked, so two machines with the same inputs make the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.heads import is_head, ties_embeddings
from mergepipe.checkpoints.layers import natural_key
from mergepipe.checkpoints.quantised import quantisation
from mergepipe.digest import record_digest
from mergepipe.errors import MergepipeError, PlanError, raise_collected
from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import key_path
from mergepipe.mergefile.resolve import unmatched_rules
from mergepipe.mergefile.schema import Output, Rule
from mergepipe.plan.adapters import adapter_notes, resized, with_bases
from mergepipe.plan.budgeted import check_budget, settled
from mergepipe.plan.given import given_errors
from mergepipe.plan.layout import TensorSlot, lay_out
from mergepipe.plan.parts import Operators, Part, whole_output
from mergepipe.plan.sampling import with_sampling
from mergepipe.plan.slices import config_source, slice_notes, slice_parts
from mergepipe.plan.stacking import restacked
from mergepipe.plan.tensors import plan_tensors
from mergepipe.plan.values import InputRef, LayerOrigin, OutputPlan, TensorPlan

_NAMED = 3


def plan_output(
    output: Output, operators: Operators, checkpoints: Mapping[str, Checkpoint], geometry: Geometry
) -> OutputPlan:
    """Plan an output.

    Parameters
    ----------
    operators
        Returns the operator of a name.
    checkpoints
        At least the sources that the output names, by source name.

    Raises
    ------
    PlanError
        If the sources do not fit together; several problems are raised as one `CollectedErrors`.
    """
    sliced = output.slices is not None
    parts = slice_parts(output, operators, checkpoints) if sliced else (whole_output(output, operators, checkpoints),)
    sources = with_bases(_sources(parts))
    raise_collected(_refuse_quantised(sources))
    tensors, notes, errors = _tensors(parts, geometry)
    dropped, head_errors = _extra_tensors(parts)
    raise_collected([*head_errors, *errors, *resized(parts), *_rule_errors(output, parts)])
    layout = lay_out(
        [TensorSlot(name=t.name, dtype=t.dtype, shape=t.shape, nbytes=t.nbytes) for t in tensors],
        output.write.shard_size,
    )
    stack = _stack(parts) if sliced else ()
    definer = config_source(parts)
    config_notes = restacked(sources[definer].config, stack, _configs(sources)).notes if sliced else ()
    stacked = (*slice_notes(parts), *config_notes) if sliced else ()
    plan = OutputPlan(
        output=output,
        operator=operators(output.operator),
        geometry=geometry,
        parts=parts,
        tensors=tensors,
        sources=sources,
        definer=definer,
        stack=stack,
        layout=layout,
        decisions=(*stacked, *adapter_notes(sources), *dropped, *notes),
        notes=tuple(_checkpoint_notes(sources)),
        expert_bytes=0,
        base_bytes=0,
        expert_blocks=0,
    )
    plan = _with_costs(plan)
    raise_collected(given_errors(plan))
    refused = check_budget(plan)
    if refused is not None:
        raise refused
    return with_sampling(settled(plan))


def _sources(parts: Sequence[Part]) -> dict[str, Checkpoint]:
    """Return the checkpoints of all parts, bases first."""
    found: dict[str, Checkpoint] = {}
    for part in parts:
        base = part.base
        if base is not None and base.source in part.checkpoints:
            found[base.source] = part.checkpoints[base.source]
    for part in parts:
        found |= part.checkpoints
    return found


def _configs(sources: Mapping[str, Checkpoint]) -> dict[str, Mapping[str, object]]:
    return {source: checkpoint.config for source, checkpoint in sources.items()}


def _stack(parts: Sequence[Part]) -> tuple[LayerOrigin, ...]:
    """Return where each layer of the output comes from: the definer of its slice, and the layer there."""
    return tuple(
        LayerOrigin(source=part.definer.source, layer=part.definer.first_layer + index)
        for part in parts
        for index in range(part.count)
    )


def _tensors(
    parts: Sequence[Part], geometry: Geometry
) -> tuple[tuple[TensorPlan, ...], list[str], list[MergepipeError]]:
    """Plan the tensors of every part; they come in natural order."""
    tensors: list[TensorPlan] = []
    notes: dict[str, None] = {}  # each once, whatever the number of slices
    errors: dict[str, MergepipeError] = {}
    for part in parts:
        planned, said, problems = plan_tensors(part, geometry)
        tensors += planned
        notes |= dict.fromkeys(said)
        for problem in problems:
            errors.setdefault(problem.message, problem)
    return tuple(sorted(tensors, key=lambda tensor: natural_key(tensor.name))), list(notes), list(errors.values())


def _refuse_quantised(sources: Mapping[str, Checkpoint]) -> Iterable[MergepipeError]:
    for source, checkpoint in sources.items():
        scheme = None if checkpoint.adapter else quantisation(checkpoint)  # what it applies to is one of the sources
        if scheme is not None:
            yield PlanError(
                f"source `{source}` is quantised: {scheme}",
                hint="merge the checkpoint that it was quantised from (float16, bfloat16 or float32), and quantise the"
                " result",
                source=source,
            )


def _extra_tensors(parts: Sequence[Part]) -> tuple[list[str], list[MergepipeError]]:
    """Return notes on expert tensors that the output drops, and errors for heads that must not be dropped."""
    dropped: dict[tuple[str, str], dict[str, None]] = {}
    heads: dict[tuple[str, str], dict[str, None]] = {}
    for part in parts:
        definer = part.definer.source
        reference = part.checkpoints[definer]
        for member in part.experts:
            checkpoint = part.checkpoints[member.source]
            extra, shares = part.unused(member)
            own = [name for name in extra if _is_own_head(checkpoint, reference, name)] if shares else []
            kind = heads if own else dropped
            kind.setdefault((member.source, definer), {}).update(dict.fromkeys(own or extra))
    notes = [_dropped_note(*pair, list(names)) for pair, names in dropped.items() if names]
    return notes, [_head_error(definer, source, name) for (source, definer), names in heads.items() for name in names]


def _dropped_note(source: str, definer: str, names: Sequence[str]) -> str:
    named = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    plural = "tensor" if len(names) == 1 else "tensors"
    return f"{source}: {len(names):,} extra {plural} that `{definer}` lacks, dropped ({named}{more})"


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


def _rule_errors(output: Output, parts: Sequence[Part]) -> Iterable[MergepipeError]:
    """Yield an error for each rule that is for no tensor; those of a slice are for its tensors alone."""
    count = sum(part.count for part in parts)
    yield from _useless(output, ("rules",), output.rules, parts, count)
    for number, declared in enumerate(output.slices or ()):
        yield from _useless(output, ("slices", number, "rules"), declared.rules, [parts[number]], count)


def _useless(
    output: Output, path: KeyPath, rules: Sequence[Rule], parts: Sequence[Part], count: int
) -> Iterable[MergepipeError]:
    tensors = [(tensor.name, tensor.layer) for part in parts for tensor in part.tensors] if rules else []
    unmatched = unmatched_rules(rules, tensors)
    for number, rule in enumerate(rules):
        line = f" (line {rule.line})" if rule.line else ""
        where = key_path(("outputs", output.name, *path, number)) + line
        overreaches = rule.layers is not None and rule.layers[1] > count
        if rule in unmatched and not overreaches:
            yield _useless_rule(output, where, number, rule, count, tensors)
        if rule.layers is not None and overreaches:
            start, stop = rule.layers
            yield PlanError(
                f"{where}: layers {start}..{stop} reach beyond the model, which has {count} layers",
                hint=f"the end is excluded: its layers are `0..{count}`",
                output=output.name,
                rule=number,
                layers=count,
            )


def _useless_rule(
    output: Output, where: str, number: int, rule: Rule, count: int, tensors: Sequence[tuple[str, int | None]]
) -> PlanError:
    wanted = f"`match` {', '.join(f'`{glob}`' for glob in rule.match)}" if rule.match else ""
    ranged = f"`layers` {rule.layers[0]}..{rule.layers[1]}" if rule.layers else ""
    name = max((name for name, _ in tensors), key=lambda name: name.count("."), default="")
    return PlanError(
        f"{where} matches no tensor: {' and '.join(part for part in (wanted, ranged) if part)}",
        hint=f"there are {count} layers and names such as `{name}`",
        output=output.name,
        rule=number,
    )


def _checkpoint_notes(sources: Mapping[str, Checkpoint]) -> list[str]:
    return [f"{source}: {note}" for source, checkpoint in sources.items() for note in checkpoint.notes]


def _with_costs(plan: OutputPlan) -> OutputPlan:
    costs = [cost for tensor in plan.tensors for cost in _costs(plan, tensor)]
    return replace(
        plan,
        expert_bytes=sum(nbytes for nbytes, _, _ in costs),
        base_bytes=sum(nbytes for _, _, nbytes in costs),
        expert_blocks=sum(blocks for _, blocks, _ in costs),
    )


def _costs(plan: OutputPlan, tensor: TensorPlan) -> Iterator[tuple[int, int, int]]:
    """Yield (expert bytes, expert blocks, base bytes) of each input; those that are stored alike cost the same."""
    known: dict[object, tuple[int, int, int]] = {}
    for slot in tensor.slots:
        if slot is None:
            continue
        alike = (slot.info.dtype, slot.info.shape, tensor.is_expert(slot), slot is tensor.base)
        cost = known.get(alike) if slot.lora is None else None
        if cost is None:
            cost = (*plan.expert_cost(tensor, slot), plan.base_cost(tensor, slot))
            if slot.lora is None:
                known[alike] = cost
        yield cost


def plan_digest(plan: OutputPlan) -> bytes:
    """Return the digest of all that a plan decides.

    It names what every tensor leaves out (``full`` if none does), or the budget while that is not resolved.
    """
    entries = [
        (
            tensor.name,
            tensor.recipe,
            tuple((slot.source, slot.info.name) if slot else None for slot in _deciding_slots(tensor)),
        )
        for tensor in plan.tensors
    ]
    access: object = "full"
    if plan.is_pending:
        assert plan.output.budget is not None, "a plan that waits has a budget"
        access = plan.output.budget.text()
    elif any(tensor.access is not None for tensor in plan.tensors):
        access = [None if tensor.access is None else tensor.access.digest() for tensor in plan.tensors]
    headers = [shard.header for shard in plan.layout.shards]
    return record_digest("plan", plan.output.name, plan.geometry.block_elements, access, entries, headers)


def _deciding_slots(tensor: TensorPlan) -> tuple[InputRef | None, ...]:
    """Return a tensor's inputs without a base that stands for nothing, because nothing is left out."""
    unused = tensor.anchored and tensor.access is None and tensor.common_rows is None
    return (None, *tensor.experts) if unused else tensor.slots
