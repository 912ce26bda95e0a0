"""mergekit's lookup of parameters, evaluated on a configuration as plain data: another opinion on the import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mergepipe.mergefile.mergekit.methods import Parameter


def evaluate(setting: Any, tensor: str, t: float) -> Any:
    """Return the value of one scope's setting for a tensor at ``t`` (0 to 1), None if no filter matches."""
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    if isinstance(setting[0], dict):
        for case in setting:
            text = case.get("filter")
            if text is None or text == "*" or text in tensor:
                return evaluate(case["value"], tensor, t)
        return None
    position = t * (len(setting) - 1)
    left = int(position)
    right = min(len(setting) - 1, left + 1)
    return (1 - (position - left)) * setting[left] + (position - left) * setting[right]


def looked_up(parameter: Parameter, scopes: Iterable[Mapping[str, Any] | None], tensor: str, t: float) -> Any:
    """Return the value of a parameter: from the first scope that has one, else the default."""
    for scope in scopes:
        if scope is not None and parameter.name in scope:
            value = evaluate(scope[parameter.name], tensor, t)
            if value is not None:
                return value
    assert parameter.default is not None
    return parameter.default


def position(layer: int, count: int) -> float:
    """Return ``t`` at a layer of a slice."""
    return layer / (count - 1) if count > 1 else 1.0
