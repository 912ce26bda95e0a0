"""Which models of a part are experts, and what its base is, as our operators take them.

mergekit adds the base model to the `models` that lack it, and not to the sources of a slice. Methods that work with
differences take the base out again; for the others it is a model like any other.
"""

from __future__ import annotations

from mergepipe.mergefile.mergekit.document import Input, Part, Recipe
from mergepipe.mergefile.mergekit.methods import BaseRole, Method
from mergepipe.mergefile.mergekit.references import Reference
from mergepipe.mergefile.mergekit.settings import Notes
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.suggest import code
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The roles in one part.

    Attributes
    ----------
    part
        The part.
    base
        What the experts are compared with, or what decides the tensors; None for no base.
    base_layers
        Its range of layers in a slice.
    experts
        The models that are merged, in order.
    """

    part: Part
    base: Reference | None
    base_layers: tuple[int, int] | None
    experts: tuple[Input, ...]


def cast(recipe: Recipe, part: Part, problems: Problems, notes: Notes) -> Cast | None:
    """Return the roles in a part, None after recording why mergekit cannot merge it."""
    if recipe.method.base is BaseRole.INPUT:
        found = _all_inputs(recipe, part, problems, notes)
    else:
        found = _around_base(recipe, part, problems, notes)
    if found is None or not _check_count(recipe.method, found, problems):
        return None
    if recipe.sliced and not _check_lengths(part, problems):
        return None
    return found


def _all_inputs(recipe: Recipe, part: Part, problems: Problems, notes: Notes) -> Cast | None:
    """Return the roles where the base is an input like the others."""
    experts, name = part.inputs, code(recipe.method.name)
    if part.base is not None:
        line = problems.line((*part.path, "base_model"))
        notes.add(f"line {line}: `base_model` of a slice has no effect on {name} in mergekit, and is left out")
    if recipe.sliced or recipe.base is None:
        return Cast(part=part, base=None, base_layers=None, experts=experts)
    if all(entry.model != recipe.base for entry in experts):
        if recipe.method.experts[1] == len(experts):
            what = f"mergekit adds `base_model` to the models, and {name} takes one"
            hint = "remove `base_model`; for its tokenizer, write `tokenizer_source`"
            problems.add((*recipe.path, "base_model"), what, hint=hint)
            return None
        notes.add(f"mergekit adds {code(str(recipe.base))} to the models of {name}: it is listed as the last expert")
        place = (*recipe.path, "base_model")
        experts = (*experts, Input(model=recipe.base, settings={}, layers=None, path=place))
    # With one expert the base is that one, and nothing is left for it to decide.
    base = None if recipe.method.experts == (1, 1) else recipe.base
    return Cast(part=part, base=base, base_layers=None, experts=experts)


def _around_base(recipe: Recipe, part: Part, problems: Problems, notes: Notes) -> Cast | None:
    """Return the roles where the experts are compared with the base."""
    base = part.base or recipe.base
    if base is None:
        if recipe.method.base is BaseRole.OPTIONAL_ORIGIN:
            return Cast(part=part, base=None, base_layers=None, experts=part.inputs)
        problems.add(part.path, f"{code(recipe.method.name)} needs `base_model`")
        return None
    entry = next((entry for entry in part.inputs if entry.model == base), None)
    if entry is None and recipe.sliced:
        what = f"the base {code(str(base))} is not among the sources: mergekit stops, as it does not know its layers"
        problems.add((*part.path, "sources"), what, hint="add it, with its `layer_range`")
        return None
    if entry is not None and entry.settings:
        line, names = problems.line(entry.path), ", ".join(map(code, entry.settings))
        notes.add(f"line {line}: {names} beside the base model has no effect in mergekit, and is left out")
    experts = tuple(other for other in part.inputs if other.model != base)
    return Cast(part=part, base=base, base_layers=None if entry is None else entry.layers, experts=experts)


def _check_count(method: Method, found: Cast, problems: Problems) -> bool:
    low, high = method.experts
    count = len(found.experts)
    if low <= count and (high is None or count <= high):
        return True
    needs = f"at least {low}" if high is None else str(low)
    noun = "model" if needs == "1" or needs.endswith(" 1") else "models"
    beside = "" if found.base is None or method.base is BaseRole.INPUT else " beside the base"
    there = f"there {'is' if count == 1 else 'are'} {count or 'none'}"
    problems.add(found.part.path, f"{code(method.name)} takes {needs} {noun}{beside}, and {there}")
    return False


def _check_lengths(part: Part, problems: Problems) -> bool:
    ranges = [entry.layers for entry in part.inputs if entry.layers is not None]
    if len({end - first for first, end in ranges}) <= 1:
        return len(ranges) == len(part.inputs)
    counts = ", ".join(str(end - first) for first, end in ranges)
    problems.add((*part.path, "sources"), f"the sources of a slice have {counts} layers: they must have equally many")
    return False
