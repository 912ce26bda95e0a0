"""Why an output must be built anew, in words that name what changed: a source's digest, a weight, the budget."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import format_digest, is_sampled_pin, sampled_pin
from mergepipe.errors import LockError
from mergepipe.lockfile.compare import Difference, declared_differences
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.records import LOCATION_KEYS, LockedOutput, Lockfile
from mergepipe.lockfile.writer import key_text, value_text
from mergepipe.project.facts import FACT_WORDS, Facts, PublishedRecord
from mergepipe.project.key_parts import shortened
from mergepipe.units import budget_words

_NAMED = 3
Locations = Mapping[str, Mapping[str, str]]
"""By source where it is, as declared."""
_QUOTE = '"'
_EXPERT = re.compile(r"experts\[(\d+)\]\.(.+)")
_FACT_OF = {  # by the beginning of an entry; whatever is not here is a parameter
    "operator": "operator",
    "numerics": "operator",
    "code.": "code",
    "budget": "budget",
    "write.": "layout",
}


def changed_reasons(
    record: PublishedRecord,
    new: Facts,
    index: SourceIndex,
    declared: LockedOutput,
    locations: Locations,
    place: Path,
) -> tuple[str, ...]:
    """Return in words which facts differ from those of the build before, each with what changed of it.

    Parameters
    ----------
    record
        Of the output as it was built.
    index
        What is known of sources beside the pins that ``new`` goes by.
    declared
        The output as it is declared now.
    locations
        Where its sources are declared to be now.
    place
        Where the record is from, for messages.
    """
    old = record.facts
    details = _details(record.lock, declared, place)
    moved = _moved(record, locations)
    reasons = [
        "; ".join(filter(None, (moved.get(name), _source_reason(name, old, new, index))))
        for name in sorted({*old.sources, *new.sources})
    ]
    reasons += [
        _joined(words, details.get(name, ()))
        for name, words in FACT_WORDS.items()
        if name not in ("tensors", "card") and getattr(old, name) != getattr(new, name)
    ]
    found = tuple(reason for reason in reasons if reason)
    # These two follow from the others, so that they say something only where they are alone.
    alone = next((name for name in ("tensors", "card") if getattr(old, name) != getattr(new, name)), None)
    return found or ((FACT_WORDS[alone],) if alone else ())


def cold_reasons(
    cold: Sequence[str],
    record: PublishedRecord,
    index: SourceIndex,
    stages: Container[str],
    declared: LockedOutput,
    locations: Locations,
    place: Path,
) -> tuple[str, ...]:
    """Return in words why an output must be built anew some of whose sources are not known as its budget asks.

    A source whose content is known, and is what it was, is no reason: then the budget is, which reads other things of
    it. What is declared otherwise than before is named, too.

    Parameters
    ----------
    cold
        The sources.
    stages
        Names of outputs of the project.
    """
    details = _details(record.lock, declared, place)
    moved = _moved(record, locations)
    found = [moved.get(name) or _cold_reason(name, record.facts, index, stages) for name in cold]
    found += [_joined(words, details[name]) for name, words in FACT_WORDS.items() if name in details]
    return tuple(filter(None, found)) or tuple(f"source `{name}` was not read as its budget asks" for name in cold)


def _moved(record: PublishedRecord, now: Locations) -> dict[str, str]:
    """Return in words by source what the Mergefile says otherwise of where it is."""
    found = {}
    for name, before in (record.last.locations if record.last else {}).items():
        after = now.get(name, before)
        changes = [
            f"{key} {before.get(key, 'none')} -> {after.get(key, 'none')}"
            for key in LOCATION_KEYS
            if before.get(key) != after.get(key)
        ]
        if changes:
            found[name] = f"source `{name}` is declared otherwise: {', '.join(changes)}"
    return found


def _cold_reason(name: str, old: Facts, index: SourceIndex, stages: Container[str]) -> str:
    if name in stages:
        return f"output `{name}`, which it is made from, is not up to date"
    before = old.sources.get(name)
    if before is None:
        return f"source `{name}` is new"
    now = _same_kind(before, name, index)
    if now is None:
        return f"source `{name}` changed on disk, or was not read before"
    return "" if now == before else _other_content(name, before, now)


def _same_kind(pin: bytes, name: str, index: SourceIndex) -> bytes | None:
    """Return the pin that a source has now of the kind that it had; None while that is not known."""
    if not is_sampled_pin(pin):
        return index.digest(name)
    fingerprint = index.fingerprint(name)
    return None if fingerprint is None else sampled_pin(fingerprint)


def _source_reason(name: str, old: Facts, new: Facts, index: SourceIndex) -> str:
    before, after = old.sources.get(name), new.sources.get(name)
    if before == after:
        return ""
    if before is None or after is None:
        return f"source `{name}` is {'new' if before is None else 'no part of it any more'}"
    if is_sampled_pin(before) == is_sampled_pin(after):
        return _other_content(name, before, after)
    # What is read of it changed; whether its content did is known where a build read it both ways.
    known = _same_kind(before, name, index)
    return "" if known in (None, before) else _other_content(name, before, known or after)


def _other_content(name: str, before: bytes, after: bytes) -> str:
    texts = (shortened(format_digest(digest)) for digest in (before, after))
    return f"source `{name}` has other content: {' -> '.join(map(str, texts))}"


def _joined(words: str, details: Sequence[str]) -> str:
    if not details:
        return words
    more = f" and {len(details) - _NAMED} more" if len(details) > _NAMED else ""
    return f"{words}: {', '.join(details[:_NAMED])}{more}"


def _details(lock: str, declared: LockedOutput, place: Path) -> Mapping[str, Sequence[str]]:
    """Return by fact what changed of it; nothing where the record's lock cannot be read any more."""
    try:
        before = parse_lock(lock, place)
    except LockError:
        return {}
    now = Lockfile(geometry=before.geometry, sources=(), outputs=(declared,))
    found: dict[str, list[str]] = {}
    prefix = f"outputs.{key_text(declared.name)}."
    for difference in declared_differences(before, now):
        entry = difference.entry.removeprefix(prefix)
        if not entry.startswith(("sources.", "path", "publish")):
            fact = next((fact for start, fact in _FACT_OF.items() if entry.startswith(start)), "parameters")
            found.setdefault(fact, []).append("".join(_words(entry, difference, declared)))
            if entry == "experts":
                found[fact] += _new_experts(before.output(declared.name), declared)
    return found


def _new_experts(before: LockedOutput | None, declared: LockedOutput) -> Iterator[str]:
    """Yield the parameters of experts that are new, such as their weights."""
    known = {expert.source for expert in before.experts} if before else set()
    for expert in declared.experts:
        if expert.source not in known:
            yield from (f"{key} of `{expert.source}` {value_text(value)}" for key, value in expert.params.items())


def _words(entry: str, difference: Difference, declared: LockedOutput) -> Iterator[str]:
    expert = _EXPERT.fullmatch(entry)
    if expert:
        yield f"{expert[2]} of `{declared.experts[int(expert[1])].source}` "
    elif entry.startswith(("params.", "write.", "code.")):
        yield f"`{entry.partition('.')[2]}` "
    elif entry not in ("budget", "operator"):
        yield f"{entry} "
    old, new = ("none" if text is None else shortened(text) or "" for text in (difference.old, difference.new))
    if entry == "budget":
        old, new = budget_words(old), budget_words(new)
    yield f"{old} -> {new}" if entry != "budget" else f"{old.strip(_QUOTE)} -> {new.strip(_QUOTE)}"
