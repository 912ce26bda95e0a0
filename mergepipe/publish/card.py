"""The model card: ``README.md`` of an output, made from its plan alone, so that it is the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe.plan.values import OutputPlan
from mergepipe.publish.sidefiles import stored_dtype
from mergepipe.units import format_bytes

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
    weights = [f"| {_cell(e.source)} | {_params(dict(e.params))} |" for e in output.experts]
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
        f"A merge of {len(output.experts)} checkpoints by `{output.operator}`, made with mergepipe.",
        f"{len(plan.tensors):,} tensors, {format_bytes(plan.layout.total_size)}, mostly {stored_dtype(plan)}.",
        "",
        "| role | source | location | content |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        "| expert | parameters |",
        "| --- | --- |",
        *weights,
        "",
        f"Output parameters: {_params(dict(output.params)) or 'defaults'}; {len(output.rules)} rules.",
        "`mergepipe.json` holds the full record from which this merge can be made again.",
        "",
    ]
    return "\n".join(lines).encode()


def _role(plan: OutputPlan, source: str) -> str:
    if source == plan.output.base:
        return "base"
    return "expert"


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
