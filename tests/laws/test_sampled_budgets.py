"""Budgets by samples (`stats = "sample"`): a build reads samples and what its budget buys, and no more of an expert.

Blocks have 16,384 elements here, of which 512 are the sample.
"""

import numpy as np
import pytest
from support.budgets import levels, selected, with_budget
from support.projects import Messages, Reads, SmallProject, data_start, tensor_range
from support.reference import assert_same_tensors

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.samples import sample_runs
from mergepipe.digest import is_sampled_pin
from mergepipe.errors import LockDiffersError
from mergepipe.lockfile.merge import inconsistencies
from mergepipe.lockfile.reader import read_lock

BLOCK = 16_384
GEOMETRY = Geometry(block_elements=BLOCK)
SHAPES = {
    "model.embed_tokens.weight": (600, 64),
    "model.layers.0.mlp.up_proj.weight": (512, 96),
    "model.layers.0.self_attn.q_proj.weight": (256, 64),
    "model.layers.1.mlp.up_proj.weight": (512, 96),
    "model.norm.weight": (64,),
}
EXPERTS = ("a", "b", "c")
BYTES = 2


def family(seed=0):
    """Return a base and three experts, bf16, whose deltas differ in length from block to block."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    base = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in SHAPES.items()}
    found = {"base": {name: array.astype(ml_dtypes.bfloat16) for name, array in base.items()}}
    for expert in EXPERTS:
        found[expert] = {}
        for name, array in base.items():
            rows = np.exp(rng.normal(0, 1, (array.shape[0],) + (1,) * (array.ndim - 1)))
            tensor = np.exp(rng.normal(0, 1))
            delta = rng.normal(0, 0.002, array.shape) * rows * tensor
            found[expert][name] = (array + delta).astype(np.float32).astype(ml_dtypes.bfloat16)
    return found


def recipe(budget="30%", stats="sample", operator="task_arithmetic", **more):
    experts = [{"source": name, "weight": 0.5} for name in EXPERTS]
    return {
        "operator": operator,
        "base": "base",
        "experts": experts,
        "budget": {"expert_reads": budget, "stats": stats},
    } | more


def make(root, *, output=None, shards=1, sources=None, seed=0):
    """Return a project with one output, `m`."""
    project = SmallProject(root, GEOMETRY)
    for name, tensors in (sources or family(seed)).items():
        project.add_source(name, tensors, shards=shards)
    project.set_output("m", output or recipe())
    return project


def result(project, output="m"):
    """Return all of an output's files but its manifest, which has what a run read, and its lock."""
    folder = project.folder(output)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "mergepipe.json"}
    return files, project.lock.read_bytes()


def row_of(name):
    """Return the elements of a row of a tensor."""
    return SHAPES[name][-1] if len(SHAPES[name]) > 1 else 1


def blocks_of(name):
    """Return the elements of each block of a tensor."""
    shape, row = SHAPES[name], row_of(name)
    rows = BLOCK // row
    return [min(rows, shape[0] - first) * row for first in range(0, shape[0], rows)]


def sample_ranges(path, name):
    """Return the byte ranges of a tensor's samples, from the first data byte of its file on."""
    start, _ = tensor_range(path, name)
    found, at = [], start
    for block, elements in enumerate(blocks_of(name)):
        found += [(at + a * BYTES, at + b * BYTES) for a, b in sample_runs(elements, block, row_of(name))]
        at += elements * BYTES
    return found


def block_range(path, name, block):
    start, _ = tensor_range(path, name)
    sizes = blocks_of(name)
    first = start + sum(sizes[:block]) * BYTES
    return first, first + sizes[block] * BYTES


def test_a_first_build_reads_samples_and_what_the_budget_buys_of_an_expert_and_nothing_else(tmp_path, monkeypatch):
    project = make(tmp_path)
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    chosen = selected(project)
    assert chosen
    for number, expert in enumerate(EXPERTS):
        path = project.source_file(expert)
        wanted = np.zeros(path.stat().st_size - data_start(path), bool)
        for name in SHAPES:
            for first, stop in sample_ranges(path, name):
                wanted[first:stop] = True
        for name, e, block in chosen:
            if e == number:
                first, stop = block_range(path, name, block)
                wanted[first:stop] = True
        found = np.zeros_like(wanted)
        for first, stop in reads.data_ranges(path):
            found[first:stop] = True
        assert (found == wanted).all()
    samples = sum(b - a for name in SHAPES for a, b in sample_ranges(project.source_file("a"), name))
    assert report.index_bytes_read == (len(EXPERTS) + 1) * samples
    planned = sum(blocks_of(name)[block] * BYTES for name, _, block in chosen)
    assert report.expert_bytes["read"] == report.expert_bytes["planned"] == planned
    assert planned <= 0.3 * report.expert_bytes["full"]


def test_what_is_left_out_counts_as_zero(tmp_path):
    project = make(tmp_path)
    project.build()
    tensors, access = project.tensors("m"), levels(project)
    sources = family()
    for name in SHAPES:
        base = sources["base"][name].astype(np.float32)
        expected = base.copy().ravel()
        for number, expert in enumerate(EXPERTS):
            delta = (sources[expert][name].astype(np.float32) - base).ravel()
            at = 0
            for block, elements in enumerate(blocks_of(name)):
                if access[name][number][block]:
                    expected[at : at + elements] += 0.5 * delta[at : at + elements]
                at += elements
        found = tensors[name].astype(np.float32).ravel()
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-6)


def test_nothing_that_makes_no_difference_changes_plan_lock_or_output(tmp_path):
    """Law 2: cold and warm caches, threads, memory, and files that are cut in another way."""
    first = make(tmp_path / "first")
    digest = first.open().plan(["m"]).outputs["m"].digest
    first.build(workers=1)
    expected = result(first)
    assert first.open().plan(["m"]).outputs["m"].digest == digest
    known = first.clone(tmp_path / "known")  # everything of every source is known there
    known.set_output("whole", recipe("100%"))
    known.build("whole")
    for project, options in (
        (known, {}),
        (first.clone(tmp_path / "threads"), {"workers": 8}),
        (first.clone(tmp_path / "memory"), {"memory": 1 << 20}),
        (make(tmp_path / "shards", shards=3), {}),
    ):
        assert project.open(**options).plan(["m"]).outputs["m"].digest == digest
        project.build("m", **options)
        assert result(project)[0] == expected[0]
        lock = read_lock(project.lock)
        assert lock.output("m") == read_lock(first.lock).output("m")


def test_a_second_build_reads_nothing(tmp_path, monkeypatch):
    project = make(tmp_path)
    project.build()
    reads, messages = Reads(monkeypatch), Messages()
    report = project.build_one("m", reporter=messages)
    assert report.state == "unchanged"
    assert project.open().status().outputs["m"].state == "up-to-date"
    assert project.open().plan(["m"]).outputs["m"].bound.kind == "estimated"
    assert not any(reads.data_ranges(project.source_file(name)) for name in project.sources)
    assert not messages.warnings


def test_a_plan_counts_no_hashing_of_experts_that_are_never_read_whole(tmp_path):
    project = make(tmp_path)
    project.build()
    project.set_output("m", recipe() | {"write": {"shard_size": "50 kB"}})  # the same tensors in other files
    planned = project.open().plan()
    built = project.build_one("m")
    assert built.blocks["cached"] == built.blocks["total"]
    assert (planned.exact, sum(planned.reads.values()), built.index_bytes_read) == (True, 0, 0)


def test_a_larger_budget_reads_only_what_it_buys_beyond_the_smaller_one(tmp_path):
    project = make(tmp_path)
    small = project.build_one("m")
    before = selected(project)
    large = with_budget(project, {"expert_reads": "60%", "stats": "sample"}).build_one("m")
    more = selected(project) - before
    assert before < selected(project)
    assert large.index_bytes_read == 0
    assert large.expert_bytes["planned"] - small.expert_bytes["planned"] == sum(
        blocks_of(name)[block] * BYTES for name, _, block in more
    )
    expected = make(tmp_path / "clean", output=recipe("60%"))
    expected.build()
    assert_same_tensors(project.tensors("m"), expected.tensors("m"))
    assert with_budget(project, {"expert_reads": "30%", "stats": "sample"}).build_one("m").expert_bytes["read"] == 0
    assert selected(project) == before


def test_a_full_budget_is_the_full_read(tmp_path):
    """Law 1, also where the budget only happens to reach as far."""
    sampled, whole = make(tmp_path / "sampled", output=recipe("100%")), make(tmp_path / "whole", output=recipe())
    whole.outputs["m"].pop("budget")
    whole.save()
    for project in (sampled, whole):
        project.build()
    assert result(sampled) == result(whole)
    sampled.set_output("m", recipe("100 MB"))
    sampled.build()
    assert_same_tensors(sampled.tensors("m"), whole.tensors("m"))


def test_the_lock_pins_experts_by_fingerprint_and_the_base_by_content(tmp_path):
    project = make(tmp_path)
    project.build()
    lock = read_lock(project.lock)
    assert {source.name: is_sampled_pin(source.digest) for source in lock.sources} == {
        "base": False, "a": True, "b": True, "c": True,
    }  # fmt: skip
    assert {name: is_sampled_pin(pin) for name, pin in lock.output("m").sources.items()} == {
        "base": False, "a": True, "b": True, "c": True,
    }  # fmt: skip
    assert lock.output("m").bound["kind"] == "estimated"
    assert lock.output("m").budget == "30% by samples"
    clone = project.clone(tmp_path / "clone")
    clone.lock.write_bytes(project.lock.read_bytes())
    clone.build(locked=True)
    assert clone.lock.read_bytes() == project.lock.read_bytes()


def changed_in(sources, expert, name, at):
    """Return the sources with one element of a tensor changed."""
    changed = {source: dict(tensors) for source, tensors in sources.items()}
    array = changed[expert][name].copy()
    array.ravel()[at] += 1
    changed[expert][name] = array
    return changed


def places(project, *, read):
    """Return (expert, tensor, flat index) of an element outside samples, in a block that is read or left out."""
    chosen = selected(project)
    for number, expert in enumerate(EXPERTS):
        for name in SHAPES:
            at = 0
            for block, elements in enumerate(blocks_of(name)):
                runs = sample_runs(elements, block, row_of(name))
                outside = [i for i in (0, elements - 1) if not any(a <= i < b for a, b in runs)]
                if outside and ((name, number, block) in chosen) == read:
                    yield expert, name, at + outside[0]
                at += elements


def test_a_build_of_everything_writes_a_lock_that_does_not_contradict_itself(tmp_path):
    """Pins go from samples to content and back as outputs that read a source whole come and go."""
    project = make(tmp_path)
    whole = {"operator": "linear", "experts": ["a", "b"]}
    for changes in ({}, {"whole": whole}, {"whole": whole, "n": recipe("10%")}, {"n": recipe("10%")}):
        project.outputs = {"m": project.outputs["m"], **changes}
        project.save()
        project.build()
        lock = read_lock(project.lock)
        assert list(inconsistencies(lock)) == []
        assert is_sampled_pin(lock.source("a").digest) == ("whole" not in changes)
        project.build(locked=True)


def test_a_change_of_what_is_never_read_changes_nothing(tmp_path):
    project = make(tmp_path)
    project.build()
    before = result(project)
    expert, name, at = next(places(project, read=False))
    project.add_source(expert, changed_in(family(), expert, name, at)[expert])
    assert project.open().status().outputs["m"].state == "stale"  # the file is another one
    report = project.build_one("m", locked=True)
    assert report.expert_bytes["read"] + report.index_bytes_read > 0
    assert result(project) == before


def test_a_change_of_what_is_read_changes_the_output_and_locked_says_so(tmp_path):
    project = make(tmp_path)
    project.build()
    before = project.tensors("m")
    expert, name, at = next(places(project, read=True))
    sources = changed_in(family(), expert, name, at)
    project.add_source(expert, sources[expert])
    with pytest.raises(LockDiffersError, match="digest"):
        project.build(locked=True)
    project.build()
    assert (project.tensors("m")[name] != before[name]).any()
    clean = make(tmp_path / "clean", sources=sources)
    clean.build()
    assert result(project) == result(clean)


def test_outputs_that_share_sources_are_what_they_are_alone(tmp_path):
    """One reads its experts whole, one by samples and one by exact statistics, in one build and in any order."""
    outputs = {"m": recipe(), "whole": recipe(), "exact": recipe("30%", "full"), "ties": recipe(operator="ties")}
    outputs["whole"].pop("budget")
    together = make(tmp_path / "together")
    for name, output in outputs.items():
        together.set_output(name, output)
    together.build()
    reverse = together.clone(tmp_path / "reverse")
    for name in reversed(outputs):
        reverse.build(name)
    assert reverse.lock.read_bytes() == together.lock.read_bytes()
    for name, output in outputs.items():
        alone = make(tmp_path / f"alone-{name}", output=output)
        alone.build()
        assert_same_tensors(together.tensors(name), alone.tensors("m"))
        assert_same_tensors(reverse.tensors(name), alone.tensors("m"))


@pytest.mark.parametrize("operator", ["ties", "dare_linear", "linear", "slerp", "model_stock", "dare_ties", "ram"])
def test_every_kind_of_operator_has_thresholds_and_coefficients_of_the_full_read(tmp_path, operator):
    """What needs whole tensors reads them; the others go by samples; each is the same again from nothing."""
    more = {"slerp": {"params": {"t": 0.5}}, "ties": {"params": {"density": 0.5}}}.get(operator, {})
    experts = EXPERTS[:1] if operator == "slerp" else EXPERTS
    plain = ["slerp", "model_stock", "ram"]
    output = recipe(operator=operator) | more
    output["experts"] = [name if operator in plain else {"source": name, "weight": 0.5} for name in experts]
    if operator.startswith("dare"):
        output["params"] = {"density": 0.5, "seed": 1}
    project = make(tmp_path / "first", output=output)
    report = project.build_one("m")
    assert report.expert_bytes["read"] <= report.expert_bytes["planned"] <= 0.3 * report.expert_bytes["full"]
    again = project.clone(tmp_path / "again")
    again.build()
    assert result(again) == result(project)


def test_an_expert_that_equals_the_base_is_read_as_planned_and_gives_the_base(tmp_path):
    sources = family()
    sources["b"] = sources["base"]
    project = make(tmp_path, sources=sources, output=recipe("90%"))
    report = project.build_one("m")
    assert report.expert_bytes["read"] <= report.expert_bytes["planned"]
    assert project.build_one("m").state == "unchanged"
    full = make(tmp_path / "full", sources=sources, output=recipe("90%", "full"))
    full.build()
    assert project.manifest("m").output.tensors[0].total == full.manifest("m").output.tensors[0].total


@pytest.mark.parametrize("stats", ["full", "sample"])
def test_experts_in_another_order_are_not_measured_again(tmp_path, stats):
    project = make(tmp_path, output=recipe("30%", stats))
    first = project.build_one("m")
    before = project.tensors("m")
    project.set_output("m", project.outputs["m"] | {"experts": project.outputs["m"]["experts"][::-1]})
    again = project.build_one("m")
    assert first.index_bytes_read > 0
    assert again.index_bytes_read == 0
    for name, array in project.tensors("m").items():
        np.testing.assert_allclose(array.astype(np.float32), before[name].astype(np.float32), rtol=2**-7, atol=1e-6)


def test_experts_that_are_the_same_are_not_estimated_to_change_more_than_both_together(tmp_path):
    sources = family()
    sources["c"] = sources["a"]
    project = make(tmp_path, sources=sources)
    nothing = project.open().sweep("m", ["0%"])
    bound = nothing.points[0].bound
    assert bound.absolute >= nothing.update * (1 - 1e-9)
    measured = project.open().sweep("m", ["0%"], measure=True)
    assert abs(measured.points[0].deviation.length.relative_to_update - 1) < 1e-9
    assert abs(nothing.update / measured.update - 1) < 0.3
