"""Reads mergekit's `parameters`: scalars, gradients and filters, as values of our operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.mergekit.methods import KNOWN_PARAMETERS, Method, our_value
from mergepipe.mergefile.params import read_value
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.suggest import code, did_you_mean, listing
from mergepipe.signatures import OperatorSignature, ParamKind, ParamSpec, ParamValue
from mergepipe.values import dataclass

_SCALARS = (bool, int, float, str)
_FORMS = "a value, a list of numbers over the layers, or a list of `{filter: ..., value: ...}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value for the tensors whose names contain ``filter``; for all of them where it is None."""

    filter: str | None
    value: ParamValue
    path: KeyPath


Settings = Mapping[str, tuple[Entry, ...]]
"""By parameter, the entries of one scope; the first whose filter matches holds, and only the last may have none."""


@dataclass(slots=True)
class Notes:
    """What changed on the way from mergekit's configuration, or means nothing there; each thing is said once."""

    said: dict[str, None] = field(default_factory=dict)

    def add(self, text: str) -> None:
        """Say something, in one sentence."""
        self.said[text] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsReader:
    """Reads the `parameters` of one document's scopes.

    Attributes
    ----------
    method, signature
        mergekit's method and our operator of that name; None for a method that is none.
    """

    method: Method
    signature: OperatorSignature | None
    problems: Problems
    notes: Notes

    def read(self, value: Any, path: KeyPath, model: str | None = None) -> Settings:
        """Return the settings of one scope, recording what is wrong with them.

        Parameters
        ----------
        value
            The value of `parameters`, or None.
        path
            Its key path.
        model
            The model that they stand beside; None for a slice or the whole merge.
        """
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.problems.add(path, "invalid value", expected="a mapping of parameters", got=value)
            return {}
        found = {}
        for name, setting in value.items():
            spec = self._spec(name, (*path, name), model)
            if spec is not None:
                found[name] = self._entries(spec, setting, (*path, name))
        return found

    def _spec(self, name: str, path: KeyPath, model: str | None) -> ParamSpec | None:
        """Return the spec of a parameter; None if it changes nothing in mergekit, or is none."""
        parameter, who = self.method.parameter(name), code(self.method.name)
        line = self.problems.line(path)
        if self.signature is None and name in KNOWN_PARAMETERS:
            return None
        if parameter is None and name not in KNOWN_PARAMETERS:
            known = [parameter.name for parameter in self.method.parameters]
            self.problems.add(
                path,
                "no method has such a parameter: mergekit ignores it, and what was meant with it",
                expected=listing(known) or None,
                hint=did_you_mean(name, known) or did_you_mean(name, KNOWN_PARAMETERS) or "remove it",
            )
        elif parameter is None and name == "int8_mask":
            self.notes.add(f"line {line}: `int8_mask` changes no value, and is left out")
        elif parameter is None:
            self.notes.add(f"line {line}: {code(name)} has no effect on {who} in mergekit, and is left out")
        elif model is not None and not parameter.per_model:
            self.notes.add(
                f"line {line}: {code(name)} is a parameter of the whole merge, which mergekit ignores beside a model "
                f"({code(model)}); it is left out"
            )
        elif self.signature is not None:
            return self.signature.all_params()[name]
        return None

    def _entries(self, spec: ParamSpec, setting: Any, path: KeyPath) -> tuple[Entry, ...]:
        """Return the entries of one parameter, without those that no tensor reaches."""
        entries: list[Entry] = []
        for condition, value, place in self._conditions(setting, path):
            typed = self._typed(spec, value, place)
            if typed is None:
                continue
            hidden = any(entry.filter is None or (condition or "").find(entry.filter) >= 0 for entry in entries)
            if hidden:
                line = self.problems.line(place)
                self.notes.add(f"line {line}: no tensor gets here past the filters before it; it is left out")
            else:
                entries.append(Entry(filter=condition, value=typed, path=place))
        return tuple(entries)

    def _conditions(self, setting: Any, path: KeyPath) -> list[tuple[str | None, Any, KeyPath]]:
        """Return (filter, value, key path) of each case of a setting, recording what is wrong with its form."""
        if isinstance(setting, _SCALARS):
            return [(None, setting, path)]
        if isinstance(setting, Mapping):
            return self._condition(setting, path)
        if setting is None or setting == []:
            what = "has no value" if setting is None else "an empty list says nothing"
            self.problems.add(path, what, expected=_FORMS)
            return []
        if not any(isinstance(item, Mapping) for item in setting):
            return [(None, setting, path)]
        found = []
        for index, item in enumerate(setting):
            if isinstance(item, Mapping):
                found += self._condition(item, (*path, index))
            else:
                what = "a list has either numbers or `{filter: ..., value: ...}`, not both"
                self.problems.add((*path, index), what, hint="for the tensors that no filter matches: `- value: ...`")
        return found

    def _condition(self, item: Mapping[str, Any], path: KeyPath) -> list[tuple[str | None, Any, KeyPath]]:
        for key in item:
            if key not in ("filter", "value"):
                hint = did_you_mean(key, ("filter", "value")) or "remove it"
                self.problems.add((*path, key), "unknown key: mergekit ignores it", hint=hint)
        value, condition = item.get("value"), item.get("filter")
        if value is None:
            self.problems.add((*path, "value"), "missing: the value for the tensors that the filter matches")
            return []
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value)):
            self.problems.add((*path, "value"), "a filter within a filter", expected="a value, or a list of numbers")
            return []
        if not isinstance(condition, str | None):
            self.problems.add((*path, "filter"), "invalid filter", expected="a part of tensor names", got=condition)
            return []
        if condition in ("*", ""):
            condition = None
        elif condition is not None and set(condition) & set("*?["):
            self.notes.add(
                f"line {self.problems.line((*path, 'filter'))}: a filter is a part of a name, no glob: "
                f"{code(condition)} is looked for as it stands, in mergekit and here"
            )
        return [(condition, value, (*path, "value"))]

    def _typed(self, spec: ParamSpec, value: Any, path: KeyPath) -> ParamValue | None:
        """Return a value in the type of our parameter, or None after recording that it has none."""
        if spec.name == "rescale":
            flag = _flag(value)
            if isinstance(flag, bool):
                return our_value("rescale", flag)
            self.problems.add(path, "invalid value", expected="true or false", got=value)
            return None
        items = value if isinstance(value, list) else [value]
        if spec.kind in (ParamKind.REAL, ParamKind.INTEGER) and any(isinstance(item, bool) for item in items):
            what = "true and false are no numbers"
            self.problems.add(
                path, what, expected=spec.range_text(), hint="`yes` and `on` are true in YAML, `no` is false"
            )
            return None
        if any(item is None for item in items):
            self.problems.add(path, "a list with nothing in one of its places", expected=spec.range_text())
            return None
        converted = [_converted(spec, item) for item in items]
        return read_value(spec, converted if isinstance(value, list) else converted[0], path, self.problems)


def _flag(value: Any) -> Any:
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _converted(spec: ParamSpec, value: Any) -> Any:
    """Return a scalar as mergekit takes it for the type: numbers in strings are numbers, 0 and 1 are flags."""
    if spec.kind is ParamKind.FLAG:
        return _flag(value)
    if spec.kind in (ParamKind.REAL, ParamKind.INTEGER) and isinstance(value, str):
        try:
            value = float(value)  # YAML 1.1 takes `1e-5`, without a dot, for a string
        except ValueError:
            return value
    if spec.kind is ParamKind.INTEGER and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
