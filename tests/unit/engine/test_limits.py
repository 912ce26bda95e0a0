"""Job sizes and the memory that they take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import random_tensors
from support.projects import SmallProject
from unit.plan.helpers import plan

from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.engine import files
from mergepipe.engine.limits import JOB_ELEMENTS, block_bytes, job_blocks, peak_memory


@given(st.integers(1, 2**30), st.integers(1, 2**32), st.integers(1, 64), st.none() | st.integers(0, 2**36))
def test_a_job_has_a_block_at_least_and_stays_in_the_memory_that_is_allowed(elements, nbytes, workers, memory):
    blocks = job_blocks(elements, nbytes, workers, memory)
    assert blocks >= 1
    assert blocks == 1 or blocks * elements <= JOB_ELEMENTS
    assert memory is None or blocks == 1 or blocks * nbytes * workers <= memory


def test_without_a_limit_a_job_is_a_read_of_good_size():
    assert job_blocks(2**18, 2**19, 2, None) == 4
    assert job_blocks(2**25, 2**26, 2, None) == 1


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
