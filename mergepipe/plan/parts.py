"""The parts of an output: one operator over some sources, for the whole of it or for one of its slices.

A part knows which output tensors it makes and what they are called in each of its sources. In a slice the layers of
the sources are renumbered; a tensor outside the layers has one name everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import field

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.heads import is_head, is_vocabulary
from mergepipe.checkpoints.layers import LayerMap, is_tower
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.mergefile.problems import key_path
from mergepipe.mergefile.resolve import ResolvedParams, Resolver
from mergepipe.mergefile.schema import Output
from mergepipe.operators.contract import Operator
from mergepipe.values import dataclass

Operators = Callable[[str], Operator]
"""Returns the operator of a name."""
_EMBEDDINGS = ("wte", "wpe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A source of a part, and which of its layers is the first that the part takes."""

    source: str
    first_layer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor that a part makes.

    Attributes
    ----------
    name, layer
        In the output; the layer is None outside the layers.
    info
        The definer's tensor, which gives shape and dtype.
    """

    name: str
    layer: int | None
    info: TensorInfo


@dataclass(frozen=True, kw_only=True)
class Part:
    """One operator over some sources.

    Attributes
    ----------
    slice
        Which of the output's slices it is; None for a whole output.
    base
        The declared base, also where the operator ignores it.
    experts
        In expert order.
    checkpoints
        Those of its members, by source name: the base first (where it is not ignored), then the experts in order.
    layers
        The layers of the definer.
    first_layer, count
        The layers of the output that it makes.
    opens, closes
        Whether it makes the tensors that come before the layers (embeddings), and all others outside of them.
    resolver
        Resolves the parameters of its tensors.
    located
        In a slice, by source and tensor name the layer in the source's own numbering.
    """

    output: Output
    slice: int | None = None
    operator: Operator
    base: Member | None
    experts: tuple[Member, ...]
    checkpoints: Mapping[str, Checkpoint]
    layers: LayerMap
    first_layer: int = 0
    count: int
    opens: bool = True
    closes: bool = True
    resolver: Resolver
    located: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)

    @property
    def definer(self) -> Member:
        """The member that defines the tensors: the base, unless there is none or it is ignored; then expert 0."""
        return self.experts[0] if self.base is None or self.operator.ignores_base else self.base

    @property
    def uses_base(self) -> bool:
        """Whether a base is an input of the formula."""
        return self.base is not None and self.operator.uses_base

    @property
    def where(self) -> str:
        """Its key path in the Mergefile, for messages."""
        inner = () if self.slice is None else ("slices", self.slice)
        return key_path(("outputs", self.output.name, *inner))

    @functools.cached_property
    def tensors(self) -> tuple[Wanted, ...]:
        """The tensors that it makes, in the definer's order."""
        definer = self.definer
        found = []
        for name, info in self.checkpoints[definer.source].tensors.items():
            layer = self._layer(definer, name)
            if self._takes(name, layer):
                found.append(Wanted(name=self._renamed(name, layer), layer=layer, info=info))
        return tuple(found)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of the tensors that it makes."""
        return frozenset(wanted.name for wanted in self.tensors)

    def unused(self, member: Member) -> tuple[list[str], bool]:
        """Return a member's tensors that the part would take and its definer lacks, and whether they share any."""
        checkpoint = self.checkpoints[member.source]
        if self.slice is None:
            found = [name for name in checkpoint.tensors if name not in self.names]
            return found, len(found) < len(checkpoint.tensors)
        places = {name: self._layer(member, name) for name in checkpoint.tensors}
        taken = [name for name, layer in places.items() if self._takes(name, layer)]
        found = [name for name in taken if self._renamed(name, places[name]) not in self.names]
        return found, len(found) < len(taken)

    def _takes(self, name: str, layer: int | None) -> bool:
        """Return whether the part is for a tensor in this layer of the output."""
        if self.slice is None:
            return True
        if layer is None:
            return self.opens if precedes_layers(name, self.layers) else self.closes
        return self.first_layer <= layer < self.first_layer + self.count

    def source_name(self, member: Member, wanted: Wanted) -> str:
        """Return what a tensor of the output is called in a member's own files."""
        if self.slice is None or wanted.layer is None or member == self.definer:
            return wanted.info.name
        return self._renamed(wanted.info.name, wanted.layer - self.first_layer + member.first_layer)

    def find(self, member: Member, wanted: Wanted) -> TensorInfo | None:
        """Return a member's tensor for a tensor of the output, None where it has none."""
        return self.checkpoints[member.source].tensors.get(self.source_name(member, wanted))

    def base_expert(self, wanted: Wanted) -> int | None:
        """Return the position of the base's very tensor among the experts, None if it is not one of them."""
        for index, expert in enumerate(self.experts):
            same_layer = wanted.layer is None or self.base == expert
            if self.base is not None and expert.source == self.base.source and same_layer:
                return index
        return None

    def resolve(self, wanted: Wanted) -> ResolvedParams:
        """Return the parameters of a tensor, and where each comes from."""
        return self.resolver.resolve(wanted.name, wanted.layer)

    def _layer(self, member: Member, name: str) -> int | None:
        """Return the output's layer of a member's tensor; it may lie beyond those that the part makes."""
        own = self.located[member.source][name] if self.located else self.layers.index(name)
        return None if own is None else own - member.first_layer + self.first_layer

    def _renamed(self, name: str, layer: int | None) -> str:
        return name if layer is None or self.slice is None else self.layers.renumbered(name, layer)


def precedes_layers(name: str, layers: LayerMap) -> bool:
    """Return whether a tensor outside the layers comes before them: an embedding, and what is named after one.

    The embeddings of a vision or audio tower do not: a tower is taken as a whole.
    """
    if layers.index(name) is not None or is_head(name) or is_tower(name):
        return False
    parts = name.split(".")
    return is_vocabulary(name) or any(part in _EMBEDDINGS or "embed" in part for part in parts)


def whole_output(output: Output, operators: Operators, checkpoints: Mapping[str, Checkpoint]) -> Part:
    """Return the one part of an output without slices."""
    operator = operators(output.operator)
    experts = tuple(Member(source=expert.source) for expert in output.experts)
    base = None if output.base is None else Member(source=output.base)
    definer = output.base if output.base is not None and not operator.ignores_base else experts[0].source
    layers = checkpoints[definer].layers()
    return Part(
        output=output,
        operator=operator,
        base=base,
        experts=experts,
        checkpoints=own_checkpoints(operator, base, experts, checkpoints),
        layers=layers,
        count=layers.count,
        resolver=Resolver(output, operator.signature, layers.count),
    )


def own_checkpoints(
    operator: Operator, base: Member | None, experts: tuple[Member, ...], checkpoints: Mapping[str, Checkpoint]
) -> dict[str, Checkpoint]:
    """Return the checkpoints of a part's members, the base first; a base that the operator ignores is none."""
    members = [*([base] if base is not None and not operator.ignores_base else []), *experts]
    return {member.source: checkpoints[member.source] for member in members}
