"""Output directories: what is put into them, what stays in them, and which ones are never written to."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import as_dtype, random_tensors, read_safetensors, safetensors_bytes
from support.projects import SmallProject, snapshot

from mergepipe.errors import MergepipeError, PublishError, StorageError

SHAPES = {f"model.layers.{n}.w": (16, 16) for n in range(4)} | {"model.embed_tokens.weight": (10, 8)}
CONFIG = {"architectures": ["M"], "torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "dtype": "float32"}
SIDE = {
    "generation_config.json": '{"eos_token_id": 1}\n',
    "tokenizer.json": '{"of": "base"}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool.jinja": "{{ tools }}",
    "training_args.bin": "no",
    "optimizer.pt": "no",
    "README.md": "of the base",
    "pytorch_model.bin.index.json": "{}",
    ".gitattributes": "no",
}


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    project.add_source("base", random_tensors(0, SHAPES, "bfloat16"), config=CONFIG, side_files=SIDE)
    project.add_source("e1", random_tensors(1, SHAPES, "bfloat16"), side_files={"tokenizer.json": '{"of": "e1"}'})
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1"]})
    return project


def change(project, **entries):
    """Change the output's recipe."""
    project.set_output("m", project.outputs["m"] | entries)


def names(project):
    folder = project.folder("m")
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


# --- what is in it ------------------------------------------------------------------------------------------------


def test_weights_config_tokenizer_card_and_manifest_are_there_and_nothing_else(project):
    project.build()
    assert names(project) == [
        "README.md",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "mergepipe.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    folder = project.folder("m")
    assert (folder / "generation_config.json").read_text() == SIDE["generation_config.json"]
    assert (folder / "tokenizer.json").read_text() == SIDE["tokenizer.json"]
    assert "of the base" not in (folder / "README.md").read_text()


def test_the_tokenizer_comes_from_the_source_that_is_named(project):
    change(project, write={"tokenizer": "e1"})
    project.build()
    assert (project.folder("m") / "tokenizer.json").read_text() == '{"of": "e1"}'
    assert "generation_config.json" not in names(project)
    assert json.loads((project.folder("m") / "config.json").read_text())["architectures"] == ["M"]


def test_a_changed_side_file_is_published_without_reading_a_weight(project):
    project.build()
    (project.root / "models/base/tokenizer.json").write_text('{"of": "base", "new": 1}')
    report = project.build_one("m")
    read = (report.expert_bytes["read"], report.base_bytes_read, report.index_bytes_read, report.bytes_written)
    assert (report.state, read) == ("built", (0, 0, 0, 0))
    assert (project.folder("m") / "tokenizer.json").read_text() == '{"of": "base", "new": 1}'
    assert project.build_one("m").state == "unchanged"


@pytest.mark.parametrize("written", ["float16", "float32", "bfloat16"])
def test_the_config_states_the_dtype_that_the_weights_have(project, written):
    change(project, write={"dtype": written})
    project.build()
    config = json.loads((project.folder("m") / "config.json").read_text())
    assert (config["torch_dtype"], config["dtype"], config["text_config"]["dtype"]) == (written,) * 3
    assert {array.dtype for array in project.tensors("m").values()} == {as_dtype(written)}
    assert config["architectures"] == ["M"]


def test_a_config_that_is_right_keeps_its_bytes(project):
    text = '{"torch_dtype":   "bfloat16", "x": 1e-05, "ü": null}'
    (project.root / "models/base/config.json").write_text(text, encoding="utf-8")
    project.build()
    assert (project.folder("m") / "config.json").read_text(encoding="utf-8") == text


def test_a_source_without_a_folder_has_no_side_files(project):
    for name in project.sources:
        project.sources[name] += "/model.safetensors"
    project.save()
    project.build()
    assert names(project) == ["README.md", "mergepipe.json", "model.safetensors"]


NAMES = [
    "ü",
    "u\u0308",
    "a b",
    'quo"te',
    "back\\slash",
    "new\nline",
    "[x]",
    "a.b.c",
    "",
    "__metadata",
    "\u2028",
    "#",
    "模型",
]


def test_any_name_of_a_tensor_goes_through_weights_lock_and_manifest(tmp_path):
    project = SmallProject(tmp_path)
    for seed, source in enumerate(("base", "e1")):
        project.add_source(source, random_tensors(seed, dict.fromkeys(NAMES, (3, 40))), shards=3)
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e1"], "write": {"shard_size": 1000}}
    project.set_output("m", recipe)
    project.build()
    project.check("m")
    assert project.build_one("m").state == "unchanged"
    assert not project.build(locked=True).lock_changed
    assert {found.name for found in project.manifest("m").tensors} == set(NAMES)


@pytest.mark.parametrize("path", ["out put/mérge", "build/a'b", "build/x.safetensors", "-m", "./elsewhere/"])
def test_any_path_of_an_output_goes(project, path):
    change(project, path=path)
    project.build()
    project.check("m")
    assert project.build_one("m").state == "unchanged"


# --- shards -------------------------------------------------------------------------------------------------------


def sharded(project, size):
    """Build with shards of that size; return the index and the tensors of each shard."""
    change(project, write={"shard_size": size})
    project.build()
    folder = project.folder("m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return index, {path.name: read_safetensors(path) for path in sorted(folder.glob("*.safetensors"))}


def test_the_index_places_every_tensor_and_states_their_size(project):
    index, shards = sharded(project, 1100)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in project.tensors("m").values())
    assert index["weight_map"] == dict(sorted((name, shard) for shard, arrays in shards.items() for name in arrays))
    assert list(shards) == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    project.check("m")


@pytest.mark.parametrize("size", [1, 160, 512, 513, 1024, 1100])
def test_no_shard_is_empty_or_larger_than_asked_for_but_by_one_tensor(project, size):
    _, shards = sharded(project, size)
    for arrays in shards.values():
        assert arrays
        assert sum(array.nbytes for array in arrays.values()) <= size or len(arrays) == 1


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
    project = SmallProject(tmp_path)
    shapes = {"a": (2, 4), "b": (100, 10), "c": (2, 4), "d": (2, 4)}
    project.add_source("e1", random_tensors(0, shapes))
    project.set_output("m", {"operator": "linear", "experts": ["e1"]})
    _, shards = sharded(project, 100)
    assert [sorted(arrays) for arrays in shards.values()] == [["a"], ["b"], ["c", "d"]]


def test_one_shard_has_no_index(project):
    project.build()
    assert "model.safetensors.index.json" not in names(project)


def test_fewer_shards_leave_no_old_shard_and_no_old_index(project):
    sharded(project, 600)
    (project.folder("m") / "user_notes.txt").write_text("mine\n")
    change(project, write={})
    project.build()
    assert [name for name in names(project) if name.startswith("model")] == ["model.safetensors"]
    assert (project.folder("m") / "user_notes.txt").read_text() == "mine\n"
    sharded(project, 600)
    assert "model.safetensors" not in names(project)
    project.check("m")


def test_every_tensor_is_aligned_to_its_element(tmp_path):
    project = SmallProject(tmp_path)
    tensors = {"a": np.ones(3, bool), "b": np.ones(5, np.float32), "c": np.ones(3, np.int8), "d": np.ones(3)}
    tensors |= {"e": np.ones(3, np.float16)}
    project.add_source("e1", tensors)
    project.set_output("m", {"operator": "linear", "experts": ["e1"]})
    project.build()
    data = (project.folder("m") / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for name, array in tensors.items():
        assert (start + header[name]["data_offsets"][0]) % array.dtype.itemsize == 0
    assert header["__metadata__"] == {"format": "pt"}


# --- what stays in it ---------------------------------------------------------------------------------------------


def user_files(folder):
    """Put files of every kind into an output directory; return a function that checks that they are there."""
    (folder / "notes.txt").write_text("mine")
    (folder / "eval/deep").mkdir(parents=True)
    (folder / "eval/deep/scores.json").write_text("[1]")
    (folder / "eval/empty").mkdir()
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o750)
    (folder / "link").symlink_to("notes.txt")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "folder-link").symlink_to("eval")
    (folder / ".hidden").write_text("x")
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes({}, {"whose": "mine"}))
    (folder / "sub").mkdir()
    (folder / "sub/model.safetensors").write_bytes(b"not ours either")

    def check():
        assert (folder / "notes.txt").read_text() == "mine"
        assert (folder / "eval/deep/scores.json").read_text() == "[1]"
        assert (folder / "eval/empty").is_dir()
        assert (folder / "run.sh").stat().st_mode & 0o777 == 0o750
        assert str((folder / "link").readlink()) == "notes.txt"
        assert str((folder / "dangling").readlink()) == "nowhere"
        assert str((folder / "folder-link").readlink()) == "eval"
        assert (folder / ".hidden").read_text() == "x"
        assert b"mine" in (folder / "adapter_model.safetensors").read_bytes()
        assert (folder / "sub/model.safetensors").read_bytes() == b"not ours either"

    return check


@pytest.mark.parametrize("exchange", [True, False])
def test_user_files_stay_where_they_are(project, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setenv("MERGEPIPE_NO_EXCHANGE", "1")
    project.build()
    check = user_files(project.folder("m"))
    for size in (600, 10**6):
        change(project, write={"shard_size": size}, params={"lambda": 0.5})
        project.build()
        check()
        project.check("m")
    assert sorted(path.name for path in project.folder("m").parent.iterdir()) == ["m"]


def test_user_files_do_not_make_an_output_stale(project):
    project.build()
    user_files(project.folder("m"))
    before = snapshot(project.root)
    assert project.build_one("m").state == "unchanged"
    assert snapshot(project.root) == before


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "model.safetensors.index.json"])
def test_a_user_file_under_a_name_that_the_output_needs_is_never_lost(project, name):
    project.build()
    path = project.folder("m") / name
    path.write_text("mine")
    before = snapshot(project.folder("m"), project.lock)
    change(project, write={"shard_size": 1100})
    with pytest.raises(PublishError, match=name) as caught:
        project.build()
    assert caught.value.exit_status == 2
    assert snapshot(project.folder("m"), project.lock) == before
    path.rename(path.with_name("aside"))
    project.build()
    assert (project.folder("m") / "aside").read_text() == "mine"
    project.check("m")


def test_force_replaces_a_user_file_under_a_name_that_the_output_needs(project):
    project.build()
    (project.folder("m") / "model-00001-of-00003.safetensors").write_text("mine")
    change(project, write={"shard_size": 1100})
    project.build(force=True)
    project.check("m")


def test_a_user_folder_under_a_name_that_the_output_needs_is_never_lost(project):
    project.build()
    folder = project.folder("m") / "tokenizer_config.json"
    folder.mkdir()
    (folder / "x").write_text("mine")
    (project.root / "models/base/tokenizer_config.json").write_text("{}")
    with pytest.raises(PublishError, match=r"tokenizer_config\.json"):
        project.build()
    assert (folder / "x").read_text() == "mine"


def test_a_published_file_that_was_edited_deleted_or_replaced_is_put_back(project):
    project.build()
    folder = project.folder("m")
    (folder / "config.json").write_text("{}")
    (folder / "README.md").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("config.json")
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").mkdir()
    fresh = project.clone(project.root.with_name("fresh"))
    fresh.build()
    project.build()
    for name in names(fresh):
        if name != "mergepipe.json":
            assert (folder / name).read_bytes() == (fresh.folder("m") / name).read_bytes()
            assert not (folder / name).is_symlink()


def test_a_deleted_output_is_linked_anew_without_reading_a_source(project):
    project.build()
    tensors = project.raw("m")
    (project.folder("m")).rename(project.root / "aside")
    report = project.build_one("m")
    assert (report.state, report.blocks["computed"], report.expert_bytes["read"]) == ("built", 0, 0)
    assert report.bytes_written == 0
    assert project.raw("m") == tensors


# --- what is never written to -------------------------------------------------------------------------------------


def test_a_directory_that_mergepipe_did_not_make_is_refused_before_weights_are_read(project):
    folder = project.root / "build/m"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"precious")
    before = snapshot(project.root)
    with pytest.raises(PublishError, match="was not made by mergepipe") as caught:
        project.build()
    assert "--force" in caught.value.hint
    assert snapshot(project.root) == before


def test_force_replaces_the_weights_and_keeps_the_rest(project):
    folder = project.root / "build/m"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"old")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (folder / "notes.txt").write_text("mine")
    project.build(force=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    project.check("m")
    assert project.build_one("m").state == "unchanged"


def test_an_empty_directory_may_be_written_to(project):
    (project.root / "build/m").mkdir(parents=True)
    project.build()
    project.check("m")


def forbid(monkeypatch, folder):
    """Let a folder say that it cannot be written."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))


@pytest.mark.parametrize("path", ["out/m", "out/deep/m"])
def test_a_place_that_cannot_be_written_is_refused_before_weights_are_read(project, monkeypatch, path):
    (project.root / "out").mkdir()
    change(project, path=path)
    with monkeypatch.context() as patched:
        forbid(patched, project.root / "out")
        with pytest.raises(StorageError, match=f"cannot write the output `.*{path}`: Permission denied"):
            project.build()
    assert project.open().plan().outputs["m"].next_build.unindexed, "no source was read"
    project.build()


def test_an_output_that_may_turn_out_to_be_unchanged_is_no_reason_to_refuse_its_place(project, monkeypatch):
    project.build()
    path = project.source_file("e1")
    path.write_bytes(path.read_bytes())
    forbid(monkeypatch, project.root / "build")
    assert project.build_one("m").state == "unchanged"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_an_output_path_that_is_no_directory_is_refused(project, kind, force):
    (project.root / "build").mkdir()
    path, elsewhere = project.root / "build/m", project.root / "elsewhere"
    if kind == "link":
        elsewhere.mkdir()
    if kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(elsewhere)
    before = snapshot(project.root)
    told = "a file" if kind == "file" else "a symbolic link"
    with pytest.raises(PublishError, match=f"^the output path `{path}` is {told}, not a directory$"):
        project.build(force=force)
    assert snapshot(project.root) == before


@pytest.mark.parametrize("path", ["models/e1", "models/base", "models", "models/e1/out", ".", "..", ".mergecache/m"])
def test_an_output_in_or_over_a_source_the_project_or_the_cache_is_refused_even_with_force(project, path):
    change(project, path=path)
    before = snapshot(project.root / "models")
    with pytest.raises(MergepipeError) as caught:
        project.build(force=True)
    assert caught.value.exit_status == 2
    assert snapshot(project.root / "models") == before


@pytest.mark.parametrize(("folder", "relation"), [("models/base", "is"), ("models", "lies in"), ("away", "lies in")])
def test_a_cache_that_would_be_or_hold_a_source_is_refused(project, folder, relation):
    (project.root / "away").symlink_to("models")
    before = snapshot(project.root / "models")
    with pytest.raises(MergepipeError, match=f"cannot be the cache: source `base` {relation} that folder") as caught:
        project.build(cache_dir=project.root / folder)
    assert "--cache-dir" in caught.value.hint
    assert snapshot(project.root / "models") == before


def test_a_cache_may_lie_in_the_folder_of_a_source(project):
    cache = project.root / "models/e1/.mergecache"
    assert project.build_one("m", cache_dir=cache).state == "built"
    assert project.build_one("m", cache_dir=cache).state == "unchanged"


@pytest.mark.parametrize("path", ["away/e1", "away", "away/e1/out"])
def test_an_overlap_through_links_is_refused_even_with_force(project, path):
    (project.root / "away").symlink_to("models")
    change(project, path=path)
    before = snapshot(project.root / "models")
    with pytest.raises(PublishError):
        project.build(force=True)
    assert snapshot(project.root / "models") == before


def test_a_source_that_links_into_the_output_directory_is_refused(project, monkeypatch):
    monkeypatch.setenv("MERGEPIPE_FOLLOW_LINKS", "1")
    project.build()
    weights = project.folder("m") / "model.safetensors"
    project.source_file("e1").unlink()
    project.source_file("e1").symlink_to(weights)
    before = snapshot(project.folder("m"))
    with pytest.raises(PublishError, match="overlaps with source `e1`"):
        project.build(force=True)
    assert snapshot(project.folder("m")) == before


def test_an_output_may_lie_below_the_folder_of_a_linked_weight_file(project, monkeypatch):
    monkeypatch.setenv("MERGEPIPE_FOLLOW_LINKS", "1")
    project.source_file("e1").rename(project.root / "e1.safetensors")
    project.source_file("e1").symlink_to(project.root / "e1.safetensors")
    project.build()
    project.check("m")


def test_two_outputs_of_equal_content_live_side_by_side(project):
    project.set_output("twin", dict(project.outputs["m"]))
    project.build()
    assert project.raw("m") == project.raw("twin")
    for name in ("m", "twin"):
        change(project, params={"lambda": 0.5})
        project.build()
        project.check(name)
    assert {report.state for report in project.build().outputs.values()} == {"unchanged"}


@pytest.mark.parametrize("damage", ["deleted", "garbled"])
def test_an_output_without_its_manifest_is_still_ours_where_the_cache_knows_it(project, damage):
    project.build()
    manifest = project.root / "build/m/mergepipe.json"
    whole = manifest.read_bytes()
    notes = project.root / "build/m/notes.txt"
    notes.write_text("mine")
    manifest.unlink()
    if damage == "garbled":
        manifest.write_bytes(whole[: len(whole) // 2])
    assert project.build().outputs["m"].blocks["computed"] == 0
    costs = ("run", "checksum")  # the checksum is that of the costs, too
    assert {key: value for key, value in json.loads(manifest.read_bytes()).items() if key not in costs} == {
        key: value for key, value in json.loads(whole).items() if key not in costs
    }
    assert notes.read_text() == "mine"


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_weights_in_the_output_that_are_not_ours_are_refused_by_name(project, name):
    project.set_output("m", project.outputs["m"] | {"write": {"shard_size": 4}})
    project.build()
    stray = project.root / "build/m" / name
    if stray.exists():
        pytest.skip("a shard of the output has this name")
    stray.write_bytes(b"other weights")
    with pytest.raises(PublishError, match="loaders") as caught:
        project.build()
    assert caught.value.facts["files"] == [name]
    assert stray.read_bytes() == b"other weights"
    project.build(force=True)
    assert not stray.exists() or stray.read_bytes() != b"other weights"
