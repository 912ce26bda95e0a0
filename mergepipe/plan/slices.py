"""From the slices of an output to its parts: ranges are checked, layers numbered consecutively.

The tensors outside the layers belong to the first slice where they come before the layers (embeddings), and all others
(final norm, head) to the last. The slices must fit together: layers under the same names, of one width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.heads import is_head, is_vocabulary, ties_embeddings
from mergepipe.checkpoints.layers import LayerMap, is_tower
from mergepipe.errors import MergepipeError, PlanError, raise_collected
from mergepipe.mergefile.problems import key_path
from mergepipe.mergefile.resolve import Resolver
from mergepipe.mergefile.schema import Output, Slice
from mergepipe.plan.parts import Member, Operators, Part, own_checkpoints, precedes_layers

_NAMED = 3


def slice_parts(output: Output, operators: Operators, checkpoints: Mapping[str, Checkpoint]) -> tuple[Part, ...]:
    """Return the parts of an output with slices, one per slice.

    Raises
    ------
    PlanError
        For every range that its model does not have; then for slices that do not fit together.
    """
    slices = output.slices or ()
    # A base that the operators ignore need not be there.
    maps = {source: checkpoints[source].layers() for source in _sources(output) if source in checkpoints}
    raise_collected(_range_errors(output, operators, maps))
    located = _Located(checkpoints)
    parts: list[Part] = []
    first = 0
    for number, part in enumerate(slices):
        parts.append(_part(output, number, first, operators, checkpoints, maps, located))
        first += part.layers[1] - part.layers[0]
    raise_collected([*_gaps(parts), *_misfits(parts), *_head_errors(parts), *_vocabulary_errors(parts)])
    return tuple(parts)


class _Located:
    """The layers of tensors, worked out once per source for all slices that number them in the same way."""

    def __init__(self, checkpoints: Mapping[str, Checkpoint]) -> None:
        self._checkpoints = checkpoints
        self._found: dict[tuple[str, tuple[str, ...]], dict[str, int | None]] = {}

    def of(self, source: str, layers: LayerMap) -> dict[str, int | None]:
        """Return the layer of every tensor of a source."""
        key = (source, layers.stacks)
        if key not in self._found:
            self._found[key] = {name: layers.index(name) for name in self._checkpoints[source].tensors}
        return self._found[key]


def _sources(output: Output) -> tuple[str, ...]:
    bases = [part.base or output.base for part in output.slices or ()]
    return tuple(dict.fromkeys([*(base for base in bases if base is not None), *output.expert_sources]))


def _part(
    output: Output,
    number: int,
    first_layer: int,
    operators: Operators,
    checkpoints: Mapping[str, Checkpoint],
    maps: Mapping[str, LayerMap],
    located: _Located,
) -> Part:
    slices = output.slices or ()
    declared = slices[number]
    operator = operators(declared.operator or output.operator)
    base = base_member(output, declared)
    experts = tuple(
        Member(source=expert.source, first_layer=(expert.layers or declared.layers)[0]) for expert in declared.experts
    )
    definer = base if base is not None and not operator.ignores_base else experts[0]
    layers = maps[definer.source]
    count = declared.layers[1] - declared.layers[0]
    own = own_checkpoints(operator, base, experts, checkpoints)
    return Part(
        output=output,
        slice=number,
        operator=operator,
        base=base,
        experts=experts,
        checkpoints=own,
        layers=layers,
        first_layer=first_layer,
        count=count,
        opens=number == 0,
        closes=number == len(slices) - 1,
        resolver=Resolver(output, operator.signature, count, slice_index=number, first_layer=first_layer),
        located={source: located.of(source, layers) for source in own},
    )


def base_member(output: Output, declared: Slice) -> Member | None:
    """Return the base of a slice: its own, or the output's."""
    source = declared.base or output.base
    return None if source is None else Member(source=source, first_layer=(declared.base_layers or declared.layers)[0])


def _range_errors(output: Output, operators: Operators, maps: Mapping[str, LayerMap]) -> Iterator[MergepipeError]:
    for number, declared in enumerate(output.slices or ()):
        ranges = [(expert.source, expert.layers or declared.layers) for expert in declared.experts]
        base = declared.base or output.base
        if base is not None and not operators(declared.operator or output.operator).ignores_base:
            ranges.append((base, declared.base_layers or declared.layers))
        for source, layers in dict.fromkeys(ranges):
            problem = _range_problem(*layers, maps[source].count)
            if problem is not None:
                where = key_path(("outputs", output.name, "slices", number))
                yield _range_error(where, source, layers, maps[source].count, problem)


def _range_problem(start: int, stop: int, count: int) -> str | None:
    if start < 0:
        return "begin below 0"
    if start == stop:
        return "are empty: the end is excluded"
    if start > stop:
        return "run backwards"
    return "reach beyond the model" if stop > count else None


def _range_error(where: str, source: str, layers: tuple[int, int], count: int, problem: str) -> PlanError:
    start, stop = layers
    has = f"{count} layer{'' if count == 1 else 's'}" if count else "no layers"
    hint = f"all of its layers are `0..{count}`" if count else "only a model with layers can be sliced"
    if problem.startswith("are empty") and 0 <= start < count:
        hint = f"layer {start} alone is `{start}..{start + 1}`"
    return PlanError(
        f"{where}: layers {start}..{stop} of `{source}` {problem}; the model has {has}",
        hint=hint,
        source=source,
        range=[start, stop],
        layers=count,
    )


def _gaps(parts: Iterable[Part]) -> Iterator[MergepipeError]:
    """Yield an error for the first layer of each slice that one of the definer's stacks does not have.

    An encoder and a decoder are sliced alike, so a range must lie in both.
    """
    for part in parts:
        source, start = part.definer.source, part.definer.first_layer
        depths: dict[str, set[int]] = {stack: set() for stack in part.layers.stacks}
        for name, layer in part.located[source].items():
            for stack in depths:
                if layer is not None and (not stack or name.startswith(f"{stack}.")):
                    depths[stack].add(layer)
        for stack, found in depths.items():
            absent = next((layer for layer in range(start, start + part.count) if layer not in found), None)
            if absent is not None:
                yield PlanError(
                    f"{part.where}: `{source}` has no layer {absent} in `{stack}`, which has {len(found)} layers",
                    hint="a slice takes the same layers of an encoder and of its decoder"
                    if len(depths) > 1
                    else "the upload may be incomplete",
                    source=source,
                    layer=absent,
                )


def _misfits(parts: Sequence[Part]) -> Iterator[MergepipeError]:
    """Yield an error for each slice whose layers lie under other names, or are of another width, than the first's."""
    first, ours = parts[0], parts[0].definer.source
    told = {ours}
    for part in parts[1:]:
        source = part.definer.source
        if source in told:
            continue
        told.add(source)
        if part.layers.stacks != first.layers.stacks:
            names = [" and ".join(f"`{stack}`" for stack in p.layers.stacks) for p in (part, first)]
            yield PlanError(
                f"{part.where}: the layers of `{source}` are under {names[0]}, those of `{ours}` under {names[1]}",
                hint="only layers of models of one architecture can be stacked",
                source=source,
            )
            continue
        odd = _other_width(first.checkpoints[ours], part.checkpoints[source], first.layers)
        if odd is not None:
            theirs, own = (list(p.checkpoints[s].tensors[odd].shape) for p, s in ((part, source), (first, ours)))
            yield PlanError(
                f"{part.where}: the layers of `{source}` do not fit those of `{ours}`: `{odd}` has shape {theirs} in"
                f" `{source}` and {own} in `{ours}`",
                hint="only layers of one width can be stacked",
                source=source,
                tensor=odd,
            )


def _other_width(first: Checkpoint, other: Checkpoint, layers: LayerMap) -> str | None:
    """Return a tensor outside the layers that shows that two models have another width, None if there is none."""
    for name, info in first.tensors.items():
        theirs = other.tensors.get(name)
        if theirs is None or layers.index(name) is not None or is_tower(name):
            continue
        start = 1 if is_vocabulary(name) else 0  # another vocabulary is no obstacle
        if info.shape[start:] != theirs.shape[start:]:
            return name
    return None


def config_source(parts: Sequence[Part]) -> str:
    """Return the source whose config an output takes: its base where a slice builds on it, else the first definer."""
    definers = [part.definer.source for part in parts]
    declared = parts[0].output.base
    return declared if declared is not None and declared in definers else definers[0]


def _head_errors(parts: Sequence[Part]) -> Iterator[MergepipeError]:
    """Yield an error if the last slice has no head where the config wants one, or the other way round."""
    configured, last = config_source(parts), parts[-1].definer.source
    if configured == last:
        return
    every = {source: checkpoint for part in parts for source, checkpoint in part.checkpoints.items()}
    ours, theirs = every[configured], every[last]
    heads = [[name for name in checkpoint.tensors if is_head(name)] for checkpoint in (ours, theirs)]
    tied = [ties_embeddings(checkpoint.config) for checkpoint in (ours, theirs)]
    if heads[1] and tied[0] and not tied[1]:
        problem = f"has a head of its own, `{heads[1][0]}`, which `{configured}` ties to its embeddings"
    elif heads[0] and not heads[1] and not tied[0]:
        problem = f"has no head `{heads[0][0]}`, and the config of `{configured}` asks for one"
    else:
        return
    yield PlanError(
        f"{parts[-1].where}: `{last}`, which the head comes from, {problem}",
        hint="end with a slice of a model that ties its head in the same way, or save one of the two with the other's"
        " way",
        source=last,
    )


def _vocabulary_errors(parts: Sequence[Part]) -> Iterator[MergepipeError]:
    """Yield an error if the embedding of the first slice and the head of the last are for other vocabularies."""
    first, last = (part.checkpoints[part.definer.source] for part in (parts[0], parts[-1]))
    embedding = next((i for n, i in first.tensors.items() if is_vocabulary(n) and not is_head(n) and i.shape), None)
    head = next((i for n, i in last.tensors.items() if is_head(n) and i.shape), None)
    own = next((i for n, i in last.tensors.items() if is_vocabulary(n) and not is_head(n) and i.shape), None)
    if embedding is None or head is None or own is None or own.shape[0] != head.shape[0]:
        return  # no such pair, or a model whose head has rows of its own
    opening, closing = parts[0].definer.source, parts[-1].definer.source
    if embedding.shape[0] != head.shape[0] and embedding.shape[1:] == head.shape[1:]:  # another width is told as that
        yield PlanError(
            f"{parts[-1].where}: `{head.name}` has {head.shape[0]:,} rows in `{closing}`, and in `{opening}`, where the"
            f" embeddings come from, `{embedding.name}` has {embedding.shape[0]:,}",
            hint="begin and end with slices of models that have one vocabulary",
            tensor=head.name,
            source=closing,
            expected=embedding.shape[0],
            got=head.shape[0],
        )


def slice_notes(parts: Sequence[Part]) -> list[str]:
    """Return in words which layers come from where, and what is left out outside of the layers."""
    notes = [_layers_note(part) for part in parts]
    first, last = parts[0], parts[-1]
    if (first.definer.source, first.checkpoints.keys()) != (last.definer.source, last.checkpoints.keys()):
        opening, closing = (_members(part, ranges=False) for part in (first, last))
        notes.append(f"outside the layers: embeddings from {opening}, all other tensors from {closing}")
    return notes + _left_out(first, last)


def _layers_note(part: Part) -> str:
    layers = f"layers {part.first_layer}..{part.first_layer + part.count}"
    name = part.operator.signature.name
    base = f", base {_member(part, part.base)}" if part.base is not None and not part.operator.ignores_base else ""
    return f"{layers}: {name} of {_members(part, ranges=True)}{base}"


def _members(part: Part, *, ranges: bool) -> str:
    return ", ".join(_member(part, expert) if ranges else f"`{expert.source}`" for expert in part.experts)


def _member(part: Part, member: Member) -> str:
    return f"`{member.source}` {member.first_layer}..{member.first_layer + part.count}"


def _left_out(first: Part, last: Part) -> list[str]:
    """Return notes on tensors outside the layers that their slice's definer lacks and the other end's has."""
    notes = []
    for taken, other, precedes in ((last, first, False), (first, last, True)):
        names = [
            name
            for name in other.checkpoints[other.definer.source].tensors
            if other.layers.index(name) is None
            and precedes_layers(name, other.layers) is precedes
            and name not in taken.checkpoints[taken.definer.source].tensors
        ]
        if names:
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            listed = ", ".join(f"`{name}`" for name in names[:_NAMED])
            notes.append(
                f"{other.definer.source}: {len(names):,} {'tensor' if len(names) == 1 else 'tensors'} outside the"
                f" layers that `{taken.definer.source}` lacks, dropped ({listed}{more})"
            )
    return notes
