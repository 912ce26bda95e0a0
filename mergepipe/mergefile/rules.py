"""Reads `rules` of an output or a slice: parameters for some tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mergepipe.mergefile.params import read_params
from mergepipe.mergefile.problems import key_path
from mergepipe.mergefile.ranges import read_layers
from mergepipe.mergefile.schema import Params, Rule
from mergepipe.mergefile.suggest import code, did_you_mean, short_listing
from mergepipe.mergefile.table import Table
from mergepipe.signatures import OperatorSignature

_RULE_KEYS = ("match", "layers", "params", "experts")


def read_rules(
    table: Table,
    signature: OperatorSignature | None,
    experts: tuple[str, ...],
    others: Sequence[OperatorSignature] = (),
) -> tuple[Rule, ...]:
    """Return the rules of an output or a slice.

    Parameters
    ----------
    experts
        The names that they may refer to.
    others
        Signatures of further operators whose parameters they may set.
    """
    return tuple(_rule(entry, signature, experts, others) for entry in tables_of(table, "rules"))


def tables_of(table: Table, key: str) -> Iterator[Table]:
    """Yield the tables of an array of tables, recording what else is in it."""
    expected = "an array of tables"
    hint = f"write each as `[[{key_path(table.at(key))}]]`"
    for index, value in enumerate(table.items(key, expected, hint)):
        path = table.at(key, index)
        if isinstance(value, Mapping):
            yield Table(value, path, table.problems)
        else:
            table.problems.add(path, "invalid value", expected="a table", got=value, hint=hint)


def _rule(
    table: Table, signature: OperatorSignature | None, experts: tuple[str, ...], others: Sequence[OperatorSignature]
) -> Rule:
    known_params = {name for one in (signature, *others) if one is not None for name in one.all_params()}
    misplaced = {key: "parameters go in `params` of the rule" for key in table.data if key in known_params}
    table.check_keys(_RULE_KEYS, misplaced)
    if "match" not in table and "layers" not in table:
        hint = 'write `match = "*.self_attn.*"`, or `layers = "8..16"`'
        table.missing("match", "which tensors the rule is for", hint=hint)
    return Rule(
        match=_match(table),
        layers=read_layers(table),
        params=read_params(table.table("params"), signature, expert=False, others=others),
        experts=_rule_experts(table.table("experts"), signature, experts, others),
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


def _rule_experts(
    table: Table | None,
    signature: OperatorSignature | None,
    experts: tuple[str, ...],
    others: Sequence[OperatorSignature],
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
        found[name] = read_params(entry, signature, expert=True, others=others)
    return found
