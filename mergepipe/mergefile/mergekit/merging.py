"""From lists of filters, of which the first that matches wins, to rules, of which the last one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe.mergefile.mergekit.settings import Entry
from mergepipe.mergefile.schema import Rule
from mergepipe.signatures import ParamValue

Slot = tuple[str, str | None]
"""A parameter and our name of the expert that its filters are for; None for all of them, or for the whole output."""


def glob(text: str) -> str:
    """Return a glob that matches the names that contain a text; all of them, for an empty one."""
    return "*" + "".join(f"[{c}]" if c in "*?[" else c for c in text) + ("*" if text else "")


def rules(slots: Mapping[Slot, Sequence[Entry]], experts: Sequence[str]) -> tuple[Rule, ...]:
    """Return rules that give every slot the value of its first entry whose filter matches.

    Only the order within a slot means something, so slots share a rule wherever they have a filter in common and none
    of them needs it later.

    Parameters
    ----------
    slots
        The entries of each slot, all with filters.
    experts
        The names of all experts: what is equal for each of them is said once, for all.
    """
    waiting = {slot: list(reversed(_distinct(entries))) for slot, entries in slots.items()}
    found: list[Rule] = []
    while any(waiting.values()):
        text = _next(list(waiting.values()))
        values: dict[Slot, ParamValue] = {}
        for slot, entries in waiting.items():
            if entries and entries[0].filter == text:
                values[slot] = entries.pop(0).value
        _append(found, _rule(text, values, experts))
    return tuple(found)


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without those whose filter a higher scope has already, in whole or in part."""
    kept: list[Entry] = []
    for entry in entries:
        if not any((other.filter or "") in (entry.filter or "") for other in kept):
            kept.append(entry)
    return kept


def _next(lists: Sequence[Sequence[Entry]]) -> str:
    """Return the filter of the next rule: the first one that no list has only further on, if there is one."""
    heads = [entries[0].filter for entries in lists if entries]
    for head in heads:
        if not any(entry.filter == head for entries in lists for entry in entries[1:]):
            return head or ""
    return heads[0] or ""


def _rule(text: str, values: Mapping[Slot, ParamValue], experts: Sequence[str]) -> Rule:
    params = {name: value for (name, expert), value in values.items() if expert is None}
    beside: dict[str, dict[str, ParamValue]] = {}
    for name in dict.fromkeys(name for name, expert in values if expert is not None):
        given = {expert: value for (other, expert), value in values.items() if other == name and expert is not None}
        if set(given) == set(experts) and len(set(given.values())) == 1:
            params[name] = next(iter(given.values()))
        else:
            for expert, value in given.items():
                beside.setdefault(expert, {})[name] = value
    return Rule(match=(glob(text),), params=params, experts=beside)


def _append(found: list[Rule], rule: Rule) -> None:
    """Add a rule, to the one before it where they say the same: then their order means nothing."""
    last = found[-1] if found else None
    if last is not None and (last.params, last.experts) == (rule.params, rule.experts):
        found[-1] = Rule(match=(*rule.match, *last.match), params=rule.params, experts=rule.experts)
    else:
        found.append(rule)
