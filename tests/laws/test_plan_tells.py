"""What `plan` says of the next build is what that build reports: reads, blocks, bytes written; or else a limit."""

from __future__ import annotations

import shutil

import pytest
from support.adapters import add_adapter, factors
from support.checkpoints import random_tensors
from support.projects import SmallProject, edit_tensor

# Blocks of 64 elements: `a` and `b` have four each, `v` one.
SHAPES = {"model.layers.0.a": (16, 16), "model.layers.1.b": (16, 16), "model.v": (64,)}
A, B, V = SHAPES
BLOCKS, BYTES = 9, 4 * 576
EXPERTS = ("e1", "e2", "e3")
OPERATORS = ("linear", "task_arithmetic", "ties", "dare_ties", "model_stock")


def family(seed, near=None):
    """Return the tensors of a base, or of an expert near it."""
    found = random_tensors(seed, SHAPES)
    return found if near is None else {name: near[name] + 0.1 * value for name, value in found.items()}


def make(root, operator="task_arithmetic", **recipe):
    project = SmallProject(root)
    base = family(0)
    project.add_source("base", base)
    for seed, name in enumerate(EXPERTS, start=1):
        project.add_source(name, family(seed, base))
    project.set_output("m", {**with_operator(operator), "base": "base", "experts": list(EXPERTS), **recipe})
    return project


def with_operator(operator):
    """Return the part of a recipe that names an operator; `ties` keeps half, which takes statistics."""
    return {"operator": operator, "params": {"density": 0.5} if operator == "ties" else {}}


@pytest.fixture
def project(tmp_path):
    return make(tmp_path)


def told(planned):
    """Return what a plan says that a build reports."""
    build = planned.next_build
    counts = (build.expert_bytes, build.base_bytes, build.index_bytes, build.written)
    return (*counts, *(planned.blocks[key] for key in ("computed", "cached", "copied")))


def done(built):
    """Return what a build reports of that."""
    counts = (built.expert_bytes["read"], built.base_bytes_read, built.index_bytes_read, built.bytes_written)
    return (*counts, *(built.blocks[key] for key in ("computed", "cached", "copied")))


def step(project, *outputs, **options):
    """Plan and build; check the one against the other, output by output, and return the plans."""
    report = project.open(**options).plan(outputs)
    plans = report.outputs
    # What measuring for a budget reads, `plan` has read by then.
    builds = project.build(*outputs, **options).outputs
    assert plans.keys() == builds.keys()
    for name, planned in plans.items():
        built, build = builds[name], planned.next_build
        assert planned.expert_bytes["planned"] == built.expert_bytes["planned"]
        assert planned.expert_bytes["full"] == built.expert_bytes["full"]
        assert build.unchanged == (built.state == "unchanged"), name
        assert planned.expert_bytes["to_read"] == sum(expert.to_read for expert in planned.experts.values())
        for expert in planned.experts.values():
            assert expert.cached + expert.to_read <= expert.planned <= expert.full
        if build.exact:
            assert told(planned) == done(built), name
        else:
            assert build.expert_bytes >= built.expert_bytes["read"]
            assert build.written >= built.bytes_written
    read = sum(built.expert_bytes["read"] for built in builds.values())
    assert report.reads["expert_bytes"] == read if report.exact else report.reads["expert_bytes"] >= read
    everything = sum(report.reads.values())
    assert everything >= sum(b.expert_bytes["read"] + b.base_bytes_read + b.index_bytes_read for b in builds.values())
    return plans


def of(plans, name="m"):
    """Return what is left to read of each expert, and what is cached."""
    return {name: (expert.to_read, expert.cached) for name, expert in plans[name].experts.items()}


def change(project, expert, tensor, index=0):
    edit_tensor(project.source_file(expert), tensor, index, 9.5)


# --- one output ---------------------------------------------------------------------------------------------------


def test_of_a_family_that_was_never_read_all_is_read_once_to_merge_and_to_index(project):
    planned = step(project)["m"]
    assert not planned.next_build.exact
    assert planned.next_build.unindexed == dict.fromkeys(("base", *EXPERTS), BYTES)
    assert told(planned) == (3 * BYTES, BYTES, 0, BYTES, BLOCKS, 0, 0)
    assert [expert.indexed for expert in planned.experts.values()] == [False] * 3
    assert of({"m": planned}) == dict.fromkeys(EXPERTS, (BYTES, 0))


@pytest.mark.parametrize("operator", OPERATORS)
def test_of_an_output_that_is_up_to_date_all_is_cached_and_nothing_is_read(tmp_path, operator):
    project = make(tmp_path, operator)
    project.build()
    planned = step(project)["m"]
    assert of({"m": planned}) == dict.fromkeys(EXPERTS, (0, BYTES))
    assert told(planned) == (0, 0, 0, 0, 0, BLOCKS, 0)
    assert planned.seconds == 0


def test_of_a_changed_tensor_its_file_is_read_to_index_it_and_the_rest_of_the_merge_is_cached(project):
    project.build()
    change(project, "e2", B)
    planned = step(project)["m"]
    assert planned.next_build.unindexed == {"e2": BYTES}
    assert planned.experts["e2"].indexed is False
    # The changed file is indexed by another output's build: from then on the figures are exact.
    project.set_output("other", {"operator": "passthrough", "experts": ["e2"]})
    change(project, "e2", A)
    project.build("other")
    planned = step(project)["m"]
    assert planned.next_build.exact
    assert of({"m": planned}) == dict.fromkeys(EXPERTS, (256, BYTES - 256))
    assert told(planned)[4:] == (1, BLOCKS - 1, 0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_of_a_replaced_expert_the_merge_is_read_again(tmp_path, operator):
    project = make(tmp_path, operator)
    project.build()
    project.add_source("e3", family(7, family(0)))
    step(project)
    step(project)


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties"])
def test_of_new_weights_all_that_is_merged_is_read_again_and_nothing_to_index(tmp_path, operator):
    project = make(tmp_path, operator)
    project.build()
    rule = {"match": "*.a", "params": {"lambda": 0.5}}
    project.set_output("m", project.outputs["m"] | {"rules": [rule]})
    planned = step(project)["m"]
    assert planned.next_build.exact
    assert of({"m": planned}) == dict.fromkeys(EXPERTS, (1024, BYTES - 1024))


def test_of_a_statistic_that_is_missing_what_is_merged_after_it_is_an_upper_limit(tmp_path):
    project = make(tmp_path)
    project.build()
    project.set_output("m", project.outputs["m"] | with_operator("ties"))
    planned = step(project)["m"]
    assert not planned.next_build.exact
    assert told(planned)[:3] == (3 * BYTES, BYTES, 0)


@pytest.mark.parametrize("limit", [None, 600])
def test_of_statistics_that_do_not_stay_in_memory_the_second_reading_is_told(tmp_path, limit):
    project = make(tmp_path, "ties")
    project.build(memory=limit)
    project.set_output("m", project.outputs["m"] | with_operator("dare_ties"))
    step(project, memory=limit)
    project.set_output("m", project.outputs["m"] | with_operator("model_stock"))
    planned = project.open(memory=limit).plan().outputs["m"]
    built = project.build_one("m", memory=limit)
    assert planned.next_build.index_bytes == built.index_bytes_read
    assert (built.index_bytes_read > 0) == (limit is not None)


def test_as_many_blocks_are_kept_between_passes_as_there_is_memory_for(tmp_path):
    """Half of the limit may be kept, a tensor takes half of that: `a` and `b` have four inputs of four blocks."""
    inputs, read = 4 * 256, {}
    for kept in range(5):
        project = make(tmp_path / str(kept), "model_stock")
        limit = 4 * kept * inputs + 2048
        planned = project.open(memory=limit).plan().outputs["m"].next_build
        built = project.build_one("m", memory=limit, workers=1)
        assert (built.expert_bytes["read"], built.base_bytes_read) == (3 * BYTES, BYTES)
        assert planned.index_bytes == built.index_bytes_read
        read[kept] = (built.index_bytes_read, built.digest)
    whole = [4 * 2 * (4 - kept) * 256 + (0 if kept else inputs) for kept in range(5)]
    assert [count for count, _ in read.values()] == whole
    assert len({digest for _, digest in read.values()}) == 1


def test_zero_deltas_and_equal_experts_are_not_read(tmp_path):
    project = make(tmp_path)
    base = family(0)
    same = family(1, base)
    project.add_source("e2", same)
    project.add_source("e3", {**base, V: same[V]})
    project.set_output("index", {"operator": "linear", "experts": list(EXPERTS)})
    project.set_output("more", {"operator": "passthrough", "experts": ["base"]})
    project.build("index")
    project.build("more")
    planned = step(project, "m")["m"]
    assert planned.next_build.exact
    assert of({"m": planned}) == {"e1": (BYTES, 0), "e2": (0, 0), "e3": (0, 0)}


def test_what_a_killed_build_left_in_staging_is_not_read_again(project, monkeypatch):
    from mergepipe.engine import run

    finish = run.ShardFinisher.finish

    def killed(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.ShardFinisher, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        project.build()
    monkeypatch.setattr(run.ShardFinisher, "finish", finish)
    planned = step(project)["m"]
    assert planned.next_build.exact
    assert told(planned) == (0, 0, 0, 0, 0, BLOCKS, 0)


def test_packs_that_are_gone_are_made_again(project):
    project.build()
    for pack in (project.cache / "packs").iterdir():
        pack.unlink()
    shutil.rmtree(project.folder("m"))
    planned = step(project)["m"]
    assert told(planned)[:3] == (3 * BYTES, BYTES, 0)


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties"])
@pytest.mark.parametrize("changed", [(), ("source",), ("rule",), ("source", "rule")])
def test_what_lay_in_packs_that_somebody_removed_is_read_once_for_all_outputs(tmp_path, operator, changed):
    """The catalog has their rows still: nothing of that is taken for a result, or looked for when all was merged."""
    project = make(tmp_path, operator)
    project.set_output("n", {"operator": "linear", "experts": list(EXPERTS)})
    project.build()
    for name in ("m", "n"):
        shutil.rmtree(project.folder(name))
    for pack in (project.cache / "packs").iterdir():
        pack.unlink()
    if "source" in changed:
        change(project, "e1", A)
    if "rule" in changed:
        for name in ("m", "n"):
            project.outputs[name] |= {"rules": [{"match": "*.a", "params": {"weight": 0.5}}]}
        project.save()
    report, builds = project.open().plan(), project.build().outputs
    assert sum(report.reads.values()) == (1 + len(EXPERTS)) * BYTES
    assert sum(sum(done(built)[:3]) for built in builds.values()) == (1 + len(EXPERTS)) * BYTES


# --- budgets ------------------------------------------------------------------------------------------------------


def test_outputs_whose_packs_were_removed_by_hand_share_what_they_read_again(project):
    budget = {"expert_reads": "50%", "precision": "blocks"}
    project.set_output("n", project.outputs["m"] | {"experts": ["e1", "e2"], "budget": budget})
    project.open().plan()
    step(project)
    for pack in (project.cache / "packs").iterdir():
        pack.unlink()
    edit_tensor(project.source_file("e1"), A, 3, 9.0)
    project.set_output("m", project.outputs["m"] | {"experts": ["e1"]})
    project.build("m")
    for pack in (project.cache / "packs").iterdir():
        pack.unlink()
    edit_tensor(project.source_file("e1"), V, 3, 9.0)
    report = project.open().plan()  # it measures the deltas of `n`, so that all content is known
    builds = project.build().outputs
    assert report.exact
    assert sum(report.reads.values()) == sum(sum(done(build)[:3]) for build in builds.values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_of_a_pack_that_was_removed_by_hand_nothing_is_read_a_second_time(tmp_path, operator):
    project = make(tmp_path / "known", operator)
    step(project)
    edit_tensor(project.source_file("e1"), A, 3, 9.0)
    for pack in (project.cache / "packs").iterdir():
        pack.unlink()
    report = project.open().plan()
    built = project.build().outputs["m"]
    assert sum(done(built)[:3]) <= sum(report.reads.values())
    assert built.expert_bytes["read"] == 3 * BYTES
    fresh = project.clone(tmp_path / "fresh")
    fresh.build()
    assert project.raw("m") == fresh.raw("m")


@pytest.mark.parametrize("operator", OPERATORS)
def test_budgets_that_grow_and_shrink_read_what_their_blocks_need(tmp_path, operator):
    project = make(tmp_path, operator)
    for share in ("10%", "25%", "60%", "100%", "25%"):
        project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": share, "precision": "blocks"}})
        planned = step(project)["m"]
        assert planned.next_build.exact or share == "100%"
        assert planned.expert_bytes["planned"] <= 3 * BYTES
        again = step(project)["m"]
        assert again.expert_bytes["cached"] == again.expert_bytes["planned"]


def test_under_a_budget_the_first_plan_measures_and_the_build_reads_what_is_planned(project):
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "25%", "precision": "blocks"}})
    planned = step(project)["m"]
    assert planned.index_bytes_read == 4 * BYTES
    assert planned.expert_bytes["to_read"] == planned.expert_bytes["planned"] <= 3 * BYTES // 4
    assert sum(expert.omitted for expert in planned.experts.values()) == planned.expert_blocks["omitted"]
    assert sum(expert.blocks for expert in planned.experts.values()) == planned.expert_blocks["total"]


def test_a_budgeted_output_with_one_changed_block_reads_for_that_block(project):
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "60%", "precision": "blocks"}})
    project.build()
    change(project, "e1", B, 70)
    planned = step(project)["m"]
    assert planned.next_build.exact, "measuring has indexed it"
    assert planned.expert_bytes["to_read"] < planned.expert_bytes["planned"] // 2


def test_what_measuring_finds_unchanged_is_unchanged_for_all_outputs(project):
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "25%", "precision": "blocks"}})
    project.set_output("n", {"operator": "linear", "experts": ["e1", "e2"]})
    project.build()
    project.open().cache_prune(max_bytes=0)
    project.add_source("e1", family(1, family(0)))
    planned = step(project)
    assert planned["m"].index_bytes_read > 0
    assert planned["n"].next_build.unchanged


def test_losses_have_their_share_of_the_error(project):
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "25%", "precision": "blocks"}})
    losses = project.open().plan().outputs["m"].losses
    assert losses
    assert sum(loss.error_share for loss in losses) == pytest.approx(1.0)
    assert [loss.error_share for loss in losses] == sorted((loss.error_share for loss in losses), reverse=True)


def test_of_what_samples_stand_for_nothing_is_read_to_index_it(project):
    budget = {"expert_reads": "40%", "precision": "blocks", "stats": "sample"}
    project.set_output("m", project.outputs["m"] | {"budget": budget})
    project.build()
    shutil.rmtree(project.folder("m"))
    planned = step(project)["m"]
    assert planned.next_build.exact
    assert told(planned) == (0, 0, 0, 0, 0, BLOCKS, 0)


# --- several outputs, stages, adapters ----------------------------------------------------------------------------


def test_outputs_that_share_reads_tell_them_once_together_and_each_alone(project):
    project.set_output("n", {"operator": "linear", "experts": ["e1", "e2"]})
    project.set_output("t", {**with_operator("ties"), "base": "base", "experts": list(EXPERTS)})
    step(project)
    for name in ("m", "n", "t"):
        params = {"normalize": name != "n"} | ({"density": 0.25} if name == "t" else {})
        project.set_output(name, project.outputs[name] | {"params": params})
    alone = project.open().plan(["n"]).outputs["n"]
    assert alone.expert_bytes["to_read"] == 2 * BYTES
    together = step(project)
    assert together["n"].expert_bytes["to_read"] == 0
    change(project, "e1", A)
    step(project)


def test_stages_that_are_there_are_exact_and_those_that_are_not_give_limits(project):
    project.set_output("n", {"operator": "linear", "base": "base", "experts": ["m", "e3"]})
    planned = step(project)
    assert not planned["n"].next_build.exact
    assert planned["n"].next_build.unindexed.keys() == {"base", "e3"}, "a stage is known when it is built"
    project.set_output("n", project.outputs["n"] | {"experts": ["m", {"source": "e3", "weight": 0.5}]})
    planned = step(project)
    assert planned["m"].next_build.unchanged
    assert planned["n"].next_build.exact
    assert of(planned, "n") == {"m": (BYTES, 0), "e3": (BYTES, 0)}


def test_a_stage_whose_packs_are_gone_is_built_again_where_it_is_read(project):
    project.set_output("m", project.outputs["m"] | {"publish": False})
    project.set_output("n", {"operator": "linear", "base": "base", "experts": ["m", "e3"]})
    project.build()
    project.open().cache_prune(max_bytes=0)
    assert project.open().plan().outputs["m"].next_build.unchanged
    project.set_output("n", project.outputs["n"] | {"params": {"normalize": False}})
    planned = project.open().plan().outputs["m"]
    built = project.build_one("m") if planned.next_build.unchanged else project.build().outputs["m"]
    assert (planned.next_build.expert_bytes, planned.next_build.base_bytes) == (
        built.expert_bytes["read"],
        built.base_bytes_read,
    )
    assert planned.next_build.expert_bytes == 3 * BYTES


def test_a_stage_whose_packs_are_gone_is_not_built_again_for_what_turns_out_to_be_unchanged(project):
    """Another stage is made from a file that was written anew: what it comes to, nobody knows before."""
    project.set_output("m", project.outputs["m"] | {"experts": ["e1", "e2"], "publish": False})
    project.set_output("other", {"operator": "passthrough", "experts": ["e3"]})
    project.set_output("n", {"operator": "linear", "base": "base", "experts": ["m", "other"]})
    project.build()
    project.open().cache_prune(max_bytes=0)
    project.add_source("e3", family(3, family(0)))
    planned = step_of_stages(project)
    assert not planned["m"].next_build.exact
    # What is certain to be read is certain to be built again.
    project.set_output("n", project.outputs["n"] | {"params": {"normalize": False}})
    again = step_of_stages(project)["m"].next_build
    assert again.exact
    assert again.expert_bytes > 0


def step_of_stages(project):
    """Plan and build; check what is told of stages, which are called unchanged where they are built again."""
    plans, builds = project.open().plan().outputs, project.build().outputs
    for name, planned in plans.items():
        if planned.next_build.exact:
            assert told(planned)[:4] == done(builds[name])[:4], name
        else:
            assert sum(told(planned)[:3]) >= sum(done(builds[name])[:3])
    return plans


@pytest.mark.parametrize("operator", ["task_arithmetic", "linear"])
def test_factors_of_adapters_are_read_once_or_cached(tmp_path, operator):
    project = make(tmp_path, operator)
    base = {"model.layers.0.q.weight": family(0)[A], V: family(0)[V]}
    project.add_source("base", base)
    project.add_source("e1", {name: value + 1 for name, value in base.items()})
    add_adapter(project, "low", factors(5, "model.layers.0.q", 16, 16))
    project.set_output("m", project.outputs["m"] | {"experts": ["e1", "low"]})
    step(project)
    assert of(step(project))["low"][1] > 0
    project.set_output("m", project.outputs["m"] | {"experts": ["e1", {"source": "low", "weight": 0.5}]})
    planned = step(project)["m"]
    assert planned.next_build.exact
    assert planned.experts["low"].to_read > 0
