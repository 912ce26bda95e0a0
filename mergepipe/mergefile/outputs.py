"""Reads `[outputs]`: operator, base, experts, parameters, rules, budget, what is written."""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe.dtypes import WRITE_DTYPES
from mergepipe.mergefile.experts import check_count, read_experts
from mergepipe.mergefile.names import Names
from mergepipe.mergefile.params import missing_params, read_params
from mergepipe.mergefile.problems import key_path
from mergepipe.mergefile.rules import read_rules
from mergepipe.mergefile.schema import DEFAULT_SHARD_SIZE, Budget, CustomOperator, ExpertRef, Output, Write
from mergepipe.mergefile.slices import Slices, read_slices
from mergepipe.mergefile.suggest import code, did_you_mean, listing, respelled
from mergepipe.mergefile.table import Table, finite_number
from mergepipe.signatures import BasePolicy, OperatorSignature
from mergepipe.units import parse_percent, parse_size

OUTPUT_KEYS = (
    "operator",
    "base",
    "experts",
    "path",
    "params",
    "rules",
    "budget",
    "write",
    "slices",
    "publish",
)
_BUDGET_KEYS = ("expert_reads", "max_error", "stats", "precision")
_WRITE_KEYS = ("dtype", "shard_size", "tokenizer")
_READS_EXPECTED = 'a share such as "25%", or bytes such as "2 GiB"'
_SIZE_EXPECTED = 'a size such as "5 GB" or "512 MiB", or a number of bytes'
_BASE_HINT = 'write `base = "NAME"`: the checkpoint that the experts were trained from'


def read_output(
    name: str,
    table: Table,
    names: Names,
    signatures: Mapping[str, OperatorSignature],
    custom: Mapping[str, CustomOperator],
) -> Output:
    """Return an output, recording what is wrong with it."""
    operator, signature = _operator(table, signatures, custom)
    specs = {} if signature is None else signature.all_params()
    inside = key_path(table.at("params"))
    table.check_keys(OUTPUT_KEYS, dict.fromkeys(specs, f"parameters go in `[{inside}]`"))
    if "operator" not in table:
        table.missing("operator", "which merge method to run", hint='write `operator = "linear"`')
    experts = read_experts(table, signature, names)
    slices = read_slices(table, signature, names, lambda entry: _operator(entry, signatures, custom))
    base = names.reference(table, "base")
    shared, others = _shared_signatures(signature, slices)
    params = read_params(table.table("params"), shared, expert=False, others=others)
    if slices is None:
        _check_experts(table, signature)
        _check_required(table, signature, params, experts)
    known = dict.fromkeys([*_listed(table), *(slices.experts if slices else ())])
    return Output(
        name=name,
        operator=operator,
        base=base,
        experts=experts,
        path=table.location("path", "a path relative to the Mergefile") or f"build/{name}",
        params=params,
        rules=read_rules(table, shared, tuple(known), others),
        budget=_budget(table),
        write=_write(table, names),
        slices=None if slices is None else slices.slices,
        publish=table.flag("publish", default=True),
        line=table.line,
    )


def _shared_signatures(
    signature: OperatorSignature | None, slices: Slices | None
) -> tuple[OperatorSignature | None, tuple[OperatorSignature, ...]]:
    """Return the signatures that the output's parameters and rules are for; none if one of them is not known."""
    others = [] if slices is None else [one for one in slices.signatures if one is not None]
    if slices is not None and len(others) < len(slices.signatures):
        return None, ()
    return signature, tuple(others)


def _operator(
    table: Table, signatures: Mapping[str, OperatorSignature], custom: Mapping[str, CustomOperator]
) -> tuple[str, OperatorSignature | None]:
    """Return the operator's name, and its signature where that is known.

    A name that is only spelled wrong (`dare-ties`) is recorded, and the rest is checked against the one that was meant.
    """
    name = table.string("operator", "the name of an operator")
    if name is None or name in signatures or name in custom:
        return name or "", signatures.get(name or "")
    known = [*signatures, *custom]
    hint = did_you_mean(name, known) or f"the operators are {listing(known, 'and')}"
    table.problems.add(table.at("operator"), f"unknown operator {code(name)}", hint=hint)
    return name, signatures.get(respelled(name, known) or "")


def _listed(table: Table) -> list[str]:
    """Return the names in `experts`, also those that are not known: a rule may use them without a second complaint."""
    value = table.data.get("experts")
    entries = value if isinstance(value, list) else []
    found = [entry.get("source") if isinstance(entry, Mapping) else entry for entry in entries]
    return [name for name in found if isinstance(name, str)]


def _check_experts(table: Table, signature: OperatorSignature | None) -> None:
    if "experts" in table:
        check_count(table, signature)
    else:
        table.missing("experts", "what to merge", hint='write `experts = ["NAME", ...]`, the names of sources')


def _check_required(
    table: Table,
    signature: OperatorSignature | None,
    params: Mapping[str, object],
    experts: tuple[ExpertRef, ...],
) -> None:
    """Record a base and parameters that the operator cannot do without."""
    if signature is None:
        return
    if signature.base is BasePolicy.REQUIRED and "base" not in table:
        table.missing("base", f"{code(signature.name)} needs a base", hint=_BASE_HINT)
    inner = table.data.get("params", {})
    if not isinstance(inner, Mapping):
        return
    given = dict.fromkeys((*params, *inner), 0.0)  # a wrong value was given all the same
    for name in missing_params(signature, given, [expert.params for expert in experts]):
        spec = signature.all_params()[name]
        hint = f"write it in `[{key_path(table.at('params'))}]`: {spec.range_text()}"
        table.problems.add(table.at("params", name), f"missing: {code(signature.name)} needs {code(name)}", hint=hint)


def _budget(table: Table) -> Budget | None:
    inner = table.table("budget", 'write `[outputs.NAME.budget]` with `expert_reads = "25%"`')
    if inner is None:
        return None
    inner.check_keys(_BUDGET_KEYS)
    reads, share = _expert_reads(inner)
    if "expert_reads" in inner and "max_error" in inner:
        inner.problems.add(
            inner.at("max_error"),
            "a budget has `expert_reads` or `max_error`, not both",
            hint="`expert_reads` limits the bytes, `max_error` finds the fewest bytes for an error",
        )
    budget = Budget(
        expert_reads=reads,
        share=share,
        max_error=_max_error(inner),
        stats=inner.choice("stats", ("full", "sample")) or "full",
        precision=inner.choice("precision", ("levels", "blocks")),
    )
    if budget.uses_levels and budget.stats == "sample":
        inner.problems.add(
            inner.at("precision"),
            '`precision = "levels"` needs every delta whole once, and `stats = "sample"` reads samples of them',
            hint='remove `stats`, or write `precision = "blocks"`',
        )
    if not budget.is_full_read and "base" not in table:
        what = "a budget needs a base, which takes the place of what is not read"
        inner.problems.add(inner.path, what, hint=_BASE_HINT)
    return budget


def _expert_reads(table: Table) -> tuple[int | None, float | None]:
    """Return the limit in bytes, or as a share of the full read."""
    value = table.data.get("expert_reads")
    if "expert_reads" not in table:
        return None, None
    share = parse_percent(value) if isinstance(value, str) else None
    if share is not None:
        if share <= 1.0:
            return None, share
        table.problems.add(table.at("expert_reads"), "out of range", expected="at most 100%", got=value)
        return None, None
    size = _size(value)
    if size is None:
        number = finite_number(value)
        fraction = number is not None and 0 <= number <= 1
        table.wrong("expert_reads", _READS_EXPECTED, f'write "{100 * (number or 0):g}%"' if fraction else None)
    return size, None


def _max_error(table: Table) -> float | None:
    value = table.data.get("max_error")
    number = finite_number(value)
    if "max_error" in table and (number is None or number < 0):
        table.wrong("max_error", "a relative error, a finite number >= 0 such as 1e-3", _error_hint(value))
        return None
    return number


def _error_hint(value: object) -> str | None:
    """Return how an error that is written in percent is written here."""
    share = parse_percent(value) if isinstance(value, str) else None
    return None if share is None else f"write {share:g}"


def _write(table: Table, names: Names) -> Write:
    inner = table.table("write")
    if inner is None:
        return Write()
    inner.check_keys(_WRITE_KEYS)
    dtype = inner.choice("dtype", WRITE_DTYPES)
    size = _size(inner.data.get("shard_size", DEFAULT_SHARD_SIZE))
    if not size:
        inner.wrong("shard_size", _SIZE_EXPECTED)
    return Write(
        dtype=None if dtype is None else WRITE_DTYPES[dtype],
        shard_size=size or DEFAULT_SHARD_SIZE,
        tokenizer=names.reference(inner, "tokenizer"),
    )


def _size(value: object) -> int | None:
    """Return a size in bytes, None if the value is not one."""
    if not isinstance(value, str | int) or isinstance(value, bool):
        return None
    try:
        return parse_size(value)
    except (ValueError, OverflowError):
        return None
