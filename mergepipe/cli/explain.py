"""``mergepipe explain``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.progress import make_reporter
from mergepipe.cli.session import Session
from mergepipe.cli.tables import fact, plain, rows
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
    ("mergepipe explain assistant", "how the tensors of an output are merged"),
    ("mergepipe explain assistant model.norm.weight", "one tensor: each value, and where it comes from"),
    ("mergepipe explain assistant --json", "the same for scripts"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("output", metavar="OUTPUT")
@click.argument("tensor", metavar="[TENSOR]", required=False)
@click.pass_obj
def explain(session: Session, output: str, tensor: str | None) -> None:
    """Show the parameters that an output's tensors are merged with, and where each comes from.

    Reads headers only. A value comes from the operator's default, from the Mergefile's `params`, from beside an
    expert, or from a rule; the last of these wins. Gradients are shown as the value for the tensor's layer.
    """
    options, console = session.options, session.console
    with make_reporter(console, options) as reporter:
        project = session.open_project(reporter)
        found = project.explain(output, tensor)
    if options.json_output:
        console.json(found.as_json())
    else:
        console.result(_lines(found, verbose=options.verbose))


def _lines(found: OutputExplanation | TensorExplanation, *, verbose: bool) -> Iterator[str]:
    if hasattr(found, "groups"):
        for group in found.groups:
            yield from _group(group, verbose=verbose)
    else:
        yield from _tensor(found, verbose=verbose)


def _group(group: ParameterGroup, *, verbose: bool) -> Iterator[str]:
    how = plain(group.operator) if group.decision == "merge" else "copied: the same in every source"
    yield f"{click.style(how, bold=True)}: {format_count(len(group.tensors), 'tensor')}"
    shown = group.tensors if verbose else group.tensors[:2]
    more = [] if len(shown) == len(group.tensors) else [f"{len(group.tensors) - len(shown):,} more"]
    yield from fact("tensors", [*map(plain, shown), *more])
    if group.decision != "merge":
        return
    yield from fact("params", [f"{key} = {_value(value)}" for key, value in group.params.items()])
    for source, params in group.experts.items():
        own = [f"{key} = {_value(value)}" for key, value in params.items()]
        yield from fact("expert", [plain(source), *own])


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
    where = "outside the layers" if found.layer is None else f"{found.layer} of {found.layers} (from 0)"
    yield from fact("layer", [where])
    yield from _params(found.params, verbose=verbose)
    if found.base is not None:
        yield from _input("base", found.base, verbose=verbose)
    for expert in found.experts:
        yield from _input("expert", expert, verbose=verbose)


def _input(label: str, found: ExplainedInput, *, verbose: bool) -> Iterator[str]:
    stored = [f"{found.dtype} `{plain(found.tensor)}`"] if found.tensor is not None else []
    yield from fact(label, [plain(found.source), found.used, *stored])
    yield from _params(found.params, verbose=verbose, indent=" " * 12)


def _params(params: Mapping[str, ExplainedParam], *, verbose: bool, indent: str = "  ") -> Iterator[str]:
    table = [
        (f"{key} = {_value(param.value)}", f"from {plain(param.origin)}" if param.origin != "default" else "default")
        for key, param in params.items()
        if verbose or param.origin != "default" or key not in _COMMON
    ]
    yield from rows(table, indent=indent)


_COMMON = ("missing", "rows", "non_finite", "numerics")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else plain(str(value))
