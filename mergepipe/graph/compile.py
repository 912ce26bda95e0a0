"""Compiling plans to a networkx graph: tensor level always, block level for the tensors that are not clean.

Edges go from inputs to what depends on them and carry a ``role``: "base", "expert:2", "part". Each node carries its
frozen value in ``node``, and for exporters ``state``, ``bytes`` and ``digest`` or ``key``.

A build needs the nodes of tensors and an order, which the plan has already. What else there is becomes a
`networkx.DiGraph` when somebody asks for it: to import networkx takes as long as to plan a merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.digest import digest_at, format_digest, record_digest
from mergepipe.graph.blocks import BlockPlan, Holding, TensorRecipe, find_block, plan_block
from mergepipe.graph.inputs import slot_blocks, slot_digest
from mergepipe.graph.nodes import (
    MergeNode,
    Node,
    NodeId,
    OutputNode,
    ReadNode,
    ReduceNode,
    State,
    StatisticNode,
    TensorNode,
)
from mergepipe.graph.reductions import KnownReduction, known_reduction
from mergepipe.graph.state import tensor_nodes
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan

if TYPE_CHECKING:
    import networkx as nx


class _Parts:
    """The nodes of a graph by id, and its edges with their roles."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, Node] = {}
        self._edges: list[tuple[NodeId, NodeId, str]] = []

    def add(self, node: Node) -> NodeId:
        """Add a node, in the place of one with the same id; return the id."""
        name = node.id
        self.nodes[name] = node
        return name

    def connect(self, source: NodeId, target: NodeId, role: str) -> None:
        """Add an edge."""
        self._edges.append((source, target, role))

    def assembled(self) -> nx.DiGraph:
        """Return the graph."""
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from((name, _attributes(node)) for name, node in self.nodes.items())
        graph.add_edges_from((source, target, {"role": role}) for source, target, role in self._edges)
        return graph


class MergeGraph:
    """The tensor-level graph of one or more outputs.

    Attributes
    ----------
    plans
        By output name.
    """

    def __init__(self, parts: _Parts, plans: Mapping[str, OutputPlan]) -> None:
        self._parts = parts
        self.plans = plans

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Nodes `("read", source, tensor)`, `("tensor", output, tensor)`, `("output", output)`."""
        return self._parts.assembled()

    def tensor(self, output: str, tensor: str) -> TensorNode:
        """Return the node of an output tensor."""
        node = self._parts.nodes["tensor", output, tensor]
        assert isinstance(node, TensorNode)
        return node

    def pending(self) -> Iterator[tuple[OutputPlan, TensorPlan]]:
        """Yield the tensors that are not clean, inputs before what depends on them, then in plan order."""
        for plan in self.plans.values():
            for tensor in plan.tensors:
                if self.tensor(plan.output.name, tensor.name).state is not State.CACHED:
                    yield plan, tensor


def compile_graph(plans: Sequence[OutputPlan], index: SourceIndex, catalog: Catalog) -> MergeGraph:
    """Compile the tensor-level graph of these outputs, marked with what the catalog knows."""
    parts = _Parts()
    reads: dict[NodeId, NodeId] = {}
    for plan in plans:
        output = parts.add(OutputNode(output=plan.output.name))
        for tensor, node in zip(plan.tensors, tensor_nodes(plan, index, catalog), strict=True):
            name = parts.add(node)
            parts.connect(name, output, "part")
            targets = [name]
            if TensorRecipe.of(tensor, plan.geometry).reduces:
                targets.append(parts.add(_reduce_tensor(plan, tensor, node)))
                parts.connect(targets[1], name, "reduction")
            for role, slot in _roles(tensor):
                same = (slot.source, slot.info.name)
                if same not in reads:
                    reads[same] = parts.add(_read_tensor(slot, index))
                for target in targets:
                    parts.connect(reads[same], target, role)
    return MergeGraph(parts, {plan.output.name: plan for plan in plans})


def expand_tensor(
    plan: OutputPlan, tensor: TensorPlan, node: TensorNode, index: SourceIndex, catalog: Catalog
) -> nx.DiGraph:
    """Return the block-level graph of one tensor: its read and merge nodes, with an edge to the tensor's node.

    It is a graph of its own: the expansion of a large model is made and dropped tensor by tensor.
    """
    recipe = TensorRecipe.of(tensor, plan.geometry)
    known = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
    earlier = catalog.candidates(plan.output.name, tensor.name, tensor.recipe, tensor.shape)
    holdings = [Holding.of_result(result) for result in earlier]
    parts = _Parts()
    parts.add(node)
    cold = any(slot is not None and packed is None for slot, packed in zip(tensor.slots, known, strict=True))
    found = known_reduction(recipe, known, StatisticStore(catalog)) if recipe.reduces and not cold else None
    for block in range(recipe.grid.count):
        waits = cold or (found is not None and found.reduction is None)
        digests = None if waits else [digest_at(packed, block) for packed in known]
        planned = plan_block(recipe, block, digests, found.reduction if found else None) if digests else None
        merge = _merge_node(recipe, plan.output.name, block, planned, holdings, cold=cold)
        parts.connect(parts.add(merge), node.id, "part")
        for _, role, read in _reads(recipe, block, known, planned, merge.state):
            parts.connect(parts.add(read), merge.id, role)
    if found is not None:
        _add_reduction(parts, plan, recipe, node, known, found)
    return parts.assembled()


def _reduce_tensor(plan: OutputPlan, tensor: TensorPlan, node: TensorNode) -> ReduceNode:
    key = None if node.key is None else record_digest("reduce", node.key)
    return ReduceNode(output=plan.output.name, tensor=tensor.name, key=key, state=node.state)


def _add_reduction(
    parts: _Parts,
    plan: OutputPlan,
    recipe: TensorRecipe,
    node: TensorNode,
    known: Sequence[bytes | None],
    found: KnownReduction,
) -> None:
    """Add the reduction, its statistics, and what they read that is not read to merge already."""
    complete = found.reduction is not None
    reduce = replace(_reduce_tensor(plan, recipe.tensor, node), state=State.CACHED if complete else State.DIRTY)
    parts.add(reduce)
    for block in range(recipe.facts.blocks):
        parts.connect(reduce.id, ("merge", plan.output.name, recipe.tensor.name, block), "reduction")
    for part in found.statistics:
        statistic = StatisticNode(
            output=plan.output.name,
            tensor=recipe.tensor.name,
            number=part.number,
            name=part.statistic.name,
            block=part.plan.block,
            key=part.plan.key,
            state=State.CACHED if part.known else State.DIRTY,
        )
        parts.add(statistic)
        parts.connect(statistic.id, reduce.id, "part")
        for slot, role, read in _reads(recipe, part.plan.block, known, None, statistic.state):
            if slot not in part.statistic.slots:
                continue
            if not part.known and slot in part.plan.reads:
                parts.add(replace(read, state=State.DIRTY))
            parts.connect(read.id, statistic.id, role)


def _merge_node(
    recipe: TensorRecipe,
    output: str,
    block: int,
    planned: BlockPlan | None,
    holdings: Sequence[Holding],
    *,
    cold: bool,
) -> MergeNode:
    """Return the node of a block; without a plan it waits for its inputs' content, or for the reduction."""
    state = State.COLD if cold else State.DIRTY
    if planned is not None:
        state = State.CACHED if find_block(holdings, block, planned.key) else State.DIRTY
    return MergeNode(
        output=output,
        tensor=recipe.tensor.name,
        block=block,
        key=planned.key if planned else None,
        state=state,
    )


def _reads(
    recipe: TensorRecipe, block: int, known: Sequence[bytes | None], planned: BlockPlan | None, user: State
) -> Iterator[tuple[int, str, ReadNode]]:
    """Yield slot, role and node of each input that has this block."""
    for slot, (role, ref) in enumerate(_all_roles(recipe.tensor)):
        layout = recipe.input_grids[slot]
        if ref is None or layout is None or block >= layout.count:
            continue
        start, stop = layout.byte_range(block)
        read = ReadNode(
            source=ref.source,
            tensor=ref.info.name,
            block=block,
            nbytes=stop - start,
            digest=digest_at(known[slot], block),
            state=_read_state(planned, slot, user),
        )
        yield slot, role, read


def _read_state(planned: BlockPlan | None, slot: int, merge: State) -> State:
    if planned is None:
        return merge
    if slot in planned.omitted:
        return State.OMITTED
    if slot in planned.zero:
        return State.ZERO
    return State.DIRTY if merge is State.DIRTY and slot in planned.reads else State.CACHED


def _roles(tensor: TensorPlan) -> Iterator[tuple[str, InputRef]]:
    return ((role, slot) for role, slot in _all_roles(tensor) if slot is not None)


def _all_roles(tensor: TensorPlan) -> Iterator[tuple[str, InputRef | None]]:
    yield "base", tensor.base
    for number, expert in enumerate(tensor.experts):
        yield f"expert:{number}", expert


def _read_tensor(slot: InputRef, index: SourceIndex) -> ReadNode:
    digest = slot_digest(slot, index)
    return ReadNode(
        source=slot.source,
        tensor=slot.info.name,
        block=None,
        nbytes=slot.info.nbytes,
        digest=digest,
        state=State.COLD if digest is None else State.CACHED,
    )


def _attributes(node: Node) -> dict[str, object]:
    attributes: dict[str, object] = {"node": node}
    if not isinstance(node, OutputNode):
        attributes["state"] = node.state.value
    if isinstance(node, ReadNode):
        attributes["bytes"] = node.nbytes
        attributes["digest"] = format_digest(node.digest) if node.digest else None
    elif not isinstance(node, OutputNode):
        attributes["key"] = format_digest(node.key) if node.key else None
    return attributes
