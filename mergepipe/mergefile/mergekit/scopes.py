"""mergekit's scopes, read as ours: a value for the tensors that no filter matches, and rules for those that one does.

mergekit looks for a parameter beside the model, then in the slice, then in the whole merge, then takes the default; in
each scope it goes through the filters in order, and goes on where none matches. So the scopes of one parameter, put one
after the other, are a single list of filters of which the first that matches wins, up to the first entry without one:
that is the value that stands beside the expert, in the slice's or in the output's `params` here. The filters before it
become rules. Of those the last one wins, hence in reverse order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.mergekit.document import Input, Part, Recipe
from mergepipe.mergefile.mergekit.merging import Slot, rules
from mergepipe.mergefile.mergekit.methods import Parameter, our_value
from mergepipe.mergefile.mergekit.references import Reference
from mergepipe.mergefile.mergekit.roles import Cast
from mergepipe.mergefile.mergekit.settings import Entry
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.schema import Rule
from mergepipe.mergefile.suggest import code
from mergepipe.signatures import OperatorSignature, ParamValue
from mergepipe.values import dataclass

# Where the number of a layer may stand in a filter: digits between dots, or at an end of the text.
_LAYER_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


@dataclass(slots=True)
class Scoped:
    """The parameters of a part as a Mergefile has them.

    Attributes
    ----------
    output, part
        For `params` of the output and of the slice.
    experts
        By position of the expert, what stands beside it.
    rules
        For the tensors of this part.
    """

    output: dict[str, ParamValue] = field(default_factory=dict)
    part: dict[str, ParamValue] = field(default_factory=dict)
    experts: tuple[dict[str, ParamValue], ...] = ()
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """Translates the parameters of one document.

    Attributes
    ----------
    recipe, casts
        The document and the roles in its parts.
    signature
        Our operator's.
    names
        Our names of the models.
    """

    recipe: Recipe
    casts: Sequence[Cast]
    signature: OperatorSignature
    names: Mapping[Reference, str]
    problems: Problems
    _reported: set[KeyPath] = field(default_factory=set)

    def shared_rules(self) -> tuple[Rule, ...]:
        """Return the rules for the tensors of all parts where there are several: the filters of the whole merge."""
        slots: dict[Slot, list[Entry]] = {}
        for parameter in self.recipe.method.parameters if len(self.casts) > 1 else ():
            slots[parameter.name, None] = _filters(self.recipe.settings.get(parameter.name, ()))
        return rules(slots, ())

    def part(self, cast: Cast) -> Scoped:
        """Return the parameters of one part."""
        found = Scoped(experts=tuple({} for _ in cast.experts))
        slots: dict[Slot, list[Entry]] = {}
        for parameter in self.recipe.method.parameters:
            for position, expert in enumerate(cast.experts if parameter.per_model else (None,)):
                chain = list(self._scopes(parameter, cast.part, expert))
                self._check_layer_numbers(parameter, cast, expert, chain)
                self._place(parameter, cast, position, chain, found)
                slots[parameter.name, None if expert is None else self.names[expert.model]] = self._own(chain)
        found.rules = rules(slots, [self.names[expert.model] for expert in cast.experts])
        return found

    def _own(self, chain: Sequence[tuple[str, tuple[Entry, ...]]]) -> list[Entry]:
        """Return the entries that the part needs rules for, those of the highest scope first.

        Of several parts, each has the rules for the whole merge below its own. What hides their filters in mergekit, a
        value of a higher scope for all tensors, becomes a rule for all tensors then.
        """
        if len(self.casts) == 1:
            return _first_matches(entries for _, entries in chain)
        found = _first_matches(entries for _, entries in chain[:-1])
        hiding = next((entry for _, entries in chain[:-1] if (entry := _fallback(entries)) is not None), None)
        if hiding is not None and _filters(chain[-1][1]):
            found.append(replace(hiding, filter=""))
        return found

    def _scopes(
        self, parameter: Parameter, part: Part, expert: Input | None
    ) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        """Yield the name and the entries of each scope, the highest first."""
        name = parameter.name
        if expert is not None:
            yield "expert", expert.settings.get(name, ())
        yield "part", part.settings.get(name, ())
        yield "output", self.recipe.settings.get(name, ())

    def _place(
        self,
        parameter: Parameter,
        cast: Cast,
        position: int,
        chain: Sequence[tuple[str, tuple[Entry, ...]]],
        found: Scoped,
    ) -> None:
        """Put the value that holds where no filter matches in its place."""
        name = parameter.name
        places = {"output": found.output, "part": found.part}
        if parameter.per_model:
            places["expert"] = found.experts[position]
        for scope, entries in chain:
            entry = _fallback(entries)
            if entry is not None:
                places[scope][name] = entry.value
                return
        if parameter.default is None:
            self._report_missing(parameter, cast, position, any(entries for _, entries in chain))
            return
        default = our_value(name, parameter.default)
        if default != self.signature.all_params()[name].default:
            found.output[name] = default

    def _report_missing(self, parameter: Parameter, cast: Cast, position: int, has_filters: bool) -> None:
        name = code(parameter.name)
        what = f"no {name} where no filter matches" if has_filters else f"no {name}"
        path, whose = cast.part.path if self.recipe.sliced else self.recipe.path, ""
        if parameter.per_model:
            expert = cast.experts[position]
            path, whose = expert.path, f" for {code(str(expert.model))}"
        hint = "add `- value: ...` at the end of its filters" if has_filters else f"add {name} to `parameters`"
        if path[-1:] == ("base_model",):
            hint = f"list it among the models, with its {name}"
            whose += ", which mergekit adds to the models"
        self.problems.add(path, f"missing: {what}{whose}: mergekit stops there", hint=hint)

    def _check_layer_numbers(
        self, parameter: Parameter, cast: Cast, expert: Input | None, chain: Sequence[tuple[str, tuple[Entry, ...]]]
    ) -> None:
        """Record filters with the number of a layer, where mergekit counts as the source and a rule as the output.

        Only parameters per model are looked up by the name in the source.
        """
        if expert is None or expert.layers is None or expert.layers[0] == self._first_layer(cast):
            return
        for _, entries in chain:
            for entry in entries:
                numbered = entry.filter is not None and _LAYER_NUMBER.search(entry.filter)
                if numbered and entry.path not in self._reported:
                    self._reported.add(entry.path)
                    what = (
                        f"the filter {code(entry.filter or '')} may hold the number of a layer, which for "
                        f"{code(parameter.name)} is that of {code(str(expert.model))} there, and the output's in a rule"
                    )
                    self.problems.add(entry.path, what, hint="split the slice there, or write the rule by hand")

    def _first_layer(self, cast: Cast) -> int:
        """Return the number of the part's first layer in the output."""
        first = 0
        for other in self.casts:
            if other is cast:
                break
            layers = other.experts[0].layers or (0, 0)
            first += layers[1] - layers[0]
        return first


def _fallback(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry for all tensors: the last one, if it has no filter."""
    return entries[-1] if entries and entries[-1].filter is None else None


def _filters(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.filter is not None]


def _first_matches(scopes: Iterator[Sequence[Entry]]) -> list[Entry]:
    """Return the filters of scopes, the highest first, up to the first entry without one."""
    found: list[Entry] = []
    for entries in scopes:
        found += _filters(entries)
        if _fallback(entries) is not None:
            break
    return found
