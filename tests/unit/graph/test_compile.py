"""The graph: nodes, edges and states; and that the states are what an engine then does."""

import subprocess
import sys
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budgets import levels, percent, with_budget
from support.checkpoints import random_tensors, read_checkpoint
from support.cli import clean_environment
from support.projects import SmallProject, edit_tensor
from support.quick import examples
from unit.graph.helpers import compiled

from mergepipe.checkpoints.geometry import Geometry

SHAPES = {"model.layers.0.a": (16, 16), "model.layers.0.b": (16, 16), "model.v": (64,)}
A, B, V = SHAPES
EXPERTS = ("e1", "e2")


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", *EXPERTS)):
        project.add_source(name, random_tensors(seed, SHAPES))
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": list(EXPERTS)})
    return project


def edges(graph):
    return {(source, target): data["role"] for source, target, data in graph.edges(data=True)}


# --- the tensor level ---------------------------------------------------------------------------------------------


def test_the_graph_has_read_tensor_and_output_nodes_with_structural_names(project):
    project.set_output("n", {"operator": "linear", "experts": ["e2"]})
    with compiled(project) as found:
        nodes = {("output", output) for output in ("m", "n")}
        nodes |= {("tensor", output, name) for output in ("m", "n") for name in SHAPES}
        nodes |= {("read", source, name) for source in ("base", *EXPERTS) for name in SHAPES}
        assert set(found.graph.nodes) == nodes
        assert nx.is_directed_acyclic_graph(found.graph)


def test_edges_go_from_inputs_to_what_depends_on_them_and_say_their_role(project):
    with compiled(project) as found:
        roles = edges(found.graph)
    assert roles == {
        **{(("read", "base", name), ("tensor", "m", name)): "base" for name in SHAPES},
        **{(("read", e, name), ("tensor", "m", name)): f"expert:{n}" for n, e in enumerate(EXPERTS) for name in SHAPES},
        **{(("tensor", "m", name), ("output", "m")): "part" for name in SHAPES},
    }


def test_what_is_no_input_has_no_edge(project):
    rules = [{"match": A, "experts": {"e2": {"weight": 0.0}}}]
    project.set_output("m", project.outputs["m"] | {"rules": rules})
    with compiled(project) as found:
        assert ("read", "e2", A) not in found.graph
        assert ("read", "e2", B) in found.graph


def test_every_node_carries_its_frozen_value(project):
    project.build()
    with compiled(project) as found:
        for name, data in found.graph.nodes(data=True):
            assert data["node"].id == name
            hash(data["node"])
        read = found.graph.nodes["read", "e1", A]
        assert (read["bytes"], read["state"]) == (1024, "cached")
        assert read["digest"].startswith("b3:")
        assert found.graph.nodes["tensor", "m", A]["key"].startswith("b3:")


def test_before_the_first_build_everything_is_cold(project):
    with compiled(project) as found:
        assert found.states() == dict.fromkeys(SHAPES, "cold")
        assert {found.graph.nodes["read", s, n]["state"] for s in ("base", "e1") for n in SHAPES} == {"cold"}
        assert found.graph.nodes["read", "e1", A]["digest"] is None
        assert [tensor.name for _, tensor in found.merge.pending()] == list(SHAPES)


def test_after_a_build_everything_is_cached(project):
    project.build()
    with compiled(project) as found:
        assert found.states() == dict.fromkeys(SHAPES, "cached")
        assert list(found.merge.pending()) == []


def test_after_a_change_of_a_weight_the_tensors_that_it_reaches_are_dirty(project):
    project.build()
    project.set_output("m", project.outputs["m"] | {"rules": [{"match": B, "params": {"weight": 0.5}}]})
    with compiled(project) as found:
        assert found.states() == {A: "cached", B: "dirty", V: "cached"}
        assert [tensor.name for _, tensor in found.merge.pending()] == [B]


def test_after_a_change_of_a_file_what_it_feeds_is_cold(project):
    project.add_source("e2", random_tensors(2, SHAPES), shards=3)
    project.build()
    edit_tensor(next((project.root / "models/e2").glob("*00002-of*")), B, 0, 5.0)
    with compiled(project) as found:
        assert found.states() == {A: "cached", B: "cold", V: "cached"}


def test_two_outputs_share_the_nodes_of_their_sources(project):
    project.set_output("n", {"operator": "linear", "experts": list(EXPERTS)})
    with compiled(project) as found:
        readers = set(found.graph.successors(("read", "e1", A)))
    assert readers == {("tensor", "m", A), ("tensor", "n", A)}


# --- the block level ----------------------------------------------------------------------------------------------


def test_a_tensor_is_expanded_into_reads_and_merges_of_its_blocks(project):
    with compiled(project) as found:
        graph = found.expand(A)
    merges = {("merge", "m", A, block) for block in range(4)}
    reads = {("read", source, A, block) for source in ("base", *EXPERTS) for block in range(4)}
    assert set(graph.nodes) == {("tensor", "m", A)} | merges | reads
    roles = edges(graph)
    assert {roles[merge, ("tensor", "m", A)] for merge in merges} == {"part"}
    assert {roles[("read", "base", A, n), ("merge", "m", A, n)] for n in range(4)} == {"base"}
    assert {roles[("read", "e2", A, n), ("merge", "m", A, n)] for n in range(4)} == {"expert:1"}
    assert all(data["bytes"] == 256 for name, data in graph.nodes(data=True) if name[0] == "read")


def states(graph, kind):
    return {name: data["state"] for name, data in graph.nodes(data=True) if name[0] == kind}


def test_the_blocks_of_a_cold_tensor_are_cold(project):
    with compiled(project) as found:
        graph = found.expand(A)
    assert set(states(graph, "merge").values()) == {"cold"}
    assert set(states(graph, "read").values()) == {"cold"}
    assert all(data["key"] is None for name, data in graph.nodes(data=True) if name[0] == "merge")


def test_the_blocks_of_a_cached_tensor_are_cached(project):
    project.build()
    with compiled(project) as found:
        graph = found.expand(A)
    assert set(states(graph, "merge").values()) == {"cached"}
    assert set(states(graph, "read").values()) == {"cached"}


def test_blocks_that_equal_the_bases_are_zero(project):
    own = read_checkpoint(project.root / "models/base")
    own[A][4:8] += 1
    project.add_source("e2", own)
    project.build()
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    with compiled(project) as found:
        graph = found.expand(A)
    assert {name[3]: state for name, state in states(graph, "read").items() if name[1] == "e2"} == {
        0: "zero",
        1: "dirty",
        2: "zero",
        3: "zero",
    }


def test_rows_beyond_the_common_ones_are_read_of_the_base_alone(tmp_path):
    project = SmallProject(tmp_path, Geometry(block_elements=8))
    project.add_source("base", random_tensors(0, {"wte.weight": (8, 4)}))
    project.add_source("e1", random_tensors(1, {"wte.weight": (3, 4)}))
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e1"], "params": {"rows": "common"}}
    project.set_output("m", recipe)
    project.build()
    with compiled(project) as found:
        graph = found.expand("wte.weight")
    assert {name[3] for name in states(graph, "read") if name[1] == "e1"} == {0, 1}
    assert {name[3] for name in states(graph, "read") if name[1] == "base"} == {0, 1, 2, 3}


# --- the engine does what the graph shows -------------------------------------------------------------------------


@settings(max_examples=examples(12))
@given(
    edits=st.lists(st.tuples(st.sampled_from(["base", *EXPERTS]), st.sampled_from(list(SHAPES)), st.integers(0, 63))),
    scale=st.sampled_from([1.0, 0.5]),
    rule=st.sampled_from([None, A, V]),
    partial=st.booleans(),
)
def test_an_engine_computes_the_dirty_blocks_and_reads_the_dirty_reads(tmp_path_factory, edits, scale, rule, partial):
    project = SmallProject(tmp_path_factory.mktemp("project"))
    for seed, name in enumerate(("base", *EXPERTS)):
        project.add_source(name, random_tensors(seed, SHAPES))
    if partial:
        own = read_checkpoint(project.root / "models/base")
        own[A][:4] += 1
        project.add_source("e2", own)
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": list(EXPERTS)})
    project.build()
    for source, name, at in edits:
        edit_tensor(project.source_file(source), name, at, 3.0)
    project.set_output("hash", {"operator": "linear", "experts": ["base", *EXPERTS]})
    project.build("hash")  # nothing is cold any more, so that the graph knows every block
    rules = [{"match": rule, "params": {"weight": 0.25}}] if rule else []
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": scale}, "rules": rules})
    with compiled(project, "m") as found:
        graphs = [found.expand(tensor.name) for _, tensor in found.merge.pending()]
    merges = Counter(state for graph in graphs for state in states(graph, "merge").values())
    reads = Counter()
    for graph in graphs:
        for name, data in graph.nodes(data=True):
            if name[0] == "read" and data["state"] == "dirty":
                reads["base" if name[1] == "base" else "expert"] += data["bytes"]
    report = project.build_one("m")
    assert report.blocks["computed"] + report.blocks["copied"] == merges["dirty"]
    assert report.expert_bytes["read"] == reads["expert"]
    assert report.base_bytes_read == reads["base"]
    assert report.index_bytes_read == merges["cold"] == 0
    project.check("m", zero_signs=False)


def test_every_block_that_the_graph_calls_cached_is_where_it_says(project):
    project.build()
    edit_tensor(project.source_file("e1"), A, 70, 9.0)
    project.set_output("other", {"operator": "linear", "experts": list(EXPERTS)})
    project.build("other")
    with compiled(project, "m") as found:
        graph = found.expand(A)
        assert [state for _, state in sorted(states(graph, "merge").items())] == ["cached", "dirty", "cached", "cached"]
        assert {name for name, state in states(graph, "read").items() if state == "dirty"} == {
            ("read", source, A, 1) for source in ("base", *EXPERTS)
        }


# --- imports ------------------------------------------------------------------------------------------------------

_SCRIPT = """
import sys
from mergepipe.project import open_project
from mergepipe.checkpoints.geometry import Geometry
project = open_project("Mergefile.toml", geometry=Geometry(block_elements=64))
getattr(project, sys.argv[1])()
print(*sorted({"networkx", "torch", "numpy", "rich"} & set(sys.modules)))
"""


def imported(project, command):
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, command],
        cwd=project.root,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_build_imports_neither_torch_nor_networkx(project):
    assert imported(project, "build") == ["numpy"]


@pytest.mark.parametrize("command", ["build", "plan", "status"])
def test_nothing_heavy_is_imported_where_nothing_is_merged(project, command):
    imported(project, "build")  # by a process, which waits as long as one does until its sources are settled
    assert imported(project, command) == []


def test_arrays_never_live_in_the_graph(project):
    project.build()
    with compiled(project) as found:
        values = [value for _, data in found.graph.nodes(data=True) for value in data.values()]
    assert not any(isinstance(value, np.ndarray) for value in values)


def test_blocks_outside_the_access_set_are_omitted(project):
    with_budget(project, percent(50))
    project.build()
    assert any(0 in row for rows in levels(project).values() for row in rows)
    with compiled(project) as found:
        for name in SHAPES:
            graph = found.expand(name)
            states = {
                (EXPERTS.index(source), block): data["state"]
                for (kind, source, *_, block), data in graph.nodes(data=True)
                if kind == "read" and source in EXPERTS
            }
            assert {pair for pair, state in states.items() if state == "omitted"} == {
                (expert, block) for expert, row in enumerate(levels(project)[name]) for block, level in enumerate(row)
                if not level
            }
