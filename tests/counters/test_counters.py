"""What builds read, open, compute and keep in memory, to the byte, for an operator of each family.

Every number is worked out from the shapes. Whoever makes a build read, open, compute or keep more finds a test here
that fails; whoever makes it do less changes the formula that says so.
"""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from support.budgets import percent
from support.checkpoints import random_tensors, read_checkpoint
from support.counters import Counters
from support.projects import TINY, SmallProject, edit_tensor

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.engine.limits import PIECE_ELEMENTS
from mergepipe.fsio.identity import FileIdentity, settle

SHAPES = {"model.layers.0.a": (16, 16), "model.layers.1.b": (16, 16), "model.v": (64,)}
A, B, V = SHAPES
EXPERTS = ("e1", "e2", "e3")
SOURCES = ("base", *EXPERTS)
ITEM = 4  # float32


def elements(name):
    return math.prod(SHAPES[name])


def nbytes(*names):
    """Return the bytes of these tensors of one source; of all of them for no names."""
    return ITEM * sum(map(elements, names or SHAPES))


BLOCK = ITEM * TINY.block_elements
BLOCKS = {name: -(-elements(name) // TINY.block_elements) for name in SHAPES}
ALL_BLOCKS = sum(BLOCKS.values())
HEADER = 1  # a file is opened once to read its header
AHEAD = 1  # once more in a run that is sure to read it, to ask the kernel for it in time
WORKER = 1  # and by the worker, which keeps it open from job to job
COLD = AHEAD + WORKER


@dataclass(frozen=True)
class Case:
    """An operator, and what is its own in the figures."""

    recipe: dict
    changed: dict
    """With one parameter changed."""
    spreads: bool = False
    """Whether a changed block changes all blocks of its tensor: coefficients follow from the whole of it."""
    passes: int = 0
    """How many passes of statistics a first build takes over each block."""


def weighted(weight):
    return [{"source": "e1", "weight": weight}, "e2", "e3"]


CASES = {
    "additive": Case(
        {"operator": "task_arithmetic", "experts": weighted(0.5)},
        {"operator": "task_arithmetic", "experts": weighted(0.25)},
    ),
    "gram": Case(
        {"operator": "multislerp", "experts": weighted(0.5)},
        {"operator": "multislerp", "experts": weighted(0.25)},
        spreads=True,
        passes=1,
    ),
    # Histograms of the magnitudes of each expert.
    "order statistic": Case(
        {"operator": "ties", "experts": list(EXPERTS), "params": {"density": 0.5}},
        {"operator": "ties", "experts": list(EXPERTS), "params": {"density": 0.25}},
        passes=len(EXPERTS),
    ),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request):
    return CASES[request.param]


def family(seed, near=None):
    """Return the tensors of a base, or of an expert near it."""
    found = random_tensors(seed, SHAPES)
    return found if near is None else {name: near[name] + 0.1 * value for name, value in found.items()}


@pytest.fixture
def project(tmp_path, case):
    project = SmallProject(tmp_path)
    project.add_source("base", family(0))
    for seed, expert in enumerate(EXPERTS, start=1):
        project.add_source(expert, family(seed, family(0)))
    project.set_output("m", {"base": "base", **case.recipe})
    return project


@pytest.fixture
def counters(monkeypatch):
    return Counters(monkeypatch)


def build(project, counters, output="m"):
    """Build with one worker; nothing that was changed meanwhile is too young for its time to tell."""
    for source in SOURCES:
        settle(FileIdentity.at(project.source_file(source)))
    counters.clear()
    return project.build_one(output, workers=1)


def check(project, counters, report, *, read, base, index, computed, opened, copied=0):
    """Compare a report with the figures that follow from the shapes, and with what really happened.

    ``opened`` is by source how often its file is opened for its weights.
    """
    assert report.expert_bytes["read"] == read
    assert report.base_bytes_read == base
    assert report.index_bytes_read == index
    cached = ALL_BLOCKS - computed - copied
    assert report.blocks == {"total": ALL_BLOCKS, "computed": computed, "cached": cached, "copied": copied}
    assert opens(project, counters) == opened
    assert data_bytes(project, counters) == read + base + index


def opens(project, counters):
    """Return by source how often its file was opened for its weights."""
    return {source: counters.opened(project.source_file(source)) - HEADER for source in SOURCES}


def data_bytes(project, counters):
    """Return the bytes of weights that were read of all sources; looking at that opens their files."""
    return sum(counters.data_bytes(project.source_file(source)) for source in SOURCES)


def each(count, **others):
    return dict.fromkeys(SOURCES, count) | others


def test_a_first_build_reads_every_byte_once_and_opens_a_file_to_ask_for_it_and_to_read_it(project, counters, case):
    report = build(project, counters)
    read = len(EXPERTS) * nbytes()
    check(project, counters, report, read=read, base=nbytes(), index=0, computed=ALL_BLOCKS, opened=each(COLD))
    assert report.bytes_written == nbytes()
    assert counters.measured == case.passes * ALL_BLOCKS


def test_a_build_with_nothing_to_do_opens_each_file_for_its_header_alone(project, counters):
    build(project, counters)
    report = build(project, counters)
    check(project, counters, report, read=0, base=0, index=0, computed=0, opened=each(0))
    assert (report.bytes_written, counters.measured, counters.weight_bytes) == (0, 0, 0)


def largest_delta(project, expert, name):
    """Return where the delta of an expert is largest, and twice its length: no threshold depends on that."""
    base, own = (read_checkpoint(project.source_file(source).parent)[name].ravel() for source in ("base", expert))
    at = int(np.argmax(np.abs(own - base)))
    return at, float(base[at] + 2 * (own[at] - base[at]))


def test_one_changed_block_is_read_of_all_and_its_file_is_hashed(project, counters, case):
    build(project, counters)
    edit_tensor(project.source_file("e2"), A, *largest_delta(project, "e2", A))
    report = build(project, counters)
    blocks = BLOCKS[A] if case.spreads else 1
    check(
        project,
        counters,
        report,
        read=len(EXPERTS) * blocks * BLOCK,
        base=blocks * BLOCK,
        index=nbytes() - blocks * BLOCK,
        computed=blocks,
        opened=each(WORKER, e2=COLD),
    )
    assert counters.measured == (1 if case.passes else 0)


def test_one_changed_tensor_is_read_of_all_and_its_file_is_hashed(project, counters, case):
    build(project, counters)
    for at in range(elements(B)):
        edit_tensor(project.source_file("e2"), B, at, float(at + 1))
    report = build(project, counters)
    check(
        project,
        counters,
        report,
        read=len(EXPERTS) * nbytes(B),
        base=nbytes(B),
        index=nbytes(A, V),
        computed=BLOCKS[B],
        opened=each(WORKER, e2=COLD),
    )
    assert counters.measured == (BLOCKS[B] if case.passes else 0)


def test_a_changed_expert_is_read_as_in_a_first_build_and_only_it_is_measured(project, counters, case):
    build(project, counters)
    project.add_source("e2", family(7, family(0)))
    report = build(project, counters)
    check(
        project,
        counters,
        report,
        read=len(EXPERTS) * nbytes(),
        base=nbytes(),
        index=0,
        computed=ALL_BLOCKS,
        opened=each(WORKER, e2=COLD),
    )
    assert counters.measured == (ALL_BLOCKS if case.passes else 0)


def test_a_changed_parameter_takes_no_pass_of_statistics(project, counters, case):
    build(project, counters)
    project.set_output("m", {"base": "base", **case.changed})
    report = build(project, counters)
    read = len(EXPERTS) * nbytes()
    opened = each(WORKER, base=WORKER + AHEAD)
    check(project, counters, report, read=read, base=nbytes(), index=0, computed=ALL_BLOCKS, opened=opened)
    assert counters.measured == 0


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_budget_reads_all_once_to_measure_and_then_what_it_buys(project, counters, case, share):
    project.set_output("m", {"base": "base", **case.recipe, "budget": percent(100 * share)})
    report = build(project, counters)
    # All blocks are of one size, so that the longest prefix within the budget is the largest number of blocks.
    read = math.floor(share * len(EXPERTS) * nbytes()) // BLOCK * BLOCK
    assert report.expert_bytes == {"full": len(EXPERTS) * nbytes(), "planned": read, "read": read}
    assert (report.base_bytes_read, report.index_bytes_read) == (nbytes(), len(SOURCES) * nbytes())
    assert report.bytes_written == nbytes()
    assert report.blocks["computed"] + report.blocks["copied"] == ALL_BLOCKS
    assert report.expert_blocks["omitted"] == len(EXPERTS) * ALL_BLOCKS - read // BLOCK
    assert counters.measured == (1 + case.passes) * ALL_BLOCKS  # the lengths of the deltas besides
    opened = opens(project, counters)
    assert data_bytes(project, counters) == read + nbytes() + len(SOURCES) * nbytes()
    # As in a first build to measure, and once more for each source of which any block is bought.
    levels = {tensor.name: (tensor.levels, BLOCKS[tensor.name]) for tensor in project.manifest("m").tensors}
    bought = [
        WORKER
        * any(any(packed[number * count : (number + 1) * count]) or not packed for packed, count in levels.values())
        for number in range(len(EXPERTS))
    ]
    assert opened == {s: COLD + n for s, n in zip(SOURCES, [WORKER + AHEAD, *bought], strict=True)}


def test_several_outputs_over_the_same_sources_cost_one_read(project, counters, case):
    project.set_output("n", {"base": "base", **case.changed})
    for source in SOURCES:
        settle(FileIdentity.at(project.source_file(source)))
    counters.clear()
    first, second = project.build(workers=1).outputs.values()
    assert first.expert_bytes["read"] == len(EXPERTS) * nbytes()
    assert second.expert_bytes["read"] == second.base_bytes_read == second.index_bytes_read == 0
    assert second.expert_blocks["shared"] == len(EXPERTS) * ALL_BLOCKS
    assert opens(project, counters) == each(COLD)
    assert data_bytes(project, counters) == len(SOURCES) * nbytes()


# --- memory -------------------------------------------------------------------------------------------------------


def test_weights_in_memory_are_one_tensor_of_each_source_and_of_the_result(project, counters, case):
    build(project, counters)
    inputs = len(SOURCES) * nbytes(A)
    if case.passes:  # what is kept between the passes: here every tensor, for three have jobs in flight
        inputs = len(SOURCES) * nbytes()
    assert counters.weight_bytes == inputs + nbytes(A)


def large_project(root, case, layers):
    """Return a project of several megabytes, cut as real models are."""
    shapes = {f"model.layers.{layer}.w": (1024, 1024) for layer in range(layers)}
    project = SmallProject(root, geometry=Geometry())
    for seed, source in enumerate(SOURCES):
        project.add_source(source, random_tensors(seed, shapes))
    project.set_output("m", {"base": "base", **case.recipe})
    return project


def test_weights_in_memory_do_not_grow_with_the_number_of_tensors(tmp_path, counters):
    case, found = CASES["additive"], []
    for layers in (1, 3):
        build(large_project(tmp_path / str(layers), case, layers), counters)
        found.append(counters.weight_bytes)
    assert found == [(len(SOURCES) + 1) * ITEM * PIECE_ELEMENTS] * 2


def test_what_is_counted_is_what_python_and_numpy_allocate(tmp_path, counters):
    project = large_project(tmp_path, CASES["additive"], 2)
    build(project, counters)  # imports, and what is kept once for all
    project.set_output("m", {"base": "base", **CASES["additive"].changed})
    counters.clear()
    tracemalloc.start()
    try:
        project.build_one("m", workers=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counters.buffer_bytes <= peak < counters.buffer_bytes + (3 << 20)
