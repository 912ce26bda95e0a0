"""The policies of OPERATORS.md, section 1, rules 9 to 13: which tensors an output has and what each is made of.

Nothing here reads weights. Problems are collected per output and name tensor, source, and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.heads import is_head, is_vocabulary
from mergepipe.checkpoints.layers import LayerMap
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.dtypes import is_mergeable
from mergepipe.errors import MergepipeError, OperatorError, PlanError
from mergepipe.mergefile.resolve import resolve
from mergepipe.mergefile.schema import Output
from mergepipe.operators.contract import Operator, Prepared, TensorParams
from mergepipe.plan.recipe import equal_recipe, merge_recipe, params_digest
from mergepipe.plan.values import Decision, InputRef, TensorPlan

# At most this many tensors are named in one message; the rest is counted.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The checkpoints of one output: the one that defines its tensors, its base, and its experts in order."""

    output: Output
    operator: Operator
    definer: str
    checkpoints: Mapping[str, Checkpoint]

    @property
    def experts(self) -> tuple[str, ...]:
        """Source names of the experts, in expert order."""
        return tuple(expert.source for expert in self.output.experts)

    @property
    def base_expert(self) -> int | None:
        """The position of the base among the experts, None if it is not one of them."""
        return self.experts.index(self.output.base) if self.output.base in self.experts else None

    def tensor(self, source: str, name: str) -> TensorInfo | None:
        """Return a source's tensor of this name."""
        return self.checkpoints[source].tensors.get(name)


def plan_tensors(family: Family) -> tuple[tuple[TensorPlan, ...], list[str], list[MergepipeError]]:
    """Return the output's tensors in natural name order, notes on missing tensors, and every problem found."""
    reference = family.checkpoints[family.definer]
    layers = reference.layers()
    plans: list[TensorPlan] = []
    missing: dict[str, list[str]] = {}
    problems = _Problems()
    preparer = _Preparer(family)
    for name, info in reference.tensors.items():
        try:
            params = preparer.params(name, layers)
            plan = _plan_tensor(family, info, params, preparer, missing, problems)
        except OperatorError as error:
            problems.add_parameter_error(name, error)
        else:
            if plan is not None:
                plans.append(plan)
    notes = [_rows_note(plan, family) for plan in plans if _has_odd_rows(plan)]
    notes += [
        f'{source}: {_listing(names)} missing, taken from `{family.definer}` (`missing = "base"`)'
        for source, names in missing.items()
    ]
    return tuple(plans), notes, problems.errors(family)


def _has_odd_rows(plan: TensorPlan) -> bool:
    return any(slot is not None and slot.info.shape != plan.shape for slot in plan.experts)


def _rows_note(plan: TensorPlan, family: Family) -> str:
    """Say which rows of a tensor are merged, and what becomes of the others."""
    rows = _rows(plan.shape)
    counts = {ref.source: _rows(ref.info.shape) for ref in plan.experts if ref is not None}
    others = ", ".join(f"{count:,} in `{source}`" for source, count in counts.items() if count != rows)
    common = rows if plan.common_rows is None else plan.common_rows
    kept = f", those from {common:,} on taken from `{family.definer}`" if common < rows else ", further rows dropped"
    return f"`{plan.name}`: the first {common:,} rows are merged ({rows:,} in `{family.definer}`, {others}){kept}"


class _Preparer:
    """Resolves parameters per tensor and prepares the operator once per distinct set of them."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._params: dict[object, TensorParams] = {}
        self._prepared: dict[tuple[int, str], Prepared] = {}
        self._digests: dict[int, bytes] = {}
        self._recipes: dict[object, bytes] = {}

    def params(self, name: str, layers: LayerMap) -> TensorParams:
        """Return the resolved parameters of a tensor; equal ones are one object."""
        family = self._family
        resolved = resolve(family.output, family.operator.signature, name, layers.index(name), layers.count)
        key = (
            tuple(sorted(resolved.params.items())),
            tuple(tuple(sorted(expert.items())) for expert in resolved.experts),
        )
        if key not in self._params:
            self._params[key] = TensorParams(
                values=resolved.params, experts=resolved.experts, base_expert=family.base_expert
            )
        return self._params[key]

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the operator's preparation for these parameters."""
        key = (id(params), work)
        if key not in self._prepared:
            self._prepared[key] = self._family.operator.prepare(params, work)
        return self._prepared[key]


    def recipe(self, params: TensorParams, work: str, dtype: str, slots: Sequence[InputRef | None]) -> bytes:
        """Return the recipe digest of a tensor; computed once per distinct set of what it is made of."""
        dtypes = tuple(slot.info.dtype if slot else None for slot in slots)
        key = (id(params), work, dtype, dtypes)
        if key not in self._recipes:
            if id(params) not in self._digests:
                self._digests[id(params)] = params_digest(params)
            digest = self._digests[id(params)]
            self._recipes[key] = merge_recipe(self._family.operator, digest, work, dtype, dtypes)
        return self._recipes[key]


def _plan_tensor(
    family: Family,
    info: TensorInfo,
    params: TensorParams,
    preparer: _Preparer,
    missing: dict[str, list[str]],
    problems: _Problems,
) -> TensorPlan | None:
    found = {source: family.tensor(source, info.name) for source in family.experts}
    absent = [source for source, tensor in found.items() if tensor is None]
    for source in absent:
        if params.values["missing"] == "error":
            problems.missing.setdefault(source, []).append(info.name)
        else:
            missing.setdefault(source, []).append(info.name)
    present = {source: tensor for source, tensor in found.items() if tensor is not None}
    base = family.output.base if family.output.base in family.checkpoints else None
    if any(not is_mergeable(tensor.dtype) for tensor in (info, *present.values())):
        return _plan_equal(family, info, present, params, problems)
    common = _common_rows(family, info, present, params, problems)
    if common is None:
        return None
    refs = [_expert_ref(family, info, source, present.get(source)) for source in family.experts]
    work = _work_dtype(info, refs, preparer.prepare(params, "float64"), uses_base=family.operator.uses_base)
    prepared = preparer.prepare(params, work)
    experts = tuple(ref if live else None for ref, live in zip(refs, prepared.live, strict=True))
    tail = common if common != _rows(info.shape) else None
    needs_base = (family.operator.uses_base and base is not None) or tail is not None
    dtype = family.output.write.dtype or info.dtype
    reference = InputRef(source=family.definer, info=info) if needs_base else None
    return TensorPlan(
        name=info.name,
        dtype=dtype,
        shape=info.shape,
        decision=Decision.MERGE,
        base=reference,
        experts=experts,
        operator=family.operator,
        base_source=family.output.base,
        params=params,
        prepared=prepared,
        work=work,
        recipe=preparer.recipe(params, work, dtype, (reference, *experts)),
        common_rows=tail,
    )


def _expert_ref(family: Family, info: TensorInfo, source: str, tensor: TensorInfo | None) -> InputRef | None:
    """Return what is read for an expert. One that lacks the tensor stands for the base: a zero delta, or its values."""
    if tensor is not None:
        return InputRef(source=source, info=tensor)
    return None if family.operator.uses_base else InputRef(source=family.definer, info=info)


def _work_dtype(
    info: TensorInfo, refs: Sequence[InputRef | None], prepared: Prepared, *, uses_base: bool
) -> str:
    """Return float64 if any real input is float64: an expert of weight 0 is none, the base's stand-in is one."""
    inputs = [ref.info for ref, live in zip(refs, prepared.live, strict=True) if ref is not None and live]
    inputs += [info] if uses_base else []
    return "float64" if any(tensor.dtype == "F64" for tensor in inputs) else "float32"


def _rows(shape: tuple[int, ...]) -> int:
    """Return how many rows of the last dimension a tensor has; a 1-D or 0-D tensor has one per element."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def _plan_equal(
    family: Family,
    info: TensorInfo,
    present: Mapping[str, TensorInfo],
    params: TensorParams,
    problems: _Problems,
) -> TensorPlan | None:
    """Plan a tensor that is copied because it cannot be merged: all sources must agree in dtype, shape and bytes."""
    odd = [s for s, t in present.items() if (t.dtype, t.shape) != (info.dtype, info.shape)]
    for source in odd:
        problems.add(_unmergeable(family.definer, info, source, present[source]))
    if odd:
        return None
    return TensorPlan(
        name=info.name,
        dtype=info.dtype,
        shape=info.shape,
        decision=Decision.EQUAL,
        base=InputRef(source=family.definer, info=info),
        experts=tuple(
            InputRef(source=source, info=present[source]) if source in present and source != family.definer else None
            for source in family.experts
        ),
        operator=family.operator,
        base_source=family.output.base,
        params=params,
        prepared=Prepared(coefficients=(0.0,) * len(family.experts)),
        work="float32",
        recipe=equal_recipe(info.dtype),
    )


def _unmergeable(definer: str, info: TensorInfo, source: str, other: TensorInfo) -> PlanError:
    return PlanError(
        f"tensor `{info.name}` cannot be merged: it is {info.dtype} {_shape(info.shape)} in `{definer}`"
        f" and {other.dtype} {_shape(other.shape)} in `{source}`",
        hint="only F64, F32, F16 and BF16 tensors are merged; any other must be the same in every source",
        tensor=info.name,
        source=source,
        expected={"dtype": info.dtype, "shape": list(info.shape)},
        got={"dtype": other.dtype, "shape": list(other.shape)},
    )


def _common_rows(
    family: Family,
    info: TensorInfo,
    present: Mapping[str, TensorInfo],
    params: TensorParams,
    problems: _Problems,
) -> int | None:
    """Return how many leading rows are merged (all, unless asked for less); None if the shapes are an error."""
    rows = _rows(info.shape)
    odd = [source for source, tensor in present.items() if tensor.shape != info.shape]
    common = rows
    refused = False
    for source in odd:
        shape = present[source].shape
        fits = len(shape) == len(info.shape) == 2 and shape[1] == info.shape[1] and is_vocabulary(info.name)
        if params.values["rows"] != "common" or not fits:
            problems.add(_shape_mismatch(family.definer, info, source, shape, fits=fits))
            refused = True
        common = min(common, _rows(shape))
    return None if refused else common


def _shape_mismatch(definer: str, info: TensorInfo, source: str, shape: tuple[int, ...], *, fits: bool) -> PlanError:
    hint = (
        'set `rows = "common"` in the output\'s params to merge the rows that all sources have and keep the rest'
        if fits
        else "the sources must be fine-tunes of one base; shapes are never cut or broadcast"
    )
    return PlanError(
        f"tensor `{info.name}` has shape {_shape(shape)} in expert `{source}` and {_shape(info.shape)} in `{definer}`",
        hint=hint,
        tensor=info.name,
        source=source,
        expected=list(info.shape),
        got=list(shape),
    )


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{len(names):,} tensor{'s' if len(names) != 1 else ''} ({shown}{more})"


class _Problems:
    """Collects problems and puts those that repeat for many tensors into one message each."""

    def __init__(self) -> None:
        self.missing: dict[str, list[str]] = {}
        self._found: list[MergepipeError] = []
        self._parameters: dict[str, tuple[OperatorError, list[str]]] = {}

    def add(self, error: MergepipeError) -> None:
        """Keep a problem of its own."""
        self._found.append(error)

    def add_parameter_error(self, tensor: str, error: OperatorError) -> None:
        """Keep a problem of parameters; equal ones of other tensors are counted."""
        self._parameters.setdefault(error.message, (error, []))[1].append(tensor)

    def errors(self, family: Family) -> list[MergepipeError]:
        """Return everything collected, missing tensors summarised per expert."""
        errors: list[MergepipeError] = [_missing_error(family, source, names) for source, names in self.missing.items()]
        errors += self._found
        for error, names in self._parameters.values():
            errors.append(
                PlanError(
                    f"output `{family.output.name}`: {error.message}; for {_listing(names)}",
                    hint=error.hint,
                    output=family.output.name,
                    tensors=names[:_NAMED],
                    **error.facts,
                )
            )
        return errors


def _missing_error(family: Family, source: str, names: list[str]) -> PlanError:
    """Say what an expert lacks; if it shares next to nothing, say how the names differ."""
    checkpoint, reference = family.checkpoints[source], family.checkpoints[family.definer]
    shared = len(reference.tensors) - len(names)
    if shared < len(reference.tensors) / 2:
        theirs, ours = _typical_name(checkpoint), _typical_name(reference)
        return PlanError(
            f"expert `{source}` shares {shared} of {len(reference.tensors)} tensor names with `{family.definer}`:"
            f" it has names such as `{theirs}`, expected were names such as `{ours}`",
            hint=_prefix_hint(checkpoint, reference),
            source=source,
            shared=shared,
            expected=ours,
            got=theirs,
        )
    head = _head_hint(names)
    return PlanError(
        f"expert `{source}` lacks {_listing(names)} of `{family.definer}`",
        hint=head or 'the upload may be incomplete; `missing = "base"` in the params takes the base\'s values instead',
        source=source,
        tensors=names[:_NAMED],
        count=len(names),
    )


def _head_hint(names: Sequence[str]) -> str | None:
    if len(names) == 1 and is_head(names[0]):
        return (
            f"the expert ties `{names[0]}` to its embeddings and the base does not: save it with its own head,"
            ' or set `missing = "base"` in the params to keep the base\'s'
        )
    return None


def _typical_name(checkpoint: Checkpoint) -> str:
    """Return a name from deep inside the model: it shows the naming scheme best."""
    return max(checkpoint.tensors, key=lambda name: name.count("."))


def _prefix_hint(checkpoint: Checkpoint, reference: Checkpoint) -> str:
    """Return a hint that names the prefix by which the names differ, if one does."""
    prefix = _extra_prefix(checkpoint.tensors, reference.tensors)
    if prefix is not None:
        return f"its names carry the prefix `{prefix}`: save it without that prefix"
    prefix = _extra_prefix(reference.tensors, checkpoint.tensors)
    if prefix is not None:
        return f"its names lack the prefix `{prefix}`: save it with that prefix"
    return "check that it is a fine-tune of this base, saved under the same names"


def _extra_prefix(names: Iterable[str], others: Container[str]) -> str | None:
    """Return the dotted prefix without which some name is among the others."""
    for name in names:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in others:
                return ".".join(parts[:cut]) + "."
    return None
