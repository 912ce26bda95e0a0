"""Parameters of operators: names, types and ranges, against the operator's signature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import Problems, key_path
from mergepipe.mergefile.suggest import closest, code, quoted, short_listing
from mergepipe.mergefile.table import Table, finite_number
from mergepipe.signatures import COMMON_PARAMS, OperatorSignature, ParamKind, ParamSpec, ParamValue, Scalar, Scope

# Coefficients are rounded to float32 before they are used; what overflows there is not a usable number.
_LARGEST_REAL = 3.4028234663852886e38
# TOML integers have 64 bits.
_LARGEST_INTEGER = 2**63 - 1


def read_params(
    table: Table | None,
    signature: OperatorSignature | None,
    *,
    expert: bool,
    skip: Iterable[str] = (),
    others: Sequence[OperatorSignature] = (),
) -> dict[str, ParamValue]:
    """Return the parameters in a table, recording what is wrong with them.

    Parameters
    ----------
    table
        The table, or None for no parameters.
    signature
        The operator's; None if it is not known, then any name goes.
    expert
        Whether they are given for one expert.
    skip
        Keys of the table that are not parameters.
    others
        Signatures of further operators whose parameters may be given here: those of an output's slices. A value must
        suit every operator that has the parameter.
    """
    params: dict[str, ParamValue] = {}
    for name, value in table.data.items() if table is not None else ():
        if table is None or name in skip:
            continue
        path = table.at(name)
        if signature is None:
            parsed = _any_value(value, path, table.problems)
        else:
            specs = _known(name, path, (signature, *others), table.problems, expert=expert)
            parsed = _read_for_all(specs, value, path, table.problems)
        if parsed is not None:
            params[name] = parsed
    return params


def _read_for_all(
    specs: Sequence[ParamSpec], value: Any, path: KeyPath, problems: Problems
) -> ParamValue | None:
    """Return a value that suits all of the specs; None after recording the first complaint, or for no specs."""
    parsed: ParamValue | None = None
    for spec in dict.fromkeys(specs):
        parsed = read_value(spec, value, path, problems)
        if parsed is None:
            return None
    return parsed


def _known(
    name: str, path: KeyPath, signatures: Sequence[OperatorSignature], problems: Problems, *, expert: bool
) -> list[ParamSpec]:
    """Return the specs of a parameter that may be given here, recording it if there is none."""
    signature = signatures[0]
    tables = [one.all_params() for one in signatures]
    specs: dict[str, ParamSpec] = {}
    for table in tables:
        specs |= {key: spec for key, spec in table.items() if key not in specs}
    found = [table[name] for table in tables if name in table]
    if not found:
        allowed = [s.name for s in specs.values() if not expert or s.scope is Scope.EXPERT]
        problems.add(
            path,
            f"unknown parameter of {code(signature.name)}",
            expected=_names(signatures, allowed),
            hint=_name_hint(name, path, specs, expert=expert),
        )
        return []
    fitting = [spec for spec in found if not expert or spec.scope is Scope.EXPERT]
    if not fitting:
        problems.add(
            path,
            f"{code(name)} is a parameter of the whole output, not of one expert",
            hint=f"move it to `[{key_path((*path[:2], 'params'))}]`, or to `params` of a rule",
        )
    return fitting


def _names(signatures: Sequence[OperatorSignature], allowed: list[str]) -> str:
    """Return the operators' own parameter names in words; the common ones only where there are no others."""
    own = [name for name in allowed if name in {spec.name for one in signatures for spec in one.params}]
    return "no parameters here" if not own else short_listing(own) or "a parameter that it takes"


def _name_hint(name: str, path: KeyPath, specs: Mapping[str, ParamSpec], *, expert: bool) -> str | None:
    near = closest(name, specs)
    if near is not None:
        return f"did you mean {code(near)}?"
    if expert and name == "params":
        return 'write the parameters beside `source`: `{ source = "NAME", weight = 0.5 }`'
    if expert and name in ("path", "model", "hub"):
        return 'experts are names: declare the checkpoint under `[sources.NAME]`, then write `source = "NAME"`'
    return None


def read_value(spec: ParamSpec, value: Any, path: KeyPath, problems: Problems) -> ParamValue | None:
    """Return a parameter's value in its own type, or None after recording what is wrong with it.

    Integers given for real parameters become floats, so that every spelling of a number is one value.
    """
    if isinstance(value, list):
        return _gradient(spec, value, path, problems)
    parsed = _scalar(spec, value)
    if parsed is None:
        hint = _value_hint(spec, value, path)
        expected = spec.range_text()
        if spec.kind is ParamKind.INTEGER and isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            expected += " of 64 bits: at most 2^63 - 1"
        problems.add(path, _complaint(spec, value), expected=expected, got=value, hint=hint)
    return parsed


def _scalar(spec: ParamSpec, value: Any) -> Scalar | None:
    """Return a single value if it has the type of ``spec`` and is in range, else None."""
    match spec.kind:
        case ParamKind.FLAG:
            return value if isinstance(value, bool) else None
        case ParamKind.CHOICE:
            # By type too: 0 equals false, and 1 true.
            same = (choice for choice in spec.choices if type(choice) is type(value) and choice == value)
            return next(same, None)
        case ParamKind.INTEGER:
            fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_INTEGER
            return value if fits and _in_range(spec, value) else None
        case ParamKind.REAL:
            number = finite_number(value)
            return number if number is not None and _in_range(spec, number) else None


def _in_range(spec: ParamSpec, value: float) -> bool:
    if spec.kind is ParamKind.REAL and abs(value) > _LARGEST_REAL:
        return False
    above = spec.low is None or value > spec.low or (value == spec.low and not spec.low_open)
    below = spec.high is None or value < spec.high or (value == spec.high and not spec.high_open)
    return above and below


def _complaint(spec: ParamSpec, value: Any) -> str:
    if spec.kind is ParamKind.REAL and (number := finite_number(value)) is not None:
        return "too large for float32" if abs(number) > _LARGEST_REAL else "out of range"
    if spec.kind is ParamKind.INTEGER and isinstance(value, int) and not isinstance(value, bool):
        return "out of range"
    return "invalid value"


def _value_hint(spec: ParamSpec, value: Any, path: KeyPath) -> str | None:
    if isinstance(value, Mapping) and spec.scope is Scope.EXPERT and path[2:3] == ("params",):
        return f'for one expert, write it beside it: `{{ source = "NAME", {spec.name} = {spec.default} }}`'
    if not isinstance(value, str):
        return None
    if spec.kind is ParamKind.CHOICE:
        near = closest(value, (choice for choice in spec.choices if isinstance(choice, str)))
        if near is not None:
            return f"did you mean {quoted(near)}?"
    unquoted = {"true": True, "false": False}.get(value.strip().lower(), _number(value))
    if unquoted is not None and _scalar(spec, unquoted) is not None:
        return "write it without quotes"
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _gradient(spec: ParamSpec, values: list[Any], path: KeyPath, problems: Problems) -> tuple[float, ...] | None:
    """Return the anchors of a list over the layers, or None after recording every one that is wrong."""
    if not spec.gradient or spec.kind is not ParamKind.REAL:
        problems.add(path, f"{code(spec.name)} takes one value, not a list", expected=spec.range_text(), got=values)
        return None
    if not values:
        problems.add(path, "a list over the layers needs at least one number", got=values)
        return None
    anchors = [_anchor(spec, value, (*path, index), problems) for index, value in enumerate(values)]
    numbers = tuple(anchor for anchor in anchors if anchor is not None)
    return numbers if len(numbers) == len(values) else None


def _anchor(spec: ParamSpec, value: Any, path: KeyPath, problems: Problems) -> float | None:
    number = _scalar(spec, value)
    if isinstance(number, float):
        return number
    expected = spec.range_text().removesuffix(", or a list of them over the layers")
    hint = None
    if isinstance(value, Mapping) and "value" in value:
        hint = "for some tensors only, use a rule: `[[outputs.NAME.rules]]` with `match` and `params`"
    problems.add(path, _complaint(spec, value), expected=expected, got=value, hint=hint)
    return None


def _any_value(value: Any, path: KeyPath, problems: Problems) -> ParamValue | None:
    """Return a parameter of an operator whose signature is not known: any scalar, or a list of numbers."""
    if isinstance(value, bool | str):
        return value
    items = value if isinstance(value, list) else [value]
    numbers = tuple(number for number in map(finite_number, items) if number is not None)
    if items and len(numbers) == len(items):
        if isinstance(value, list):
            return numbers
        return value if isinstance(value, int) else numbers[0]
    expected = "a finite number, true or false, a string, or a list of numbers over the layers"
    problems.add(path, "invalid value", expected=expected, got=value)
    return None


def missing_params(
    signature: OperatorSignature, given: Mapping[str, ParamValue], experts: Iterable[Mapping[str, ParamValue]]
) -> tuple[str, ...]:
    """Return the required parameters that are given neither for the output nor beside every expert."""
    beside = list(experts)
    required = [spec for spec in (*signature.params, *COMMON_PARAMS) if spec.default is None]
    return tuple(
        spec.name
        for spec in required
        if spec.name not in given
        and not (spec.scope is Scope.EXPERT and beside and all(spec.name in params for params in beside))
    )
