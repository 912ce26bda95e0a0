"""The parameters with which a lock's output merges each of its tensors: rules, gradients and slices applied."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from mergepipe.checkpoints.layers import LayerMap
from mergepipe.lockfile.diff_groups import places_of
from mergepipe.lockfile.diff_values import ParameterChange, ParameterGroup
from mergepipe.lockfile.manifest_records import ManifestTensor
from mergepipe.lockfile.records import LockedExpert, LockedOutput, LockedRule, LockedSlice
from mergepipe.mergefile.resolve import ResolvedParams, Resolver
from mergepipe.mergefile.schema import ExpertRef, Output, Rule, Slice
from mergepipe.plan.parts import precedes_layers
from mergepipe.signatures import OperatorSignature, ParamValue

Values = Mapping[str, tuple[ParamValue, bool]]
"""By name, such as ``lambda`` or ``weight[math]``: the value, and whether it was given (else it is the default)."""
Resolve = Callable[[str], Values]
Signatures = Mapping[str, OperatorSignature]


def resolver_of(
    output: LockedOutput, tensors: Sequence[ManifestTensor], signatures: Signatures, layers: LayerMap
) -> Resolve | None:
    """Return what resolves the parameters of an output's tensors by name.

    Parameters
    ----------
    tensors
        What a manifest says of them: the values for operators that are not known here. Empty without one.
    layers
        Those of the output's tensors.

    Returns
    -------
    Resolve or None
        None if an operator is not known and nothing tells the values.
    """
    operators = {output.operator, *(part.operator for part in output.slices if part.operator is not None)}
    if operators <= set(signatures) and _is_resolvable(output):
        return _from_rules(output, signatures, layers)
    return _from_manifest(tensors, output) if tensors else None


def _is_resolvable(output: LockedOutput) -> bool:
    """Return whether no gradient is empty and every range is one: a lock that nobody edited has neither."""
    parts: tuple[LockedOutput | LockedSlice, ...] = (output, *output.slices)
    tables = [table for part in parts for table in (part.params, *(expert.params for expert in part.experts))]
    rules = [rule for part in parts for rule in part.rules]
    tables += [table for rule in rules for table in (rule.params, *rule.experts.values())]
    texts = [rule.layers for rule in rules] + [part.layers for part in output.slices]
    return all(value != () for table in tables for value in table.values()) and all(
        text is None or _range(text) is not None for text in texts
    )


def _from_rules(output: LockedOutput, signatures: Signatures, layers: LayerMap) -> Resolve:
    declared = _declared(output)
    if not output.slices:
        resolver = Resolver(declared, signatures[output.operator], layers.count)
        labels = _labels(output.experts)
        return lambda name: _values(resolver.resolve(name, layers.index(name)), output.experts, labels)
    return _from_slices(output, declared, signatures, layers)


def _from_slices(output: LockedOutput, declared: Output, signatures: Signatures, layers: LayerMap) -> Resolve:
    resolvers, starts, first = [], [], 0
    for number, part in enumerate(declared.slices or ()):
        signature = signatures[part.operator or output.operator]
        count = part.layers[1] - part.layers[0]
        resolvers.append(Resolver(declared, signature, count, slice_index=number, first_layer=first))
        starts.append(first)
        first += count

    def resolve(name: str) -> Values:
        layer = layers.index(name)
        if layer is None:
            number = 0 if precedes_layers(name, layers) else len(starts) - 1
        else:
            number = max(index for index, start in enumerate(starts) if start <= layer or not index)
        experts = output.slices[number].experts
        return _values(resolvers[number].resolve(name, layer), experts, _labels(experts))

    return resolve


def _values(resolved: ResolvedParams, experts: Sequence[LockedExpert], labels: Sequence[str]) -> Values:
    origins = resolved.origins
    found = {name: (value, origins[name] != "default") for name, value in resolved.params.items()}
    for expert, label, params in zip(experts, labels, resolved.experts, strict=True):
        for name, value in params.items():
            found[f"{name}[{label}]"] = value, origins[f"{name}[{expert.source}]"] != "default"
    return found


def _labels(experts: Sequence[LockedExpert]) -> list[str]:
    """Return the names of experts; one that stands there again has its number with it."""
    seen: Counter[str] = Counter()
    labels = []
    for expert in experts:
        seen[expert.source] += 1
        number = seen[expert.source]
        labels.append(expert.source if number == 1 else f"{expert.source} #{number}")
    return labels


def _from_manifest(tensors: Sequence[ManifestTensor], output: LockedOutput) -> Resolve:
    sets = {tensor.name: tensor.parameters for tensor in tensors}
    labels = _labels(output.experts)

    def resolve(name: str) -> Values:
        parameters = sets.get(name)
        if parameters is None:
            return {}
        found: dict[str, tuple[ParamValue, bool]] = {key: (value, True) for key, value in parameters.params.items()}
        for number, params in enumerate(parameters.experts):
            label = labels[number] if number < len(labels) else str(number)
            found |= {f"{key}[{label}]": (value, True) for key, value in params.items()}
        return found

    return resolve


def _declared(output: LockedOutput) -> Output:
    """Return an output of a lock as the Mergefile declared it."""
    return Output(
        name=output.name,
        operator=output.operator,
        base=output.base,
        experts=tuple(map(_expert, output.experts)),
        path=output.path or "",
        params=output.params,
        rules=tuple(map(_rule, output.rules)),
        slices=tuple(map(_slice, output.slices)) or None,
    )


def _slice(part: LockedSlice) -> Slice:
    return Slice(
        layers=_range(part.layers) or (0, 0),
        experts=tuple(map(_expert, part.experts)),
        operator=part.operator,
        base=part.base,
        base_layers=_range(part.base_layers),
        params=part.params,
        rules=tuple(map(_rule, part.rules)),
    )


def _expert(expert: LockedExpert) -> ExpertRef:
    return ExpertRef(source=expert.source, params=expert.params, layers=_range(expert.layers))


def _rule(rule: LockedRule) -> Rule:
    return Rule(match=rule.match, layers=_range(rule.layers), params=rule.params, experts=rule.experts)


def _range(text: str | None) -> tuple[int, int] | None:
    start, _, stop = (text or "").partition("..")
    return (int(start), int(stop)) if start.isdigit() and stop.isdigit() else None


def expert_of(parameter: str) -> str | None:
    """Return ``math`` of ``weight[math]`` and of ``weight[math #2]``, None of ``lambda``."""
    return parameter.partition("[")[2][:-1].partition(" #")[0] if parameter.endswith("]") else None


def changed_values(
    old: Values, new: Values, ignored: Collection[str] = ()
) -> dict[str, tuple[ParamValue | None, ParamValue | None]]:
    """Return the parameters of one tensor that differ.

    One that only one of the two operators has counts if it was given: its default is nobody's choice.

    Parameters
    ----------
    ignored
        Experts whose parameters say no more than that they are new or gone.
    """
    found: dict[str, tuple[ParamValue | None, ParamValue | None]] = {}
    for name in dict.fromkeys((*new, *old)):
        before, after = old.get(name), new.get(name)
        if expert_of(name) in ignored:
            continue
        if before is None or after is None:
            one = before or after
            if one is not None and one[1]:
                found[name] = (before and before[0], after and after[0])
        elif before[0] != after[0]:
            found[name] = (before[0], after[0])
    return found


def parameter_changes(
    changes: Iterable[tuple[str, Mapping[str, tuple[ParamValue | None, ParamValue | None]]]],
    layers: LayerMap,
    whole: Collection[str],
) -> tuple[ParameterChange, ...]:
    """Return what `changed_values` gave for each tensor (name and changes), with like tensors together.

    Parameters
    ----------
    layers, whole
        Those of the output's tensors, and the names of all of these.
    """
    found: defaultdict[str, defaultdict[tuple[ParamValue | None, ParamValue | None], list[str]]]
    found = defaultdict(lambda: defaultdict(list))
    for tensor, values in changes:
        for name, pair in values.items():
            found[name][pair].append(tensor)
    return tuple(
        ParameterChange(
            name=name,
            groups=tuple(
                ParameterGroup(old=old, new=new, tensors=len(tensors), places=places_of(tensors, layers, whole))
                for (old, new), tensors in groups.items()
            ),
        )
        for name, groups in found.items()
    )
