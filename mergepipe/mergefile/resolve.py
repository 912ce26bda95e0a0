"""From an output's parameters, experts, rules and gradients to the parameters of one tensor.

One precedence, from low to high: the operator's default, `params` of the output, `params` of the slice, beside the
expert, then the rules in order (of each, `params` before `experts`), those of the slice after the output's. A value
that was given for all experts and one that was given for one of them differ only in where they stand in this order.
Gradients are interpolated last: over the layers of the output, or of the slice.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import key_path
from mergepipe.mergefile.schema import Output, Params, Rule
from mergepipe.signatures import OperatorSignature, ParamValue, Scalar, Scope
from mergepipe.values import dataclass

_Slot = tuple[str, int | None]
"""A parameter, and the position of the expert that it belongs to (None: the output)."""
_Values = dict[_Slot, tuple[ParamValue, str]]
"""The value of each parameter, and where it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedParams:
    """The parameters of one tensor.

    Attributes
    ----------
    params
        Those of the output, by name.
    experts
        Those of each expert, in the order of the experts of the output or of the slice.
    origins
        Where each value comes from, by ``name`` or ``name[expert]``: a key path, or ``default``.
    """

    params: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]
    origins: Mapping[str, str]


@functools.lru_cache(maxsize=1024)
def _pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs))


def rule_matches(rule: Rule, tensor: str, layer: int | None) -> bool:
    """Return whether a rule is for a tensor: any of its globs matches the whole name, and its layers hold the layer."""
    if rule.layers is not None and (layer is None or not rule.layers[0] <= layer < rule.layers[1]):
        return False
    return not rule.match or _pattern(rule.match).match(tensor) is not None


def unmatched_rules(rules: Iterable[Rule], tensors: Iterable[tuple[str, int | None]]) -> tuple[Rule, ...]:
    """Return the rules that are for none of the tensors (name and layer), in order."""
    located = list(tensors)
    return tuple(rule for rule in rules if not any(rule_matches(rule, *tensor) for tensor in located))


def interpolate(anchors: tuple[float, ...], layer: int | None, layer_count: int) -> float:
    """Return a gradient's value at a layer, in float64.

    The anchors are spread evenly over t = layer / (layer_count - 1), which is 1 where there is only one layer. A
    tensor outside the layers (None) takes the first anchor. The value never leaves the range of its two anchors.
    """
    if layer is None:
        return anchors[0]
    t = layer / (layer_count - 1) if layer_count > 1 else 1.0
    position = t * (len(anchors) - 1)
    below = min(int(position), len(anchors) - 1)
    left, right = anchors[below], anchors[min(below + 1, len(anchors) - 1)]
    fraction = position - below
    value = left * (1.0 - fraction) + right * fraction
    return min(max(value, min(left, right)), max(left, right))


class Resolver:
    """Resolves the parameters of an output's tensors; tensors with the same rules and layer share their result.

    Parameters
    ----------
    output, signature
        The output, and its operator's signature or that of the slice's operator.
    layer_count
        The number of layers that gradients run over: those of the output, or of the slice.
    slice_index, first_layer
        The slice that the tensors belong to and its first layer in the output; None for an output without slices.
    """

    def __init__(
        self,
        output: Output,
        signature: OperatorSignature,
        layer_count: int,
        *,
        slice_index: int | None = None,
        first_layer: int = 0,
    ) -> None:
        part = None if slice_index is None else (output.slices or ())[slice_index]
        self._output = output
        self._inside: KeyPath = () if slice_index is None else ("slices", slice_index)
        self._experts = output.experts if part is None else part.experts
        self._part_params: Params = {} if part is None else part.params
        self._rules = [(("rules", number), rule) for number, rule in enumerate(output.rules)]
        self._rules += [((*self._inside, "rules", n), rule) for n, rule in enumerate(part.rules if part else ())]
        self._layer_count = layer_count
        self._first_layer = first_layer
        self._specs = signature.all_params()
        self._values: _Values = {}
        self._by_rules: dict[tuple[int, ...], tuple[_Values, bool]] = {}
        self._resolved: dict[tuple[tuple[int, ...], int | None], ResolvedParams] = {}
        self._set_below_rules()

    def resolve(self, tensor: str, layer: int | None) -> ResolvedParams:
        """Return the parameters of one tensor by its name and layer in the output; None outside the layers."""
        rules = tuple(i for i, (_, rule) in enumerate(self._rules) if rule_matches(rule, tensor, layer))
        if rules not in self._by_rules:
            self._by_rules[rules] = self._with_rules(rules)
        values, has_gradient = self._by_rules[rules]
        key = (rules, layer if has_gradient else None)
        if key not in self._resolved:
            self._resolved[key] = self._settle(values, layer)
        return self._resolved[key]

    def _slots(self, params: Params, position: int | None) -> Iterator[tuple[str, _Slot]]:
        """Yield each parameter's name and slot; one for experts that is given for all has a slot for each.

        A parameter that the operator does not have belongs to another slice's.
        """
        for name in params:
            if name not in self._specs:
                continue
            if self._specs[name].scope is Scope.OUTPUT:
                yield name, (name, None)
            elif position is not None:
                yield name, (name, position)
            else:
                for index in range(len(self._experts)):
                    yield name, (name, index)

    def _set_below_rules(self) -> None:
        defaults = {spec.name: spec.default for spec in self._specs.values() if spec.default is not None}
        for name, slot in self._slots(defaults, None):
            self._values[slot] = (defaults[name], "default")
        self._apply(self._values, self._output.params, None, "params")
        self._apply(self._values, self._part_params, None, *self._inside, "params")
        for index, expert in enumerate(self._experts):
            self._apply(self._values, expert.params, index, *self._inside, "experts", index)

    def _with_rules(self, numbers: tuple[int, ...]) -> tuple[_Values, bool]:
        """Return the values after some rules, and whether any is a gradient."""
        values = dict(self._values)
        for path, rule in (self._rules[number] for number in numbers):
            self._apply(values, rule.params, None, *path, "params")
            for index, expert in enumerate(self._experts):
                given = rule.experts.get(expert.source, {})
                self._apply(values, given, index, *path, "experts", expert.source)
        return values, any(isinstance(value, tuple) for value, _ in values.values())

    def _apply(self, values: _Values, params: Params, position: int | None, *where: str | int) -> None:
        for name, slot in self._slots(params, position):
            values[slot] = (params[name], key_path(("outputs", self._output.name, *where, name)))

    def _settle(self, values: _Values, layer: int | None) -> ResolvedParams:
        place = None if layer is None else layer - self._first_layer
        params: dict[str, Scalar] = {}
        experts: list[dict[str, Scalar]] = [{} for _ in self._experts]
        origins = {}
        for (name, position), (value, origin) in values.items():
            scalar = interpolate(value, place, self._layer_count) if isinstance(value, tuple) else value
            if position is None:
                params[name] = scalar
                origins[name] = origin
            else:
                experts[position][name] = scalar
                origins[f"{name}[{self._experts[position].source}]"] = origin
        return ResolvedParams(params=params, experts=tuple(experts), origins=origins)
