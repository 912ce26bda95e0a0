"""``mergepipe explain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.explained import input_lines, module_lines, shown_digest, summary_lines, tensor_lines
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.session import Session, shown_path
from mergepipe.cli.tables import fact, plain, rows
from mergepipe.errors import CancelledError
from mergepipe.signatures import COMMON_PARAMS
from mergepipe.units import format_count

if TYPE_CHECKING:
    from mergepipe.project.explain import (
        ExplainedInput,
        ExplainedParam,
        OutputExplanation,
        ParameterGroup,
        TensorExplanation,
    )

_EXAMPLES = (
    ("mergepipe explain assistant", "how tensors are merged, and what each expert gave"),
    ("mergepipe explain assistant model.norm.weight", "one tensor: values, inputs, error, build"),
    ("mergepipe explain assistant --no-measure", "without reading weights"),
    ("mergepipe explain assistant --json", "the same for scripts"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("output", metavar="OUTPUT")
@click.argument("tensor", metavar="[TENSOR]", required=False)
@click.option("--no-measure", is_flag=True, help="Read no weights: leave out what experts gave unless it is known.")
@click.pass_obj
def explain(session: Session, output: str, tensor: str | None, no_measure: bool) -> None:
    """Show how an output or a tensor comes about.

    The operator, each parameter and where it comes from, the inputs and what is read of them, the share of the error,
    why it was rebuilt or reused, and what each expert contributed.

    A value comes from the operator's default, from the Mergefile's `params`, from beside an expert, or from a rule; the
    last of these wins. Gradients are shown as the value for the tensor's layer.

    Of an output that is built, contributions are measured once from the weights, and kept in the cache.
    """
    options, console = session.options, session.console
    with make_reporter(console, options) as reporter:
        project = session.open_project(reporter)
        try:
            found = project.explain(output, tensor, measure=not no_measure)
        except KeyboardInterrupt:
            raise CancelledError("interrupted", hint="what was measured is kept for the next time") from None
    if options.json_output:
        console.json(found.as_json())
    else:
        console.result(_lines(found, shown_path(project.mergefile.root), verbose=options.verbose))


def _lines(
    found: OutputExplanation | TensorExplanation, show: Callable[[str], str], *, verbose: bool
) -> Iterator[str]:
    from mergepipe.project.explain import TensorExplanation  # it is loaded by now

    if isinstance(found, TensorExplanation):
        yield from _tensor(found, verbose=verbose)
        return
    if found.summary is not None:
        yield from summary_lines(found.summary, show, verbose=verbose)
    yield from _output(found.groups, verbose=verbose)
    yield from module_lines(found, verbose=verbose)


def _output(groups: Sequence[ParameterGroup], *, verbose: bool) -> Iterator[str]:
    """Yield the groups: what those of one operator have in common once, then what each has of its own."""
    for operator in dict.fromkeys((group.operator, group.decision) for group in groups):
        members = [group for group in groups if (group.operator, group.decision) == operator]
        count = format_count(sum(len(group.tensors) for group in members), "tensor")
        merged = operator[1] == "merge"
        yield f"{click.style(plain(operator[0]) if merged else 'copied', bold=True)}: {count}"
        if not merged:
            yield from fact("because", ["they are not floating point: every source must hold the same"])
            continue
        values = [_values(group, verbose=verbose) for group in members]
        common = {key: value for key, value in values[0].items() if all(own.get(key) == value for own in values)}
        yield from _facts(common)
        for group, own in zip(members, values, strict=True):
            if len(members) > 1:
                where = f"{_where(group)}, {format_count(len(group.tensors), 'tensor')}"
                yield f"  {click.style(where, bold=True)}"
                yield from _facts({key: value for key, value in own.items() if key not in common}, indent="    ")
            if verbose:
                yield from fact("tensors", map(plain, group.tensors), indent="    ")


def _values(group: ParameterGroup, *, verbose: bool) -> dict[tuple[str | None, str], str]:
    """Return a group's parameters in words, by expert (None: the output) and name."""
    defaults = {spec.name: spec.default for spec in COMMON_PARAMS}
    values: dict[tuple[str | None, str], str] = {
        (None, key): f"{key} = {_value(value)}"
        for key, value in group.params.items()
        if verbose or key not in defaults or defaults[key] != value
    }
    if group.base is not None:
        values[None, ""] = f"base = {plain(group.base)}"
    for source, params in group.experts.items():
        values[source, ""] = ""
        for key, value in params.items():
            values[source, key] = f"{key} = {_value(value)}"
    return values


def _facts(values: Mapping[tuple[str | None, str], str], indent: str = "  ") -> Iterator[str]:
    for source in dict.fromkeys(source for source, _ in values):
        own = [text for (owner, _), text in values.items() if owner == source and text]
        if source is None:
            yield from fact("params", own, indent=indent)
        else:
            yield from fact("expert", [plain(source), *own], indent=indent)


def _where(group: ParameterGroup) -> str:
    """Return the layers of a group in words: ``layers 0 to 3 and 7, outside the layers``."""
    layers = [layer for layer in group.layers if layer is not None]
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    words = [f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(texts)}"] if texts else []
    return " and ".join([*words, *(["outside the layers"] if None in group.layers else [])])


def _tensor(found: TensorExplanation, *, verbose: bool) -> Iterator[str]:
    yield click.style(plain(found.tensor), bold=True)
    if found.decision == "merge":
        passes = ", after a pass for statistics of the whole tensor" if found.reduces else ""
        yield from fact("operator", [f"{plain(found.operator)} (version {found.operator_version}){passes}"])
    else:
        yield from fact("operator", ["none: copied, and it must be the same in every source"])
    shape = " x ".join(map(str, found.shape)) or "a scalar"
    blocks = format_count(found.blocks, "block")
    yield from fact("output", [f"{found.dtype} {shape}", blocks, f"computed in {found.work}"])
    if found.layer is None:
        where = "outside the layers"
    elif found.slice is None:
        where = f"{found.layer} of {found.layers} (from 0)"
    else:
        own = f"{found.layer - found.first_layer} of {found.layers}"
        where = f"{found.layer} of the output, {own} of `slices[{found.slice}]` (from 0)"
    yield from fact("layer", [where])
    yield from _params(found.params, verbose=verbose)
    if found.base is not None:
        yield from _input("base", found.base, verbose=verbose)
    for expert in found.experts:
        yield from _input("expert", expert, verbose=verbose)
    yield from tensor_lines(found)


def _input(label: str, found: ExplainedInput, *, verbose: bool) -> Iterator[str]:
    stored = [f"{found.dtype} `{plain(found.tensor)}`"] if found.tensor is not None else []
    digest = [shown_digest(found.digest, verbose=verbose)] if found.digest is not None else []
    yield from fact(label, [plain(found.source), found.used, *stored, *digest])
    yield from _params(found.params, verbose=verbose, indent=" " * 12)
    yield from input_lines(found, indent=" " * 12)


def _params(params: Mapping[str, ExplainedParam], *, verbose: bool, indent: str = "  ") -> Iterator[str]:
    table = [
        (f"{key} = {_value(param.value)}", _origin(param))
        for key, param in params.items()
        if verbose or param.origin != "default" or key not in _COMMON
    ]
    yield from rows(table, indent=indent)


def _origin(param: ExplainedParam) -> str:
    """Return where a value comes from: its key path, the line that it stands on, the rule that gives it."""
    if param.origin == "default":
        return "default"
    place = [f"line {param.line}"] if param.line is not None else []
    place += [f"rule {param.rule}"] if param.rule is not None else []
    return f"from {plain(param.origin)}" + (f" ({', '.join(place)})" if place else "")


_COMMON = frozenset(spec.name for spec in COMMON_PARAMS)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else plain(str(value))
