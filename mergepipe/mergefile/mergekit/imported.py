"""A mergekit configuration in, a Mergefile out, or every problem of it in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mergepipe.errors import CollectedErrors, InternalError, MergefileError, MergepipeError
from mergepipe.mergefile.locate import KeyPath, LineMap
from mergepipe.mergefile.mergekit.convert import convert, free_path
from mergepipe.mergefile.mergekit.document import Recipe, read_recipe
from mergepipe.mergefile.mergekit.methods import RANDOM
from mergepipe.mergefile.mergekit.settings import Notes
from mergepipe.mergefile.mergekit.sources import Locate, references, register
from mergepipe.mergefile.mergekit.text import render
from mergepipe.mergefile.mergekit.yamltext import Document, read_documents
from mergepipe.mergefile.names import clean_name
from mergepipe.mergefile.parse import parse_mergefile
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.schema import Mergefile
from mergepipe.mergefile.suggest import code, listing
from mergepipe.signatures import OperatorSignature
from mergepipe.values import dataclass

_MASKS = (
    "random masks are drawn in another way than in mergekit: as many elements are dropped, and not the same; `seed` in "
    "`params` (default 0) gives others"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What a configuration became.

    Attributes
    ----------
    text, mergefile
        The Mergefile, as text and as what it means.
    notes
        What changed on the way, in sentences.
    unsupported
        What of it this release cannot build yet, one message each.
    """

    text: str
    mergefile: Mergefile
    notes: tuple[str, ...]
    unsupported: tuple[str, ...]


def import_mergekit(
    content: bytes, source: Path, target: Path, signatures: Mapping[str, OperatorSignature], locate: Locate
) -> Imported:
    """Return the Mergefile that a mergekit configuration becomes.

    Nothing but ``locate`` looks at the file system.

    Parameters
    ----------
    content
        The configuration: YAML, one document, or several that refer to one another by `name`.
    source
        Where it comes from: for messages, and for the name of an output that has none.
    target
        Where the Mergefile is going to be.
    signatures
        The operators'.
    locate
        Says where a model is.

    Raises
    ------
    MergefileError, CollectedErrors
        For what is wrong with the configuration or cannot be said in a Mergefile, each with its line and its reason.
    """
    documents = read_documents(content, source.name, str(source))
    problems, notes = Problems(source.name, str(source), _lines(documents)), Notes()
    recipes = _recipes(documents, signatures, problems, notes)
    outputs, stages = _named(recipes, source, problems, notes)
    problems.raise_if_any()  # what follows would only repeat it in other words
    mergefile, origins = _mergefile(outputs, stages, target, signatures, locate, problems, notes)
    problems.raise_if_any()
    text = render(mergefile, source.name, tuple(notes.said), origins, signatures)
    return Imported(
        text=text,
        mergefile=mergefile,
        notes=tuple(notes.said),
        unsupported=_checked(text, mergefile, target, signatures),
    )


def _prefix(documents: tuple[Document, ...], index: int) -> KeyPath:
    return ("documents", index) if len(documents) > 1 else ()


def _lines(documents: tuple[Document, ...]) -> LineMap:
    lines: dict[KeyPath, int] = {}
    for index, document in enumerate(documents):
        lines |= {(*_prefix(documents, index), *path): line for path, line in document.lines.items()}
    return LineMap(lines)


def _recipes(
    documents: tuple[Document, ...], signatures: Mapping[str, OperatorSignature], problems: Problems, notes: Notes
) -> list[Recipe]:
    found = [
        read_recipe(document.data, _prefix(documents, index), signatures, problems, notes)
        for index, document in enumerate(documents)
    ]
    return [recipe for recipe in found if recipe is not None]


def _named(
    recipes: list[Recipe], source: Path, problems: Problems, notes: Notes
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Return the documents by the names of their outputs, and those names by the documents' own."""
    outputs: dict[str, Recipe] = {}
    stages: dict[str, str] = {}
    for recipe in sorted(recipes, key=lambda recipe: recipe.name is None):  # names that are given come first
        where = (*recipe.path, "name")
        if recipe.name in stages:
            problems.add(where, f"{code(recipe.name)} is the name of two documents", hint="rename one")
            continue
        if recipe.name is None and any(other.name is None for other in outputs.values()):
            problems.add(recipe.path, "two documents without a name", hint="give each its `name`")
            continue
        name = clean_name(source.stem if recipe.name is None else recipe.name)
        while name in outputs:
            name += "-2"
        outputs[name] = recipe
        if recipe.name is not None:
            stages[recipe.name] = name
            if name != recipe.name:
                notes.add(f"the document {code(recipe.name)} is called {code(name)} here")
    _check_cycles(outputs, stages, problems)
    return {name: recipe for recipe in recipes for name, other in outputs.items() if other is recipe}, stages


def _uses(recipe: Recipe, stages: Mapping[str, str]) -> list[str]:
    """Return the outputs that a document uses as models."""
    paths = [reference.model.path for reference, _ in references(recipe)]
    return list(dict.fromkeys(stages[path] for path in paths if path in stages))


def _check_cycles(outputs: Mapping[str, Recipe], stages: Mapping[str, str], problems: Problems) -> None:
    """Record the documents that need one another; what only leads to them is left alone."""
    waiting = dict(outputs)
    while True:
        needs = {name: [use for use in _uses(recipe, stages) if use in waiting] for name, recipe in waiting.items()}
        needed = {use for uses in needs.values() for use in uses}
        ends = [name for name in waiting if not needs[name] or name not in needed]
        if not ends:
            break
        for name in ends:
            del waiting[name]
    if waiting:
        who = listing(waiting, "and")
        what = f"{who} refers to itself" if len(waiting) == 1 else f"a cycle: {who} need one another"
        problems.add((*next(iter(waiting.values())).path, "name"), what)


def _mergefile(
    recipes: Mapping[str, Recipe],
    stages: Mapping[str, str],
    target: Path,
    signatures: Mapping[str, OperatorSignature],
    locate: Locate,
    problems: Problems,
    notes: Notes,
) -> tuple[Mergefile, Mapping[str, str]]:
    registry = register(recipes, stages, locate, problems, notes)
    problems.raise_if_any()
    used = {use for recipe in recipes.values() for use in _uses(recipe, stages)}
    outputs = {}
    for name, recipe in recipes.items():
        signature = signatures[recipe.method.name]
        output = convert(name, recipe, registry.names, signature, problems, notes)
        if output is not None:
            path = free_path(output, registry.sources.values())
            outputs[name] = replace(output, path=path, publish=name not in used)
        if recipe.method.name in RANDOM:
            notes.add(_MASKS)
    mergefile = Mergefile(path=target.absolute(), sources=registry.sources, outputs=outputs)
    return mergefile, registry.origins


def _unsupported(errors: Sequence[MergepipeError]) -> tuple[str, ...]:
    """Return a sentence for each thing that is not supported yet, with the key paths where it is used."""
    where: dict[str, list[str]] = {}
    for error in errors:
        path = str(error.facts["key_path"])
        what = error.message.partition(f": {path}: ")[2]
        where.setdefault(what, []).append(code(path))
    return tuple(f"{what} ({', '.join(paths)})" for what, paths in where.items())


def _checked(
    text: str, mergefile: Mergefile, target: Path, signatures: Mapping[str, OperatorSignature]
) -> tuple[str, ...]:
    """Return what of a Mergefile cannot be built yet, after making sure that it reads as what it was made from.

    Raises
    ------
    MergefileError
        If it is refused for another reason, which the configuration should have been refused for.
    InternalError
        If it means something else.
    """
    try:
        parsed = parse_mergefile(text, target, signatures)
    except MergepipeError as error:
        found = error.errors if isinstance(error, CollectedErrors) else (error,)
        others = [member.message for member in found if "unsupported" not in member.facts]
        if others:
            message = "the configuration cannot be imported, as a Mergefile of it is refused:\n" + "\n".join(others)
            raise MergefileError(message) from None
        return _unsupported(found)
    if (parsed.sources, parsed.outputs) != (mergefile.sources, mergefile.outputs):
        raise InternalError("the Mergefile that was written means something else than the configuration")
    return ()
