"""Opening checkpoints: which files hold the weights, what is refused and in which words."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from support.checkpoints import random_tensors, raw_file_bytes, safetensors_bytes, write_checkpoint, write_safetensors

from mergepipe.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mergepipe.digest import content_digest
from mergepipe.errors import CollectedErrors, FormatError, MergepipeError, SourceChangedError, SourceError
from mergepipe.fsio.identity import FileIdentity

SHAPES = {
    "model.embed_tokens.weight": (16, 4),
    **{f"model.layers.{i}.mlp.weight": (4, 4) for i in range(12)},
    "model.norm.weight": (4,),
}
TENSORS = random_tensors(0, SHAPES, "BF16")
A, B = random_tensors(1, {"a": (2, 2)}), random_tensors(2, {"b": (3,)})
SHARD = "model-{:05d}-of-{:05d}.safetensors"


def opened(path: Path, **more: str) -> Checkpoint:
    return open_checkpoint(path, label="math", **more)


def refusal(path: Path) -> MergepipeError:
    """Return the error; the path is shown as the user would have written it."""
    with pytest.raises(SourceError) as caught:
        open_checkpoint(path, label="math", shown=path.name)
    assert caught.value.exit_status == 2
    assert caught.value.message.startswith(f"source `math`: `{path.name}")
    return caught.value


def refusals(path: Path) -> tuple[MergepipeError, ...]:
    with pytest.raises(CollectedErrors) as caught:
        open_checkpoint(path, label="math", shown=path.name)
    return caught.value.errors


def write_index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def data_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the bytes of every tensor, read where the checkpoint says they are."""
    found: dict[str, bytes] = {}
    for name, info in checkpoint.tensors.items():
        content = checkpoint.files[info.file].path.read_bytes()
        found[name] = content[info.offset : info.offset + info.nbytes]
    return found


# -- what a checkpoint is


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_tensor_is_found_whatever_the_shards(tmp_path, shards):
    checkpoint = opened(write_checkpoint(tmp_path / "m", TENSORS, shards=shards, config={"model_type": "llama"}))
    assert data_of(checkpoint) == {name: array.tobytes() for name, array in TENSORS.items()}
    assert list(checkpoint.tensors) == list(SHAPES)  # natural order: layer 2 before layer 10
    assert len(checkpoint.files) == shards
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.notes == ()
    assert checkpoint.nbytes == sum(array.nbytes for array in TENSORS.values())
    assert checkpoint.layers().count == 12
    assert (checkpoint.label, checkpoint.root, checkpoint.is_folder) == ("math", tmp_path / "m", True)


def test_a_file_is_recorded_with_its_identity_and_header_digest(tmp_path):
    folder = write_checkpoint(tmp_path / "m", TENSORS)
    (file,) = opened(folder).files
    content = file.path.read_bytes()
    assert (file.path, file.name) == (folder / "model.safetensors", "model.safetensors")
    assert file.identity == FileIdentity.at(file.path)
    assert file.header_digest == content_digest(content[: file.header_size])


def test_a_relative_path_gives_absolute_files(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "a b" / "münchen", A)
    monkeypatch.chdir(tmp_path)
    checkpoint = opened(Path("a b") / "münchen")
    assert checkpoint.root == tmp_path / "a b" / "münchen"
    assert checkpoint.files[0].path.is_absolute()
    (tmp_path / "a b" / "münchen" / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match=r"`a b/münchen/model\.safetensors` is empty"):
        opened(Path("a b") / "münchen")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("expert_a", "`expert_a/m"), ("./x/", "`./x/m"), ("../up", "`../up/m"), ("/abs", "`/abs/m")],
)
def test_messages_show_the_path_as_it_was_written(tmp_path, shown, expected):
    (write_checkpoint(tmp_path / "m", A) / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(FormatError) as caught:
        opened(tmp_path / "m", shown=shown)
    assert expected + "odel.safetensors`" in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_a_single_file_is_a_checkpoint_without_side_files(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A, config={"model_type": "llama"})
    write_safetensors(folder / "other.safetensors", B)
    checkpoint = opened(folder / "other.safetensors")
    assert list(checkpoint.tensors) == ["b"]
    assert (checkpoint.root, checkpoint.config, checkpoint.is_folder) == (folder, {}, False)


def test_a_broken_single_file_is_named_as_it_was_written(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(FormatError, match=r"`models/bad\.safetensors` is not a safetensors file: it is an HTML page"):
        opened(path, shown="models/bad.safetensors")


def test_links_to_blobs_as_in_the_hub_cache_work(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    write_safetensors(blobs / ("e" * 64), A)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / ("e" * 64))
    assert list(opened(snapshot).tensors) == ["a"]


def test_hidden_files_are_not_there(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A, side_files={"._model.safetensors": b"junk", ".DS_Store": b"junk"})
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    checkpoint = opened(folder)
    assert list(checkpoint.tensors) == ["a"]
    assert checkpoint.notes == ()


def test_tensors_that_are_equal_in_name_order_do_not_depend_on_the_file_system(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "m", TENSORS, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    listdir = os.listdir
    orders = []
    for reverse in (False, True):
        monkeypatch.setattr(os, "listdir", lambda path, r=reverse: sorted(listdir(path), reverse=r))
        orders.append(opened(folder))
    assert orders[0] == orders[1]
    assert list(orders[0].tensors) == list(orders[1].tensors)


# -- which files hold the weights


def test_the_index_wins_over_every_other_set(tmp_path):
    folder = write_checkpoint(tmp_path / "m", TENSORS, shards=3)
    other = random_tensors(9, SHAPES, "BF16")
    for name in (SHARD.format(1, 2), SHARD.format(2, 2), "consolidated.safetensors", "model.fp16.safetensors"):
        write_safetensors(folder / name, other)
    write_safetensors(folder / "model.safetensors", other)
    write_safetensors(folder / "original" / "consolidated.00.safetensors", other)
    checkpoint = open_checkpoint(folder, label="math", shown="m")
    assert data_of(checkpoint) == {name: array.tobytes() for name, array in TENSORS.items()}
    (note,) = checkpoint.notes
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "model.safetensors", SHARD.format(2, 2)):
        assert f"`{name}`" in note
    assert "`m`: ignored" in note


def test_an_index_of_another_name_counts_where_it_is_alone(tmp_path):
    write_safetensors(tmp_path / "m" / "x.safetensors", A)
    write_safetensors(tmp_path / "m" / "y.safetensors", A)
    write_index(tmp_path / "m", {"a": "y.safetensors"}, "pytorch.safetensors.index.json")
    assert opened(tmp_path / "m").files[0].name == "y.safetensors"
    write_safetensors(tmp_path / "m" / "model.safetensors", B)
    assert opened(tmp_path / "m").files[0].name == "model.safetensors"


def test_the_index_of_another_copy_does_not_count(tmp_path):
    write_safetensors(tmp_path / "m" / SHARD.format(1, 1), A)
    write_safetensors(tmp_path / "m" / "consolidated-00001-of-00001.safetensors", B)
    write_index(tmp_path / "m", {"b": "consolidated-00001-of-00001.safetensors"}, "consolidated.safetensors.index.json")
    assert list(opened(tmp_path / "m").tensors) == ["a"]
    (tmp_path / "m" / SHARD.format(1, 1)).unlink()
    assert list(opened(tmp_path / "m").tensors) == ["b"]


def test_two_indexes_of_other_names_are_ambiguous(tmp_path):
    write_safetensors(tmp_path / "m" / "x.safetensors", A)
    for name in ("p.safetensors.index.json", "q.safetensors.index.json"):
        write_index(tmp_path / "m", {"a": "x.safetensors"}, name)
    error = refusal(tmp_path / "m")
    assert "`p.safetensors.index.json`, `q.safetensors.index.json`" in error.message
    assert "model.safetensors.index.json" in (error.hint or "")


def test_model_safetensors_wins_where_there_is_no_index(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A)
    write_safetensors(folder / "consolidated.safetensors", B)
    write_safetensors(folder / "adapter_model.safetensors", B)
    checkpoint = opened(folder)
    assert list(checkpoint.tensors) == ["a"]
    assert "`consolidated.safetensors`" in checkpoint.notes[0]


def test_all_files_count_where_nothing_else_decides(tmp_path):
    folder = tmp_path / "m"
    write_safetensors(folder / SHARD.format(1, 2), A)
    write_safetensors(folder / SHARD.format(2, 2), B)
    write_safetensors(folder / "consolidated.safetensors", random_tensors(3, {"c": (1,)}))
    write_safetensors(folder / "adapter_model.safetensors", random_tensors(3, {"d": (1,)}))
    write_safetensors(folder / "sub" / "x.safetensors", random_tensors(3, {"e": (1,)}))
    checkpoint = opened(folder)
    assert list(checkpoint.tensors) == ["a", "b"]
    assert [info.file for info in checkpoint.tensors.values()] == [0, 1]
    assert "`consolidated.safetensors`" in checkpoint.notes[0]


def test_consolidated_alone_is_the_checkpoint(tmp_path):
    write_safetensors(tmp_path / "m" / "consolidated.safetensors", A)
    assert list(opened(tmp_path / "m").tensors) == ["a"]


def test_shards_counted_from_zero_are_complete(tmp_path):
    write_safetensors(tmp_path / "m" / SHARD.format(0, 2), A)
    write_safetensors(tmp_path / "m" / SHARD.format(1, 2), B)
    assert list(opened(tmp_path / "m").tensors) == ["a", "b"]


def test_safetensors_count_where_there_are_bin_files_too(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A, side_files={"pytorch_model.bin": b"PK\x03\x04"})
    assert opened(folder).notes == ()


# -- what is missing or twice


def test_all_missing_shards_of_an_index_are_listed_together(tmp_path):
    folder = write_checkpoint(tmp_path / "m", TENSORS, shards=4)
    for number in (2, 3):
        (folder / SHARD.format(number, 4)).unlink()
    error = refusal(folder)
    assert "incomplete download" in error.message
    assert f"`{SHARD.format(2, 4)}`, `{SHARD.format(3, 4)}`" in error.message
    assert error.facts["missing"] == [SHARD.format(2, 4), SHARD.format(3, 4)]


def test_missing_siblings_are_seen_without_an_index(tmp_path):
    write_safetensors(tmp_path / "m" / SHARD.format(1, 3), A)
    error = refusal(tmp_path / "m")
    assert "incomplete download" in error.message
    assert f"`{SHARD.format(2, 3)}`, `{SHARD.format(3, 3)}`" in error.message


def test_an_absurd_number_of_missing_siblings_is_cut_short(tmp_path):
    write_safetensors(tmp_path / "m" / SHARD.format(1, 99999), A)
    assert len(refusal(tmp_path / "m").message) < 1000


def test_a_tensor_in_two_files_is_an_error_that_names_both(tmp_path):
    write_safetensors(tmp_path / "m" / "one.safetensors", A)
    write_safetensors(tmp_path / "m" / "two.safetensors", {**B, **A})
    error = refusal(tmp_path / "m")
    assert "the tensor `a` in both `one.safetensors` and `two.safetensors`" in error.message
    assert "index" in (error.hint or "")


def test_two_full_sets_are_an_error(tmp_path):
    for total in (1, 2):
        folder = write_checkpoint(tmp_path / "x", {**A, **B}, shards=2) if total == 2 else tmp_path / "x"
        if total == 1:
            write_safetensors(folder / SHARD.format(1, 1), {**A, **B})
    (tmp_path / "x" / "model.safetensors.index.json").unlink()
    error = refusal(tmp_path / "x")
    assert f"`{SHARD.format(1, 1)}`" in error.message
    assert f"`{SHARD.format(1, 2)}`" in error.message


def test_a_tensor_that_its_shard_lacks_is_an_error_for_every_such_shard(tmp_path):
    folder = tmp_path / "m"
    write_safetensors(folder / "x.safetensors", A)
    write_safetensors(folder / "y.safetensors", B)
    write_index(folder, {"a": "x.safetensors", "c": "x.safetensors", "d": "y.safetensors"})
    first, second = refusals(folder)
    assert "`m/x.safetensors` lacks 1 of the tensors that the index places there: `c`" in first.message
    assert "`m/y.safetensors` lacks 1 of the tensors that the index places there: `d`" in second.message


def test_tensors_that_the_index_does_not_place_in_a_shard_are_ignored_with_a_note(tmp_path):
    folder = tmp_path / "m"
    write_safetensors(folder / "x.safetensors", {**A, "c": A["a"] + 1})
    write_safetensors(folder / "y.safetensors", {**B, "a": A["a"] + 1})
    write_index(folder, {"a": "x.safetensors", "b": "y.safetensors"})
    checkpoint = opened(folder)
    assert data_of(checkpoint) == {"a": A["a"].tobytes(), "b": B["b"].tobytes()}
    assert [("`c`" in note, "`a`" in note) for note in checkpoint.notes] == [(True, False), (False, True)]


# -- the index is data from somewhere else


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/../../x.safetensors",
        "..",
        "",
        ".",
        "sub//x.safetensors",
        "..\\x.safetensors",
        "sub\\x.safetensors",
        "C:x.safetensors",
        "c:/x.safetensors",
        "x\0.safetensors",
    ],
)
def test_an_index_cannot_name_files_outside_its_folder(tmp_path, name):
    write_safetensors(tmp_path / "model.safetensors", A)
    write_index(tmp_path / "m", {"a": name})
    error = refusal(tmp_path / "m")
    assert isinstance(error, FormatError)
    assert error.rule == "escape"
    assert error.facts["tensor"] == "a"
    assert "`m/model.safetensors.index.json`" in error.message


def test_every_wrong_file_name_of_an_index_is_reported_once(tmp_path):
    write_index(tmp_path / "m", {"a": "../x", "b": "../x", "c": "/y", "d": 4})
    found = refusals(tmp_path / "m")
    assert [error.facts["tensor"] for error in found] == ["a", "c", "d"]


def test_an_index_may_name_files_in_sub_folders(tmp_path):
    write_safetensors(tmp_path / "m" / "sub" / "x.safetensors", A)
    write_index(tmp_path / "m", {"a": "sub/x.safetensors"})
    (file,) = opened(tmp_path / "m").files
    assert (file.name, file.path) == ("sub/x.safetensors", tmp_path / "m" / "sub" / "x.safetensors")


@pytest.mark.parametrize(
    ("rule", "words", "content"),
    [
        ("index-json", "line 1, column 2", b"{"),
        ("index-json", "not UTF-8", b'{"weight_map":{"a":"\xff"}}'),
        ("index-json", "nested", b"[" * 100_000),
        ("index-json", "Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\nsize 99\n"),
        ("index-json", "HTML page", b"<html>not found</html>"),
        ("index", "no `weight_map`", b"[]"),
        ("index", "no `weight_map`", b'{"metadata":{}}'),
        ("index", "no `weight_map`", b'{"weight_map":{}}'),
        ("index", "not a file name", b'{"weight_map":{"a":null}}'),
        ("duplicate-name", "the key `a` appears twice", b'{"weight_map":{"a":"x","a":"y"}}'),
        ("duplicate-name", "the key `weight_map` appears twice", b'{"weight_map":{"a":"x"},"weight_map":{"a":"x"}}'),
        ("surrogate", "surrogate", b'{"weight_map":{"a":"\\ud800"}}'),
    ],
)
def test_a_broken_index_is_refused(tmp_path, rule, words, content):
    write_checkpoint(tmp_path / "m", A, side_files={"model.safetensors.index.json": content})
    error = refusal(tmp_path / "m")
    assert isinstance(error, FormatError)
    assert error.rule == rule
    assert words in error.message
    assert "`m/model.safetensors.index.json`" in error.message


# -- what lies there instead


def test_a_missing_path_suggests_a_sibling(tmp_path):
    write_checkpoint(tmp_path / "expert-math", A)
    with pytest.raises(SourceError) as caught:
        opened(tmp_path / "expert-mth", shown="models/expert-mth")
    assert "source `math`: `models/expert-mth` does not exist" in caught.value.message
    assert caught.value.hint == "did you mean `models/expert-math`?"
    with pytest.raises(SourceError, match="nor does the folder"):
        opened(tmp_path / "none" / "such")


def test_a_path_with_a_variable_is_told_that_there_are_none(tmp_path):
    with pytest.raises(SourceError, match="nor does the folder") as caught:
        open_checkpoint(tmp_path / "$HOME/m", label="math", shown="$HOME/m")
    assert caught.value.hint == "variables are not expanded in a path; `~` is"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_a_folder_with_torch_files_only_gets_the_recipe_to_convert(tmp_path, name):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).write_bytes(b"PK\x03\x04")
    (tmp_path / "m" / "training_args.bin").write_bytes(b"PK\x03\x04")
    error = refusal(tmp_path / "m")
    assert f"only `{name}`" in error.message
    assert "training_args" not in error.message
    assert f'torch.load("{name}"' in (error.hint or "")
    assert "save_file({k: v.clone()" in (error.hint or "")


@pytest.mark.parametrize(("name", "words"), [("m.gguf", "GGUF"), ("m.h5", "from_tf"), ("m.msgpack", "from_flax")])
def test_other_formats_get_their_own_hint(tmp_path, name, words):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).write_bytes(b"?")
    error = refusal(tmp_path / "m")
    assert f"`{name}`" in error.message
    assert words in (error.hint or "")
    assert words in (refusal(tmp_path / "m" / name).hint or "")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"])
def test_an_adapter_is_called_an_adapter(tmp_path, name):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).write_bytes(safetensors_bytes(A))
    error = refusal(tmp_path / "m")
    assert "is a LoRA adapter" in error.message
    if name.endswith(".safetensors"):
        assert "is a LoRA adapter" in refusal(tmp_path / "m" / name).message


def test_an_empty_folder_and_one_without_weights_are_told_apart(tmp_path):
    (tmp_path / "m").mkdir()
    assert "is an empty folder" in refusal(tmp_path / "m").message
    (tmp_path / "m" / "config.json").write_text("{}", encoding="utf-8")
    error = refusal(tmp_path / "m")
    assert "holds no weights" in error.message
    assert "`config.json`" in error.message


def test_weights_in_sub_folders_are_pointed_at(tmp_path):
    write_checkpoint(tmp_path / "m" / "checkpoint-500", A)
    assert "`m/checkpoint-500`" in (refusal(tmp_path / "m").hint or "")
    (tmp_path / "hub" / "snapshots" / "0123abcd").mkdir(parents=True)
    assert "`hub/snapshots/0123abcd`" in (refusal(tmp_path / "hub").hint or "")


def test_a_path_to_another_file_is_refused_in_words(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A, shards=2, config={})
    assert "folder" in (refusal(folder / "model.safetensors.index.json").hint or "")
    (tmp_path / "weights").write_bytes(b"\x1f\x8b")
    assert "gzip" in refusal(tmp_path / "weights").message
    (tmp_path / "blob").write_bytes(safetensors_bytes(A))
    assert "does not end in `.safetensors`" in refusal(tmp_path / "blob").message
    (tmp_path / "w.bin").write_bytes(b"PK\x03\x04")
    assert "torch.load" in (refusal(tmp_path / "w.bin").hint or "")


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_an_impossible_path_is_an_error_like_any_other(path):
    with pytest.raises(SourceError, match="cannot be used as a path"):
        opened(Path(path))


# -- files that cannot be read


def test_broken_links_are_told_with_their_target(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to("../blobs/gone")
    error = refusal(tmp_path / "m")
    assert "`m/model.safetensors` is a link to `../blobs/gone`, which does not exist" in error.message
    (tmp_path / "link").symlink_to("nowhere")
    assert "is a link to `nowhere`" in refusal(tmp_path / "link").message
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be used as a path" in refusal(tmp_path / "loop").message


def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "m" / "model.safetensors").mkdir(parents=True)
    assert "`m/model.safetensors` is a folder" in refusal(tmp_path / "m").message
    (tmp_path / "p").mkdir()
    os.mkfifo(tmp_path / "p" / "model.safetensors")
    assert "is not a regular file" in refusal(tmp_path / "p").message


@pytest.mark.parametrize(("code", "words"), [(errno.EACCES, "Permission denied"), (errno.EIO, "Input/output error")])
def test_a_file_that_may_not_be_opened_is_refused(tmp_path, monkeypatch, code, words):
    folder = write_checkpoint(tmp_path / "m", A)
    system_open = os.open

    def failing(path, *args, **kwargs):
        if str(path).endswith(".safetensors"):
            raise OSError(code, os.strerror(code))
        return system_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    error = refusal(folder)
    assert f"`m/model.safetensors` cannot be read: {words}" in error.message
    assert ("permissions" in (error.hint or "")) == (code == errno.EACCES)


def test_a_disk_that_fails_while_reading_is_reported(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "m", A)

    def failing(fd, count, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", failing)
    assert "`m/model.safetensors` cannot be read" in refusal(folder).message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_listed_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A)
    folder.chmod(0)
    try:
        assert "cannot be" in refusal(folder).message
    finally:
        folder.chmod(0o755)


def test_a_file_that_changes_while_its_header_is_read_is_refused(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "m", A)
    pread = os.pread

    def changing(fd, count, offset):
        data = pread(fd, count, offset)
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b"more")
        return data

    monkeypatch.setattr(os, "pread", changing)
    with pytest.raises(SourceChangedError) as caught:
        opened(folder)
    assert caught.value.exit_status == 1


def test_no_descriptor_is_left_open(tmp_path):
    good = write_checkpoint(tmp_path / "good", TENSORS, shards=3)
    bad = write_checkpoint(tmp_path / "bad", A)
    (bad / "model.safetensors").write_bytes(b"broken")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(5):
        opened(good)
        refusal(bad)
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before


# -- everything wrong is reported together


def test_all_problems_of_a_checkpoint_are_reported_together(tmp_path):
    folder = write_checkpoint(tmp_path / "m", TENSORS, shards=3, side_files={"config.json": "{\n  oops"})
    (folder / SHARD.format(1, 3)).write_bytes(b"")
    (folder / SHARD.format(3, 3)).write_bytes(
        raw_file_bytes({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}})
    )
    config, first, third = refusals(folder)
    assert "`m/config.json`" in config.message
    assert isinstance(first, FormatError)
    assert isinstance(third, FormatError)
    assert (first.rule, third.rule) == ("empty-file", "size")


def test_a_checkpoint_without_tensors_is_an_error(tmp_path):
    folder = tmp_path / "m"
    write_safetensors(folder / "model.safetensors", {})
    assert "`m/model.safetensors` holds no tensors" in refusal(folder).message
    write_safetensors(folder / "x.safetensors", {})
    (folder / "model.safetensors").rename(folder / "y.safetensors")
    assert "`m` holds no tensors" in refusal(folder).message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n "a": 1,\n oops\n}', "line 3, column 2"),
        (b"", "line 1"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[]", "does not hold a JSON object"),
        (b"[" * 100_000, "nested"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 99\n", "Git LFS pointer"),
    ],
)
def test_a_broken_config_names_file_and_line(tmp_path, content, words):
    folder = write_checkpoint(tmp_path / "m", A, side_files={"config.json": content})
    error = refusal(folder)
    assert "`m/config.json`" in error.message
    assert words in error.message


def test_a_config_may_hold_infinity_and_a_byte_order_mark(tmp_path):
    folder = write_checkpoint(tmp_path / "m", A, side_files={"config.json": b'\xef\xbb\xbf{"limit": [0.0, Infinity]}'})
    assert opened(folder).config == {"limit": [0.0, float("inf")]}
