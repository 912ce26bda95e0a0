"""Reads ranges of layers: `"8..16"` is layers 8 to 15."""

from __future__ import annotations

import re

from mergepipe.mergefile.table import Table

_LAYERS = re.compile(r"\s*(-?[0-9]{1,9})\s*\.\.\s*(-?[0-9]{1,9})\s*")
_LAYERS_EXPECTED = 'layers such as "8..16" (8 to 15: the end is not included)'


def read_layers(table: Table) -> tuple[int, int] | None:
    """Return the half-open range of layers of a rule; None if it is not given or wrong."""
    found = read_range(table, "layers")
    if found is None:
        return None
    first, end = found
    if first < 0:
        table.wrong("layers", _LAYERS_EXPECTED)
        return None
    if first >= end:
        hint = f'layer {first} alone is "{first}..{first + 1}"' if first == end else f'"{end}..{first}" counts up'
        got = table.data["layers"]
        table.problems.add(
            table.at("layers"), "empty range of layers", expected=_LAYERS_EXPECTED, got=got, hint=hint
        )
        return None
    return first, end


def read_range(table: Table, key: str) -> tuple[int, int] | None:
    """Return a range of layers as it is written, ``"a..b"``; None if it is not given or none."""
    value = table.data.get(key)
    match = _LAYERS.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return int(match[1]), int(match[2])
    if key in table:
        one = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        hint = f'layer {value} alone is "{value}..{value + 1}"' if one and value is not None else None
        table.wrong(key, _LAYERS_EXPECTED, hint)
    return None
