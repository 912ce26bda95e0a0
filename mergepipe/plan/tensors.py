"""The policies of OPERATORS.md, section 1, rules 9 to 13: which tensors a part makes and what each is made of.

Nothing here reads weights. Problems are collected per part and name tensor, source, and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.heads import is_vocabulary
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.dtypes import is_mergeable
from mergepipe.errors import MergepipeError, OperatorError
from mergepipe.operators.contract import Prepared, TensorParams
from mergepipe.plan.adapters import expert_ref, value_ref
from mergepipe.plan.facts import tensor_facts
from mergepipe.plan.parts import Member, Part, Wanted
from mergepipe.plan.problems import Problems, listing, shape_mismatch, unmergeable
from mergepipe.plan.recipe import equal_recipe, input_form, merge_recipe, params_digest
from mergepipe.plan.values import Decision, InputRef, TensorPlan


def plan_tensors(part: Part, geometry: Geometry) -> tuple[tuple[TensorPlan, ...], list[str], list[MergepipeError]]:
    """Return a part's tensors in the definer's order, notes on missing tensors and rows, and every problem found."""
    plans: list[TensorPlan] = []
    missing: dict[str, list[str]] = {}
    problems = Problems()
    preparer = _Preparer(part)
    for wanted in part.tensors:
        try:
            params = preparer.params(wanted)
            plan = _plan_tensor(part, wanted, params, preparer, missing, problems)
            if plan is not None and plan.decision is Decision.MERGE:
                part.operator.check(plan.prepared, tensor_facts(plan, geometry))
        except OperatorError as error:
            problems.add_parameter_error(wanted.name, error)
        else:
            if plan is not None:
                plans.append(plan)
    for source in [source for source, names in missing.items() if len(names) == len(part.tensors)]:
        problems.missing[source] = missing.pop(source)  # nothing in common is no checkpoint with a gap
    notes = [_rows_note(plan, part) for plan in plans if _has_odd_rows(plan)]
    notes += [
        f'{source}: {listing(names)} missing, taken from `{part.definer.source}` (`missing = "base"`)'
        for source, names in missing.items()
    ]
    return tuple(plans), notes, problems.errors(part, len(part.tensors))


def _has_odd_rows(plan: TensorPlan) -> bool:
    return any(slot is not None and slot.info.shape != plan.shape for slot in plan.experts)


def _rows_note(plan: TensorPlan, part: Part) -> str:
    """Say which rows of a tensor are merged, and what becomes of the others."""
    rows, definer = _rows(plan.shape), part.definer.source
    counts = {ref.source: _rows(ref.info.shape) for ref in plan.experts if ref is not None}
    others = ", ".join(f"{count:,} in `{source}`" for source, count in counts.items() if count != rows)
    common = rows if plan.common_rows is None else plan.common_rows
    kept = f", those from {common:,} on taken from `{definer}`" if common < rows else ", further rows dropped"
    return f"`{plan.name}`: the first {common:,} rows are merged ({rows:,} in `{definer}`, {others}){kept}"


class _Preparer:
    """Resolves parameters per tensor and prepares the operator once per distinct set of them.

    For an operator that depends on names, every tensor has a set of its own.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._params: dict[object, TensorParams] = {}
        self._prepared: dict[tuple[int, str], Prepared] = {}
        self._digests: dict[int, bytes] = {}
        self._recipes: dict[object, bytes] = {}

    def params(self, wanted: Wanted) -> TensorParams:
        """Return the resolved parameters of a tensor; equal ones are one object."""
        part = self._part
        resolved = part.resolve(wanted)
        tensor = wanted.name if part.operator.names else ""
        base_expert = part.base_expert(wanted)
        key = (
            tuple(sorted(resolved.params.items())),
            tuple(tuple(sorted(expert.items())) for expert in resolved.experts),
            base_expert,
            tensor,
        )
        if key not in self._params:
            self._params[key] = TensorParams(
                values=resolved.params,
                experts=resolved.experts,
                base_expert=base_expert,
                tensor=tensor,
                sources=tuple(expert.source for expert in part.experts) if part.operator.names else (),
            )
        return self._params[key]

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the operator's preparation for these parameters."""
        key = (id(params), work)
        if key not in self._prepared:
            self._prepared[key] = self._part.operator.prepare(params, work)
        return self._prepared[key]

    def recipe(self, params: TensorParams, work: str, dtype: str, slots: Sequence[InputRef | None]) -> bytes:
        """Return the recipe digest of a tensor; computed once per distinct set of what it is made of."""
        forms = tuple(input_form(slot) for slot in slots)
        key = (id(params), work, dtype, forms)
        if key not in self._recipes:
            if id(params) not in self._digests:
                self._digests[id(params)] = params_digest(params)
            digest = self._digests[id(params)]
            self._recipes[key] = merge_recipe(self._part.operator, digest, work, dtype, forms)
        return self._recipes[key]


def _plan_tensor(
    part: Part,
    wanted: Wanted,
    params: TensorParams,
    preparer: _Preparer,
    missing: dict[str, list[str]],
    problems: Problems,
) -> TensorPlan | None:
    info = wanted.info
    found = [part.find(expert, wanted) for expert in part.experts]
    for expert, tensor in zip(part.experts, found, strict=True):
        if tensor is None:
            lacking = problems.missing if params.values["missing"] == "error" else missing
            lacking.setdefault(expert.source, []).append(part.source_name(expert, wanted))
    present = {e.source: tensor for e, tensor in zip(part.experts, found, strict=True) if tensor is not None}
    if any(not is_mergeable(tensor.dtype) for tensor in (info, *present.values())):
        return _plan_equal(part, wanted, present, params, problems)
    common = _common_rows(part, wanted, present, params, problems)
    if common is None:
        return None
    refs = [_expert_ref(part, wanted, expert, tensor) for expert, tensor in zip(part.experts, found, strict=True)]
    work = _work_dtype(info, refs, preparer.prepare(params, "float64"), uses_base=part.uses_base)
    prepared = preparer.prepare(params, work)
    experts = tuple(ref if live else None for ref, live in zip(refs, prepared.live, strict=True))
    tail = common if common != _rows(info.shape) else None
    dtype = part.output.write.dtype or info.dtype
    anchored = part.output.is_budgeted and not part.uses_base
    of_base = value_ref(part, part.definer, wanted)
    reference = of_base if part.uses_base or tail is not None else None
    return TensorPlan(
        name=wanted.name,
        dtype=dtype,
        shape=info.shape,
        decision=Decision.MERGE,
        base=of_base if anchored else reference,
        experts=experts,
        operator=part.operator,
        base_source=None if part.base is None else part.base.source,
        part=part.slice or 0,
        layer=wanted.layer,
        params=params,
        prepared=prepared,
        work=work,
        recipe=preparer.recipe(params, work, dtype, (reference, *experts)),
        common_rows=tail,
        anchored=anchored,
    )


def _expert_ref(part: Part, wanted: Wanted, expert: Member, tensor: TensorInfo | None) -> InputRef | None:
    """Return what is read for an expert. One that lacks the tensor stands for the base: a zero delta, or its values."""
    if tensor is not None:
        return expert_ref(part, expert, wanted)
    return None if part.uses_base else value_ref(part, part.definer, wanted)


def _work_dtype(
    info: TensorInfo, refs: Sequence[InputRef | None], prepared: Prepared, *, uses_base: bool
) -> str:
    """Return float64 if any real input is float64: an expert of weight 0 is none, the base's stand-in is one."""
    used = [ref for ref, live in zip(refs, prepared.live, strict=True) if ref is not None and live]
    inputs = [stored.info for ref in used for stored in ref.stored]
    inputs += [info] if uses_base else []
    return "float64" if any(tensor.dtype == "F64" for tensor in inputs) else "float32"


def _rows(shape: tuple[int, ...]) -> int:
    """Return how many rows of the last dimension a tensor has; a 1-D or 0-D tensor has one per element."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def _plan_equal(
    part: Part, wanted: Wanted, present: Mapping[str, TensorInfo], params: TensorParams, problems: Problems
) -> TensorPlan | None:
    """Plan a tensor that is copied because it cannot be merged: all sources must agree in dtype, shape and bytes."""
    info, definer = wanted.info, part.definer
    odd = [s for s, t in present.items() if (t.dtype, t.shape) != (info.dtype, info.shape)]
    for source in odd:
        problems.add(unmergeable(definer.source, info, source, present[source]))
    if odd:
        return None
    return TensorPlan(
        name=wanted.name,
        dtype=info.dtype,
        shape=info.shape,
        decision=Decision.EQUAL,
        base=value_ref(part, definer, wanted),
        experts=tuple(
            value_ref(part, expert, wanted)
            if expert.source in present and present[expert.source] is not info
            else None
            for expert in part.experts
        ),
        operator=part.operator,
        base_source=None if part.base is None else part.base.source,
        part=part.slice or 0,
        layer=wanted.layer,
        params=params,
        prepared=Prepared(coefficients=(0.0,) * len(part.experts)),
        work="float32",
        recipe=equal_recipe(info.dtype),
    )


def _common_rows(
    part: Part, wanted: Wanted, present: Mapping[str, TensorInfo], params: TensorParams, problems: Problems
) -> int | None:
    """Return how many leading rows are merged (all, unless asked for less); None if the shapes are an error."""
    info = wanted.info
    rows = _rows(info.shape)
    odd = [source for source, tensor in present.items() if tensor.shape != info.shape]
    common = rows
    refused = False
    for source in odd:
        shape = present[source].shape
        fits = len(shape) == len(info.shape) == 2 and shape[1] == info.shape[1] and is_vocabulary(info.name)
        if params.values["rows"] != "common" or not fits:
            problems.add(shape_mismatch(part.definer.source, info, source, shape, fits=fits))
            refused = True
        common = min(common, _rows(shape))
    return None if refused else common
