"""What the model cards of sources say: the ``README.md`` beside the weights, whose front matter is YAML of anybody's.

Only a few keys are looked at, as text, and only values of the form that a hub knows count. A card that cannot be read
says nothing: it is no part of the merge, so it is no reason to refuse one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergepipe.checkpoints.place import Place, opened
from mergepipe.errors import SourceError
from mergepipe.values import dataclass

SOURCE_CARD = "README.md"
_FRONT_LIMIT = 1 << 20
_ENTRY_LIMIT = 4096
_BRACKETS = 16
_WANTED = ("license", "license_name", "license_link", "language", "pipeline_tag", "base_model")
_KEY = re.compile(rf"(?P<key>{'|'.join(_WANTED)})[ \t]*:(?:\s|$)")
_LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
_LICENSE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_LICENSE_LINK = re.compile(r"https://[A-Za-z0-9.-]+(?:/[A-Za-z0-9._~/-]*)?")
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(?:-[A-Za-z0-9]{1,8})*")
_PIPELINE = re.compile(r"[a-z][a-z0-9-]{1,63}")
_HUB_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?", re.ASCII)
_LISTED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCard:
    """What a source's card states; an empty value is not stated.

    Attributes
    ----------
    license
        A hub's identifier such as ``apache-2.0``; of ``other``, ``license_name`` and ``license_link`` tell more.
    languages
        Codes such as ``en``, in the card's order.
    base_models
        The repositories that the source says that it was made from.
    """

    license: str = ""
    license_name: str = ""
    license_link: str = ""
    languages: tuple[str, ...] = ()
    pipeline_tag: str = ""
    base_models: tuple[str, ...] = ()


def read_source_card(place: Place) -> SourceCard:
    """Return what the card in a source's folder states; nothing where there is none, or none that can be read."""
    try:
        with opened(place, SOURCE_CARD) as (fd, _), open(fd, "rb", closefd=False) as file:
            data = file.read(_FRONT_LIMIT)
    except SourceError:
        return SourceCard()
    return parse_source_card(data)


def parse_source_card(data: bytes) -> SourceCard:
    """Return what a card states in its front matter."""
    values = _entries(data)
    known = _strings(values.get("license"), _LICENSE)
    link = _strings(values.get("license_link"), _LICENSE_LINK)
    named = _strings(values.get("license_name"), _LICENSE_NAME)
    pipeline = _strings(values.get("pipeline_tag"), _PIPELINE)
    models = values.get("base_model")
    listed = models if isinstance(models, list) else [models]
    return SourceCard(
        license=known[0].lower() if len(known) == 1 else "",
        license_name=named[0] if len(named) == 1 else "",
        license_link=link[0] if len(link) == 1 else "",
        languages=_strings(values.get("language"), _LANGUAGE),
        pipeline_tag=pipeline[0] if len(pipeline) == 1 else "",
        base_models=tuple(dict.fromkeys(m for m in listed[:_LISTED] if isinstance(m, str) and is_hub_id(m))),
    )


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form of a repository's name on a hub, ``owner/name``."""
    owner, slash, name = text.partition("/")
    return bool(slash) and is_hub_name(owner) and is_hub_name(name) and not name.endswith(".git")


def is_hub_name(text: str) -> bool:
    """Return whether a text may be the owner or the name of a repository."""
    return _HUB_NAME.fullmatch(text) is not None and "--" not in text and ".." not in text


def _entries(data: bytes) -> Mapping[str, Any]:
    """Return the wanted entries of the front matter, each parsed alone: one that is broken hides no other.

    With the loader that knows neither types nor tags: all scalars are text, so that Norwegian (``no``) is no boolean,
    and no date, number or tag can fail in a constructor. Anchors reach no further than their entry, which is small.
    """
    chunks = dict(_chunks(data.decode("utf-8-sig", "replace")))
    if not chunks:
        return {}
    import yaml  # only here: most sources have no card

    found: dict[str, Any] = {}
    for key, text in chunks.items():
        try:
            value = yaml.load(text, yaml.BaseLoader)  # noqa: S506 - the base loader makes text, lists and mappings only
        except (yaml.YAMLError, RecursionError, ValueError):
            continue
        if isinstance(value, dict) and key in value:
            found[key] = value[key]
    return found


def _chunks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text of each wanted entry at the top of the front matter."""
    lines = text.splitlines()
    if not lines or lines[0].rstrip() != "---":
        return
    ends = [number for number, line in enumerate(lines[1:], 1) if line.rstrip() in ("---", "...")]
    body = lines[1 : ends[0]] if ends else []
    for number, line in enumerate(body):
        match = _KEY.match(line)
        if match is None:
            continue
        rest = number + 1
        while rest < len(body) and (body[rest][:1] in (" ", "\t", "") or body[rest].startswith("- ")):
            rest += 1
        chunk = "\n".join(body[number:rest])
        if len(chunk) <= _ENTRY_LIMIT and chunk.count("[") + chunk.count("{") <= _BRACKETS:  # nesting takes its time
            yield match["key"], chunk


def _strings(value: object, form: re.Pattern[str]) -> tuple[str, ...]:
    """Return a text or a list of texts as far as they have the right form; nothing if any has not."""
    values: Sequence[object] = value if isinstance(value, list) else [value]
    found = [item for item in values[:_LISTED] if isinstance(item, str) and form.fullmatch(item)]
    return tuple(dict.fromkeys(found)) if len(found) == len(values) else ()
