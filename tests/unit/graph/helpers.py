"""Compiling the graph of a small project as a build would find it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unit.plan.helpers import plan

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.sources import SourceIndex
from mergepipe.graph.compile import MergeGraph, compile_graph, expand_tensor
from mergepipe.project.budgets import resolved

if TYPE_CHECKING:
    import networkx as nx
    from support.projects import SmallProject


@dataclass
class Compiled:
    """The tensor-level graph of a project's outputs, and what it was compiled from."""

    merge: MergeGraph
    index: SourceIndex
    catalog: Catalog

    @property
    def graph(self) -> nx.DiGraph:
        return self.merge.graph

    def states(self, output: str = "m") -> dict[str, str]:
        """Return the state of each tensor of an output."""
        tensors = self.merge.plans[output].tensors
        return {found.name: self.graph.nodes["tensor", output, found.name]["state"] for found in tensors}

    def expand(self, name: str, output: str = "m") -> nx.DiGraph:
        """Return the block-level graph of one tensor."""
        found = self.merge.plans[output]
        tensor = next(tensor for tensor in found.tensors if tensor.name == name)
        return expand_tensor(found, tensor, self.merge.tensor(output, name), self.index, self.catalog)


@contextlib.contextmanager
def compiled(project: SmallProject, *outputs: str) -> Iterator[Compiled]:
    """Compile the graph of these outputs with what the project's cache knows."""
    plans = [plan(project, output) for output in outputs or project.outputs]
    checkpoints = {name: checkpoint for found in plans for name, checkpoint in found.sources.items()}
    catalog = Catalog(CacheLayout(project.cache), project.geometry.block_elements, create=False)
    try:
        index = SourceIndex(catalog, checkpoints, project.geometry)
        plans = [resolved(found, index, catalog) for found in plans]
        yield Compiled(compile_graph(plans, index, catalog), index, catalog)
    finally:
        catalog.close()
