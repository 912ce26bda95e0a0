"""The words of a difference that text and markdown share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from mergepipe.units import budget_words, format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.lockfile.compare import Difference
    from mergepipe.lockfile.diff_values import Cause, EntryChange, OutputChange, ParameterGroup, Places, Side
    from mergepipe.lockfile.records import LockedExpert
    from mergepipe.project.diff_numbers import Distance
    from mergepipe.project.diff_weights import Compared
    from mergepipe.signatures import ParamValue

Quote = Callable[[str], str]
"""Shows a name or a value that comes from outside."""
_MOVES = 4  # pairs of levels that are named
ARROW = "->"

_LONG_DIGEST = re.compile(r"(b3:[0-9a-f]{12})[0-9a-f]{52}")
_DECLARED = {
    "operator": "another operator",
    "operator_version": "another version of the operator",
    "code": "other code of a custom operator",
    "numerics": "other numerics",
    "base": "another base",
    "budget": "the budget",
    "experts": "the list of experts",
    "write.dtype": "the dtype that is written",
    "slices": "the slices",
    "parameters": "the parameters",
    "access set": "what the budget buys",
}
_RAW_PARAMETERS = re.compile(r"params\.|rules\[|experts\[|slices\[\d+\]\.(params\.|rules\[|experts\[)")


def cause_text(cause: Cause, quote: Quote, *, within: str) -> str:
    """Return a cause in words, for the output ``within``."""
    match cause.kind:
        case "source":
            text = f"source {quote(cause.name)}"
        case "parameter":
            text = quote(cause.name)
        case "stage":
            text = f"output {quote(cause.name)}"
        case "declared":
            text = _DECLARED.get(cause.name, cause.name)
        case "geometry":
            text = "blocks are cut differently"
        case _:
            text = "nothing that is recorded"
    if cause.output is not None and cause.output != within:
        text += f" of {quote(cause.output)}"
    return text + (f", through {' and '.join(map(quote, cause.via))}" if _shows_way(cause, within) else "")


def _shows_way(cause: Cause, within: str) -> bool:
    return bool(cause.via) and cause.via != (cause.output,) and cause.via != (within,)


def is_same_content(source: EntryChange) -> bool:
    """Return whether a source that both sides have changed in nothing that a result follows from."""
    return source.change == "changed" and all(fact.key != "digest" for fact in source.facts)


def fact_words(fact: Difference, output: OutputChange) -> tuple[str, str]:
    """Return the old and the new value of what is declared; of experts also the parameters of those not in both."""
    if fact.key == "budget":
        return budget_words(short(fact.old)), budget_words(short(fact.new))
    if fact.key != "experts" or output.old is None or output.new is None:
        return short(fact.old), short(fact.new)
    sides = [side.experts for side in (output.old, output.new)]
    shared = {expert.source for expert in sides[0]} & {expert.source for expert in sides[1]}
    old, new = (
        ", ".join(expert.source if expert.source in shared else expert_words(expert) for expert in side)
        for side in sides
    )
    return old, new


def expert_words(expert: LockedExpert) -> str:
    """Return ``math (weight 0.5)``."""
    params = ", ".join(f"{key} {value_words(value)}" for key, value in expert.params.items())
    return f"{expert.source} ({params})" if params else expert.source


def short(text: str | None) -> str:
    """Return a value of a difference with its digests cut short; ``none`` where there is none."""
    return "none" if text is None else _LONG_DIGEST.sub(r"\1", text)


def value_words(value: ParamValue | None) -> str:
    """Return a resolved value."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.6g}"
        case tuple():
            return "[" + ", ".join(map(value_words, value)) + "]"
    return str(value)


def group_words(group: ParameterGroup) -> str:
    """Return ``0.4 -> 0.5``."""
    return f"{value_words(group.old)} {ARROW} {value_words(group.new)}"


def places_words(places: Places, quote: Quote, *, short: bool = False) -> tuple[str, list[str]]:
    """Return where tensors are, and the modules with their counts: ``layers 0-7``, ``["mlp.down_proj (8)"]``.

    Parameters
    ----------
    short
        Whether not to list the modules where they are all that there are.
    """
    if places.layers is None:
        where = "outside the layers"
    else:
        where = f"{'layers' if re.search('[-,]', places.layers) else 'layer'} {places.layers}"
    if short and places.complete and len(places.modules) > 1:
        return where, [f"all {format_count(places.count, 'tensor')}"]
    counts = [f" ({count:,})" if places.layers is not None or count > 1 else "" for _, count in places.modules]
    return where, [quote(module) + count for (module, _), count in zip(places.modules, counts, strict=True)]


def is_raw_parameter(fact: Difference) -> bool:
    """Return whether a difference is one of parameters as they are written; their resolved values say it better."""
    return _RAW_PARAMETERS.match(fact.key) is not None


def shown_facts(output: OutputChange) -> Iterator[Difference]:
    """Yield what is declared differently and is said nowhere else."""
    for fact in output.declared:
        if fact.key.startswith("sources."):
            continue
        if output.parameters is None or not is_raw_parameter(fact):
            yield fact


def same_values(output: OutputChange) -> bool:
    """Return whether parameters are written differently and every tensor gets the same ones."""
    return output.parameters == () and any(map(is_raw_parameter, output.declared))


def entry_facts(output: OutputChange) -> list[tuple[str, str]]:
    """Return what is declared for an output that is new or gone; nothing for one that both sides have."""
    entry = output.new or output.old
    if output.change == "changed" or entry is None:
        return []
    experts = [*entry.experts, *(expert for part in entry.slices for expert in part.experts)]
    facts = [("base", entry.base or ""), ("experts", ", ".join(map(expert_words, experts)))]
    facts += [("params", ", ".join(f"{key} {value_words(value)}" for key, value in entry.params.items()))]
    facts += [("budget", budget_words(entry.budget)), ("path", entry.path or "not published")]
    return [(key, text) for key, text in facts if text]


def heading_words(output: OutputChange) -> str:
    """Return what became of an output: ``8 of 39 tensors changed, 1 added``."""
    if output.change != "changed":
        entry = output.new or output.old
        return f"{output.change}, {format_count(len(entry.tensors) if entry else 0, 'tensor')}"
    changed = output.counted("changed")
    if not output.tensors:
        return "no tensor changed"
    whole = max(len(side.tensors) for side in (output.old, output.new) if side is not None)
    words = [f"{changed:,} of {format_count(whole, 'tensor')} changed"]
    words += [f"{output.counted(c):,} {c}" for c in ("added", "removed") if output.counted(c)]
    return ", ".join(words)


def reads_words(output: OutputChange) -> str | None:
    """Return what is read of the experts, before and after, where that differs."""
    reads = output.reads()
    keys = ("expert_bytes_planned", "expert_bytes_full")
    texts = []
    for side in (0, 1):
        planned, full = (reads[key][side] for key in keys)
        if planned is None or full is None:
            return None
        texts.append(format_bytes(planned) + (f" of {format_bytes(full)}" if planned != full else ""))
    return None if all(reads[key][0] == reads[key][1] for key in keys) else f" {ARROW} ".join(texts)


def blocks_words(output: OutputChange) -> str | None:
    """Return how many expert blocks carry content and are read, before and after, where that differs."""
    reads = output.reads()
    read, total = reads["expert_blocks_read"], reads["expert_blocks_total"]
    if None in (*read, *total) or (read[0] == read[1] and total[0] == total[1]):
        return None
    return f" {ARROW} ".join(f"{read[side]:,} of {total[side]:,}" for side in (0, 1))


def levels_words(output: OutputChange) -> str | None:
    """Return how precisely expert blocks are read, before and after, where that differs."""
    old, new = output.levels()
    if old == new or output.change != "changed":
        return None
    return f" {ARROW} ".join("whole blocks" if known is None else _counted(known) for known in (old, new))


def _counted(levels: Mapping[int, int]) -> str:
    return ", ".join(f"{count:,} {level_words(level)}" for level, count in levels.items()) or "no blocks"


def level_words(level: int) -> str:
    """Return what it is to be read at a level: ``exact``, ``omitted``, ``at level 3``."""
    return {0: "omitted", 255: "exact"}.get(level, f"at level {level}")


def moves_words(output: OutputChange) -> str | None:
    """Return how many expert blocks went from one level to another, where that is known."""
    names = {0: "omitted", 255: "exact"}
    moves = [
        f"{format_count(count, 'block')} from {names.get(old, f'level {old}')} to {names.get(new, f'level {new}')}"
        for (old, new), count in output.moves()
    ]
    return listed(moves, _MOVES) or None


def bound_words(output: OutputChange) -> str | None:
    """Return the bound before and after, where it differs."""
    if output.old is None or output.new is None or output.old.bound == output.new.bound:
        return None
    return f" {ARROW} ".join(bound_text(side.bound) for side in (output.old, output.new))


def bound_text(bound: Mapping[str, str | float]) -> str:
    """Return ``exact``, or ``certified, at most 1.2% of the update``."""
    kind, relative = str(bound.get("kind", "none")), bound.get("relative_to_update")
    if kind == "exact" or not isinstance(relative, float):
        return kind
    how = {"certified": "at most ", "estimated": "about "}.get(kind, "")
    return f"{kind}, {how}{relative * 100:.3g}% of the update"


def written_words(output: OutputChange) -> str | None:
    """Return the bytes of the shards before and after, where they differ."""
    if output.old is None or output.new is None:
        return None
    sizes = [sum(shard.bytes for shard in side.shards) for side in (output.old, output.new)]
    return None if sizes[0] == sizes[1] else f" {ARROW} ".join(map(format_bytes, sizes))


def side_files(output: OutputChange) -> list[str]:
    """Return the names of the side files that differ, with ``added`` or ``removed`` behind those that are."""
    if output.old is None or output.new is None:
        return []
    old, new = ({file.name: file.digest for file in side.side_files} for side in (output.old, output.new))
    return [
        name + ("" if name in old and name in new else " added" if name in new else " removed")
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def forms(output: OutputChange) -> list[tuple[str, str]]:
    """Return the tensors whose dtype or shape differs, as far as that is known: ``BF16 4 x 4 -> F32 4 x 4``."""
    found = []
    for tensor in output.tensors:
        both = list(zip(tensor.dtypes, tensor.shapes, strict=True))
        if both[0] != both[1] and all(dtype is not None for dtype, _ in both):
            texts = [f"{dtype} {' x '.join(map(str, shape or ()))}".strip() for dtype, shape in both]
            found.append((tensor.name, f" {ARROW} ".join(texts)))
    return found


def by_distance(tensors: Iterable[Compared]) -> list[tuple[str, Distance]]:
    """Return the tensors that have a distance, the largest first; those that are not finite before all."""
    found = [(tensor.name, tensor.distance) for tensor in tensors if tensor.distance is not None]

    def key(item: tuple[str, Distance]) -> float:
        relative = item[1].relative_l2
        return -math.inf if relative is None or math.isnan(relative) else -relative

    return sorted(found, key=key)


def distance_words(distance: Distance) -> tuple[str, str, str]:
    """Return relative L2, the largest difference and the cosine; ``-`` where there is none."""
    cosine = "-" if distance.cosine is None else f"{distance.cosine:.6f}"
    return _number(distance.relative_l2), _number(distance.max_abs), cosine


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def listed(parts: Iterable[str], limit: int, joint: str = ", ") -> str:
    """Return at most so many parts in a row, and how many more there are."""
    found = list(parts)
    more = [f"and {len(found) - limit:,} more"] if len(found) > limit else []
    return joint.join([*found[:limit], *more])


def side_words(side: Side, quote: Quote) -> str:
    """Return what a side is called."""
    return "nothing" if side.kind == "empty" else quote(side.name)
