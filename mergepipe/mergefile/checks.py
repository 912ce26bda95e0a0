"""What can only be seen of the Mergefile as a whole: names used twice, cycles, directories in one another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.schema import Mergefile, Output
from mergepipe.mergefile.suggest import code


def check_whole(mergefile: Mergefile, problems: Problems) -> None:
    """Record every problem between the entries of a Mergefile."""
    _check_shared_names(mergefile, problems)
    _check_cycles(mergefile, problems)
    _check_paths(mergefile, problems)


def references(output: Output) -> Iterator[tuple[str, KeyPath]]:
    """Yield every name that an output refers to, with the key path of the reference, in the order of the schema."""
    path: KeyPath = ("outputs", output.name)
    if output.base is not None:
        yield output.base, (*path, "base")
    for index, expert in enumerate(output.experts):
        yield expert.source, (*path, "experts", index)
    for index, part in enumerate(output.slices or ()):
        if part.base is not None:
            yield part.base, (*path, "slices", index, "base")
        for expert in part.experts:
            yield expert.source, (*path, "slices", index)
    if output.write.tokenizer is not None:
        yield output.write.tokenizer, (*path, "write", "tokenizer")


def _check_shared_names(mergefile: Mergefile, problems: Problems) -> None:
    for name in mergefile.outputs:
        if name in mergefile.sources:
            problems.add(
                ("outputs", name),
                f"{code(name)} is the name of a source too",
                hint="rename one: an expert or a base could mean either",
            )


def _check_cycles(mergefile: Mergefile, problems: Problems) -> None:
    """Record each cycle of references once, at its first entry in the file."""
    edges = {output.name: [name for name, _ in references(output)] for output in mergefile.outputs.values()}
    # A name that is used twice is reported as such, and means the source here.
    edges |= {source.name: [source.on] if source.on else [] for source in mergefile.sources.values()}
    for cycle in _cycles(edges):
        first = cycle[0]
        kind, key = ("sources", ("on",)) if first in mergefile.sources else ("outputs", ())
        if len(cycle) == 1:
            what = f"{code(first)} refers to itself"
        else:
            what = "a cycle: " + " needs ".join(code(name) for name in (*cycle, first))
        problems.add((kind, first, *key), what)


def _cycles(edges: Mapping[str, list[str]]) -> list[tuple[str, ...]]:
    """Return cycles that share no node; every cycle shares one with a cycle that is returned."""
    cycles = []
    waiting = _without_ends(dict.fromkeys(edges), edges)
    while waiting:
        # Each of these refers to another of them, so that following the references comes back to the trail.
        trail: dict[str, None] = {}
        node = next(iter(waiting))
        while node not in trail:
            trail[node] = None
            node = next(target for target in edges[node] if target in waiting)
        members = tuple(trail)[tuple(trail).index(node) :]
        order = list(edges)
        first = min(range(len(members)), key=lambda index: order.index(members[index]))
        cycles.append((*members[first:], *members[:first]))
        rest = {name: None for name in waiting if name not in members}
        waiting = _without_ends(rest, edges)
    return cycles


def _without_ends(nodes: dict[str, None], edges: Mapping[str, list[str]]) -> dict[str, None]:
    """Return those of the nodes that are on a cycle of them or lead to one, in order."""
    waiting = dict(nodes)
    while True:
        ends = [node for node in waiting if not any(target in waiting for target in edges[node])]
        if not ends:
            return waiting
        for node in ends:
            del waiting[node]


def _check_paths(mergefile: Mergefile, problems: Problems) -> None:
    """Record outputs whose directory is, holds or lies in another entry's, as far as the paths themselves tell."""
    root = _normal(mergefile.root)
    located = [(name, mergefile.source_path(name)) for name in mergefile.sources]
    sources = [(f"source {code(name)}", _normal(path)) for name, path in located if path is not None]
    outputs: list[tuple[str, tuple[str, ...]]] = []
    for name, output in mergefile.outputs.items():
        if not output.publish:
            continue
        path = _normal(mergefile.absolute(output.path))
        key = ("outputs", name, "path")
        if path == root[: len(path)]:
            problems.add(key, "the output's directory would hold the Mergefile itself", hint=_path_hint(name))
        else:
            for other, other_path in (*sources, *outputs):
                relation = _relation(path, other_path)
                if relation is not None:
                    problems.add(key, f"the output's directory {relation} {other}", hint=_path_hint(name))
        outputs.append((f"output {code(name)}", path))


def _relation(path: tuple[str, ...], other: tuple[str, ...]) -> str | None:
    if path == other:
        return "is also that of"
    if other == path[: len(other)]:
        return "lies inside that of"
    if path == other[: len(path)]:
        return "would hold that of"
    return None


def _normal(path: Path) -> tuple[str, ...]:
    return Path(os.path.normpath(path)).parts


def _path_hint(name: str) -> str:
    return f'give it one of its own: `path = "build/{name}"`'
