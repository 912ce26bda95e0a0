"""From a document and the names of its models to an output of a Mergefile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mergepipe.mergefile.mergekit.document import Recipe
from mergepipe.mergefile.mergekit.references import Reference
from mergepipe.mergefile.mergekit.roles import Cast, cast
from mergepipe.mergefile.mergekit.scopes import Scoped, Scopes
from mergepipe.mergefile.mergekit.settings import Notes
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.schema import ExpertRef, Output, Slice, Source, Write
from mergepipe.signatures import OperatorSignature

_FOLDERS = ("build", "merged", "outputs")


def convert(
    name: str,
    recipe: Recipe,
    names: Mapping[Reference, str],
    signature: OperatorSignature,
    problems: Problems,
    notes: Notes,
) -> Output | None:
    """Return the output that a document becomes, None after recording why it becomes none."""
    found = [cast(recipe, part, problems, notes) for part in recipe.parts]
    casts = [entry for entry in found if entry is not None]
    if not casts or len(casts) < len(found):
        return None
    scopes = Scopes(recipe=recipe, casts=casts, signature=signature, names=names, problems=problems)
    scoped = [scopes.part(entry) for entry in casts]
    base = _base(recipe, casts)
    params = {key: value for part in scoped for key, value in part.output.items()}
    rules = scopes.shared_rules()
    if recipe.tokenizer is not None and recipe.tokenizer.model is None and recipe.base is None:
        notes.add("the base's tokenizer is asked for, and there is no `base_model`: it is that of the first model")
    write = _write(recipe, base, casts, names)
    output = Output(
        name=name,
        operator=recipe.method.name,
        base=None if base is None else names[base],
        path=f"build/{name}",
        params=params,
        rules=rules,
        write=write,
    )
    if not recipe.sliced:
        return replace(output, experts=_experts(casts[0], scoped[0], names, None), rules=scoped[0].rules)
    if len(casts) == 1:
        output = replace(output, params=params | scoped[0].part, rules=scoped[0].rules)
        scoped = [Scoped(experts=scoped[0].experts)]
    parts = [_slice(entry, part, base, names) for entry, part in zip(casts, scoped, strict=True)]
    return replace(output, slices=tuple(parts))


def _base(recipe: Recipe, casts: Sequence[Cast]) -> Reference | None:
    """Return the base of the output; where only some slices have one, they alone name it."""
    bases = [entry.base for entry in casts]
    if None not in bases and recipe.base is None:
        return bases[0]
    return None if bases == [None] * len(bases) else recipe.base


def _experts(
    entry: Cast, scoped: Scoped, names: Mapping[Reference, str], layers: tuple[int, int] | None
) -> tuple[ExpertRef, ...]:
    return tuple(
        ExpertRef(source=names[expert.model], params=params, layers=expert.layers if expert.layers != layers else None)
        for expert, params in zip(entry.experts, scoped.experts, strict=True)
    )


def _slice(entry: Cast, scoped: Scoped, base: Reference | None, names: Mapping[Reference, str]) -> Slice:
    layers = entry.experts[0].layers or (0, 0)
    return Slice(
        layers=layers,
        experts=_experts(entry, scoped, names, layers),
        base=names[entry.base] if entry.base is not None and entry.base != base else None,
        base_layers=entry.base_layers if entry.base_layers != layers else None,
        params=scoped.part,
        rules=scoped.rules,
    )


def _write(recipe: Recipe, base: Reference | None, casts: Sequence[Cast], names: Mapping[Reference, str]) -> Write:
    """Return the dtype and whose tokenizer; said where it is asked for, or where another's would be taken."""
    asked = recipe.tokenizer
    tokenizer = recipe.base if asked is None or asked.model is None else asked.model
    default = base or casts[0].experts[0].model
    if asked is None and tokenizer == default:
        tokenizer = None
    return Write(dtype=recipe.dtype, tokenizer=None if tokenizer is None else names[tokenizer])


def free_path(output: Output, sources: Iterable[Source]) -> str:
    """Return a directory for an output that is, holds and lies in no source."""
    taken = [os.path.normpath(source.path) for source in sources if source.path is not None]
    for folder in _FOLDERS:
        path = f"{folder}/{output.name}"
        if not any(_touch(path, other) for other in taken):
            return path
    return output.path


def _touch(path: str, other: str) -> bool:
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/") or other == "."
