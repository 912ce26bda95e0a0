"""Laws 1, 2, 3, 4 and 6 of budgets, through real builds: what is left out counts as zero, and nothing else changes."""

import numpy as np
import pytest
from laws.test_every_operator import SHAPES, family, make
from support.budgets import levels, limit, percent, selected, with_budget
from support.every_operator import RECIPES
from support.projects import TINY, Messages, Reads, SmallProject, tensor_range
from support.quick import every
from support.reference import assert_same_tensors

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.statistics import forget_statistics
from mergepipe.errors import InternalError, LockDiffersError
from mergepipe.lockfile.reader import read_lock

NAMES = sorted(name for name, recipe in RECIPES.items() if recipe["operator"] != "passthrough")
SHARES = (0, 7, 30, 60, 90)
BYTES = 2  # of an element of the sources
# Thresholds and coefficients of the others are those of the full read.
LOCAL = ["dare_linear", "linear", "nearswap", "ram", "task_arithmetic"]


def budgeted(root, name, budget, **options):
    """Return a project with one output `m`, a recipe under a budget."""
    project = make(root, name, **options)
    project.set_output("m", project.outputs["m"] | {"base": "base", "budget": budget})
    return project


def block_rows(shape):
    """Return the rows of the geometry of a tensor: 64 elements in a block."""
    length = shape[-1] if len(shape) > 1 else 1
    return max(1, TINY.block_elements // length), length


def distance(first, second):
    """Return the Frobenius norm of the difference of two checkpoints."""
    squares = [
        np.sum((np.asarray(first[name], np.float64) - np.asarray(second[name], np.float64)) ** 2) for name in first
    ]
    return float(np.sqrt(sum(squares)))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a function from a recipe to its full read and the same under every share, in one cache."""
    made = {}

    def build(name):
        if name not in made:
            project = make(tmp_path_factory.mktemp("budgets") / "project", name)
            project.set_output("m", project.outputs["m"] | {"base": "base"})
            project.build()
            full = project.tensors("m")
            found = {}
            for share in SHARES:
                report = with_budget(project, percent(share)).build_one("m")
                found[share] = (report, project.tensors("m"), selected(project))
            made[name] = (full, found)
        return made[name]

    return build


# --- law 1 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every(NAMES))
def test_a_full_budget_gives_the_full_read_bit_for_bit(tmp_path, name):
    full = make(tmp_path / "full", name)
    full.set_output("m", full.outputs["m"] | {"base": "base"})
    report = full.build_one("m")
    want, digest = full.raw("m"), full.open().plan().outputs["m"].digest
    total = report.expert_bytes["full"]
    for number, budget in enumerate(
        ({"expert_reads": "100%"}, limit(total), limit(total - 1), percent(99.9))
    ):
        project = full.clone(tmp_path / str(number))
        with_budget(project, budget)
        planned = project.open().plan().outputs["m"]
        assert (planned.index_bytes_read > 0) == (number >= 2)  # nothing is measured where there is nothing to choose
        assert (planned.bound.kind, planned.digest) == ("exact", digest)
        found = project.build_one("m")
        assert project.raw("m") == want
        assert found.bound.kind == "exact"
        if number == 0:
            assert project.lock.read_text() == full.lock.read_text()


def test_blocks_of_the_full_read_are_reused_under_a_budget_and_the_other_way_round(tmp_path):
    project = make(tmp_path, "linear")
    project.set_output("m", project.outputs["m"] | {"base": "base"})
    project.build()
    report = with_budget(project, percent(85)).build_one("m")
    assert report.blocks["cached"] > 1
    assert report.expert_bytes["read"] < report.expert_bytes["planned"]
    del project.outputs["m"]["budget"]
    project.save()
    again = project.build_one("m")
    assert (again.blocks["computed"], again.expert_bytes["read"]) == (0, 0)


# --- laws 3 and 4 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every(NAMES))
def test_access_sets_nest_and_planned_bytes_stay_within_the_budget(built, name):
    _, found = built(name)
    before = set()
    for share in SHARES:
        report, _, chosen = found[share]
        assert report.expert_bytes["planned"] <= report.expert_bytes["full"] * share / 100
        assert report.expert_bytes["read"] <= report.expert_bytes["planned"]
        assert before <= chosen
        before = chosen
    bounds = [found[share][0].bound.absolute for share in SHARES]
    assert None in bounds or bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("name", every(NAMES))
def test_the_true_error_is_within_the_bound(built, name):
    full, found = built(name)
    for share in SHARES:
        report, tensors, _ = found[share]
        if report.bound.kind == "none":
            assert report.bound.absolute is None
            continue
        assert report.bound.kind == ("certified" if report.expert_blocks["omitted"] else "exact")
        # The bound is about the formula; float32 steps round besides.
        assert distance(full, tensors) <= report.bound.absolute * (1 + 1e-5) + 1e-4


@pytest.mark.parametrize("name", every(NAMES))
def test_what_the_reader_counts_is_what_was_planned(tmp_path, monkeypatch, name):
    project = budgeted(tmp_path, name, percent(30))
    project.open().plan()  # takes the measurements, and merges nothing
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    experts = [e if isinstance(e, str) else e["source"] for e in project.outputs["m"]["experts"]]
    read = [(start, stop) for e in experts for start, stop in reads.data_ranges(project.source_file(e))]
    assert sum(stop - start for start, stop in read) == report.expert_bytes["read"] == report.expert_bytes["planned"]
    assert report.index_bytes_read == 0
    assert 0 < report.expert_bytes["read"] <= report.expert_bytes["full"] * 0.3


def test_a_build_that_reads_more_than_was_planned_stops_and_publishes_nothing(tmp_path, monkeypatch):
    from mergepipe.engine import meter

    add = meter.Meter.add

    def adding_more(self, other):
        add(self, other)
        self.expert_bytes += 1

    project = budgeted(tmp_path, "task_arithmetic", percent(30))
    monkeypatch.setattr(meter.Meter, "add", adding_more)
    with pytest.raises(InternalError, match="was to read"):
        project.build()
    assert not project.folder("m").exists()
    assert not project.lock.exists()


def test_the_fewest_blocks_within_an_error(tmp_path):
    project = budgeted(tmp_path, "task_arithmetic", {"max_error": 0.2, "precision": "blocks"})
    report = project.build_one("m")
    assert 0 < report.bound.relative_to_update <= 0.2
    fewer = with_budget(project, limit(report.expert_bytes["planned"] - 1)).build_one("m")
    assert fewer.bound.relative_to_update > 0.2
    assert fewer.index_bytes_read == 0


def test_an_error_that_no_bound_is_within_reads_everything_and_says_so(tmp_path):
    project = budgeted(tmp_path, "ties", {"max_error": 1e-9, "precision": "blocks"})
    planned = project.open().plan(["m"]).outputs["m"]
    built = project.build_one("m")
    note = "max_error 1e-09: everything is read, `ties` has no bound that is known to be within it when less is read"
    assert note in planned.notes
    assert built.notes == (note,)
    assert built.expert_blocks["omitted"] == 0
    assert with_budget(project, percent(50)).build_one("m").notes == ()


# --- what is left out is a zero delta -----------------------------------------------------------------------------


def test_the_operators_without_a_reduction_are_these(tmp_path):
    for name in NAMES:
        project = budgeted(tmp_path / name, name, percent(30)).open()
        assert any(project.explain("m", tensor).reduces for tensor in SHAPES) == (name not in LOCAL)


@pytest.mark.parametrize("name", LOCAL)
def test_the_output_is_that_of_experts_that_have_the_bases_bytes_where_they_are_left_out(tmp_path, name):
    project = budgeted(tmp_path / "one", name, percent(30))
    project.build()
    chosen = levels(project)
    sources = family()
    for expert, entry in enumerate(project.outputs["m"]["experts"]):
        source = entry if isinstance(entry, str) else entry["source"]
        for tensor, rows in chosen.items():
            count, length = block_rows(SHAPES[tensor])
            array, base = np.array(sources[source][tensor]), sources["base"][tensor]
            for block, level in enumerate(rows[expert]):
                part = slice(block * count * length, (block + 1) * count * length)
                if not level:
                    array.reshape(-1)[part] = base.reshape(-1)[part]
            sources[source] = sources[source] | {tensor: array}
    other = make(tmp_path / "two", name, sources=sources)
    other.build()
    assert any(0 in row for rows in chosen.values() for row in rows)
    assert_same_tensors(project.tensors("m"), other.tensors("m"), zero_signs=False)


@pytest.mark.parametrize("name", ["task_arithmetic", "linear", "ties", "dare_linear"])
def test_without_any_expert_every_block_is_copied_from_the_base(tmp_path, name):
    project = make(tmp_path, name)
    recipe = {key: value for key, value in project.outputs["m"].items() if key != "write"}
    project.set_output("m", recipe | {"base": "base", "budget": percent(0)})
    report = project.build_one("m")
    # All experts equal the base in one block: nothing is left out there, and an average of it is computed.
    computed = 1 if name == "linear" else 0
    assert (report.blocks["computed"], report.expert_bytes["read"]) == (computed, 0)
    assert report.blocks["copied"] == report.blocks["total"] - computed
    assert_same_tensors(project.tensors("m"), family()["base"], zero_signs=False)


def test_an_average_that_is_no_average_is_computed_from_the_base(tmp_path):
    project = make(tmp_path, "linear")
    project.set_output(
        "m", project.outputs["m"] | {"base": "base", "params": {"normalize": False}, "budget": percent(0)}
    )
    report = project.build_one("m")
    assert (report.blocks["computed"], report.expert_bytes["read"]) == (report.blocks["total"], 0)
    for name, base in family()["base"].items():
        np.testing.assert_allclose(project.tensors("m")[name], np.asarray(base, np.float64) * 1.4, rtol=1e-6)


def test_neighbours_in_the_access_set_are_read_in_one_go(tmp_path, monkeypatch):
    sources = {"base": {"w": np.zeros((16, 16), np.float32)}, "e": {"w": np.ones((16, 16), np.float32)}}
    sources["e"]["w"][4:12] = 5  # the second and third of four blocks
    project = SmallProject(tmp_path)
    for name, tensors in sources.items():
        project.add_source(name, tensors)
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e"], "budget": percent(50)}
    project.set_output("m", recipe)
    project.open().plan()
    reads = Reads(monkeypatch)
    project.build()
    start, _ = tensor_range(project.source_file("e"), "w")
    assert reads.data_ranges(project.source_file("e")) == [(start + 256, start + 768)]


# --- law 2 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "karcher"])
def test_threads_memory_sharding_and_cache_do_not_matter(tmp_path, name):
    first = budgeted(tmp_path / "first", name, percent(30))
    digest = first.open().plan().outputs["m"].digest
    first.build()
    want = (first.raw("m"), first.lock.read_text())
    assert first.open().plan().outputs["m"].digest == digest
    for number, (workers, memory, shards) in enumerate([(1, None, 3), (8, 1, 2)]):
        other = budgeted(tmp_path / str(number), name, percent(30), shards=shards)
        other.build(workers=workers, memory=memory)
        assert (other.raw("m"), other.lock.read_text()) == want
        assert other.open().plan().outputs["m"].digest == digest


def test_two_outputs_share_measurements_and_reads(tmp_path):
    project = budgeted(tmp_path, "task_arithmetic", percent(30))
    project.set_output("n", project.outputs["m"] | {"budget": percent(60)})
    report = project.build()
    one, two = report.outputs["m"], report.outputs["n"]
    stored = sum(a.nbytes for tensors in family().values() for a in tensors.values())
    assert one.index_bytes_read + two.index_bytes_read == stored
    assert one.expert_bytes["read"] == one.expert_bytes["planned"]
    assert one.expert_bytes["read"] + two.expert_bytes["read"] == two.expert_bytes["planned"]
    alone = budgeted(tmp_path / "alone", "task_arithmetic", percent(60))
    alone.build()
    assert alone.raw("m") == project.raw("n")


# --- law 6, and what is measured once -----------------------------------------------------------------------------


def test_nothing_changed_nothing_read(tmp_path, monkeypatch):
    project = budgeted(tmp_path, "ties", percent(30))
    first = project.build_one("m")
    reads = Reads(monkeypatch)
    report = project.build("m", locked=True)
    assert report.outputs["m"].state == "unchanged"
    assert not report.lock_changed
    assert all(not reads.data_ranges(project.source_file(source)) for source in ("base", "e1", "e2", "e3"))
    assert report.outputs["m"].bound == first.bound
    assert report.outputs["m"].expert_blocks["omitted"] == first.expert_blocks["omitted"]
    assert project.open().status().outputs["m"].state == "up-to-date"


def test_the_record_knows_the_access_set_when_the_statistics_are_gone(tmp_path):
    project = budgeted(tmp_path, "ties", percent(30))
    planned = what_is_planned(project)
    project.build()
    with project.open()._writing() as (catalog, _):
        assert isinstance(catalog, Catalog)
        forget_statistics(catalog)
    assert project.open().status().outputs["m"].state == "up-to-date"
    report = project.build_one("m")
    assert (report.state, report.index_bytes_read) == ("unchanged", 0)
    assert what_is_planned(project) == planned


def what_is_planned(project):
    """Return the part of a plan that does not depend on what is cached."""
    planned = project.open().plan().outputs["m"]
    experts = {name: (expert.planned, expert.omitted) for name, expert in planned.experts.items()}
    sizes = (planned.expert_bytes["full"], planned.expert_bytes["planned"], planned.base_bytes, planned.expert_blocks)
    return (planned.digest, experts, sizes, planned.bound, planned.losses, planned.expected_error, planned.omitted_mass)


def test_another_budget_measures_nothing_and_computes_only_what_differs(tmp_path, monkeypatch):
    project = budgeted(tmp_path, "task_arithmetic", percent(30))
    project.build()
    monkeypatch.setattr("mergepipe.engine.job.measure_block", None)
    chosen = selected(project)
    assert project.open().status().outputs["m"].state == "up-to-date"
    with_budget(project, percent(40))
    assert project.open().status().outputs["m"].reasons == ("the budget changed: 30% -> 40%",)
    report = project.build_one("m")
    changed = {(tensor, block) for tensor, _, block in selected(project) ^ chosen}
    assert report.index_bytes_read == 0
    assert report.blocks["computed"] == len(changed) < report.blocks["total"]


def test_a_changed_block_is_measured_alone(tmp_path):
    sources = family()
    project = budgeted(tmp_path, "task_arithmetic", percent(30), sources=sources)
    project.build()
    array = sources["e1"]["model.layers.1.mlp.weight"].copy()
    array[1, 7] += 1
    project.add_source("e1", sources["e1"] | {"model.layers.1.mlp.weight": array})
    assert project.open().status().outputs["m"].state == "stale"
    report = project.build_one("m")
    other = budgeted(tmp_path / "clean", "task_arithmetic", percent(30), sources=sources | {
        "e1": sources["e1"] | {"model.layers.1.mlp.weight": array}
    })
    other.build()
    assert (project.raw("m"), project.lock.read_text()) == (other.raw("m"), other.lock.read_text())
    row = 100 * BYTES  # a row is a block here; those of base, e2 and e3 are read again to be compared with it
    assert report.index_bytes_read == sum(a.nbytes for a in sources["e1"].values()) + 3 * row


def test_status_says_what_is_not_known_yet(tmp_path):
    project = make(tmp_path, "task_arithmetic")
    project.build()
    with_budget(project, percent(30))
    assert project.open().status().outputs["m"].reasons == ("which blocks its budget reads is not known yet",)
    messages = Messages()
    report = project.open(reporter=messages).plan()
    assert report.outputs["m"].index_bytes_read > 0
    ((phase, total, done, ended),) = messages.phases
    assert (phase, done, ended) == ("measuring", total, True)
    assert total == sum(array.nbytes for tensors in family().values() for array in tensors.values())
    assert project.open().plan().outputs["m"].index_bytes_read == 0


def test_a_locked_build_of_another_budget_is_refused(tmp_path):
    project = budgeted(tmp_path, "task_arithmetic", percent(30))
    project.build()
    with pytest.raises(LockDiffersError):
        with_budget(project, percent(40)).build(locked=True)
    assert with_budget(project, percent(30)).build(locked=True).outputs["m"].state == "unchanged"


def test_lock_and_manifest_say_what_was_read(tmp_path):
    project = budgeted(tmp_path, "ties", percent(30))
    report = project.build_one("m")
    locked = read_lock(project.lock).output("m")
    assert locked.budget == "30%"
    assert locked.expert_bytes_planned == report.expert_bytes["planned"]
    assert locked.bound["absolute"] == report.bound.absolute
    assert sum(tensor.read for tensor in locked.tensors) == report.expert_blocks["read"]
    chosen = selected(project)
    total = sum(tensor.total for tensor in locked.tensors)
    omitted = sum(row.count(0) for rows in levels(project).values() for row in rows)
    assert (omitted, total) == (report.expert_blocks["omitted"], report.expert_blocks["total"])
    assert len(chosen) >= report.expert_blocks["read"]


def test_a_source_that_was_touched_is_hashed_again_and_nothing_else_happens(tmp_path):
    project = budgeted(tmp_path, "ties", percent(30))
    project.build()
    before = project.raw("m")
    project.source_file("e1").touch()
    assert project.open().status().outputs["m"].reasons == ("source `e1` changed on disk, or was not read before",)
    report = project.build_one("m")
    assert (report.state, report.expert_bytes["read"], report.bytes_written) == ("unchanged", 0, 0)
    assert report.index_bytes_read == sum(array.nbytes for array in family()["e1"].values())
    assert project.raw("m") == before
