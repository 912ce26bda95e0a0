"""What a case may expect of an output: one small function per key of ``expected``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from support.cases.errors import CaseError
from support.cases.tensors import INDEX, Tensor, read_checkpoint, read_safetensors
from support.cases.values import BIT_EXACT, DEFAULT_TOLERANCE, difference, set_differences

Expected = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


@dataclass(kw_only=True)
class Context:
    """The state to judge.

    Attributes
    ----------
    case
        The case's own folder, with the files of expected values.
    out
        The output folder.
    base
        The folder of the base, as it is now; None without a base.
    earlier
        The outputs of the case's earlier runs, None for those that made none.
    """

    case: Path
    out: Path
    base: Path | None = None
    earlier: Sequence[Tensors | None] = field(default_factory=list)

    @cached_property
    def tensors(self) -> Tensors:
        """The output's tensors."""
        return read_checkpoint(self.out)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The output's ``config.json``, empty if there is none."""
        path = self.out / "config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def stored(self, name: str) -> Tensors:
        """Return the tensors of a file of the case."""
        return read_safetensors(self.case / name)

    def output_of_run(self, number: int) -> Tensors | None:
        """Return the output of an earlier run."""
        if not 0 <= number < len(self.earlier):
            raise CaseError(f"there is no run {number} before this one")
        return self.earlier[number]


Check = Callable[[Any, Context, Expected], Iterator[str]]


def _tensors(file: str, context: Context, expected: Expected) -> Iterator[str]:
    return set_differences(
        context.tensors,
        context.stored(file),
        expected.get("tolerance", DEFAULT_TOLERANCE),
        optional=expected.get("optional_names", ()),
        unchecked=expected.get("unchecked_values", ()),
    )


def _one_of(files: Sequence[str], context: Context, expected: Expected) -> Iterator[str]:
    problems = {file: list(_tensors(file, context, expected)) for file in files}
    if all(problems.values()):
        yield from (f"not {file}: {found[0]}" for file, found in problems.items())


def _names_exact(names: Sequence[str], context: Context, _: Expected) -> Iterator[str]:
    if set(context.tensors) != set(names):
        yield f"the tensors' names differ from the expected ones by {sorted(set(context.tensors) ^ set(names))}"


def _names_absent(names: Sequence[str], context: Context, _: Expected) -> Iterator[str]:
    yield from (f"{name}: must not be in the output" for name in names if name in context.tensors)


def _names_present(names: Sequence[str], context: Context, _: Expected) -> Iterator[str]:
    yield from (f"{name}: not in the output" for name in names if name not in context.tensors)


def _if_present_bit_exact(file: str, context: Context, _: Expected) -> Iterator[str]:
    for name, want in context.stored(file).items():
        got = context.tensors.get(name)
        if got and (problem := difference(name, got, want, BIT_EXACT)):
            yield problem


def _bit_exact_names(names: Sequence[str], context: Context, expected: Expected) -> Iterator[str]:
    stored = context.stored(expected["tensors"])
    for name in names:
        if name not in context.tensors:
            yield f"{name}: not in the output"
        elif problem := difference(name, context.tensors[name], stored[name], BIT_EXACT):
            yield problem


def _each(wanted: Mapping[str, Any], context: Context, what: str, value: Callable[[Tensor], Any]) -> Iterator[str]:
    for name, want in wanted.items():
        got = value(context.tensors[name]) if name in context.tensors else "absent"
        if got != want:
            yield f"{name}: the {what} is {got}, expected {want}"


def _dtypes(dtypes: Mapping[str, str], context: Context, _: Expected) -> Iterator[str]:
    return _each(dtypes, context, "dtype", lambda tensor: tensor.dtype)


def _shapes(shapes: Mapping[str, Sequence[int]], context: Context, _: Expected) -> Iterator[str]:
    return _each({k: list(v) for k, v in shapes.items()}, context, "shape", lambda tensor: list(tensor.shape))


def _nonzero_count(counts: Mapping[str, int], context: Context, _: Expected) -> Iterator[str]:
    return _each(counts, context, "number of nonzero elements", lambda t: int(np.count_nonzero(t.array())))


def _finite(finite: bool, context: Context, _: Expected) -> Iterator[str]:
    for name, tensor in context.tensors.items():
        if finite and tensor.is_float and not np.isfinite(tensor.array()).all():
            yield f"{name}: holds nan or infinity"


def _allowed_values(values: Sequence[float], context: Context, _: Expected) -> Iterator[str]:
    for name, tensor in context.tensors.items():
        others = np.setdiff1d(tensor.array(), np.asarray(values, dtype=np.float64))
        if others.size:
            yield f"{name}: holds {others[:4].tolist()}, allowed are {list(values)}"


def _kept_fraction(ranges: Mapping[str, Sequence[float]], context: Context, _: Expected) -> Iterator[str]:
    for name, (low, high) in ranges.items():
        array = context.tensors[name].array() if name in context.tensors else np.zeros(0)
        share = np.count_nonzero(array) / max(array.size, 1)
        if not low <= share <= high:
            yield f"{name}: {share:.4f} of the elements are not zero, expected {low} to {high}"


def _must_differ(pairs: Sequence[Sequence[str]], context: Context, _: Expected) -> Iterator[str]:
    for one, other in pairs:
        if context.tensors.get(one) == context.tensors.get(other):
            yield f"{one} and {other} are the same, or absent"


def _config(wanted: Mapping[str, Any], context: Context, _: Expected) -> Iterator[str]:
    for key, want in wanted.items():
        if not _holds(context.config, {key: want}):
            yield f"config.json: {key} is {context.config.get(key, 'absent')!r}, expected {want!r}"


def _holds(config: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(config, Mapping) and all(k in config and _holds(config[k], v) for k, v in wanted.items())
    return type(config) is type(wanted) and config == wanted


def _config_any_of(alternatives: Sequence[Mapping[str, Any]], context: Context, _: Expected) -> Iterator[str]:
    if not any(_holds(context.config, wanted) for wanted in alternatives):
        yield f"config.json: none of {list(alternatives)} holds"


def _config_absent(keys: Sequence[str], context: Context, _: Expected) -> Iterator[str]:
    yield from (f"config.json: {key} must not be there" for key in keys if key in context.config)


def _total_size(size: int, context: Context, _: Expected) -> Iterator[str]:
    stored = sum(len(tensor.data) for tensor in context.tensors.values())
    if stored != size:
        yield f"the tensors take {stored} bytes, expected {size}"
    index = context.out / INDEX
    if index.exists():
        written = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        if written != size:
            yield f"{INDEX}: total_size is {written}, expected {size}"


def _files_present(patterns: Sequence[str], context: Context, _: Expected) -> Iterator[str]:
    yield from (f"no file `{p}` in the output" for p in patterns if not any(context.out.glob(p)))


def _files_absent(patterns: Sequence[str], context: Context, _: Expected) -> Iterator[str]:
    for pattern in patterns:
        yield from (f"`{path.name}` must not be in the output" for path in sorted(context.out.glob(pattern)))


def _same_file(context: Context, name: str) -> bool:
    if context.base is None:
        raise CaseError("a comparison with the base's files needs a base")
    mine, theirs = context.out / name, context.base / name
    return mine.is_file() and theirs.is_file() and mine.read_bytes() == theirs.read_bytes()


def _files_same_as_base(names: Sequence[str], context: Context, _: Expected) -> Iterator[str]:
    yield from (f"`{name}` is not the base's, byte for byte" for name in names if not _same_file(context, name))


def _files_not_from_base(names: Sequence[str], context: Context, _: Expected) -> Iterator[str]:
    yield from (f"`{name}` was copied from the base" for name in names if _same_file(context, name))


def same_bits(one: Tensors, other: Tensors) -> bool:
    """Return whether two outputs have the same tensors, bit for bit."""
    return dict(one) == dict(other)


def _bit_equal_to_run(run: int, context: Context, _: Expected) -> Iterator[str]:
    earlier = context.output_of_run(run)
    if earlier is None or not same_bits(context.tensors, earlier):
        yield f"not bit for bit the output of run {run}"


def _differs_from_run(run: int, context: Context, _: Expected) -> Iterator[str]:
    earlier = context.output_of_run(run)
    if earlier is None or same_bits(context.tensors, earlier):
        yield f"the output does not differ from that of run {run}"


CHECKS: Mapping[str, Check] = {
    "tensors": _tensors,
    "one_of": _one_of,
    "names_exact": _names_exact,
    "names_absent": _names_absent,
    "names_present": _names_present,
    "if_present_bit_exact": _if_present_bit_exact,
    "bit_exact_names": _bit_exact_names,
    "dtypes": _dtypes,
    "shapes": _shapes,
    "nonzero_count": _nonzero_count,
    "finite": _finite,
    "allowed_values": _allowed_values,
    "kept_fraction": _kept_fraction,
    "must_differ": _must_differ,
    "config": _config,
    "config_any_of": _config_any_of,
    "config_absent": _config_absent,
    "total_size": _total_size,
    "files_present": _files_present,
    "files_absent": _files_absent,
    "files_same_as_base": _files_same_as_base,
    "files_not_from_base": _files_not_from_base,
    "bit_equal_to_run": _bit_equal_to_run,
    "differs_from_run": _differs_from_run,
}
# Used by the checks above, not checks themselves.
SETTINGS = frozenset({"tolerance", "optional_names", "unchecked_values"})
