"""Names for the models of all documents, and where each of them is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.mergekit.document import Recipe
from mergepipe.mergefile.mergekit.references import Place, Reference
from mergepipe.mergefile.mergekit.settings import Notes
from mergepipe.mergefile.names import clean_name
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.schema import Source
from mergepipe.mergefile.suggest import code
from mergepipe.values import dataclass

_HUB = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a model is for the new Mergefile: a path as it is written there, and whether there is something."""

    path: str
    exists: bool = True


Locate = Callable[[Place], Found | None]
"""Says where a model is on this machine; None for one that is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The models of all documents.

    Attributes
    ----------
    names
        Our name of each model: a source's, or that of the output that the document of this name becomes.
    sources
        By name, in the order of first use.
    origins
        By source, how mergekit's configuration calls it.
    """

    names: Mapping[Reference, str]
    sources: Mapping[str, Source]
    origins: Mapping[str, str]


def references(recipe: Recipe) -> Iterable[tuple[Reference, KeyPath]]:
    """Yield the models of a document with their key paths: the base first, then in the order of the document."""
    if recipe.base is not None:
        yield recipe.base, (*recipe.path, "base_model")
    for part in recipe.parts:
        if part.base is not None:
            yield part.base, (*part.path, "base_model")
        for entry in part.inputs:
            yield entry.model, (*entry.path, "model")
    if recipe.tokenizer is not None and recipe.tokenizer.model is not None:
        yield recipe.tokenizer.model, recipe.tokenizer.path


def register(
    recipes: Mapping[str, Recipe], stages: Mapping[str, str], locate: Locate, problems: Problems, notes: Notes
) -> Registry:
    """Return the models of some documents.

    Parameters
    ----------
    recipes
        The documents by the name of the output that they become.
    stages
        The outputs' names by the names of the documents: what other documents may call a model.
    locate
        Says where a model is.
    """
    return _Registrar(recipes, stages, locate, problems, notes).registry()


class _Registrar:
    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        stages: Mapping[str, str],
        locate: Locate,
        problems: Problems,
        notes: Notes,
    ) -> None:
        self._stages = stages
        self._locate = locate
        self._problems = problems
        self._notes = notes
        self._taken = set(recipes)
        self._names: dict[Reference, str] = {}
        self._sources: dict[str, Source] = {}
        self._origins: dict[str, str] = {}
        uses = [use for recipe in recipes.values() for use in references(recipe)]
        self._paths: dict[Reference, KeyPath] = {}
        for reference, path in uses:
            bare = Reference(model=reference.model)
            self._paths.setdefault(bare, path)  # before its adapters, which apply to it
            self._paths.setdefault(reference, path)

    def registry(self) -> Registry:
        for reference, path in self._paths.items():
            if reference.adapter is not None:
                self._add(reference, reference.adapter, path, on=self._names.get(Reference(model=reference.model)))
            elif reference.model.path in self._stages:
                self._names[reference] = self._stages[reference.model.path]
                if reference.model.revision is not None:
                    what = f"{code(reference.model.path)} is a document of this file, which has no revisions"
                    self._problems.add(path, what, hint="remove `@` and what follows")
            else:
                self._add(reference, reference.model, path, on=None)
        return Registry(names=self._names, sources=self._sources, origins=self._origins)

    def _add(self, reference: Reference, place: Place, path: KeyPath, on: str | None) -> None:
        name = self._free_name(reference, place)
        self._names[reference] = name
        self._origins[name] = str(reference)
        found = self._locate(place)
        if found is not None:
            self._sources[name] = Source(name=name, path=found.path, on=on)
            self._note_found(place, found)
        elif _HUB.fullmatch(place.path):
            self._sources[name] = Source(name=name, hub=place.path, revision=place.revision, on=on)
        else:
            what = f"{code(place.path)} is not here, and no repository such as `org/name`"
            self._problems.add(path, what, hint=f"say where it is: `--model {place}=DIR`")

    def _note_found(self, place: Place, found: Found) -> None:
        if not found.exists:
            self._notes.add(f"{code(found.path)} is not there (yet)")
        elif place.revision is not None:
            self._notes.add(
                f"{code(str(place))} is taken from {code(found.path)} as it is there: a path has no revisions"
            )

    def _free_name(self, reference: Reference, place: Place) -> str:
        """Return a name from the last part of the path; with the one before it, or the model, where that is taken."""
        parent = place.path.replace("\\", "/").rstrip("/").rpartition("/")[0].rpartition("/")[2]
        candidates = [place.name()]
        if reference.adapter is not None:
            candidates.append(clean_name(f"{place.name()}-on-{reference.model.name()}"))
        if parent.strip("."):
            candidates.append(clean_name(f"{parent}-{place.name()}"))
        if place.revision is not None:
            candidates.append(clean_name(f"{place.name()}-{place.revision}"))
        candidates += [f"{candidates[0]}-{number}" for number in range(2, len(self._taken) + 3)]
        name = next(candidate for candidate in candidates if candidate not in self._taken)
        self._taken.add(name)
        return name
