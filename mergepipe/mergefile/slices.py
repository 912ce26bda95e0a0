"""Reads `slices` of an output: layers from several checkpoints, each taken as it is or merged by an operator.

Whether the models have these layers is seen when an output is planned; a range is kept here as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mergepipe.mergefile.experts import check_count, read_experts
from mergepipe.mergefile.names import Names
from mergepipe.mergefile.params import missing_params, read_params
from mergepipe.mergefile.problems import key_path
from mergepipe.mergefile.ranges import read_range
from mergepipe.mergefile.rules import read_rules, tables_of
from mergepipe.mergefile.schema import ExpertRef, Slice
from mergepipe.mergefile.suggest import code
from mergepipe.mergefile.table import Table
from mergepipe.signatures import BasePolicy, OperatorSignature
from mergepipe.values import dataclass

SLICE_KEYS = ("source", "experts", "layers", "operator", "base", "base_layers", "params", "rules")
ReadOperator = Callable[[Table], tuple[str, OperatorSignature | None]]
"""Reads the key `operator` of a table: its name, and its signature where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The slices of an output, and the signatures of the operators that they name (None: not known)."""

    slices: tuple[Slice, ...]
    signatures: tuple[OperatorSignature | None, ...]

    @property
    def experts(self) -> tuple[str, ...]:
        """The names of all experts."""
        return tuple(expert.source for part in self.slices for expert in part.experts)


def read_slices(
    table: Table, signature: OperatorSignature | None, names: Names, read_operator: ReadOperator
) -> Slices | None:
    """Return the slices of an output, None if it has none.

    Parameters
    ----------
    table, signature
        The output, and the signature of its operator, which is that of slices without one of their own.
    """
    if "slices" not in table:
        return None
    if "experts" in table:
        hint = "name the experts in the slices; one slice of all layers is the same as no slices"
        table.problems.add(table.at("experts"), "an output has `experts` or `slices`, not both", hint=hint)
    if table.data["slices"] == []:
        table.problems.add(table.at("slices"), "an output needs at least one slice", got=[])
    found: list[Slice] = []
    signatures: list[OperatorSignature | None] = []
    for entry in tables_of(table, "slices"):
        own = signature
        operator = None
        if "operator" in entry:
            operator, own = read_operator(entry)
            signatures.append(own)
        part = _slice(entry, operator, own, table, names)
        if part is not None:
            found.append(part)
    return Slices(slices=tuple(found), signatures=tuple(signatures))


def _slice(
    table: Table, operator: str | None, signature: OperatorSignature | None, output: Table, names: Names
) -> Slice | None:
    known = () if signature is None else signature.all_params()
    table.check_keys(SLICE_KEYS, dict.fromkeys(known, "parameters go in `params` of the slice"))
    experts = _experts(table, signature, names)
    params = read_params(table.table("params"), signature, expert=False)
    base = names.reference(table, "base")
    _check_required(table, signature, output, experts)
    if "layers" not in table:
        table.missing("layers", "which layers the slice takes", hint='write `layers = "0..8"`')
    layers = read_range(table, "layers")
    base_layers = read_range(table, "base_layers")
    if "base_layers" in table and "base" not in table and "base" not in output:
        table.problems.add(table.at("base_layers"), "there is no base that they could be of", hint="name a `base`")
    rules = read_rules(table, signature, tuple(expert.source for expert in experts))
    if layers is None:
        return None
    _check_lengths(table, layers, base_layers, experts)
    return Slice(
        layers=layers,
        experts=experts,
        operator=operator or None,
        base=base,
        base_layers=base_layers,
        params=params,
        rules=rules,
        line=table.line,
    )


def _experts(table: Table, signature: OperatorSignature | None, names: Names) -> tuple[ExpertRef, ...]:
    if "source" in table and "experts" in table:
        table.problems.add(table.at("experts"), "a slice has a `source` or `experts`, not both")
    if "source" not in table and "experts" not in table:
        table.missing("source", "where the slice comes from", hint='write `source = "NAME"`, or `experts = [...]`')
    if "experts" in table:
        check_count(table, signature)
        return read_experts(table, signature, names, ranged=True)
    if "source" in table:
        check_count(table, signature, key="source", count=1)
    source = names.reference(table, "source")
    return () if source is None else (ExpertRef(source=source),)


def _check_required(
    table: Table, signature: OperatorSignature | None, output: Table, experts: tuple[ExpertRef, ...]
) -> None:
    """Record a base and parameters that the slice's operator cannot do without, and has from nowhere."""
    if signature is None:
        return
    if signature.base is BasePolicy.REQUIRED and "base" not in table and "base" not in output:
        hint = f'write `base = "NAME"` here, or in `[{key_path(output.path)}]`'
        table.missing("base", f"{code(signature.name)} needs a base", hint=hint)
    given = {name: 0.0 for place in (output, table) for name in _keys(place.data.get("params"))}
    for name in missing_params(signature, given, [expert.params for expert in experts]):
        hint = f"write it in `params` of the slice or of the output: {signature.all_params()[name].range_text()}"
        table.problems.add(table.at("params", name), f"missing: {code(signature.name)} needs {code(name)}", hint=hint)


def _keys(value: Any) -> Iterator[str]:
    return iter(value if isinstance(value, Mapping) else ())


def _check_lengths(
    table: Table, layers: tuple[int, int], base_layers: tuple[int, int] | None, experts: tuple[ExpertRef, ...]
) -> None:
    """Record ranges that do not have as many layers as the slice; ranges that are wrong alone are refused later."""
    own = [(table.at("base_layers"), base_layers)] if base_layers is not None else []
    own += [(table.at("experts", i, "layers"), e.layers) for i, e in enumerate(experts) if e.layers is not None]
    length = layers[1] - layers[0]
    for path, (start, stop) in own:
        if start < stop and length > 0 and stop - start != length:
            table.problems.add(
                path,
                f"has {stop - start} layers, and the slice {length}",
                hint=f'all ranges of a slice have one length: "{start}..{start + length}"',
            )
