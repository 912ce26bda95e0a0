"""The state of output tensors: cached, dirty or cold. Needs no networkx, so that a no-op build stays quick."""

from __future__ import annotations

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.graph.inputs import slot_digest
from mergepipe.graph.keys import tensor_key
from mergepipe.graph.nodes import TensorNode
from mergepipe.plan.values import OutputPlan, TensorPlan


def tensor_nodes(plan: OutputPlan, index: SourceIndex, catalog: Catalog) -> tuple[TensorNode, ...]:
    """Return the node of every tensor of an output, in the plan's order."""
    keys = tensor_keys(plan, index)
    results = catalog.results(key for _, key in keys if key is not None)
    return tuple(
        TensorNode(output=plan.output.name, tensor=name, key=key, result=results.get(key) if key is not None else None)
        for name, key in keys
    )


def tensor_keys(plan: OutputPlan, index: SourceIndex) -> tuple[tuple[str, bytes | None], ...]:
    """Return (name, action key) of every tensor of an output, in the plan's order; None while an input is cold."""
    return tuple((tensor.name, current_key(plan, tensor, index)) for tensor in plan.tensors)


def current_key(plan: OutputPlan, tensor: TensorPlan, index: SourceIndex) -> bytes | None:
    """Return a tensor's action key, or None while an input's content is not known."""
    digests = [slot_digest(slot, index) if slot else None for slot in tensor.slots]
    if any(digest is None and slot is not None for digest, slot in zip(digests, tensor.slots, strict=True)):
        return None
    return tensor_key(tensor, plan.geometry, digests)
