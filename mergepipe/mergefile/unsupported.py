"""What a Mergefile can declare and this release cannot execute: one problem for each.

Each function here goes away when its feature arrives; the schema and the parser know them all already.
"""

from __future__ import annotations

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.schema import Mergefile, Source
from mergepipe.mergefile.suggest import code


def report_unsupported(mergefile: Mergefile, problems: Problems) -> None:
    """Record what is declared and cannot be executed yet."""
    for source in mergefile.sources.values():
        _source(source, mergefile, problems)
        if source.on is not None and source.on in mergefile.outputs and source.on not in mergefile.sources:
            advice = f"build {code(source.on)} first, and declare its directory under `[sources]`"
            _unsupported(problems, ("sources", source.name, "on"), "an adapter on an output", "adapter", advice)


def _source(source: Source, mergefile: Mergefile, problems: Problems) -> None:
    path: KeyPath = ("sources", source.name)
    if source.hub is not None:
        hint = "download the checkpoint, and give its `path`"
        _unsupported(problems, (*path, "hub"), "`hub`", "hub", hint)
    below = mergefile.sources.get(source.on or "")
    if below is not None and below.on is not None and below.name != source.name:
        hint = f"merge {code(below.name)} into {code(below.on)} first (`passthrough`), and apply it to the result"
        _unsupported(problems, (*path, "on"), "an adapter on an adapter", "adapter", hint)


def _unsupported(problems: Problems, path: KeyPath, what: str, feature: str, hint: str | None = None) -> None:
    problems.add(path, f"{what} is not supported yet", hint=hint, unsupported=feature)
