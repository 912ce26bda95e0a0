"""Law 5: a change reruns the blocks that it touches, and reads their inputs alone. Counters are exact."""

import os
import shutil

import numpy as np
import pytest
from support.checkpoints import read_checkpoint, write_safetensors
from support.projects import Messages, Reads, SmallProject, edit_tensor, snapshot, tensor_range

# Blocks of 64 elements: `a` and `b` have four each, `v` one. Everything is bfloat16 or float32 below.
BLOCK = 64
SHAPES = {"model.layers.0.a": (16, 16), "model.layers.0.b": (16, 16), "model.v": (64,)}
A, B, V = SHAPES
ELEMENTS = 576
BLOCKS = 9


def tensors(seed, dtype="float32"):
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


@pytest.fixture
def project(tmp_path):
    """Return a project that was built: task arithmetic over two experts, with a rule."""
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, tensors(seed))
    project.set_output("m", recipe())
    project.build()
    return project


def recipe(weight=0.5, rule=0.3, experts=("e1", "e2")):
    return {
        "operator": "task_arithmetic",
        "base": "base",
        "experts": [{"source": name, "weight": weight} for name in experts],
        "rules": [{"match": "*.a", "experts": {"e1": {"weight": rule}}}],
    }


def counts(report):
    """Return computed blocks; expert, base and index bytes read."""
    return (report.blocks["computed"], report.expert_bytes["read"], report.base_bytes_read, report.index_bytes_read)


def block_range(project, source, tensor, block):
    """Return where a block lies in the data of a source's file."""
    start, _ = tensor_range(project.source_file(source), tensor)
    return start + block * BLOCK * 4, start + (block + 1) * BLOCK * 4


def total(ranges):
    return sum(stop - start for start, stop in ranges)


def merged(ranges):
    """Return touching ranges as one; overlapping ones fail."""
    found = []
    for start, stop in sorted(ranges):
        if found and start == found[-1][1]:
            found[-1] = (found[-1][0], stop)
        else:
            assert not found or start > found[-1][1], "a byte was read twice"
            found.append((start, stop))
    return found


def test_a_change_that_is_taken_back_links_the_pack_that_is_there(project, monkeypatch):
    monkeypatch.setattr("mergepipe.cache.packs.hash_shard", lambda *_: pytest.fail("the pack was hashed"))
    for weight in (0.25, 0.5):
        project.set_output("m", recipe(weight))
        reads = Reads(monkeypatch)
        report = project.build_one("m")
        taken = [reads.data_ranges(pack) for pack in (project.cache / "packs").iterdir()]
        project.check("m")
    assert taken == [[], []]
    assert (report.state, report.blocks["cached"], report.bytes_written) == ("built", BLOCKS, 0)


def test_the_first_build_reads_every_byte_once(tmp_path, monkeypatch):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, tensors(seed))
    project.set_output("m", recipe())
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert counts(report) == (BLOCKS, 2 * 4 * ELEMENTS, 4 * ELEMENTS, 0)
    assert report.blocks == {"total": BLOCKS, "computed": BLOCKS, "cached": 0, "copied": 0}
    assert report.expert_blocks == {"total": 18, "read": 18, "omitted": 0, "zero": 0, "shared": 0}
    assert report.bytes_written == 4 * ELEMENTS
    for name in project.sources:
        assert merged(reads.data_ranges(project.source_file(name))) == [(0, 4 * ELEMENTS)]


def test_one_element_of_an_expert_reruns_its_block_and_reads_that_block_of_the_others(project, monkeypatch):
    edit_tensor(project.source_file("e1"), A, 2 * BLOCK + 5, 9.0)
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert counts(report) == (1, 2 * 4 * BLOCK, 4 * BLOCK, 4 * (ELEMENTS - BLOCK))
    assert report.blocks == {"total": BLOCKS, "computed": 1, "cached": BLOCKS - 1, "copied": 0}
    assert report.expert_blocks["read"] == 2
    for name in ("base", "e2"):
        assert reads.data_ranges(project.source_file(name)) == [block_range(project, name, A, 2)]
    assert merged(reads.data_ranges(project.source_file("e1"))) == [(0, 4 * ELEMENTS)]  # to hash it, once
    project.check("m")


def test_one_element_of_the_base_reruns_its_block(project, monkeypatch):
    edit_tensor(project.source_file("base"), B, 0, 9.0)
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert counts(report) == (1, 2 * 4 * BLOCK, 4 * BLOCK, 4 * (ELEMENTS - BLOCK))
    for name in ("e1", "e2"):
        assert reads.data_ranges(project.source_file(name)) == [block_range(project, name, B, 0)]
    project.check("m")


def test_one_tensor_of_an_expert_reruns_its_blocks_alone(project, monkeypatch):
    changed = read_checkpoint(project.source_file("e2").parent)
    changed[B] = changed[B] + 1
    write_safetensors(project.source_file("e2"), changed)
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert counts(report) == (4, 2 * 4 * 256, 4 * 256, 4 * (ELEMENTS - 256))
    for name in ("base", "e1"):
        ranges = merged(reads.data_ranges(project.source_file(name)))
        assert ranges == [(block_range(project, name, B, 0)[0], block_range(project, name, B, 3)[1])]
    project.check("m")


def test_one_weight_in_a_rule_reruns_the_tensors_that_it_matches_alone(project, monkeypatch):
    project.set_output("m", recipe(rule=0.9))
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert counts(report) == (4, 2 * 4 * 256, 4 * 256, 0)
    assert report.blocks["cached"] == BLOCKS - 4
    for name in project.sources:
        ranges = merged(reads.data_ranges(project.source_file(name)))
        assert ranges == [(block_range(project, name, A, 0)[0], block_range(project, name, A, 3)[1])]
    project.check("m")


def test_a_weight_that_every_tensor_has_reruns_everything_without_hashing_again(project):
    project.set_output("m", recipe(weight=0.6))
    assert counts(project.build_one("m")) == (BLOCKS, 2 * 4 * ELEMENTS, 4 * ELEMENTS, 0)
    project.check("m")


def test_a_weight_put_back_computes_and_reads_nothing(project, monkeypatch):
    project.set_output("m", recipe(rule=0.9))
    project.build()
    project.set_output("m", recipe())
    reads = Reads(monkeypatch)
    assert counts(project.build_one("m")) == (0, 0, 0, 0)
    assert all(not reads.data_ranges(project.source_file(name)) for name in project.sources)
    project.check("m")


def test_another_expert_reruns_everything_and_reads_each_byte_once(project, monkeypatch):
    project.add_source("e3", tensors(3))
    project.set_output("m", recipe(experts=("e1", "e2", "e3")))
    reads = Reads(monkeypatch)
    assert counts(project.build_one("m")) == (BLOCKS, 3 * 4 * ELEMENTS, 4 * ELEMENTS, 0)
    for name in project.sources:
        assert merged(reads.data_ranges(project.source_file(name))) == [(0, 4 * ELEMENTS)]
    project.check("m")


def test_an_expert_taken_away_reads_nothing_of_it(project, monkeypatch):
    project.set_output("m", recipe(experts=("e1",)))
    reads = Reads(monkeypatch)
    assert counts(project.build_one("m")) == (BLOCKS, 4 * ELEMENTS, 4 * ELEMENTS, 0)
    assert not reads.data_ranges(project.source_file("e2"))
    project.check("m")


def test_an_expert_of_weight_zero_is_not_read_for_the_merge(project, monkeypatch):
    experts = [{"source": "e1", "weight": 0.5}, {"source": "e2", "weight": 0.0}]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert counts(report) == (BLOCKS, 4 * ELEMENTS, 4 * ELEMENTS, 0)
    assert report.expert_bytes["full"] == 4 * ELEMENTS
    assert not reads.data_ranges(project.source_file("e2"))
    project.check("m")


def test_another_dtype_of_the_output_computes_again_and_hashes_nothing(project):
    project.set_output("m", recipe() | {"write": {"dtype": "bfloat16"}})
    report = project.build_one("m")
    assert counts(report) == (BLOCKS, 2 * 4 * ELEMENTS, 4 * ELEMENTS, 0)
    assert report.bytes_written == 2 * ELEMENTS
    project.check("m")


def test_another_shard_size_copies_every_block_and_reads_no_source(project, monkeypatch):
    project.set_output("m", recipe() | {"write": {"shard_size": 1200}})
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert counts(report) == (0, 0, 0, 0)
    assert report.bytes_written == 4 * ELEMENTS
    assert all(not reads.data_ranges(project.source_file(name)) for name in project.sources)
    project.check("m")


def test_a_shard_that_stays_the_same_is_neither_read_nor_written(project, monkeypatch):
    project.set_output("m", recipe() | {"write": {"shard_size": 1200}})
    project.build()
    shards = {path.name: path.stat().st_ino for path in project.folder("m").glob("*.safetensors")}
    edit_tensor(project.source_file("e1"), B, 70, 4.0)
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert report.bytes_written == 4 * 256  # one shard: the changed block and three that are copied
    now = {path.name: path.stat().st_ino for path in project.folder("m").glob("*.safetensors")}
    assert sum(shards[name] != now[name] for name in now) == 1
    packs = [path for path, _, _ in reads.ranges if path.is_relative_to(project.cache)]
    assert len(set(packs)) <= 1
    project.check("m")


@pytest.mark.parametrize("source", ["base", "e1"])
def test_a_touched_source_is_hashed_and_nothing_else_happens(project, source):
    os.utime(project.source_file(source))
    before = snapshot(project.folder("m"), project.lock, project.cache / "packs")
    report = project.build_one("m")
    assert counts(report) == (0, 0, 0, 4 * ELEMENTS)
    assert (report.state, report.bytes_written) == ("unchanged", 0)
    assert snapshot(project.folder("m"), project.lock, project.cache / "packs") == before
    assert counts(project.build_one("m")) == (0, 0, 0, 0)


def test_a_source_written_anew_with_other_metadata_and_order_is_hashed_and_nothing_else_happens(project):
    same = read_checkpoint(project.source_file("e1").parent)
    before = snapshot(project.folder("m"), project.lock)
    write_safetensors(project.source_file("e1"), dict(reversed(same.items())), metadata={"made": "elsewhere"})
    report = project.build_one("m")
    assert counts(report) == (0, 0, 0, 4 * ELEMENTS)
    assert report.state == "unchanged"
    assert snapshot(project.folder("m"), project.lock) == before


def test_equal_tensors_of_one_shard_are_all_known_after_a_touch(tmp_path):
    project = SmallProject(tmp_path)
    names = [f"model.layers.{n}.norm.weight" for n in range(3)]
    for name, value in (("base", 1.0), ("e1", 2.0)):
        same = {norm: np.full((100,), value, np.float32) for norm in names}
        project.add_source(name, same | {"w": np.full((3, 50), value, np.float32)})
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1"]})
    project.build()
    os.utime(project.source_file("base"))
    assert counts(project.build_one("m"))[:3] == (0, 0, 0)
    edit_tensor(project.source_file("e1"), names[0], 70, 5.0)
    assert counts(project.build_one("m"))[0] == 1
    project.check("m")


def test_a_change_reruns_one_block_of_each_of_many_outputs(project):
    outputs = [f"o{n}" for n in range(12)]
    for number, name in enumerate(outputs):
        project.set_output(name, recipe() | {"params": {"lambda": 0.1 * (number + 1)}})
    project.build()
    edit_tensor(project.source_file("e1"), A, 0, 9.0)
    reports = project.build().outputs
    assert {name: report.blocks["computed"] for name, report in reports.items()} == dict.fromkeys(["m", *outputs], 1)
    assert sum(report.expert_bytes["read"] for report in reports.values()) == 2 * 4 * BLOCK
    assert sum(report.index_bytes_read for report in reports.values()) == 4 * (ELEMENTS - BLOCK)


def test_a_change_reruns_one_block_of_each_of_many_outputs_of_one_recipe(tmp_path):
    project = SmallProject(tmp_path)
    project.add_source("base", tensors(0))
    for number in range(12):
        project.add_source(f"e{number}", tensors(number + 1))
        recipe = {"operator": "task_arithmetic", "base": "base", "experts": [f"e{number}"]}
        project.set_output(f"o{number}", recipe)
    project.build()
    edit_tensor(project.source_file("base"), A, 0, 9.0)
    reports = project.build().outputs
    assert [report.blocks["computed"] for report in reports.values()] == [1] * 12
    os.utime(project.source_file("base"))
    reports = project.build().outputs
    assert [report.blocks["computed"] for report in reports.values()] == [0] * 12


def test_outputs_that_share_sources_read_them_once(tmp_path, monkeypatch):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, tensors(seed))
    project.set_output("m", recipe())
    project.set_output("n", recipe(weight=0.1))
    project.set_output("mean", {"operator": "linear", "experts": ["e2", "e1"]})
    reads = Reads(monkeypatch)
    reports = project.build().outputs
    assert sum(report.expert_bytes["read"] for report in reports.values()) == 2 * 4 * ELEMENTS
    assert sum(report.base_bytes_read for report in reports.values()) == 4 * ELEMENTS
    assert [reports[name].expert_blocks["shared"] for name in ("m", "n", "mean")] == [0, 18, 18]
    for name in project.sources:
        assert merged(reads.data_ranges(project.source_file(name))) == [(0, 4 * ELEMENTS)]
    for name in project.outputs:
        project.check(name)


def test_two_names_of_one_checkpoint_are_read_once(tmp_path, monkeypatch):
    project = SmallProject(tmp_path)
    project.add_source("base", tensors(0))
    project.add_source("e1", tensors(1))
    project.sources["again"] = project.sources["e1"]
    project.set_output("m", {"operator": "linear", "experts": ["e1", "again", {"source": "base", "weight": 2.0}]})
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert report.expert_bytes["read"] == 2 * 4 * ELEMENTS  # without a base all are experts
    assert report.expert_blocks == {"total": 27, "read": 18, "omitted": 0, "zero": 0, "shared": 9}
    assert merged(reads.data_ranges(project.source_file("e1"))) == [(0, 4 * ELEMENTS)]
    project.check("m")


def test_an_expert_that_is_the_base_under_another_name_is_no_delta(tmp_path):
    project = SmallProject(tmp_path)
    project.add_source("base", tensors(0))
    project.sources["again"] = project.sources["base"]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["again"]})
    report = project.build_one("m")
    assert report.blocks == {"total": BLOCKS, "computed": 0, "cached": 0, "copied": BLOCKS}
    assert (report.expert_bytes["read"], report.base_bytes_read) == (0, 4 * ELEMENTS)
    assert report.expert_blocks["zero"] == BLOCKS
    project.check("m")


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_announces_what_is_done_and_does_it(project, workers):
    project.set_output("m", recipe(weight=0.1) | {"write": {"shard_size": 1200}})
    project.set_output("n", recipe(weight=0.5, rule=0.1))
    messages = Messages()
    project.build(reporter=messages, workers=workers)
    assert messages.phases
    assert all(ended and done == announced for _, announced, done, ended in messages.phases)


# --- zero deltas and equal blocks ---------------------------------------------------------------------------------


@pytest.fixture
def partial(project):
    """Return the project with an e2 that equals the base but for `v` and two blocks of `a`; built with a cold e2."""
    own = tensors(0)
    own[A][:8] += 1
    own[V] = own[V] * 3
    project.add_source("e2", own)
    return project


def test_a_zero_delta_is_read_to_hash_it_and_never_again(partial, monkeypatch):
    report = partial.build_one("m")
    assert report.expert_blocks["zero"] == 6
    assert report.index_bytes_read == 6 * 4 * BLOCK
    assert report.expert_bytes["read"] == 4 * (3 * BLOCK + ELEMENTS)
    partial.check("m")
    partial.set_output("m", recipe(weight=0.7, rule=0.7))
    reads = Reads(monkeypatch)
    report = partial.build_one("m")
    assert counts(report) == (BLOCKS, 4 * (3 * BLOCK + ELEMENTS), 4 * ELEMENTS, 0)
    assert total(reads.data_ranges(partial.source_file("e2"))) == 3 * 4 * BLOCK
    partial.check("m")


def test_a_block_without_any_delta_is_copied_from_the_base(partial):
    partial.set_output("m", recipe(experts=("e2",)) | {"rules": []})
    report = partial.build_one("m")
    assert report.blocks == {"total": BLOCKS, "computed": 3, "cached": 0, "copied": 6}
    assert report.expert_bytes["read"] == 3 * 4 * BLOCK
    assert report.base_bytes_read == 4 * ELEMENTS
    partial.check("m")


def test_equal_blocks_of_two_experts_are_read_once(tmp_path, monkeypatch):
    project = SmallProject(tmp_path)
    one, two = tensors(1), tensors(2)
    two[A] = one[A].copy()
    project.add_source("e1", one)
    project.add_source("e2", two)
    project.set_output("m", {"operator": "linear", "experts": ["e1", {"source": "e2", "weight": 0.3}]})
    assert project.build_one("m").expert_blocks == {"total": 18, "read": 14, "omitted": 0, "zero": 0, "shared": 4}
    project.set_output("m", {"operator": "linear", "experts": ["e1", {"source": "e2", "weight": 0.6}]})
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    assert counts(report) == (BLOCKS, 4 * (2 * ELEMENTS - 256), 0, 0)
    assert total(reads.data_ranges(project.source_file("e2"))) == 4 * (ELEMENTS - 256)
    project.check("m")


def test_equal_bytes_in_another_dtype_are_other_values(tmp_path):
    project = SmallProject(tmp_path)
    bits = np.random.default_rng(0).integers(0, 2**15, (4, 32), np.uint16) & 0x3FFF
    project.add_source("base", {"x": bits.view(np.float16)})
    raw = ("BF16", (4, 32), bits.tobytes())
    project.add_source("e1", {"x": raw})
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1"]})
    report = project.build_one("m")
    assert report.expert_blocks["zero"] == 0
    project.check("m")


# --- early cutoff -------------------------------------------------------------------------------------------------


def test_a_change_that_rounds_away_leaves_the_packs_as_they_are(project):
    project.set_output("m", recipe() | {"write": {"dtype": "bfloat16"}})
    project.build()
    tensor = project.raw("m")
    before = snapshot(project.cache / "packs")
    value = read_checkpoint(project.source_file("e1").parent)[V][3]
    edit_tensor(project.source_file("e1"), V, 3, float(np.nextafter(value, np.float32(9))))
    report = project.build_one("m")
    assert (report.blocks["computed"], report.bytes_written) == (1, 2 * BLOCK)
    assert project.raw("m") == tensor
    after = snapshot(project.cache / "packs")
    assert {name: status[:3] for name, status in after.items()} == {name: status[:3] for name, status in before.items()}


def test_an_output_of_equal_content_computes_nothing_in_a_later_build(project):
    shutil.copytree(project.root / "models" / "e1", project.root / "models" / "twin")
    project.sources["twin"] = "models/twin"
    project.set_output(
        "n", recipe(experts=("twin", "e2")) | {"rules": [{"match": "*.a", "experts": {"twin": {"weight": 0.3}}}]}
    )
    report = project.build_one("n")
    assert counts(report) == (0, 0, 0, 4 * ELEMENTS)
    project.check("n")
