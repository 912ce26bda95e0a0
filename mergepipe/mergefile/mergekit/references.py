"""References to models as mergekit writes them: `path`, `org/name`, with `@revision`, with `+adapter`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.names import clean_name
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.suggest import code
from mergepipe.values import dataclass

_SNAPSHOT = re.compile(r".*?models--(?:[^/]*--)?(?P<name>[^/]+)/snapshots/[^/]+/*")
_EXPECTED = "a model: a path or `org/name`, with `@revision` and `+adapter` where needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a checkpoint or an adapter is: a path or a hub repository, as written, and a revision of it."""

    path: str
    revision: str | None = None

    def __str__(self) -> str:
        """Return it as mergekit writes it."""
        return self.path if self.revision is None else f"{self.path}@{self.revision}"

    def name(self) -> str:
        """Return a name for it: the last component of the path; of a snapshot in the hub's cache, its repository's."""
        path = self.path.replace("\\", "/")
        snapshot = _SNAPSHOT.fullmatch(path)
        last = path.rstrip("/").rpartition("/")[2]
        return clean_name(snapshot["name"] if snapshot else last.removesuffix(".safetensors"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A model: a checkpoint, and an adapter that is applied to it. Two are equal where mergekit finds them equal."""

    model: Place
    adapter: Place | None = None

    def __str__(self) -> str:
        """Return it as mergekit writes it."""
        return str(self.model) if self.adapter is None else f"{self.model}+{self.adapter}"


def read_reference(value: Any, path: KeyPath, problems: Problems) -> Reference | None:
    """Return the model that a value refers to, or None after recording what is wrong with it."""
    if isinstance(value, Mapping):
        return _from_mapping(value, path, problems)
    if not isinstance(value, str) or not _is_text(value):
        problems.add(path, "invalid model", expected=_EXPECTED, hint=_text_hint(value))
        return None
    parts = value.split("+")
    if len(parts) > 2:
        problems.add(path, f"{code(value)} has more than one `+`", hint="mergekit takes one adapter for a model")
        return None
    places = [_place(part, path, problems) for part in parts]
    if places[0] is None or None in places:
        return None
    return Reference(model=places[0], adapter=places[1] if len(places) == 2 else None)


def _is_text(value: str) -> bool:
    return bool(value.strip()) and value.isprintable()


def _text_hint(value: Any) -> str | None:
    return "put a name that looks like a number in quotes" if isinstance(value, bool | int | float) else None


def _place(text: str, path: KeyPath, problems: Problems) -> Place | None:
    where, at, revision = text.partition("@")
    if "@" in revision:
        problems.add(path, f"{code(text)} has more than one `@`", hint="a model is `path` or `path@revision`")
    elif not where or (at and not revision):
        problems.add(
            path, f"{code(text)} lacks {'a path' if not where else 'a revision after `@`'}", expected=_EXPECTED
        )
    else:
        return Place(path=where, revision=revision or None)
    return None


def _from_mapping(value: Mapping[str, Any], path: KeyPath, problems: Problems) -> Reference | None:
    """Return the reference of the form with keys, which mergekit writes for paths that its short form cannot hold."""
    if value.get("override_architecture") is not None:
        what = "the architecture is taken from the checkpoint's names and shapes: none can be forced on it"
        problems.add((*path, "override_architecture"), what, hint="remove it")
    for key in value:
        if key not in ("model", "lora", "override_architecture"):
            problems.add((*path, key), "unknown key of a model", expected="`model` and `lora`")
    model = _place_from(value.get("model"), (*path, "model"), problems)
    adapter = value.get("lora")
    found = None if adapter is None else _place_from(adapter, (*path, "lora"), problems)
    if model is None or (adapter is not None and found is None):
        return None
    return Reference(model=model, adapter=found)


def _place_from(value: Any, path: KeyPath, problems: Problems) -> Place | None:
    if isinstance(value, str) and _is_text(value):
        return _place(value, path, problems)
    where, revision = (value.get("path"), value.get("revision")) if isinstance(value, Mapping) else (None, None)
    wanted = isinstance(where, str) and _is_text(where) and (revision is None or isinstance(revision, str))
    if not wanted or (isinstance(value, Mapping) and set(value) - {"path", "revision"}):
        problems.add(path, "invalid model", expected="a path, or a mapping with `path` and `revision`")
        return None
    return Place(path=str(where), revision=revision or None)
