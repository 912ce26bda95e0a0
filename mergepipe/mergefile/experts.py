"""Reads `experts`: names, or tables with a name and the expert's own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergepipe.mergefile.names import Names
from mergepipe.mergefile.params import read_params
from mergepipe.mergefile.ranges import read_range
from mergepipe.mergefile.schema import ExpertRef
from mergepipe.mergefile.suggest import code
from mergepipe.mergefile.table import Table
from mergepipe.signatures import OperatorSignature

_EXPECTED = "a list of names and tables"
_HINT = 'write `experts = ["math", { source = "code", weight = 0.5 }]`'


def read_experts(
    table: Table, signature: OperatorSignature | None, names: Names, *, ranged: bool = False
) -> tuple[ExpertRef, ...]:
    """Return the experts of an output or a slice, recording what is wrong with them.

    With ``ranged`` (in a slice) each may have `layers` of its own.
    """
    found: dict[str, int] = {}
    experts = []
    for index, value in enumerate(table.items("experts", _EXPECTED, _HINT)):
        expert = _expert(table, index, value, signature, names, ranged=ranged)
        experts.append(expert)
        if expert.source in found:
            table.problems.add(
                table.at("experts", index),
                f"{code(expert.source)} is listed twice (it is also `experts[{found[expert.source]}]`)",
                hint="list it once, with one weight",
            )
        elif expert.source:
            found[expert.source] = index
    return tuple(experts)


def _expert(
    table: Table, index: int, value: Any, signature: OperatorSignature | None, names: Names, *, ranged: bool
) -> ExpertRef:
    """Return one entry of the list; where it is wrong, one without a name keeps its place."""
    path = table.at("experts", index)
    if isinstance(value, str) and value:
        names.check(value, path, table.problems)
        return ExpertRef(source=value)
    if not isinstance(value, Mapping):
        expected = "the name of a source, or a table with `source` and parameters"
        table.problems.add(path, "invalid value", expected=expected, got=value, hint=_HINT)
        return ExpertRef(source="")
    entry = Table(value, path, table.problems)
    params = read_params(entry, signature, expert=True, skip=("source", "layers") if ranged else ("source",))
    if "source" not in entry:
        entry.missing("source", "which source the expert is", hint=_HINT)
    source = entry.string("source", "the name of a source")
    if source is not None:
        names.check(source, entry.at("source"), table.problems)
    layers = read_range(entry, "layers") if ranged else None
    return ExpertRef(source=source or "", params=params, layers=layers)


def check_count(
    table: Table, signature: OperatorSignature | None, *, key: str = "experts", count: int | None = None
) -> None:
    """Record that an output or a slice has too few or too many experts for its operator.

    They are those of the list at ``key``, unless their ``count`` is given.
    """
    value = table.data.get(key)
    if count is None:
        if not isinstance(value, list):
            return
        count = len(value)
    low = 1 if signature is None else signature.min_experts
    high = None if signature is None else signature.max_experts
    if count >= low and (high is None or count <= high):
        return
    if low == high:
        needs = f"exactly {low}"
    elif high is not None and count > high:
        needs = f"at most {high}"
    else:
        needs = f"at least {low}"
    noun = "expert" if needs.endswith(" 1") else "experts"
    who = "an output" if signature is None else code(signature.name)
    table.problems.add(table.at(key), f"{who} needs {needs} {noun}, and there {_are(count)} {count or 'none'}")


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
