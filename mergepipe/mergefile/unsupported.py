"""What a Mergefile can declare and this release cannot execute: one problem for each.

Each function here goes away when its feature arrives; the schema and the parser know them all already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.schema import Mergefile, Output, Source
from mergepipe.mergefile.suggest import code, short_listing
from mergepipe.signatures import OperatorSignature

_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_HINT = "merge the adapter into its base first, and give the path of the result"


def report_unsupported(mergefile: Mergefile, signatures: Mapping[str, OperatorSignature], problems: Problems) -> None:
    """Record what is declared and cannot be executed yet."""
    for source in mergefile.sources.values():
        _source(source, problems)
        if source.on is not None and source.on in mergefile.outputs and source.on not in mergefile.sources:
            advice = f"build {code(source.on)} first, and declare its directory under `[sources]`"
            _unsupported(problems, ("sources", source.name, "on"), "an adapter on an output", "adapter", advice)
    for name in mergefile.operators:
        _unsupported(problems, ("operators", name), f"a custom operator ({code(name)})", "custom_operator")
    available = short_listing([name for name, signature in signatures.items() if signature.available], "and")
    for output in mergefile.outputs.values():
        signature = signatures.get(output.operator)
        if signature is not None and not signature.available:
            hint = None if available is None else f"this release runs {available}"
            _unsupported(problems, ("outputs", output.name, "operator"), code(output.operator), "operator", hint)
        _output(output, problems)


def report_adapters(mergefile: Mergefile, problems: Problems) -> None:
    """Record the sources whose folder holds an adapter; those with ``on`` were recorded already."""
    for source in mergefile.sources.values():
        path = mergefile.source_path(source.name)
        if path is not None and source.on is None and os.path.isfile(path / _ADAPTER_CONFIG):  # noqa: PTH113
            _unsupported(
                problems,
                ("sources", source.name, "path"),
                f"an adapter (`{_ADAPTER_CONFIG}` in {code(source.path or '')})",
                "adapter",
                _ADAPTER_HINT,
            )


def _source(source: Source, problems: Problems) -> None:
    path: KeyPath = ("sources", source.name)
    if source.hub is not None:
        hint = "download the checkpoint, and give its `path`"
        _unsupported(problems, (*path, "hub"), "`hub`", "hub", hint)
    if source.on is not None:
        _unsupported(problems, (*path, "on"), "`on` (an adapter)", "adapter", _ADAPTER_HINT)
    if source.progressive:
        hint = "remove it: it changes no result"
        _unsupported(problems, (*path, "progressive"), "`progressive`", "progressive", hint)


def _output(output: Output, problems: Problems) -> None:
    path: KeyPath = ("outputs", output.name)
    if output.budget is not None and not output.budget.is_full_read:
        hint = 'remove it, or write `expert_reads = "100%"`: the full-read merge'
        _unsupported(problems, (*path, "budget"), "`budget`", "budget", hint)
    if output.slices is not None:
        _unsupported(problems, (*path, "slices"), "`slices`", "slices")


def _unsupported(problems: Problems, path: KeyPath, what: str, feature: str, hint: str | None = None) -> None:
    problems.add(path, f"{what} is not supported yet", hint=hint, unsupported=feature)
