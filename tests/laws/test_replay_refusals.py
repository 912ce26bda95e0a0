"""What a replay must refuse: sources, manifests and results that are not what they were; nothing is left behind."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import random_tensors
from support.projects import TINY, data_start, tensor_range
from support.replays import MANIFEST, assert_replays, contents, replay_alone
from support.stages import A, B, V, declare, merged

from mergepipe.cache.packs import PackStore
from mergepipe.errors import CollectedErrors, LockError, MergepipeError, PlanError, PublishError, ReplayError
from mergepipe.lockfile.checksum import with_checksum
from mergepipe.lockfile.manifest import parse_manifest, render_manifest
from mergepipe.operators.additive import TaskArithmetic
from mergepipe.project.replay import ReplayOptions, replay
from mergepipe.project.replay_plan import Places, base_directory

BLOCK_BYTES = 64 * 4


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a project: `final` is made from `stage`, which is not published, and has a budget."""
    project = declare(tmp_path_factory.mktemp("built"), publish=False)
    for name in ("e1", "e3"):
        tensors = random_tensors(7, {A: (16, 16), B: (16, 16), V: (64,), "unused": (8,), "ids": (0,)})
        tensors["ids"] = np.arange(10)
        project.add_source(name, tensors)
    base = random_tensors(0, {A: (16, 16), B: (16, 16), V: (64,)}) | {"ids": np.arange(10)}
    project.add_source("base", base)
    project.add_source("e2", random_tensors(2, {A: (16, 16), B: (16, 16), V: (64,)}) | {"ids": np.arange(10)})
    project.set_output("final", project.outputs["final"] | {"budget": {"expert_reads": "60%", "precision": "blocks"}})
    project.build()
    return project


@pytest.fixture
def project(built, tmp_path):
    """Return a copy that may be changed."""
    copy = dataclasses.replace(built, root=tmp_path / "project")
    shutil.copytree(built.root, copy.root)
    shutil.rmtree(copy.cache)
    return copy


def refused(project, root, kind=MergepipeError, output="final", **places):
    """Return the errors that a replay ends with; it must not leave anything."""
    with pytest.raises(kind) as caught:
        replay_alone(project, output, root, **places)
    assert [path.name for path in root.iterdir()] == [MANIFEST]
    error = caught.value
    return error.errors if isinstance(error, CollectedErrors) else (error,)


def edited(project, edit, output="final"):
    """Change the JSON of a manifest and seal it again, as somebody would who wants it to be believed."""
    path = project.folder(output) / MANIFEST
    data = json.loads(path.read_bytes())
    edit(data)
    del data["checksum"]
    path.write_bytes(with_checksum(json.dumps(data, indent=1)[:-2].encode() + b",\n"))


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# --- sources ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 100))])
def test_one_flipped_bit_in_a_source_is_named_by_source_tensor_and_block(project, tmp_path, seed):
    rng = random.Random(seed)
    source, tensor = rng.choice(["base", "e1", "e2", "e3"]), rng.choice([A, B, V, "ids"])
    path = project.source_file(source)
    start, stop = tensor_range(path, tensor)
    at = rng.randrange(start, stop)
    flip(path, data_start(path) + at)
    (error,) = refused(project, tmp_path / "empty")
    assert error.exit_status == 2
    block = 0 if tensor == "ids" else (at - start) // BLOCK_BYTES
    assert (error.facts["source"], error.facts["tensor"], error.facts["blocks"]) == (source, tensor, [block])
    what = f"tensor `{tensor}` of source `{source}` is not what the output was made from: block {block} of"
    assert what in error.message
    assert f"--source {source}=PATH" in error.hint


@pytest.mark.parametrize("read", [True, False])
def test_of_a_source_that_is_not_read_whole_blocks_and_samples_are_compared(tmp_path, read):
    project = declare(tmp_path / "project")
    project.set_output("cheap", merged("e1", "e3", budget={"expert_reads": "40%", "stats": "sample"}))
    project.build("cheap")
    levels = {t.name: t.levels for t in project.manifest("cheap").tensors}
    tensor, block = next(
        (name, rows.index(255 if read else 0)) for name, rows in levels.items() if rows and 255 in rows
    )
    source, block = ("e1", block) if block < len(levels[tensor]) // 2 else ("e3", block - len(levels[tensor]) // 2)
    path = project.source_file(source)
    start, _ = tensor_range(path, tensor)
    flip(path, data_start(path) + start + block * BLOCK_BYTES)  # samples of so small a block are all of it
    (error,) = refused(project, tmp_path / "empty", output="cheap")
    assert (error.facts["source"], error.facts["tensor"], error.facts["blocks"]) == (source, tensor, [block])
    assert error.exit_status == 2


def test_a_value_that_cannot_be_merged_is_a_changed_source_first(project, tmp_path):
    path = project.source_file("e3")
    start, _ = tensor_range(path, B)
    data = bytearray(path.read_bytes())
    at = data_start(path) + start + 4 * 100
    data[at : at + 4] = np.array([np.nan], np.float32).tobytes()
    path.write_bytes(data)
    (error,) = refused(project, tmp_path / "empty")
    assert (error.facts["source"], error.facts["tensor"], error.facts["blocks"]) == ("e3", B, [1])


def test_a_change_of_a_tensor_that_the_output_does_not_use_is_found_by_the_source_digest(project, tmp_path):
    path = project.source_file("e3")
    start, _ = tensor_range(path, "unused")
    flip(path, data_start(path) + start)
    (error,) = refused(project, tmp_path / "empty")
    assert error.exit_status == 2
    assert "source `e3` is not what the output was made from: its digest differs" in error.message


def test_another_header_is_another_source_before_weights_are_read(project, tmp_path):
    tensors = random_tensors(3, {A: (16, 16), B: (16, 16)})
    project.add_source("e3", tensors)
    (error,) = refused(project, tmp_path / "empty")
    assert "it has 2 tensors of 2,048 bytes, and had 5 of" in error.message


def test_sources_that_are_not_there_are_named_together_with_how_to_give_them(project, tmp_path):
    (project.root / "models").rename(tmp_path / "gone")
    errors = refused(project, tmp_path / "empty", base_dir=None)
    assert {error.facts["source"] for error in errors} == {"base", "e1", "e2", "e3"}
    for error in errors:
        assert f"--source {error.facts['source']}=PATH" in error.hint
        assert "--base-dir" in error.hint
    given = {name: tmp_path / "gone" / name for name in ("base", "e1", "e2", "e3")}
    assert_replays(project, "final", tmp_path / "found", base_dir=None, sources=given)


@pytest.mark.parametrize("there", [True, False])
def test_a_source_that_was_given_is_named_by_the_path_that_was_given(project, tmp_path, there):
    given = tmp_path / "given"
    (given / "inner").mkdir(parents=True)
    shutil.copy(project.source_file("e1"), given / "inner")
    if not there:
        shutil.rmtree(project.root / "models/e1")
    (error,) = refused(project, tmp_path / "empty", sources={"e1": given})
    assert f"`{given}` holds no weights" in error.message
    assert "models/e1" not in f"{error.message}{error.hint}"


def test_a_side_file_of_a_source_that_was_given_is_named_where_it_is(project, tmp_path):
    shutil.copytree(project.root / "models/base", tmp_path / "given")
    (tmp_path / "given/config.json").write_text("{")
    (error,) = refused(project, tmp_path / "empty", sources={"base": tmp_path / "given"})
    assert f"`{tmp_path / 'given/config.json'}`" in error.message


def test_an_unknown_name_is_suggested(project, tmp_path):
    (error,) = refused(project, tmp_path / "empty", sources={"bas": tmp_path})
    assert (error.hint, error.exit_status) == ("did you mean `base`?", 2)
    (error,) = refused(project, tmp_path / "other", sources={"xyz": tmp_path})
    assert error.hint == "its sources are: base, e1, e2, e3"


# --- side files ---------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_changed_is_another_result(tmp_path):
    project = declare(tmp_path / "project")
    project.build()
    (project.root / "models/base/tokenizer.json").write_text("{}")
    (error,) = refused(project, tmp_path / "empty", ReplayError)
    assert (error.facts["file"], error.exit_status) == ("tokenizer.json", 1)


def test_files_that_the_sources_lack_or_have_in_addition_are_told(tmp_path):
    project = declare(tmp_path / "project")
    project.build()
    folder = project.root / "models/base"
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ x }}")
    report = replay_alone(project, "final", tmp_path / "empty")
    assert report.side_files["missing"] == ("generation_config.json",)
    assert report.side_files["extra"] == ("chat_template.jinja",)
    made = contents(tmp_path / "empty/out")
    assert sorted(made) == ["README.md", "config.json", MANIFEST, "model.safetensors", "tokenizer.json"]
    parse_manifest(made[MANIFEST], Path(MANIFEST))


# --- results ------------------------------------------------------------------------------------------------------


def otherwise(monkeypatch, expected):
    """Let the operator give something else where it would give these values."""
    apply = TaskArithmetic.apply

    def other(self, inputs, prepared, reduction=None):
        result = apply(self, inputs, prepared, reduction)
        return result + np.float32(1) * np.array_equal(result.ravel(), expected.ravel())

    monkeypatch.setattr(TaskArithmetic, "apply", other)


def test_a_result_that_differs_is_named_by_tensor_and_block_and_not_published(tmp_path, monkeypatch):
    project = declare(tmp_path / "project")
    project.build()
    otherwise(monkeypatch, project.tensors("final")[A][8:12])
    (error,) = refused(project, tmp_path / "empty", ReplayError)
    assert (error.facts["output"], error.facts["tensor"], error.facts["blocks"]) == ("final", A, [2])
    assert error.exit_status == 1
    assert "block 2 of 4 differs" in error.message


def test_a_stage_that_differs_is_named_before_anything_is_made_of_it(tmp_path, monkeypatch):
    project = declare(tmp_path / "project")
    project.build()
    otherwise(monkeypatch, project.tensors("stage")[B][:4])
    (error,) = refused(project, tmp_path / "empty", ReplayError)
    assert (error.facts["output"], error.facts["tensor"], error.exit_status) == ("stage", B, 1)


def test_an_operator_of_another_version_is_refused_by_name(project, tmp_path, monkeypatch):
    monkeypatch.setattr(TaskArithmetic, "version", TaskArithmetic.version + 1)
    (error,) = refused(project, tmp_path / "empty", PlanError)
    assert "operator `task_arithmetic` is of version" in error.message
    assert "replay it with mergepipe 0.1.0" in error.hint


# --- manifests ----------------------------------------------------------------------------------------------------


def wrong_parameter(data):
    used = data["tensors"][1]["parameters"]
    data["parameters"][used]["experts"][1]["weight"] = 0.5


def other_access(data):
    levels = next(t["access"] for t in data["tensors"] if t["access"] != "full")
    levels["levels"] = "fw" + levels["levels"][2:]  # a level between omitted and exact


def swap_inputs(data):
    data["tensors"][1]["inputs"][0]["source"], data["tensors"][1]["inputs"][1]["source"] = ("stage", "base")


HOSTILE = {
    "digest": (lambda d: d.update(digest="b3:" + "0" * 64), "not that of its tensors"),
    "parameter": (wrong_parameter, "`weight` of expert 1 would be 0.4, and was 0.5"),
    "declared": (lambda d: d["output"]["params"].update({"lambda": 2.0}), "`lambda` would be 2.0, and was 1.0"),
    "expert": (lambda d: d["output"]["experts"][1].update(source="e1"), "`e3` has no part in it|one of its inputs"),
    "unknown-expert": (lambda d: d["output"]["experts"][1].update(source="e9"), "does not say where source `e9` is"),
    "unknown-operator": (lambda d: d["output"].update(operator="x"), "unknown operator `x`"),
    "out-of-range": (lambda d: d["output"]["experts"][1]["params"].update(weight=1e300), "too large"),
    "decision": (lambda d: d["tensors"][1].update(decision="equal"), "its decision would be merge, and was equal"),
    "inputs": (swap_inputs, "its inputs would come in another order|one of its inputs"),
    "budget": (lambda d: d["output"].update(budget="100%"), "leaves blocks out of output `final`"),
    "budget-text": (lambda d: d["output"].update(budget="lots"), "outputs.final.budget.expert_reads"),
    "levels": (other_access, "access levels of tensor"),
    "planned": (lambda d: d["expert_bytes"].update(planned=5), "the manifest states 5 bytes"),
    "counts": (lambda d: d["tensors"][1]["expert_blocks"].update(total=10**15), "expert blocks, and it is"),
    "name": (lambda d: d["output"].update(name="../../evil"), "invalid name"),
    "shard-outside": (lambda d: d["shards"][0].update(name="../x.safetensors"), "not among the files"),
    "file-outside": (lambda d: d["files"].append("../x"), "is not a file name inside the output"),
    "shard-size": (lambda d: d["output"]["write"].update(shard_size=1), "shards"),
    "huge-shard": (lambda d: d["shards"][0].update(bytes=2**62), "would have"),
    "geometry": (lambda d: d.update(geometry=2), "block geometry 2"),
    "stage-gone": (lambda d: d["stages"].clear(), "not among the stages before it"),
    "stage-cycle": (
        lambda d: d["stages"][0]["output"]["experts"].append({"source": "final", "params": {}}),
        "a cycle: `final` needs `stage` needs `final`|a cycle: `stage` needs `final` needs `stage`",
    ),
    "stage-itself": (
        lambda d: d["stages"][0]["output"].update(base="stage"), "`stage` refers to itself",
    ),
    "location": (lambda d: d["sources"][0]["location"].clear(), "is not at|hub repository|described in two ways"),
    "control": (lambda d: d["output"]["experts"][1].update(source="\x1b[31m"), "invalid name"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_that_cannot_be_believed_is_refused(project, tmp_path, case):
    edit, expected = HOSTILE[case]
    edited(project, edit)
    errors = refused(project, tmp_path / "empty")
    text = "\n".join(error.message for error in errors)
    assert any(part in text for part in expected.split("|")), text
    assert max(error.exit_status for error in errors) in (1, 2)


def test_an_edited_manifest_is_refused_without_its_checksum(project, tmp_path):
    path = project.folder("final") / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"weight": 0.4', b'"weight": 0.5'))
    (error,) = refused(project, tmp_path / "empty", LockError)
    assert "changed after it was written" in error.message


# --- custom operators ---------------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
Path({mark!r}).touch()
def mid(base, experts):
    return base + {factor} * (sum(experts) / len(experts) - base)
"""


def custom(root, mark, python="ops.py"):
    project = declare(root)
    del project.outputs["stage"]
    project.set_output("final", merged("e1", "e2", operator="mid"))
    place = root / python
    place.parent.mkdir(exist_ok=True)
    place.write_text(CODE.format(mark=str(mark), factor=0.5))
    with project.mergefile.open("a") as file:
        file.write(f'[operators.mid]\npython = "{python}:mid"\n')
    project.build(allow_custom=True)
    mark.unlink()
    return project


def test_code_runs_only_where_it_is_allowed_and_must_be_what_it_was(tmp_path):
    mark = tmp_path / "ran"
    project = custom(tmp_path / "project", mark)
    (error,) = refused(project, tmp_path / "empty")
    assert "--allow-custom" in error.hint
    assert not mark.exists()
    (project.root / "ops.py").write_text(CODE.format(mark=str(mark), factor=0.25))
    (error,) = refused(project, tmp_path / "changed", PlanError, allow_custom=True)
    assert "the code of the custom operator `mid` is not what output `final` was made with" in error.message
    (project.root / "ops.py").unlink()
    (error,) = refused(project, tmp_path / "gone", allow_custom=True)
    assert "the code of operator `mid` is not at" in error.message
    assert "--operators" in error.hint


def test_code_outside_of_the_folder_is_never_looked_for(tmp_path):
    mark = tmp_path / "ran"
    project = custom(tmp_path / "project", mark, python="../ops.py")
    (error,) = refused(project, tmp_path / "empty", allow_custom=True)
    assert "outside of the folder of the Mergefile" in error.message
    assert "--operators" in error.hint
    assert not mark.exists()
    assert_replays(project, "final", tmp_path / "given", code=tmp_path, allow_custom=True)


# --- places -------------------------------------------------------------------------------------------------------


def run(project, **options):
    return replay(project.folder("final"), Places(base_dir=project.root), ReplayOptions(geometry=TINY, **options))


def test_the_output_itself_can_be_replaced_and_nothing_else(project, tmp_path):
    folder = project.folder("final")
    before = contents(folder)
    (folder / "model.safetensors").chmod(0o644)
    flip(folder / "model.safetensors", 2000)
    report = run(project, out=folder)
    assert report.path == str(folder)
    assert contents(folder)["model.safetensors"] == before["model.safetensors"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out, message in (
        (other, "was not made by mergepipe"),
        (project.root / "models/e1", "overlaps with source `e1`"),
        (tmp_path / "file", "a file, not a directory"),
    ):
        with pytest.raises(PublishError, match=message) as caught:
            run(project, out=out)
        assert "--out DIR" in caught.value.hint
        assert "`path`" not in caught.value.hint
    assert contents(other) == {"notes.txt": b"mine"}


def test_another_output_is_not_replaced_without_force(project):
    project.set_output("other", merged("e1"))
    project.build("other")
    target = project.folder("other")
    before = contents(target)
    with pytest.raises(PublishError, match="holds another output"):
        run(project, out=target)
    assert contents(target) == before
    assert run(project, out=target, force=True).path == str(target)


def test_an_interrupted_replay_leaves_nothing(project, tmp_path, monkeypatch):
    def interrupted(self, plans):
        raise KeyboardInterrupt

    monkeypatch.setattr("mergepipe.engine.run.Engine.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(project, out=tmp_path / "deep/er/out")
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_a_shard_that_was_written_wrong_is_found_before_it_is_published(project, tmp_path, monkeypatch):
    """The shard is read again from the disk: here another one was written than was computed."""
    adopt = PackStore.adopt

    def damaged(self, staged, name, results):
        adopt(self, staged, name, results)
        self.path(name).chmod(0o644)
        flip(self.path(name), -1)

    project.set_output("alone", merged("e1"))
    project.build("alone")
    monkeypatch.setattr(PackStore, "adopt", damaged)
    (error,) = refused(project, tmp_path / "empty", ReplayError, output="alone")
    assert "shard `model.safetensors` differs" in error.message


def test_a_check_leaves_nothing(project, tmp_path):
    before = sorted(project.root.rglob("*"))
    scratch = tmp_path / "scratch"
    assert run(project, check=True, scratch=scratch).path is None
    assert list(scratch.iterdir()) == []
    assert sorted(project.root.rglob("*")) == before


@pytest.mark.parametrize(
    ("stated", "place", "base"),
    [
        ("build/m", "/p/build/m", "/p"),
        ("./build//m/", "/p/build/m", "/p"),
        ("build/m", "/p/m", "/p/m"),
        ("build/m", "/build/m", "/"),
        ("../out/m", "/p/out/m", "/p/out/m"),
        ("/p/build/m", "/p/build/m", "/p/build/m"),
        ("m", "/p/m", "/p"),
    ],
)
def test_relative_locations_start_where_the_mergefile_was(built, stated, place, base):
    manifest = built.manifest("final")
    manifest = dataclasses.replace(manifest, output=dataclasses.replace(manifest.output, path=stated))
    assert parse_manifest(render_manifest(manifest), Path("m")) == manifest
    assert base_directory(manifest, Path(place) / MANIFEST) == Path(base)
