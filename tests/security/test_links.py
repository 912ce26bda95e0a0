"""A checkpoint's files lie in its folder: no link, index or record leads elsewhere, but for a hub's cache."""

import json

import pytest
from support.adapters import factors, write_adapter
from support.checkpoints import random_tensors, write_checkpoint, write_safetensors
from support.projects import SmallProject

from mergepipe.checkpoints.adapter import open_adapter
from mergepipe.checkpoints.checkpoint import open_checkpoint
from mergepipe.checkpoints.place import FOLLOW_VARIABLE
from mergepipe.errors import CollectedErrors, MergepipeError, SourceError

A = random_tensors(0, {"a": (2, 2)})
SECRET = "machine example.org login me password hunter2"


def refusal(folder):
    with pytest.raises(MergepipeError) as caught:
        open_checkpoint(folder, label="a", shown="m")
    return caught.value


def moved_out(folder, name):
    """Put a file elsewhere, and a link in its place."""
    target = folder.parent / "elsewhere" / name
    target.parent.mkdir(exist_ok=True)
    (folder / name).rename(target)
    (folder / name).symlink_to(target)
    return target


@pytest.mark.parametrize("relative", [True, False])
def test_weights_behind_a_link_that_leads_out_are_refused(tmp_path, relative):
    folder = write_checkpoint(tmp_path / "m", A)
    target = moved_out(folder, "model.safetensors")
    if relative:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to("../elsewhere/model.safetensors")
    error = refusal(folder)
    assert error.message == (
        f"source `a`: `m/model.safetensors` is a link that leads out of the folder, to `{target.resolve()}`"
    )
    assert FOLLOW_VARIABLE in error.hint
    assert error.exit_status == 2


def test_they_are_read_where_the_user_says_so(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "m", A)
    target = moved_out(folder, "model.safetensors")
    assert list(open_checkpoint(target, label="a").tensors) == ["a"]
    assert list(open_checkpoint(folder / "model.safetensors", label="a").tensors) == ["a"]  # the file itself is named
    for no in ("", "0", "false", "no"):
        monkeypatch.setenv(FOLLOW_VARIABLE, no)
        refusal(folder)
    monkeypatch.setenv(FOLLOW_VARIABLE, "1")
    assert list(open_checkpoint(folder, label="a").tensors) == ["a"]


def test_a_link_inside_of_the_folder_and_one_to_the_folder_are_no_matter(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A)
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to("m")
    assert list(open_checkpoint(tmp_path / "link", label="a").tensors) == ["a"]


def hub_cache(root):
    """Write a checkpoint as a hub's cache keeps it; return the folder of the revision."""
    snapshot = root / "models--org--m" / "snapshots" / "0123abcd"
    blobs = root / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    write_checkpoint(snapshot, random_tensors(0, {f"layers.{i}.w": (2, 2) for i in range(4)}), shards=2, config={})
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{number:064}")
        path.symlink_to(f"../../blobs/{number:064}")
    return snapshot


def test_links_of_a_hubs_cache_are_followed(tmp_path):
    snapshot = hub_cache(tmp_path)
    assert len(open_checkpoint(snapshot, label="a").tensors) == 4
    (tmp_path / "mine").symlink_to(snapshot)
    assert len(open_checkpoint(tmp_path / "mine", label="a").tensors) == 4


def test_a_folder_that_only_looks_like_a_hubs_cache_leads_nowhere_else(tmp_path):
    snapshot = hub_cache(tmp_path)
    secret = tmp_path / "other" / "blobs" / "x"
    secret.parent.mkdir(parents=True)
    secret.write_text(SECRET)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(secret)
    assert "leads out of the folder" in refusal(snapshot).message
    (snapshot / "config.json").unlink()
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "moved")
    blobs.symlink_to(tmp_path / "moved")  # the folder of blobs is a link itself
    assert "leads out of the folder" in refusal(snapshot).message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "additional_chat_templates/a.jinja"])
def test_no_file_of_the_machine_is_copied_into_an_output(tmp_path, name):
    (tmp_path / "secret").write_text(json.dumps({"secret": SECRET}))
    project = SmallProject(tmp_path / "p")
    folder = project.add_source("a", A)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    project.set_output("m", {"operator": "linear", "experts": ["a"]})
    with pytest.raises(SourceError, match="leads out of the folder") as caught:
        project.build()
    assert SECRET not in str(caught.value.as_json())
    assert not project.folder("m").exists()


def test_a_card_behind_a_link_says_nothing(tmp_path):
    (tmp_path / "card").write_text("---\nlicense: mit\n---\n")
    project = SmallProject(tmp_path / "p")
    (project.add_source("a", A) / "README.md").symlink_to(tmp_path / "card")
    project.set_output("m", {"operator": "linear", "experts": ["a"]})
    project.build()
    assert "license: mit" not in (project.folder("m") / "README.md").read_text()


def test_what_a_link_leads_to_is_not_shown(tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to(tmp_path / "secret")
    assert "hunter2" not in str(refusal(tmp_path / "m").as_json())


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_the_files_of_an_adapter_lie_in_its_folder(tmp_path, name):
    base = open_checkpoint(write_checkpoint(tmp_path / "base", {"q.weight": A["a"]}), label="base")
    folder = write_adapter(tmp_path / "a", factors(0, "q", 2, 2))
    open_adapter(folder, label="a", on=base)
    moved_out(folder, name)
    with pytest.raises(SourceError, match="leads out of the folder"):
        open_adapter(folder, label="a", on=base)


@pytest.mark.parametrize(
    "file",
    [
        "../m/model.safetensors", "/etc/passwd", "a/../../x", "./model.safetensors", "a//b", "a\0b", "C:\\x",
        "\\\\host\\x", "..", "", "a/", "sub/..",
    ],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_alone(tmp_path, file):
    folder = write_checkpoint(tmp_path / "m", A, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    error = refusal(folder)
    assert error.facts["rule"] == "escape"
    assert "\0" not in error.message


def test_a_folder_of_shards_that_is_a_link_leads_nowhere(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A)
    write_safetensors(tmp_path / "elsewhere" / "x.safetensors", A)
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "sub/x.safetensors"}}))
    error = refusal(folder)
    assert not isinstance(error, CollectedErrors)
    assert "leads out of the folder" in error.message
