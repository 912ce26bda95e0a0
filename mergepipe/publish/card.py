"""The model card: ``README.md`` of an output, made from its plan alone, so that it is the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe.mergefile.schema import ExpertRef
from mergepipe.plan.values import OutputPlan
from mergepipe.publish.sidefiles import stored_dtype
from mergepipe.units import format_bytes, format_count

CARD = "README.md"


def model_card(plan: OutputPlan, locations: Mapping[str, str], digests: Mapping[str, str]) -> bytes:
    """Return the card.

    Parameters
    ----------
    locations
        Per source where it is, as the Mergefile says; absolute paths are reduced to their last part.
    digests
        Per source its content digest (``b3:...``).
    """
    output = plan.output
    rows = [
        f"| {_role(plan, source)} | {_cell(source)} | {_cell(_shown(locations[source]))} | `{digests[source][:19]}…` |"
        for source in plan.sources
    ]
    made = "slices" if output.slices is not None else f"`{output.operator}`"
    lines = [
        "---",
        "library_name: transformers",
        "tags:",
        "- merge",
        "- mergepipe",
        "---",
        "",
        f"# {output.name}",
        "",
        f"A merge of {len(output.expert_sources)} checkpoints by {made}, made with mergepipe.",
        f"{len(plan.tensors):,} tensors, {format_bytes(plan.layout.total_size)}, mostly {stored_dtype(plan)}.",
        "",
        "| role | source | location | content |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        *(_experts(output.experts) if output.slices is None else _slices(plan)),
        "",
        f"Output parameters: {_params(dict(output.params)) or 'defaults'}; {format_count(len(output.rules), 'rule')}.",
        *_budget(plan),
        "`mergepipe.json` holds the full record from which this merge can be made again.",
        "",
    ]
    return "\n".join(lines).encode()


def _budget(plan: OutputPlan) -> list[str]:
    """Return what was read under a budget and how far that can be from the full read, in a paragraph of its own."""
    outcome, budget = plan.outcome, plan.output.budget
    if outcome is None or budget is None:
        return []
    read = f"{format_bytes(plan.planned_bytes)} of the experts' {format_bytes(plan.expert_bytes)} were read"
    relative = outcome.bound.relative_to_update
    known = {
        "exact": "nothing is missing: it is the full-read merge",
        "none": "how far that is from the full-read merge is not known",
    }.get(outcome.bound.kind, "")
    if not known:
        far = f"{outcome.bound.absolute:.3g} (Frobenius norm)" if outcome.bound.absolute is not None else ""
        share = "" if relative is None else f", {100 * relative:.3g}% of what the full read changes"
        known = f"the weights are at most {far}{share} from the full-read merge"
    return ["", f"Made under a budget (`{budget.text()}`): {read}; {known}.", ""]


def _experts(experts: Sequence[ExpertRef]) -> list[str]:
    rows = [f"| {_cell(expert.source)} | {_params(dict(expert.params))} |" for expert in experts]
    return ["| expert | parameters |", "| --- | --- |", *rows]


def _slices(plan: OutputPlan) -> list[str]:
    """Return which layers come from where, with the parameters that stand in the slice."""
    rows = []
    for part, declared in zip(plan.parts, plan.output.slices or (), strict=True):
        layers = f"{part.first_layer}..{part.first_layer + part.count}"
        sources = [
            f"{_cell(member.source)} {member.first_layer}..{member.first_layer + part.count}"
            + (f" ({_params(dict(expert.params))})" if expert.params else "")
            for member, expert in zip(part.experts, declared.experts, strict=True)
        ]
        operator = f"`{part.operator.signature.name}`"
        rows.append(f"| {layers} | {operator} | {', '.join(sources)} | {_params(dict(declared.params))} |")
    return ["| layers | operator | from | parameters |", "| --- | --- | --- | --- |", *rows]


def _role(plan: OutputPlan, source: str) -> str:
    bases = {part.base.source for part in plan.parts if part.base is not None}
    return "base" if source in bases else "expert"


def _shown(location: str) -> str:
    return location.rstrip("/").rsplit("/", 1)[-1] if location.startswith(("/", "~")) else location


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _params(params: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {_value(value)}" for name, value in params.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
