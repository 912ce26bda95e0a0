"""Experts that are there as progressive checkpoints alone: the same outputs, within the same limits, and no other."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from laws.test_levels import GEOMETRY, budget, distance, family, make
from support.budgets import levels, with_budget
from support.every_operator import RECIPES
from support.projects import Messages, Reads, SmallProject
from support.standalone import lock_without_places, other_machine, packed, planes, resealed, spoil

from mergepipe.checkpoints.geometry import GEOMETRY_1
from mergepipe.checkpoints.progressive import open_standalone
from mergepipe.digest import format_digest
from mergepipe.errors import (
    CollectedErrors,
    MergepipeError,
    PackError,
    PlanError,
    PublishError,
    SourceError,
)
from mergepipe.plan.given import WORKING
from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.pack import read_header
from mergepipe.progressive.writer import PackWriter
from mergepipe.project.pack import PackOptions, pack
from mergepipe.reporting import SilentReporter

EXPERTS = ("e1", "e2", "e3")
FAMILY = Path(__file__).parents[2] / "examples" / "family"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a project with whole experts, and the same on a machine that has them as progressive checkpoints."""
    root = tmp_path_factory.mktemp("progressive")
    whole = make(root / "here", "task_arithmetic", 25)
    return whole, other_machine(whole, root / "there", EXPERTS)


def raw(project):
    return project.raw("m")


@pytest.mark.parametrize("operator", WORKING)
def test_the_output_is_that_of_the_whole_experts_bit_for_bit(pair, operator):
    for project in pair:
        project.set_output("m", RECIPES[operator] | {"base": "base", "write": {"dtype": "float32"}})
    for share in (4, 10, 20):  # more would buy exact blocks of the whole experts
        whole, there = pair
        reports = [with_budget(project, budget(share)).build_one("m") for project in pair]
        assert levels(there) == levels(whole)
        assert raw(there) == raw(whole)
        assert lock_without_places(there) == lock_without_places(whole)
        assert reports[1].expert_bytes == reports[0].expert_bytes
        assert reports[1].digest == reports[0].digest
        assert reports[1].bound.kind == "certified"
        assert reports[1].bound.relative_to_update is None
        # The margin for rounding goes by the number of steps.
        assert reports[1].bound.absolute == pytest.approx(reports[0].bound.absolute, rel=1e-12)


def test_the_bytes_that_are_read_stay_within_the_budget(pair, monkeypatch):
    whole, there = pair
    reads = Reads(monkeypatch)
    there.set_output("m", RECIPES["task_arithmetic"] | {"base": "base"})
    full = sum(whole.source_file(name).stat().st_size for name in EXPERTS)
    for share in (3, 12, 30, 60):
        shutil.rmtree(there.cache, ignore_errors=True)
        reads.clear()
        report = with_budget(there, budget(share)).build_one("m")
        assert report.expert_bytes["read"] == report.expert_bytes["planned"] <= share / 100 * full
        files = [path.resolve() for name in EXPERTS for path in planes(there.root / there.sources[name])]
        behind = {path: read_header(path).nbytes for path in files}
        chunks = [stop - start for path, start, stop in reads.ranges if path in behind and start >= behind[path]]
        assert 0 < sum(chunks) <= report.expert_bytes["read"]  # the rest lies there exactly
        headers = sum(path.stat().st_size for name in EXPERTS for path in planes(there.root / there.sources[name]))
        assert report.index_bytes_read < headers + there.source_file("base").stat().st_size


def test_a_full_budget_reads_all_planes_and_stays_certified(tmp_path, pair):
    whole, _ = pair
    whole.set_output("m", RECIPES["task_arithmetic"] | {"base": "base", "write": {"dtype": "float32"}})
    whole.build()
    there = other_machine(whole, tmp_path, EXPERTS)
    for share in ("100%", "1 GiB"):
        with_budget(there, {"expert_reads": share, "precision": "levels"})
        report = there.build_one("m")
        assert report.bound.kind == "certified"
        assert 0 < distance(whole.tensors("m"), there.tensors("m")) <= report.bound.absolute
        assert report.expert_bytes["read"] < report.expert_bytes["full"]


def test_bounds_hold_beside_whole_experts(tmp_path):
    whole = make(tmp_path / "here")
    whole.build()
    there = other_machine(whole, tmp_path / "there", ["e2"])
    for share in (5, 20, 70, 100):
        report = with_budget(there, budget(share)).build_one("m")
        assert report.bound.kind == "certified"
        assert distance(whole.tensors("m"), there.tensors("m")) <= report.bound.absolute * (1 + 1e-6)


def test_a_second_build_reads_nothing(pair):
    _, there = pair
    with_budget(there, budget(20)).build()
    messages = Messages()
    report = there.build_one("m", reporter=messages)
    assert report.state == "unchanged"
    assert report.expert_bytes["read"] == report.index_bytes_read == report.base_bytes_read == 0
    assert there.open().status().outputs["m"].state == "up-to-date"


MIXED = [("F32",) * 4, ("BF16", "F16", "F32", "BF16"), ("F64", "F64", "F32", "BF16")]


def test_status_says_that_another_expert_was_packed(there, pair):
    whole, _ = pair
    there.build()
    source, base = (whole.root / whole.sources[name] for name in ("e3", "base"))
    packed(source, base, there.root / there.sources["e1"], GEOMETRY)
    (reason,) = there.open().status().outputs["m"].reasons
    assert reason.startswith("source `e1` has other content: b3:")
    there.build()
    assert there.open().status().outputs["m"].state == "up-to-date"


def test_plan_and_build_read_the_same_headers(there):
    recipe = RECIPES["task_arithmetic"] | {"base": "base"}
    there.set_output("m2", recipe | {"budget": budget(10)})
    for change in (lambda: None, lambda: shutil.rmtree(there.root / "build"), lambda: with_budget(there, budget(40))):
        change()
        there.open().plan()  # measures what is not known
        planned = there.open().plan()
        built = there.build()
        for name, output in planned.outputs.items():
            assert output.next_build.index_bytes == built.outputs[name].index_bytes_read
            assert sum(expert.index for expert in output.experts.values()) == output.next_build.index_bytes
        read = sum(output.index_bytes_read for output in built.outputs.values())
        assert planned.reads["index_bytes"] == read > 0
    assert there.open().plan().reads["index_bytes"] == 0  # what is unchanged needs none


def test_a_plan_that_measures_has_read_more_headers_than_the_build_may_need(there):
    planned = there.open().plan()
    built = there.build_one("m")
    most = planned.outputs["m"].next_build
    assert not most.exact
    assert most.index_bytes > built.index_bytes_read
    shutil.rmtree(there.root / "build")
    exact = there.open().plan().outputs["m"].next_build
    assert exact.exact
    assert exact.index_bytes == there.build_one("m").index_bytes_read


@pytest.mark.parametrize("dtypes", MIXED)
def test_every_dtype_can_be_packed(tmp_path, dtypes):
    whole = make(tmp_path / "here", share=8, sources=family(3, dtypes=dtypes))
    there = other_machine(whole, tmp_path / "there", EXPERTS)
    for project in (whole, there):
        project.build()
    assert levels(there) == levels(whole)
    assert raw(there) == raw(whole)


@pytest.mark.parametrize("share", [10, 25])
def test_a_trained_family_gives_the_same_bytes(tmp_path, share):
    project = SmallProject(tmp_path / "here", GEOMETRY_1)
    for name in ("base", "expert-python", "expert-c", "expert-legal"):
        shutil.copytree(FAMILY / name, tmp_path / "here" / name)
        project.sources[name] = name
    experts = [{"source": name, "weight": 0.3} for name in project.sources if name != "base"]
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": experts, "budget": budget(share)}
    project.set_output("m", recipe)
    there = other_machine(project, tmp_path / "there", [expert["source"] for expert in experts])
    full = project.build_one("m").expert_bytes["full"]
    report = there.build_one("m")
    assert levels(there) == levels(project)
    assert raw(there) == raw(project)
    assert report.expert_bytes["read"] <= share / 100 * full


def test_special_values_and_odd_tensors_lie_there_exactly(tmp_path):
    sources = family(1)
    for name in sources:
        sources[name]["model.steps"] = np.arange(40_000, dtype=np.int64)
        sources[name]["model.scalar"] = np.array(0.5, np.float32)
        sources[name]["model.none"] = np.zeros((0, 8), np.float32)
    odd = sources["e1"]["model.layers.0.mlp.up_proj.weight"]
    odd[200] = np.inf
    whole = make(tmp_path / "here", share=15, sources=sources, params={"non_finite": "allow"})
    there = other_machine(whole, tmp_path / "there", EXPERTS)
    value = open_standalone(there.root / there.sources["e1"], label="e1").standalone
    assert not value.is_coded("model.layers.0.mlp.up_proj.weight")
    assert not value.is_coded("model.steps")
    assert value.is_coded("model.embed_tokens.weight")
    for project in (whole, there):
        project.build()
    assert levels(there) == levels(whole)
    assert raw(there) == raw(whole)


def test_equal_experts_are_read_once(tmp_path):
    sources = family(2)
    sources["e3"] = {name: np.array(array) for name, array in sources["e1"].items()}
    whole = make(tmp_path / "here", share=30, sources=sources)
    for number, experts in enumerate((["e1"], ["e3"], ["e1", "e3"])):
        there = other_machine(whole, tmp_path / f"there{number}", experts)
        for share in (10, 60, 100):
            shutil.rmtree(there.cache, ignore_errors=True)
            shutil.rmtree(there.root / "build", ignore_errors=True)
            report = with_budget(there, budget(share)).build_one("m")
            assert report.expert_bytes["read"] == report.expert_bytes["planned"]


def test_shards_and_threads_change_nothing(tmp_path):
    sources = family(4)
    found = []
    for number, shards in enumerate((1, 3)):
        project = SmallProject(tmp_path / str(number), GEOMETRY)
        project.add_sources(sources, shards=shards)
        base = project.root / "models/base"
        packed(project.root / "models/e1", base, tmp_path / f"out{number}", GEOMETRY, workers=1 + 2 * number)
        found.append({str(p.relative_to(tmp_path / f"out{number}")): p.read_bytes()
                      for p in (tmp_path / f"out{number}").rglob("*") if p.is_file()})  # fmt: skip
    assert found[0] == found[1]


def test_verify_and_replay_need_no_more(pair):
    whole, there = pair
    for project in pair:
        project.set_output("m", RECIPES["task_arithmetic"] | {"base": "base", "budget": budget(15)})
        project.build()
    from mergepipe.project.replay import ReplayOptions, replay
    from mergepipe.project.replay_plan import Places
    from mergepipe.project.verify import VerifyOptions

    assert not list(there.open().verify(options=VerifyOptions(full=True)).problems)
    given = {name: there.root / there.sources[name] for name in EXPERTS}
    for places in (Places(), Places(sources={"e1": whole.root / whole.sources["e1"]})):
        options = ReplayOptions(check=True, geometry=GEOMETRY)
        assert replay(there.folder("m"), places, options, SilentReporter()).digest
    options = ReplayOptions(check=True, geometry=GEOMETRY)
    assert replay(whole.folder("m"), Places(sources=given), options, SilentReporter()).digest


# --- what is refused --------------------------------------------------------------------------------------------------


def message(error):
    found = error.errors if isinstance(error, CollectedErrors) else (error,)
    return "\n".join(f"{one.message}\nhint: {one.hint}" for one in found)


def refused(project, match):
    with pytest.raises(MergepipeError) as found:
        project.build()
    assert match in message(found.value)
    assert not project.folder("m").exists()


@pytest.fixture
def there(pair, tmp_path):
    """Return a fresh machine with progressive checkpoints."""
    _, machine = pair
    shutil.copytree(machine.root, tmp_path / "there", ignore=shutil.ignore_patterns(".mergecache", "build", "*.lock"))
    project = SmallProject(tmp_path / "there", GEOMETRY, sources=dict(machine.sources))
    project.progressive = set(machine.progressive)
    project.set_output("m", RECIPES["task_arithmetic"] | {"base": "base", "budget": budget(25)})
    return project


@pytest.mark.parametrize("name", sorted(name for name in RECIPES if RECIPES[name]["operator"] not in WORKING))
def test_operators_that_need_whole_deltas_are_refused(there, name):
    there.set_output("m", RECIPES[name] | {"base": "base", "budget": budget(25)})
    with pytest.raises(MergepipeError) as found:
        there.open().plan()
    assert "needs numbers of whole deltas" in message(found.value) or "needs whole tensors" in message(found.value)
    assert all(f"`{operator}`" in message(found.value) for operator in WORKING)


def test_another_base_is_refused_and_both_digests_named(there):
    there.add_source("base", family(9)["base"])
    with pytest.raises(PlanError) as found:
        there.build()
    text = message(found.value)
    assert "was packed against another base" in text
    assert text.count("b3:") == 2
    own = open_standalone(there.root / there.sources["e1"], label="e1").standalone
    tensor = found.value.facts["tensor"]
    code = read_header(there.root / there.sources["e1"] / "tensors" / own.tensors[tensor].pack)
    # The base was not indexed before: what is known of it is this tensor, and the message says so.
    assert f"tensor `{tensor}` that it was packed against: {format_digest(code.base_digest)}" in text
    assert f"tensor `{tensor}` of `base`: b3:" in text
    assert not there.folder("m").exists()


def test_another_base_that_is_indexed_is_named_by_its_own_digest(there):
    there.add_source("base", family(9)["base"])
    there.set_output("copy", {"operator": "passthrough", "experts": ["base"]})
    there.build("copy")
    there.set_output("m", RECIPES["task_arithmetic"] | {"base": "base", "budget": budget(25)})
    with pytest.raises(PlanError) as found:
        there.build("m")
    own = open_standalone(there.root / there.sources["e1"], label="e1").standalone
    assert f"  that it was packed against: {format_digest(own.base)}\n  of `base`: b3:" in message(found.value)


def test_budgets_that_cannot_be_are_refused(there):
    recipe = RECIPES["task_arithmetic"] | {"base": "base"}
    for given, match in (
        (None, "which cannot be read exactly"),
        ({"max_error": 0.1, "precision": "levels"}, "no error relative to the update"),
        ({"expert_reads": "25%", "precision": "blocks"}, "no exact blocks"),
        ({"expert_reads": "25%", "stats": "sample"}, "nothing to take samples of"),
    ):
        there.set_output("m", recipe | ({} if given is None else {"budget": given}))
        refused(there, match)


def test_a_progressive_checkpoint_is_no_base_and_no_path(there):
    there.set_output("m", RECIPES["task_arithmetic"] | {"base": "e1", "budget": budget(25)})
    refused(there, "can be an expert and no base")
    there.set_output("m", RECIPES["task_arithmetic"] | {"base": "base", "budget": budget(25)})
    there.progressive -= {"e1"}
    there.save()
    refused(there, "is a progressive checkpoint")
    there.progressive |= {"e1", "base"}
    there.save()
    refused(there, "can be an expert and no base")


# --- damage and ill will ----------------------------------------------------------------------------------------------


def test_a_damaged_chunk_never_reaches_an_output(there):
    path = planes(there.root / there.sources["e2"])[0]
    spoil(path, read_header(path).nbytes + 5)
    with pytest.raises(PackError) as found:
        there.build()
    assert str(path) in found.value.message
    assert "again" in found.value.hint
    assert not there.folder("m").exists()
    from mergepipe.project.verify import VerifyOptions

    problems = there.open().verify(options=VerifyOptions(full=True)).problems
    assert any(path.name in str(problem) for problem in problems)


@pytest.mark.parametrize("kind", ["header", "cut", "gone", "record", "exact", "swapped"])
def test_other_damage_is_named(there, kind):
    folder = there.root / there.sources["e2"]
    files = planes(folder)
    match kind:
        case "header":
            spoil(files[1], 40)
        case "cut":
            files[1].chmod(0o644)
            os.truncate(files[1], files[1].stat().st_size - 1)
        case "gone":
            files[1].unlink()
        case "record":
            spoil(folder / "progressive.json", 700)
        case "exact":
            spoil(folder / "tensors/exact.safetensors", -3)
        case "swapped":
            files[0].rename(folder / "tensors/x")
            files[1].rename(files[0])
            (folder / "tensors/x").rename(files[1])
    with pytest.raises(MergepipeError) as found:
        there.build()
    assert str(folder) in message(found.value) or there.sources["e2"] in message(found.value)
    assert not there.folder("m").exists()


def test_a_damaged_exact_tensor_is_called_damaged(there):
    path = there.root / there.sources["e2"] / "tensors/exact.safetensors"
    spoil(path, -3)
    for _ in range(2):
        with pytest.raises(PackError) as found:
            there.build()
        assert f"`{path}` of source `e2` is damaged: tensor `model." in found.value.message
        assert "get the progressive checkpoint again" in found.value.hint
    assert not there.folder("m").exists()


@pytest.fixture
def with_side_files(tmp_path):
    """Return a project whose expert is a progressive checkpoint that brings the tokenizer, and its folder."""
    whole = SmallProject(tmp_path / "here", GEOMETRY)
    sources = family(6)
    whole.add_sources({name: sources[name] for name in ("base", "e1")})
    folder = whole.root / whole.sources["e1"]
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"name_or_path": "/home/me/e1", "x": 1}')
    recipe = {"operator": "linear", "base": "base", "experts": [{"source": "e1", "weight": 0.5}]}
    whole.set_output("m", recipe | {"write": {"tokenizer": "e1"}, "budget": budget(25)})
    there = other_machine(whole, tmp_path / "there", ["e1"])
    return there, there.root / there.sources["e1"]


def test_side_files_are_published_as_they_were_packed(with_side_files):
    project, folder = with_side_files
    (folder / "README.md").write_text("edited")  # anybody may
    (folder / "notes.txt").write_text("mine")
    project.build()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (project.folder("m") / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"])
def test_side_files_that_are_not_what_was_packed_are_refused(with_side_files, name):
    project, folder = with_side_files
    project.build()
    shutil.rmtree(project.folder("m"))
    was_there = (folder / name).exists()
    (folder / name).write_text('{"evil": 1}')
    with pytest.raises(SourceError) as found:
        project.build()
    assert name in found.value.message
    assert ("is not what was packed" in found.value.message) == was_there
    assert "get the progressive checkpoint again" in found.value.hint
    assert not project.folder("m").exists()


def test_a_side_file_that_is_gone_is_refused(with_side_files):
    project, folder = with_side_files
    (folder / "tokenizer.json").unlink()
    refused(project, "tokenizer.json` is gone")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"pack":"00000.planes"', '"pack":"../00000.planes"'),
        ('"pack":"00000.planes"', '"pack":"/etc/passwd"'),
        ('"pack":"00000.planes"', '"pack":"00001.planes"'),
        ('"exact":["exact.safetensors"]', '"exact":["../../base/model.safetensors"]'),
        ('"exact":["exact.safetensors"]', '"exact":[]'),
        ('"exact":["exact.safetensors"]', '"exact":["exact.safetensors","exact.safetensors"]'),
        ('"block_elements":16384', '"block_elements":0'),
        ('"block_elements":16384', '"block_elements":99999999999999999999'),
        ('"block_elements":16384', '"block_elements":1'),
        ('"code":1', '"code":2'),
        ('"progressive":1', '"progressive":2'),
        ('"progressive":1', '"progressive":"x"'),
        ('"shape":[600,64]', '"shape":[600,-64]'),
        ('"shape":[600,64]', '"shape":[9223372036854775807,9223372036854775807]'),
        ('"shape":[600,64]', '"shape":[38400]'),
        ('"dtype":"BF16"', '"dtype":"X9"'),
        ('"squares":[', '"squares":[-1.0,'),
        ('"squares":[', '"squares":[1e999,'),
        ('"squares":[', '"squares":[NaN,'),
        ('"name":"model.embed_tokens.weight"', '"name":"\\ud800"'),
        ('"name":"model.embed_tokens.weight"', '"name":"model.norm.weight"'),
        ('"tensors":[', '"tensors":{},"more":['),
        ('"base":"b3:', '"base":"b4:'),
        ('"files":{', '"files":{"../x":"b3:' + "0" * 64 + '",'),
        ('"files":{', '"files":{"/etc/passwd":"b3:' + "0" * 64 + '",'),
        ('"files":{', '"files":{"a\\u0000b":"b3:' + "0" * 64 + '",'),
    ],
)
def test_a_hostile_record_is_refused(there, old, new):
    folder = there.root / there.sources["e1"]
    assert old in (folder / "progressive.json").read_text()
    resealed(folder, lambda text: text.replace(old, new, 1))
    with pytest.raises(MergepipeError) as found:
        there.build()
    assert not isinstance(found.value, PackError | PlanError) or found.value.hint
    assert "internal error" not in message(found.value)
    assert not there.folder("m").exists()


def test_a_code_of_another_expert_is_refused_where_the_expert_was_coded(there, pair):
    """Somebody claims the digests of an expert for a code of his own: a cache that knows better is not deceived."""
    whole, _ = pair
    with_budget(whole, budget(25)).build()
    path = planes(there.root / there.sources["e1"])[0]
    header = read_header(path)
    writer = PackWriter(path.parent, shape=header.shape, block_elements=header.block_elements)
    for block in range(header.blocks):
        delta = np.full(header.grid.elements_of(block), 0.25, np.float32)
        writer.put(block, encode_block(delta, header.grid.row_elements))
    seal = writer.finish(header.base_digest, header.expert_digest, path).seal
    old, new = format_digest(header.seal), format_digest(seal)
    resealed(there.root / there.sources["e1"], lambda text: text.replace(old, new))
    shutil.rmtree(there.cache, ignore_errors=True)
    shutil.copytree(whole.cache, there.cache)
    refused(there, "is no code of the expert that it names")


def test_links_do_not_lead_out(there, tmp_path):
    folder = there.root / there.sources["e1"]
    outside = tmp_path / "outside.planes"
    planes(folder)[0].rename(outside)
    (folder / "tensors/00000.planes").symlink_to(outside)
    refused(there, "is a link that leads out of the folder")


# --- packing ----------------------------------------------------------------------------------------------------------


def test_nothing_of_somebody_else_is_replaced(tmp_path, pair):
    whole, _ = pair
    source, base = (whole.root / whole.sources[name] for name in ("e1", "base"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "model.safetensors").write_text("theirs")
    with pytest.raises(PublishError, match="is no progressive checkpoint"):
        packed(source, base, out, GEOMETRY)
    packed(source, base, out, GEOMETRY, force=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "model.safetensors").exists()
    packed(source, base, out, GEOMETRY)  # it is its own now
    assert (out / "notes.txt").read_text() == "mine"
    for wrong in (source, base, source.parent, source / "inside"):
        with pytest.raises(PublishError):
            packed(source, base, wrong, GEOMETRY, force=True)


def test_adapters_and_progressive_checkpoints_are_not_packed(tmp_path, pair):
    whole, there = pair
    base = whole.root / whole.sources["base"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(SourceError, match="is a LoRA adapter"):
        packed(adapter, base, tmp_path / "out", GEOMETRY)
    with pytest.raises(SourceError, match="is a progressive checkpoint"):
        packed(there.root / there.sources["e1"], base, tmp_path / "out", GEOMETRY)
    options = PackOptions(geometry=GEOMETRY)
    with pytest.raises(SourceError, match="is a progressive checkpoint already"):
        pack("e1", "base", tmp_path / "out", options, SilentReporter(), there.mergefile)
    with pytest.raises(SourceError, match="neither a source"):
        pack("e9", "base", tmp_path / "out", options, SilentReporter(), there.mergefile)
    assert not (tmp_path / "out").exists()


def test_side_files_come_along_without_private_places(tmp_path):
    project = SmallProject(tmp_path / "p", GEOMETRY)
    sources = family(5)
    project.add_sources({name: sources[name] for name in ("base", "e1")})
    folder = project.root / "models/e1"
    (folder / "config.json").write_text(json.dumps({"_name_or_path": "/home/me/secret", "model_type": "x"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_x.py").write_text("import os")
    (folder / "optimizer.pt").write_text("x")
    packed(folder, project.root / "models/base", tmp_path / "out", GEOMETRY)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "config.json", "progressive.json", "tensors", "tokenizer.json"}
    assert "secret" not in (tmp_path / "out/config.json").read_text()
