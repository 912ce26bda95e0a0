"""Groups and jobs: what is read together, and in which pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import random_tensors
from support.projects import SmallProject

from mergepipe.engine import schedule
from mergepipe.engine.code_reader import adjacent
from mergepipe.engine.meter import Meter
from mergepipe.engine.work import Group, Job, jobs_of


class FixedGroup(Group):
    """A group of so many blocks and bytes."""

    __slots__ = ("_blocks", "_nbytes")

    def __init__(self, blocks, nbytes=0):
        super().__init__(works=(), inputs={})
        self._blocks, self._nbytes = blocks, nbytes

    @property
    def blocks(self):
        return self._blocks

    @property
    def nbytes(self):
        return self._nbytes


@given(st.integers(0, 200), st.integers(1, 50))
def test_jobs_cover_every_block_once_in_order(blocks, size):
    jobs = list(jobs_of(FixedGroup(blocks), size))
    assert [block for job in jobs for block in range(job.start, job.stop)] == list(range(blocks))
    assert all(0 < job.stop - job.start <= size for job in jobs)


@given(st.integers(1, 60), st.integers(0, 10**6), st.integers(1, 20))
def test_progress_adds_up_to_the_whole(blocks, nbytes, size):
    group = FixedGroup(blocks, nbytes)
    assert sum(job.nbytes for job in jobs_of(group, size)) == nbytes


@given(st.lists(st.integers(0, 40), unique=True).map(sorted))
def test_adjacent_blocks_make_one_run(blocks):
    runs = list(adjacent(blocks))
    assert [block for run in runs for block in run] == blocks
    assert all(first.stop < second.start for first, second in itertools.pairwise(runs))


def test_meters_add_up_in_every_count():
    one, two = Meter(), Meter()
    for number, name in enumerate(Meter.__slots__):
        setattr(one, name, number + 1)
        setattr(two, name, 10 * (number + 1))
    one.add(two)
    assert [getattr(one, name) for name in Meter.__slots__] == [11 * (n + 1) for n in range(len(Meter.__slots__))]


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    shapes = {"a": (40, 16), "b": (8, 16), "empty": (0, 4), "scalar": ()}
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, shapes))
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e1"]}
    project.set_output("m", recipe)
    project.set_output("n", recipe | {"experts": ["e2"]})
    project.set_output("unrelated", {"operator": "passthrough", "experts": ["e2"]})
    return project


def jobs_of_build(project, monkeypatch, **options):
    seen = []
    original = schedule.run_job

    def recording(job, scratch):
        seen.append(job)
        return original(job, scratch)

    monkeypatch.setattr(schedule, "run_job", recording)
    project.build(workers=1, **options)
    return seen


def test_tensors_of_one_name_are_worked_on_together_for_all_outputs(project, monkeypatch):
    jobs = jobs_of_build(project, monkeypatch)
    outputs = {tuple(sorted((work.plan.output.name, work.name) for work in job.group.works)) for job in jobs}
    assert outputs == {tuple((output, name) for output in ("m", "n", "unrelated")) for name in ("a", "b", "scalar")}


def test_jobs_are_worked_on_in_the_order_of_tensors(project, monkeypatch):
    jobs = jobs_of_build(project, monkeypatch, memory=1)
    assert [(job.group.works[0].name, job.start) for job in jobs] == [
        *(("a", block) for block in range(10)),
        *(("b", block) for block in range(2)),
        ("scalar", 0),
    ]


def test_a_source_that_no_merge_reads_is_hashed_in_groups_of_its_own(project, monkeypatch):
    experts = [{"source": "e1", "weight": 1.0}, {"source": "e2", "weight": 0.0}]
    project.outputs.clear()
    project.set_output("m", {"operator": "linear", "experts": experts})
    jobs = jobs_of_build(project, monkeypatch)
    alone = [job for job in jobs if not job.group.works]
    assert {key[1] for job in alone for key in job.group.inputs} == {"a", "b", "scalar"}
    assert project.build_one("m").state == "unchanged"


def test_a_job_is_a_plain_value():
    group = FixedGroup(3)
    assert Job(group=group, start=0, stop=1) == Job(group=group, start=0, stop=1)
    assert Job(group=group, start=0, stop=1).reuse
