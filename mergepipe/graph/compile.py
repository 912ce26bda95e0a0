"""Compiling plans to a networkx graph: tensor level always, block level for the tensors that are not clean.

Edges go from inputs to what depends on them and carry a ``role``: "base", "expert:2", "part". Each node carries its
frozen value in ``node``, and for exporters ``state``, ``bytes`` and ``digest`` or ``key``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import DIGEST_SIZE, format_digest
from mergepipe.graph.blocks import BlockPlan, Holding, TensorRecipe, find_block, plan_block
from mergepipe.graph.nodes import MergeNode, Node, OutputNode, ReadNode, State, TensorNode
from mergepipe.graph.state import tensor_nodes
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeGraph:
    """The tensor-level graph of one or more outputs.

    Attributes
    ----------
    graph
        Nodes `("read", source, tensor)`, `("tensor", output, tensor)`, `("output", output)`.
    plans
        By output name.
    """

    graph: nx.DiGraph
    plans: Mapping[str, OutputPlan]

    def tensor(self, output: str, tensor: str) -> TensorNode:
        """Return the node of an output tensor."""
        node: TensorNode = self.graph.nodes["tensor", output, tensor]["node"]
        return node

    def pending(self) -> Iterator[tuple[OutputPlan, TensorPlan]]:
        """Yield the tensors that are not clean, inputs before what depends on them, then in plan order."""
        for plan in self.plans.values():
            for tensor in plan.tensors:
                if self.tensor(plan.output.name, tensor.name).state is not State.CACHED:
                    yield plan, tensor


def compile_graph(plans: Sequence[OutputPlan], index: SourceIndex, catalog: Catalog) -> MergeGraph:
    """Compile the tensor-level graph of these outputs, marked with what the catalog knows."""
    graph = nx.DiGraph()
    for plan in plans:
        output = OutputNode(output=plan.output.name)
        _add(graph, output)
        for tensor, node in zip(plan.tensors, tensor_nodes(plan, index, catalog), strict=True):
            _add(graph, node)
            graph.add_edge(node.id, output.id, role="part")
            for role, slot in _roles(tensor):
                read = _read_tensor(slot, index)
                _add(graph, read)
                graph.add_edge(read.id, node.id, role=role)
    return MergeGraph(graph=graph, plans={plan.output.name: plan for plan in plans})


def expand_tensor(
    plan: OutputPlan, tensor: TensorPlan, node: TensorNode, index: SourceIndex, catalog: Catalog
) -> nx.DiGraph:
    """Return the block-level graph of one tensor: its read and merge nodes, with an edge to the tensor's node.

    It is a graph of its own: the expansion of a large model is made and dropped tensor by tensor.
    """
    recipe = TensorRecipe.of(plan.operator, tensor, plan.geometry)
    known = [index.blocks(slot.source, slot.info) if slot else None for slot in tensor.slots]
    earlier = catalog.candidates(plan.output.name, tensor.name, tensor.recipe, tensor.shape)
    holdings = [Holding.of_result(result) for result in earlier]
    graph = nx.DiGraph()
    _add(graph, node)
    for block in range(recipe.grid.count):
        merge, reads = _expand_block(recipe, plan.output.name, block, known, holdings)
        _add(graph, merge)
        graph.add_edge(merge.id, node.id, role="part")
        for role, read in reads:
            _add(graph, read)
            graph.add_edge(read.id, merge.id, role=role)
    return graph


def _expand_block(
    recipe: TensorRecipe,
    output: str,
    block: int,
    known: Sequence[bytes | None],
    holdings: Sequence[Holding],
) -> tuple[MergeNode, list[tuple[str, ReadNode]]]:
    digests = [_at(packed, block) for packed in known]
    cold = any(slot is not None and packed is None for slot, packed in zip(recipe.tensor.slots, known, strict=True))
    planned = None if cold else plan_block(recipe, block, digests)
    state = State.COLD
    if planned is not None:
        state = State.CACHED if find_block(holdings, block, planned.key) else State.DIRTY
    merge = MergeNode(
        output=output,
        tensor=recipe.tensor.name,
        block=block,
        key=planned.key if planned else None,
        state=state,
    )
    reads = []
    for index, (role, slot) in enumerate(_all_roles(recipe.tensor)):
        layout = recipe.input_grids[index]
        if slot is None or layout is None or block >= layout.count:
            continue
        start, stop = layout.byte_range(block)
        read = ReadNode(
            source=slot.source,
            tensor=slot.info.name,
            block=block,
            nbytes=stop - start,
            digest=digests[index],
            state=_read_state(planned, index, merge.state),
        )
        reads.append((role, read))
    return merge, reads


def _read_state(planned: BlockPlan | None, slot: int, merge: State) -> State:
    if planned is None:
        return State.COLD
    if slot in planned.zero:
        return State.ZERO
    return State.DIRTY if merge is State.DIRTY and slot in planned.reads else State.CACHED


def _at(packed: bytes | None, block: int) -> bytes | None:
    piece = packed[block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE] if packed is not None else b""
    return piece or None


def _roles(tensor: TensorPlan) -> Iterator[tuple[str, InputRef]]:
    return ((role, slot) for role, slot in _all_roles(tensor) if slot is not None)


def _all_roles(tensor: TensorPlan) -> Iterator[tuple[str, InputRef | None]]:
    yield "base", tensor.base
    for number, expert in enumerate(tensor.experts):
        yield f"expert:{number}", expert


def _read_tensor(slot: InputRef, index: SourceIndex) -> ReadNode:
    digest = index.tensor(slot.source, slot.info)
    return ReadNode(
        source=slot.source,
        tensor=slot.info.name,
        block=None,
        nbytes=slot.info.nbytes,
        digest=digest,
        state=State.COLD if digest is None else State.CACHED,
    )


def _add(graph: nx.DiGraph, node: Node) -> None:
    attributes: dict[str, object] = {"node": node}
    if not isinstance(node, OutputNode):
        attributes["state"] = node.state.value
    if isinstance(node, ReadNode):
        attributes["bytes"] = node.nbytes
        attributes["digest"] = format_digest(node.digest) if node.digest else None
    elif isinstance(node, TensorNode | MergeNode):
        attributes["key"] = format_digest(node.key) if node.key else None
    graph.add_node(node.id, **attributes)
