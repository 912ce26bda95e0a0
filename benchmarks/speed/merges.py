"""The merges of the benchmark, as values: what both sides are asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One merge of a family.

    Attributes
    ----------
    base
        The source that is the base; None where there is none.
    experts
        The names of the other sources.
    parameters, expert_parameters
        Of the output, and of every expert; both sides know them by the same names.
    ours
        More parameters of the output, for mergepipe alone.
    budget
        How much is read of the experts, for mergepipe alone.
    """

    operator: str
    base: str | None
    experts: tuple[str, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    expert_parameters: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    budget: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of all sources that are read."""
        return (self.base, *self.experts) if self.base else self.experts

    def table(self) -> str:
        """Return the output's table in a Mergefile."""
        listed = ", ".join(_inline({"source": name, **self.expert_parameters}) for name in self.experts)
        lines = [f'operator = "{self.operator}"', f"experts = [{listed}]"]
        lines += [f'base = "{self.base}"'] if self.base else []
        params = {**self.parameters, **self.ours}
        lines += [f"params = {_inline(params)}"] if params else []
        lines += [f'budget = {{ expert_reads = "{self.budget}", precision = "blocks" }}'] if self.budget else []
        return "\n".join(lines) + "\n"


def merge(operator: str, experts: int, **changes: Any) -> Merge:
    """Return a merge with the settings that the benchmark has for its operator.

    Raises
    ------
    ValueError
        If the benchmark has none.
    """
    names = tuple(f"e{number}" for number in range(1, experts + 1))
    base: str | None = "base"
    parameters: Mapping[str, Any] = {}
    if operator == "linear":
        base, own = None, {"weight": 1.0}
    elif operator == "task_arithmetic":
        own = {"weight": 0.3}
    elif operator == "slerp":
        parameters, own, names = {"t": 0.4}, {}, names[:1]
    elif operator in ("ties", "dare_linear", "dare_ties"):
        own = {"weight": 0.3, "density": 0.5}
    else:
        raise ValueError(f"no settings for `{operator}`")
    settings = {"parameters": parameters, "expert_parameters": own, **changes}
    return Merge(operator=operator, base=base, experts=names, **settings)


def mergefile(sources: Mapping[str, Path], outputs: Mapping[str, Merge]) -> str:
    """Return a Mergefile with the sources that its outputs read."""
    used = dict.fromkeys(name for one in outputs.values() for name in one.inputs)
    parts = [f"[sources.{name}]\npath = {_value(str(sources[name]))}\n" for name in used]
    parts += [f"[outputs.{name}]\n{one.table()}" for name, one in outputs.items()]
    return "version = 1\n\n" + "\n".join(parts)


def _inline(values: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{name} = {_value(value)}" for name, value in values.items()) + " }"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
