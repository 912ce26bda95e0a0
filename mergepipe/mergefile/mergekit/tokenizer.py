"""Reads `tokenizer_source` and `tokenizer`: whose tokenizer the result gets. Mixing vocabularies is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.mergekit.references import Reference, read_reference
from mergepipe.mergefile.mergekit.settings import Notes
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.suggest import did_you_mean
from mergepipe.values import dataclass

_UNION = (
    "a union of the models' vocabularies has no counterpart: mergepipe merges the rows of embeddings and heads as they "
    "are, and takes the tokenizer of one source"
)
_HINT = "name whose tokenizer is right: `tokenizer_source: base`, or a model"
_ROWS = (
    "mergekit sorts the rows of embeddings and heads by the tokenizer that is asked for; mergepipe merges them as they "
    "are, which is the same where all models have one vocabulary (row counts that differ are an error)"
)
_REASONS = {
    "tokens": "rows of single tokens cannot be chosen or replaced: embeddings are merged row by row as they are",
    "pad_to_multiple_of": "no rows are added: embeddings keep those of the base",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Whose tokenizer is written: that of ``model``, or of the base model where it is None."""

    model: Reference | None
    path: KeyPath


def read_tokenizer(data: Mapping[str, Any], path: KeyPath, problems: Problems, notes: Notes) -> Tokenizer | None:
    """Return whose tokenizer a document asks for; None if it does not, or after recording what cannot be done."""
    if "tokenizer_source" in data and "tokenizer" in data:
        problems.add((*path, "tokenizer"), "a merge has `tokenizer_source` or `tokenizer`, not both")
    if "tokenizer" in data:
        found = _section(data["tokenizer"], (*path, "tokenizer"), problems)
    elif "tokenizer_source" in data:
        found = _source(data["tokenizer_source"], (*path, "tokenizer_source"), problems)
    else:
        return None
    if found is not None:
        notes.add(_ROWS)
    return found


def _section(value: Any, path: KeyPath, problems: Problems) -> Tokenizer | None:
    if not isinstance(value, Mapping):
        problems.add(path, "invalid value", expected="a mapping with `source`", got=value)
        return None
    for key, inner in value.items():
        if key in _REASONS:
            if inner:
                problems.add((*path, key), f"cannot be imported: {_REASONS[key]}")
        elif key != "source":
            hint = did_you_mean(key, ("source", *_REASONS)) or "remove it"
            problems.add((*path, key), "unknown key: mergekit ignores it, and what was meant with it", hint=hint)
    # Without a source, mergekit takes the union.
    return _source(value.get("source", "union"), (*path, "source"), problems)


def _source(value: Any, path: KeyPath, problems: Problems) -> Tokenizer | None:
    if value == "union":
        problems.add(path, f"cannot be imported: {_UNION}", hint=_HINT)
        return None
    if value == "base":
        return Tokenizer(model=None, path=path)
    if value is None:
        problems.add(path, "has no value", expected="`base`, or a model")
        return None
    model = read_reference(value, path, problems)
    return None if model is None else Tokenizer(model=model, path=path)
