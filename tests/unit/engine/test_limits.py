"""Job sizes and the memory that they take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import random_tensors
from support.projects import SmallProject
from unit.plan.helpers import plan

from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.engine import files
from mergepipe.engine.limits import (
    JOB_ELEMENTS,
    PIECE_ELEMENTS,
    block_bytes,
    job_blocks,
    job_sizes,
    kept_blocks,
    kept_bytes,
    peak_memory,
)


@given(st.integers(1, 2**30), st.integers(1, 2**32), st.integers(1, 64), st.none() | st.integers(0, 2**36))
def test_a_job_has_a_block_at_least_and_stays_in_the_memory_that_is_allowed(elements, nbytes, workers, memory):
    blocks = job_blocks(elements, nbytes, workers, memory)
    assert blocks >= 1
    assert blocks == 1 or blocks * elements <= JOB_ELEMENTS
    assert memory is None or blocks == 1 or blocks * nbytes * workers <= memory


def test_without_a_limit_a_job_is_a_read_of_good_size():
    assert job_blocks(2**18, 2**19, 2, None) == 4
    assert job_blocks(2**25, 2**26, 2, None) == 1


def test_a_job_without_a_limit_goes_through_several_pieces_of_one_size():
    sizes = job_sizes([], [grid("BF16", (4096, 1024), Geometry())], 2, None)
    assert sizes.piece * 2**18 == PIECE_ELEMENTS
    assert sizes.piece < sizes.whole < sizes.blocks


@given(st.integers(0, 2**20))
def test_with_a_limit_no_job_has_more_in_memory_than_one_that_takes_its_blocks_at_once(memory):
    sizes = job_sizes([], [grid("BF16", (4096, 1024), Geometry())], 2, memory)
    assert sizes.piece <= sizes.whole == sizes.blocks


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([4, 16])), max_size=5), st.integers(0, 20_000))
def test_a_group_keeps_as_many_blocks_of_each_input_as_half_of_the_limit_takes(shapes, limit):
    grids = [grid("F32", shape, Geometry(block_elements=64)) for shape in shapes]
    count = kept_blocks(grids, limit)
    assert kept_bytes(grids, count) <= limit // 2
    assert count == max((one.count for one in grids), default=0) or kept_bytes(grids, count + 1) > limit // 2


@pytest.mark.parametrize(("shape", "size"), [((100, 16), 4 * 64), ((3, 16), 4 * 64), ((1, 500), 2000), ((7,), 256)])
def test_a_full_block_counts_whole(shape, size):
    assert block_bytes(grid("F32", shape, Geometry(block_elements=64))) == size


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, {"w": (400, 16)}))
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1", "e2"]})
    return project


def test_the_estimate_grows_with_workers_and_shrinks_with_the_limit(project):
    found = [plan(project)]
    assert peak_memory(found, 1, None) < peak_memory(found, 4, None)
    assert peak_memory(found, 4, 4096) < peak_memory(found, 4, None)
    assert peak_memory(found, 4, 1) == peak_memory(found, 4, 2)


@pytest.mark.parametrize(
    ("workers", "memory", "largest"), [(1, None, 100), (1, 4096, 4), (2, 4096, 2), (4, 4096, 1), (2, 1, 1)]
)
def test_no_read_is_larger_than_the_limit_allows(project, monkeypatch, workers, memory, largest):
    sizes = []
    original = files.pread_into

    def reading(fd, buffer, offset, *, path):
        sizes.append(len(buffer))
        original(fd, buffer, offset, path=path)

    monkeypatch.setattr(files, "pread_into", reading)
    project.build(workers=workers, memory=memory)
    assert max(sizes) == largest * 256  # four inputs and outputs of a block are 1024 bytes
    project.check("m")
