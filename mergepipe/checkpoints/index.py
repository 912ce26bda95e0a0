"""The index of a sharded checkpoint: which file holds which tensor.

An index is data from somewhere else. The files that it names must lie in its folder, by the names alone: no absolute
path, no ``..``, no drive, no backslash. (A file there may well be a link to elsewhere, as in the hub's cache.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mergepipe.checkpoints.place import Place, read_small, what_instead
from mergepipe.checkpoints.strictjson import Flaw, JsonError, decode, is_encodable
from mergepipe.checkpoints.wording import quote
from mergepipe.errors import FormatError, MergepipeError, raise_collected

_MOST_ERRORS = 20
_DRIVE = re.compile(r"[A-Za-z]:")


def read_index(place: Place, name: str) -> Mapping[str, str]:
    """Return the file of every tensor that an index names.

    Raises
    ------
    FormatError
        If it is not valid, or names a file outside the folder (rule ``escape``); all such names together.
    SourceError
        If it cannot be read.
    """
    data = read_small(place, name)
    try:
        root = decode(data)
    except JsonError as error:
        instead = what_instead(data)
        what = f"is not a valid index: {instead[0] if instead else error.what}"
        raise _error(place, name, "index-json", what, hint=instead[1] if instead else None) from None
    weight_map = _weight_map(place, name, root)
    if _is_plain(weight_map):
        return weight_map
    # One error for each wrong file name, however many tensors have it.
    errors: dict[str, MergepipeError] = {}
    for tensor, file in weight_map.items():
        problem = _problem(tensor, file)
        if problem is not None:
            rule, what = problem
            found = _error(place, name, rule, f"maps the tensor {quote(tensor)} to {what}", tensor=tensor)
            errors.setdefault(what, found)
    raise_collected(list(errors.values())[:_MOST_ERRORS])
    return weight_map


def _error(place: Place, name: str, rule: str, what: str, *, hint: str | None = None, **facts: Any) -> FormatError:
    shown = place.show(name)
    message = f"source {quote(place.label)}: {quote(shown)} {what}"
    return FormatError(message, rule=rule, hint=hint, source=place.label, path=shown, **facts)


def _weight_map(place: Place, name: str, root: Any) -> dict[str, Any]:
    """Return the mapping of tensors to files; its values are unchecked yet."""
    value = root.get("weight_map") if isinstance(root, dict) else root
    if isinstance(value, Flaw):
        subject = f"the key {quote(value.subject)} " if value.subject else ""
        raise _error(place, name, value.rule, f"is not a valid index: {subject}{value.what}")
    if not isinstance(value, dict) or not value:
        raise _error(place, name, "index", "is not a valid index: it has no `weight_map` of tensors to files")
    return value


def _is_plain(weight_map: Mapping[str, object]) -> bool:
    """Return whether nothing is wrong with any entry, where few files are named many times and names are ASCII."""
    if not all(map(str.isascii, weight_map)) or not all(isinstance(file, str) for file in weight_map.values()):
        return False
    return all(_problem("", file) is None for file in set(weight_map.values()))


def _problem(tensor: str, file: object) -> tuple[str, str] | None:
    """Return the rule that an entry breaks and the words for it, or None."""
    if not isinstance(file, str):
        return "index", "something that is not a file name"
    if not is_encodable(tensor) or not is_encodable(file):
        return "surrogate", f"{quote(file)}: a lone surrogate"
    if "\0" in file:
        return "escape", f"{quote(file)}, which is not a file name"
    if file.startswith("/") or "\\" in file or _DRIVE.match(file):
        return "escape", f"{quote(file)}, which is not a name within the checkpoint's folder"
    if any(part in ("", ".", "..") for part in file.split("/")):
        return "escape", f"{quote(file)}, which may lie outside the checkpoint's folder"
    return None
