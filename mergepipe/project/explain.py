"""Explaining an output: which parameters a tensor is merged with, where each comes from, and what it is made from.

Pure: what is here follows from the plan alone. What the cache and an earlier build know besides is put in by
`mergepipe.project.explained`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mergepipe.errors import MergefileError
from mergepipe.mergefile.resolve import ResolvedParams
from mergepipe.mergefile.suggest import code
from mergepipe.plan.facts import tensor_facts
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan
from mergepipe.project.contributions import Contribution, ExpertShare
from mergepipe.project.explain_values import BuildState, ErrorShare, InputReads, ModuleContribution, OutputSummary
from mergepipe.project.reports import Json
from mergepipe.signatures import Scalar
from mergepipe.values import dataclass

_CLOSE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedParam:
    """A parameter's value, and where it comes from.

    Attributes
    ----------
    origin
        A key path of the Mergefile, or ``default``.
    line
        Where that stands in the Mergefile, from 1; None for a default.
    rule
        Which rule gives it, from 1, among those of the output or of its slice; None where none does.
    """

    value: Scalar
    origin: str
    line: int | None = None
    rule: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedInput:
    """The base or an expert of a tensor.

    Attributes
    ----------
    source
        Its name.
    tensor
        What the tensor is called in its file, None where it has none or it is not read.
    dtype
        As stored.
    used
        ``read``, or why it is no input.
    params
        Its own parameters.
    digest
        Of its tensor, ``b3:<hex>``; of an adapter's, of its factors. None while the content is not known, and where it
        is no input.
    reads
        What is read of it and what is left out; None where it is no input.
    contribution
        What it contributed to the output as it was built; None for the base, and where that is not known.
    """

    source: str
    tensor: str | None
    dtype: str | None
    used: str
    params: Mapping[str, ExplainedParam]
    digest: str | None = None
    reads: InputReads | None = None
    contribution: ExpertShare | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorExplanation:
    """How one tensor of an output comes about.

    Attributes
    ----------
    decision
        ``merge``, or ``equal`` for a tensor that is only copied.
    layer, first_layer, layers
        Its layer in the output (None outside the layers), and the range that gradients run over: the first layer and
        the number of layers of the output or of its slice.
    slice
        Which slice of the output it belongs to, None without slices.
    reduces
        Whether statistics of the whole tensor are taken first.
    digest
        Of the tensor as an earlier build made it, ``b3:<hex>``; None before the first.
    build
        Why it was rebuilt or reused, or would be.
    error
        What it loses by the output's budget; None without a budget, and while that is not resolved.
    contribution
        What the experts contributed to it; None where that is not known, ``not_measured`` says why.
    """

    output: str
    tensor: str
    operator: str
    operator_version: int
    decision: str
    dtype: str
    shape: tuple[int, ...]
    work: str
    layer: int | None
    first_layer: int
    layers: int
    slice: int | None
    blocks: int
    reduces: bool
    params: Mapping[str, ExplainedParam]
    base: ExplainedInput | None
    experts: tuple[ExplainedInput, ...]
    digest: str | None = None
    build: BuildState | None = None
    error: ErrorShare | None = None
    contribution: Contribution | None = None
    not_measured: str | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {**asdict(self), "build": None if self.build is None else self.build.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Tensors of an output that are merged by one operator with the same parameters.

    ``layers`` are those that the tensors belong to, in order, None for tensors outside the layers.
    """

    operator: str
    decision: str
    base: str | None
    tensors: tuple[str, ...]
    layers: tuple[int | None, ...]
    params: Mapping[str, Scalar]
    experts: Mapping[str, Mapping[str, Scalar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputExplanation:
    """An output's tensors, grouped by how they are merged, and what is known of it besides.

    Attributes
    ----------
    summary
        How it stands: its sources, what is read of them, and the build that made it.
    contribution
        What the experts contributed to all of it; None where that is not known, ``not_measured`` says why.
    modules
        The same by module, those with the larger updates first.
    """

    output: str
    groups: tuple[ParameterGroup, ...]
    summary: OutputSummary | None = None
    contribution: Contribution | None = None
    modules: tuple[ModuleContribution, ...] = ()
    not_measured: str | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return asdict(self)


def explain_output(plan: OutputPlan) -> OutputExplanation:
    """Return the groups of an output's tensors, in the order of their first tensors."""
    found: dict[Any, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        found.setdefault((tensor.part, tensor.decision, id(tensor.params)), []).append(tensor)
    merged: dict[Any, list[TensorPlan]] = {}
    for (part, decision, _), tensors in found.items():  # operators that depend on names have parameters per tensor
        params = tensors[0].params
        key = (part, decision, tuple(sorted(params.values.items())), tuple(map(_frozen, params.experts)))
        merged.setdefault(key, []).extend(tensors)
    return OutputExplanation(output=plan.output.name, groups=tuple(_group(plan, group) for group in merged.values()))


def _frozen(params: Mapping[str, Scalar]) -> tuple[tuple[str, Scalar], ...]:
    return tuple(sorted(params.items()))


def _group(plan: OutputPlan, tensors: list[TensorPlan]) -> ParameterGroup:
    first = tensors[0]
    experts = [member.source for member in plan.parts[first.part].experts]
    return ParameterGroup(
        operator=first.operator.signature.name,
        decision=first.decision.value,
        base=first.base_source if first.operator.uses_base else None,
        tensors=tuple(tensor.name for tensor in tensors),
        layers=tuple(sorted({tensor.layer for tensor in tensors}, key=lambda layer: -1 if layer is None else layer)),
        params=dict(first.params.values),
        experts={source: dict(own) for source, own in zip(experts, first.params.experts, strict=True)},
    )


def explain_tensor(plan: OutputPlan, name: str) -> TensorExplanation:
    """Return how a tensor comes about.

    Raises
    ------
    MergefileError
        If the output has no such tensor.
    """
    tensor = next((tensor for tensor in plan.tensors if tensor.name == name), None)
    if tensor is None:
        raise _unknown(plan, name)
    part = plan.parts[tensor.part]
    wanted = next(wanted for wanted in part.tensors if wanted.name == name)
    resolved = part.resolve(wanted)
    facts = tensor_facts(tensor, plan.geometry)
    merged = tensor.decision is Decision.MERGE
    base = part.base if part.uses_base or tensor.base is not None else None
    return TensorExplanation(
        output=plan.output.name,
        tensor=name,
        operator=tensor.operator.signature.name,
        operator_version=tensor.operator.version,
        decision=tensor.decision.value,
        dtype=tensor.dtype,
        shape=tensor.shape,
        work=tensor.work,
        layer=tensor.layer,
        first_layer=part.first_layer,
        layers=part.count,
        slice=part.slice,
        blocks=tensor.grid(plan.geometry).count,
        reduces=merged and facts.elements > 0 and tensor.operator.reduces(tensor.prepared, facts),
        params={key: ExplainedParam(value=value, origin=resolved.origins[key])
                for key, value in sorted(resolved.params.items())},
        base=None if base is None else _input(base.source, tensor.base, _use_of_base(tensor), {}),
        experts=tuple(
            _expert(tensor, index, member.source, part.find(member, wanted) is None, resolved)
            for index, member in enumerate(part.experts)
        ),
    )  # fmt: skip


def _use_of_base(tensor: TensorPlan) -> str:
    if tensor.anchored and tensor.common_rows is None:
        return "for what is left out"
    copied = tensor.operator.copied_input(tensor.prepared, tensor.prepared.live)
    if tensor.base is None:
        return "not read"
    return "read" if copied is None or copied < 0 else "not read: the result is a copy of an expert"


def _expert(
    tensor: TensorPlan, index: int, source: str, missing: bool, resolved: ResolvedParams
) -> ExplainedInput:
    params = {
        key: ExplainedParam(value=value, origin=resolved.origins[f"{key}[{source}]"])
        for key, value in sorted(resolved.experts[index].items())
    }
    slot = tensor.experts[index]
    if slot is not None:
        used = "read"
    elif missing:
        used = "missing"
    elif not tensor.prepared.live[index]:
        used = "the base itself" if source == tensor.base_source else "not read: it has no part in the result"
    else:
        used = "zero delta"
    return _input(source, slot, used, params)


def _input(
    source: str, slot: InputRef | None, used: str, params: Mapping[str, ExplainedParam]
) -> ExplainedInput:
    stored = slot.info if slot is not None else None
    if slot is not None and slot.lora is not None:
        stored, rank = slot.lora.b.info, slot.lora.a.info.shape[0]
        used = f"{used} as factors of rank {rank}, scaled by {slot.lora.scaling:g}"
    return ExplainedInput(
        source=source,
        tensor=stored.name if stored else None,
        dtype=stored.dtype if stored else None,
        used=used,
        params=params,
    )


def _unknown(plan: OutputPlan, name: str) -> MergefileError:
    names = [tensor.name for tensor in plan.tensors]
    close = difflib.get_close_matches(name, names, n=_CLOSE)
    ending = [other for other in names if other.endswith(name) or name in other][:_CLOSE]
    near = ", ".join(code(other) for other in (close or ending))
    return MergefileError(
        f"output `{plan.output.name}` has no tensor `{name}`",
        hint=f"did you mean {near}?" if near else f"its names are such as {code(names[0])}" if names else None,
        output=plan.output.name,
        tensor=name,
    )
