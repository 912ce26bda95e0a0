"""Reads `[sources]` and `[operators]`."""

from __future__ import annotations

import re

from mergepipe.mergefile.names import Names
from mergepipe.mergefile.schema import CustomOperator, Source
from mergepipe.mergefile.suggest import code
from mergepipe.mergefile.table import Table

SOURCE_KEYS = ("path", "hub", "revision", "on", "progressive")
_HUB = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_PYTHON = re.compile(r"(?P<file>.+\.py):(?P<function>[^\W\d]\w*)")


def read_source(name: str, table: Table, names: Names) -> Source:
    """Return a source, recording what is wrong with it."""
    table.check_keys(SOURCE_KEYS)
    path = table.location("path", "a path relative to the Mergefile")
    hub = table.string("hub", "a repository such as `org/model`")
    revision = table.string("revision", "a commit or a branch")
    if hub is not None and not _HUB.fullmatch(hub):
        table.wrong("hub", "a repository such as `org/model`")
    progressive = table.location("progressive", "a path relative to the Mergefile")
    if "path" in table and "hub" in table:
        table.problems.add(table.at("hub"), "a source has a `path` or a `hub` repository, not both")
    elif "progressive" in table and ("path" in table or "hub" in table):
        other = "path" if "path" in table else "hub"
        table.problems.add(
            table.at("progressive"),
            f"a source has a {code(other)} or a `progressive` checkpoint, not both",
            hint=f"remove {code(other)} to read the progressive checkpoint, or `progressive` to read the other",
        )
    if "progressive" in table and "on" in table:
        what = "an adapter is no progressive checkpoint: `on` goes with a `path`"
        table.problems.add(table.at("on"), what)
    if not any(key in table for key in ("path", "hub", "progressive")):
        table.missing("path", "where the checkpoint is", hint='write `path = "models/NAME"`, relative to the Mergefile')
    if "revision" in table and "hub" not in table:
        table.problems.add(
            table.at("revision"),
            "`revision` goes with a `hub` repository",
            hint="remove it: a local path has no revisions",
        )
    on = table.string("on", "the name of a source")
    if on is not None:
        names.check(on, table.at("on"), table.problems, below=True)
    return Source(
        name=name,
        path=path,
        hub=hub,
        revision=revision,
        on=on,
        progressive=progressive,
        line=table.line,
    )


def read_operator(name: str, table: Table, built_in: bool) -> CustomOperator | None:
    """Return an operator of the user's own, None after recording what is wrong with it.

    ``built_in`` says that its name is taken.
    """
    table.check_keys(("python",))
    if built_in:
        table.problems.add(table.path, f"{code(name)} is a built-in operator", hint="choose another name for yours")
    expected = 'a file and a function, such as "ops.py:my_merge"'
    text = table.string("python", expected)
    if text is None:
        if "python" not in table:
            table.missing("python", "the function that merges", hint='write `python = "ops.py:my_merge"`')
        return None
    match = _PYTHON.fullmatch(text)
    if match is None:
        table.wrong("python", expected)
        return None
    return CustomOperator(name=name, file=match["file"], function=match["function"], line=table.line)
