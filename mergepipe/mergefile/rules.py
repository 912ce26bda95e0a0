"""Reads `rules` and `slices` of an output: parameters for some tensors, and layers from several checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mergepipe.mergefile.experts import check_count, read_experts
from mergepipe.mergefile.names import Names
from mergepipe.mergefile.params import read_params
from mergepipe.mergefile.problems import key_path
from mergepipe.mergefile.schema import ExpertRef, Params, Rule, Slice
from mergepipe.mergefile.suggest import code, did_you_mean, short_listing
from mergepipe.mergefile.table import Table
from mergepipe.signatures import OperatorSignature

_RULE_KEYS = ("match", "layers", "params", "experts")
_SLICE_KEYS = ("source", "experts", "layers")
_LAYERS = re.compile(r"\s*([0-9]{1,9})\s*\.\.\s*([0-9]{1,9})\s*")
_LAYERS_EXPECTED = 'layers such as "8..16" (8 to 15: the end is not included)'


def read_rules(table: Table, signature: OperatorSignature | None, experts: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules of an output; ``experts`` are the names that they may refer to."""
    return tuple(_rule(entry, signature, experts) for entry in _entries(table, "rules"))


def _entries(table: Table, key: str) -> Iterator[Table]:
    """Yield the tables of an array of tables, recording what else is in it."""
    expected = "an array of tables"
    hint = f"write each as `[[{key_path(table.at(key))}]]`"
    for index, value in enumerate(table.items(key, expected, hint)):
        path = table.at(key, index)
        if isinstance(value, Mapping):
            yield Table(value, path, table.problems)
        else:
            table.problems.add(path, "invalid value", expected="a table", got=value, hint=hint)


def _rule(table: Table, signature: OperatorSignature | None, experts: tuple[str, ...]) -> Rule:
    known_params = () if signature is None else signature.all_params()
    misplaced = {key: "parameters go in `params` of the rule" for key in table.data if key in known_params}
    table.check_keys(_RULE_KEYS, misplaced)
    if "match" not in table and "layers" not in table:
        hint = 'write `match = "*.self_attn.*"`, or `layers = "8..16"`'
        table.missing("match", "which tensors the rule is for", hint=hint)
    return Rule(
        match=_match(table),
        layers=read_layers(table),
        params=read_params(table.table("params"), signature, expert=False),
        experts=_rule_experts(table.table("experts"), signature, experts),
        line=table.line,
    )


def _match(table: Table) -> tuple[str, ...]:
    value = table.data.get("match")
    if isinstance(value, str) and value:
        return (value,)
    if not isinstance(value, list) or not value:
        if "match" in table:
            table.wrong("match", "a glob on tensor names, or a list of them")
        return ()
    for index, pattern in enumerate(value):
        if not isinstance(pattern, str) or not pattern:
            expected = "a glob on tensor names"
            table.problems.add(table.at("match", index), "invalid value", expected=expected, got=pattern)
    return tuple(pattern for pattern in value if isinstance(pattern, str) and pattern)


def read_layers(table: Table) -> tuple[int, int] | None:
    """Return the half-open range of layers of a rule or a slice; None if it is not given or wrong."""
    value = table.data.get("layers")
    match = _LAYERS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        if "layers" in table:
            one = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            hint = f'layer {value} alone is "{value}..{value + 1}"' if one and value is not None else None
            table.wrong("layers", _LAYERS_EXPECTED, hint)
        return None
    first, end = int(match[1]), int(match[2])
    if first >= end:
        hint = f'layer {first} alone is "{first}..{first + 1}"' if first == end else f'"{end}..{first}" counts up'
        table.problems.add(table.at("layers"), "empty range of layers", expected=_LAYERS_EXPECTED, got=value, hint=hint)
        return None
    return first, end


def _rule_experts(
    table: Table | None, signature: OperatorSignature | None, experts: tuple[str, ...]
) -> Mapping[str, Params]:
    found = {}
    hint = "write `experts = { NAME = { weight = 0.5 } }`"
    for name, entry in table.tables(hint) if table is not None else ():
        if name not in experts:
            entry.problems.add(
                entry.path,
                f"{code(name)} is not an expert of this output",
                expected=short_listing(experts),
                hint=did_you_mean(name, experts),
            )
        found[name] = read_params(entry, signature, expert=True)
    return found


def read_slices(table: Table, signature: OperatorSignature | None, names: Names) -> tuple[Slice, ...] | None:
    """Return the slices of an output, None if it has none."""
    if "slices" not in table:
        return None
    if table.data["slices"] == []:
        table.problems.add(table.at("slices"), "an output needs at least one slice", got=[])
    slices = [_slice(entry, signature, names) for entry in _entries(table, "slices")]
    return tuple(entry for entry in slices if entry is not None)


def _slice(table: Table, signature: OperatorSignature | None, names: Names) -> Slice | None:
    table.check_keys(_SLICE_KEYS)
    if "layers" not in table:
        table.missing("layers", "which layers the slice takes", hint='write `layers = "0..8"`')
    if "source" in table and "experts" in table:
        table.problems.add(table.at("experts"), "a slice has a `source` or `experts`, not both")
    if "source" not in table and "experts" not in table:
        table.missing("source", "where the slice comes from", hint='write `source = "NAME"`, or `experts = [...]`')
    source = names.reference(table, "source")
    experts = read_experts(table, signature, names)
    if source is not None:
        experts = (ExpertRef(source=source), *experts)
    if "experts" in table:
        check_count(table, signature)
    layers = read_layers(table)
    return None if layers is None else Slice(layers=layers, experts=experts)
