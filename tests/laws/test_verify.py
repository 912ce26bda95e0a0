"""Law 8: a flipped byte in an output, a pack, a manifest or the lock is found by `verify`, and named."""

import json
import os
import random
import shutil
import struct

import numpy as np
import pytest
from support.checkpoints import random_tensors
from support.projects import TINY, Messages, SmallProject, data_start, skip_flushing

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.samples import sample_runs
from mergepipe.errors import LockError, MergefileError
from mergepipe.project import verify as verify_module
from mergepipe.project import verify_shards
from mergepipe.project.verify import VerifyOptions, verify_directories

SHAPES = {"model.layers.0.a": (16, 16), "model.layers.1.b": (16, 16), "model.v": (64,), "model.s": ()}
MERGE = {"operator": "task_arithmetic", "base": "base", "experts": [{"source": "e1", "weight": 0.5}, "e2"]}


def make(root):
    """Return a built project: an output with three shards, one that is not published, and one made from both."""
    project = SmallProject(root)
    for seed, name in enumerate(("base", "e1", "e2")):
        tensors = dict(random_tensors(seed, SHAPES)) | {"ids": np.arange(10)}
        project.add_source(name, tensors, config={"torch_dtype": "float32"})
    rules = [{"match": "*.1.*", "experts": {"e2": {"weight": -0.1}}}]
    project.set_output("m", MERGE | {"write": {"shard_size": 1200}, "rules": rules})
    project.set_output("hidden", {"operator": "linear", "experts": ["e1", "e2"], "publish": False})
    project.set_output("n", {"operator": "linear", "experts": ["m", "hidden"]})
    project.build()
    return project


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        skip_flushing(patch)
        return make(tmp_path_factory.mktemp("built"))


@pytest.fixture
def project(built, tmp_path):
    """Return a copy of the built project; its packs are files of their own."""
    shutil.copytree(built.root, tmp_path / "project")
    return SmallProject(tmp_path / "project", sources=dict(built.sources), outputs=dict(built.outputs))


def problems(project, *targets, **options):
    return list(project.open().verify(targets, VerifyOptions(**options)).problems)


def write_at(path, position, data):
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path, position, bit=4):
    """Flip one bit in place; return the byte that was there."""
    was = path.read_bytes()[position : position + 1]
    write_at(path, position, bytes([was[0] ^ bit]))
    return was


def tensor_at(path, position):
    """Return the tensor, and the block of 64 elements in whole rows, that a byte of a shard belongs to."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    for name, info in json.loads(data[8 : 8 + size]).items():
        first, stop = info.get("data_offsets", (0, 0))
        if first <= position - 8 - size < stop:
            row = info["shape"][-1] if len(info["shape"]) > 1 else 1
            itemsize = (stop - first) // max(1, int(np.prod(info["shape"])))
            return name, (position - 8 - size - first) // (itemsize * row * max(1, TINY.block_elements // row))
    return None


# --- 200 random places ------------------------------------------------------------------------------------------------

PLACES = ("shards", "manifests", "lock", "beside", "packs")


def files_of(project, place):
    m, n = project.folder("m"), project.folder("n")
    return {
        "shards": sorted([*m.glob("*.safetensors"), *n.glob("*.safetensors")]),
        "manifests": [m / "mergepipe.json", n / "mergepipe.json"],
        "lock": [project.lock],
        "beside": [m / "README.md", m / "config.json", m / "model.safetensors.index.json", n / "README.md"],
        "packs": sorted((project.cache / "packs").iterdir()),
    }[place]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_anywhere_is_named(built, place, seed):
    """Ten random bytes for each of 4 seeds in each of 5 kinds of files: 200 places."""
    choice = random.Random(f"{place} {seed}")
    for _ in range(10):
        path = choice.choice(files_of(built, place))
        position, bit = choice.randrange(path.stat().st_size), 1 << choice.randrange(8)
        where = tensor_at(path, position) if path.suffix == ".safetensors" else None
        line = path.read_bytes().count(b"\n", 0, position) + 1
        was = flip(path, position, bit)
        found = problems(built)
        write_at(path, position, was)
        named = [problem for problem in found if path.name in problem.where or path.stem[:16] in problem.message]
        assert named, (path, position, bit, [problem.message for problem in found])
        if where is not None:
            blocks = [p.facts["blocks"] for p in found if p.facts.get("tensor") == where[0] and "blocks" in p.facts]
            assert [where[1], where[1] + 1] in blocks
        if place == "lock":
            assert line in [problem.facts.get("line") for problem in named], (line, named)
    assert problems(built) == []


def test_packs_that_are_copies_are_found_damaged_where_the_output_is_not(project):
    for pack in (project.cache / "packs").iterdir():
        was = flip(pack, pack.stat().st_size - 3)
        (found,) = problems(project)
        assert (found.kind, pack.name in found.where) == ("pack", True)
        assert "remove" in found.hint
        write_at(pack, pack.stat().st_size - 3, was)


def test_a_pack_is_not_hashed_twice_where_it_is_the_published_file(built, project):
    linked, copied = (one.open().verify(["m"]).outputs[0] for one in (built, project))
    assert (linked.packs.linked, linked.packs.checked) == (3, 0)
    assert (copied.packs.linked, copied.packs.checked) == (0, 3)
    sizes = [path.stat().st_size for path in built.folder("m").glob("*.safetensors")]
    headers = sum(struct.unpack("<Q", path.read_bytes()[:8])[0] + 8 for path in built.folder("m").glob("*.safetensors"))
    assert copied.bytes - linked.bytes == sum(sizes) - headers


def test_pruned_packs_are_no_problem(project):
    project.open().cache_prune(max_bytes=0)
    report = project.open().verify()
    assert report.ok
    assert [output.packs.absent for output in report.outputs] == [3, 1, 1]


@pytest.mark.parametrize("moment", ["before they are opened", "while they are hashed"])
def test_packs_that_are_pruned_meanwhile_are_no_problem(project, monkeypatch, moment):
    """Nothing holds the cache while its packs are hashed: a build or `cache prune` may remove them."""
    folder = project.cache / "packs"
    total = project.open().verify([]).outputs[0].packs
    assert total.checked > 0
    check, hash_run = verify_module.check_shards, verify_shards._hash

    def gone(*_):
        for pack in list(folder.iterdir()):
            pack.unlink(missing_ok=True)  # threads come here together

    def before(*args):
        gone()
        return check(*args)

    def during(*args):
        gone()
        return hash_run(*args)

    if moment == "before they are opened":
        monkeypatch.setattr(verify_module, "check_shards", before)
    else:
        monkeypatch.setattr(verify_shards, "_hash", during)
    report = project.open().verify([])
    assert list(report.problems) == []
    packs = report.outputs[0].packs
    assert (packs.checked, packs.absent) == (0, total.checked + total.absent)


def test_without_a_cache_everything_else_is_verified(project):
    shutil.rmtree(project.cache)
    assert project.open().verify().ok
    flip(project.lock, project.lock.read_text().index("[outputs.hidden.tensors]") + 50)
    assert {problem.kind for problem in problems(project)} == {"lock"}
    assert not project.cache.exists()


# --- what is named ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (b'"pt"', b'"pl"', "metadata"),
        (b'"F32"', b'"U32"', "`dtype` in the header is U32 and should be F32"),
        (b"[16,16]", b"[16,17]", "`shape`"),
        (b"model.layers.0.a", b"model.layers.0.x", "no tensor `model.layers.0.a`"),
        (b'{"dtype"', b' "dtype"', "no JSON"),
        (b"data_offsets", b"data_offsetz", "`data_offsetz` in the header"),
    ],
)
def test_what_differs_in_a_header_is_named_and_the_data_is_looked_at_all_the_same(project, was, now, words):
    path = project.folder("m") / "model-00001-of-00003.safetensors"
    data = path.read_bytes()
    last = tensor_at(path, len(data) - 1)
    write_at(path, data.index(was), now)
    flip(path, len(data) - 1)
    found = problems(project)
    assert any(words in problem.what for problem in found if problem.kind == "header"), found
    assert [(p.facts["tensor"], p.facts["blocks"][0]) for p in found if p.kind == "block"] == [last]


def test_adjacent_blocks_that_differ_are_one_problem_with_their_rows(project):
    path = project.folder("n") / "model.safetensors"
    start = path.stat().st_size
    for position in range(start):
        if tensor_at(path, position) == ("model.layers.1.b", 1):
            start = position
            break
    write_at(path, start, bytes(2 * 256))
    (found,) = problems(project, "n")
    assert found.what == "tensor `model.layers.1.b`: blocks 1 to 2 of 4 differ (rows 4 to 11)"
    assert (found.facts["blocks"], found.facts["rows"], found.facts["elements"]) == ([1, 3], [4, 12], [64, 192])


def test_files_that_are_missing_cut_off_or_too_many_are_named(project):
    folder = project.folder("m")
    (folder / "config.json").unlink()
    shard = folder / "model-00001-of-00003.safetensors"
    shard.chmod(0o644)
    os.truncate(shard, shard.stat().st_size - 100)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00007-of-00009.safetensors").write_bytes(b"x")
    (folder / "notes.txt").write_text("mine")
    messages = {problem.message.removeprefix(os.path.relpath(folder) + "/") for problem in problems(project, "m")}
    messages = {message.rsplit("/", 1)[-1] for message in messages}
    assert "config.json: is missing" in messages
    assert "model-00002-of-00003.safetensors: is missing" in messages
    assert any(m.startswith("model-00001-of-00003.safetensors: has ") for m in messages)
    assert any("cut off" in m for m in messages)
    assert any(m.startswith("model-00007-of-00009.safetensors: is not part of the output") for m in messages)
    assert not any("notes.txt" in m for m in messages)
    assert project.open().verify(["m"]).outputs[0].others == 2


@pytest.mark.parametrize("copied", [False, True])
def test_files_that_loaders_take_for_weights_by_themselves_are_a_problem(project, tmp_path, copied):
    """An adapter is applied by its name alone; where no index says which files are meant, some take all."""
    names = ("adapter_config.json", "adapter_model.safetensors", "extra.safetensors")
    folders = {output: project.folder(output) for output in ("m", "n")}
    assert "model.safetensors.index.json" in project.manifest("m").files
    for folder in folders.values():
        for name in (*names, "sub/extra.safetensors", "extra.bin"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"x")

    def extra(output):
        found = verified(folders[output]).problems if copied else problems(project, output)
        return [os.path.basename(problem.where) for problem in found if problem.kind == "extra"]

    assert extra("m") == list(names[:2])
    assert extra("n") == list(names)


def test_a_shard_in_the_place_of_another_is_found(project):
    folder = project.folder("m")
    shutil.copy(folder / "model-00002-of-00003.safetensors", folder / "x")
    (folder / "x").replace(folder / "model-00001-of-00003.safetensors")
    assert {problem.kind for problem in problems(project, "m")} >= {"file", "header", "block"}


def test_the_manifest_of_another_output_is_found(project):
    shutil.copy(project.folder("n") / "mergepipe.json", project.folder("m") / "mergepipe.json")
    assert any("manifest of output `n`" in problem.what for problem in problems(project, "m"))


def test_a_manifest_that_is_gone_or_garbage_is_a_problem_and_no_error(project):
    path = project.folder("m") / "mergepipe.json"
    path.write_text("{}")
    assert [problem.kind for problem in problems(project, "m")] == ["manifest"]
    path.unlink()
    assert [problem.what for problem in problems(project, "m")] == ["is missing"]


def test_an_output_that_was_never_built_is_named(project):
    project.set_output("new", MERGE)
    found = problems(project, "new")
    assert [problem.kind for problem in found] == ["output", "lock"]
    assert "mergepipe build new" in found[0].hint


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "config.json", "mergepipe.json"])
def test_what_the_hint_says_repairs_it_also_where_no_time_stamp_tells(tmp_path, name, shared, monkeypatch):
    skip_flushing(monkeypatch)
    project = make(tmp_path)
    path, notes = project.folder("m") / name, project.folder("m") / "notes.txt"
    notes.write_text("mine")
    if not shared:
        shutil.rmtree(project.cache)
    stamps = path.stat()
    flip(path, 700 if path.suffix == ".safetensors" else 20)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    found = problems(project, "m")[0]
    assert name in found.where
    assert found.hint.startswith("remove it and run `mergepipe build m`")
    path.unlink()
    project.build("m", force="--force" in found.hint and not shared)
    assert problems(project) == []
    assert notes.read_text() == "mine"


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_comment_a_blank_or_a_line_too_many_in_the_lock_is_named_with_its_line(project):
    text = project.lock.read_text()
    for changed, line in (
        (text.replace("review and commit", "review, commit", 1), 1),
        (text.replace("geometry = 1\n", "geometry = 1 \n"), 5),
        (text.replace("\n\n[sources.base]", "\n# mine\n\n[sources.base]"), 6),
        (text + "\n", text.count("\n") + 2),
    ):
        assert changed != text
        project.lock.write_text(changed)
        assert [problem.facts["line"] for problem in problems(project)] == [line]


def test_a_lock_without_its_last_line_end_is_named_as_that(project):
    text = project.lock.read_text()
    project.lock.write_text(text.removesuffix("\n"))
    (found,) = problems(project)
    assert (found.what, found.facts) == ("the newline at the end is missing", {"line": text.count("\n")})
    project.lock.write_text(text.removesuffix("\n").replace("review and commit", "review, commit", 1))
    assert [problem.facts["line"] for problem in problems(project)] == [text.count("\n"), 1]


def test_a_long_line_of_the_lock_is_shown_where_it_differs(project):
    place = f"models/{'x' * 200}"
    (project.root / project.sources["e2"]).rename(project.root / place)
    project.sources["e2"] = place
    project.save()
    project.build("m")
    text = project.lock.read_text()
    project.lock.write_text(text.replace(place, f"{place[:-1]}y"))
    (found,) = problems(project)
    assert found.what == f'is `...{"x" * 80}y"` and should be `...{"x" * 81}"`'


def test_a_lock_with_the_line_ends_of_windows_is_the_same_lock(project):
    project.lock.write_bytes(b"\xef\xbb\xbf" + project.lock.read_bytes().replace(b"\n", b"\r\n"))
    assert problems(project) == []
    project.lock.write_bytes(project.lock.read_bytes().replace(b"\r\n", b"\n", 1))
    assert len(problems(project)) > 0


def test_a_lock_that_is_gone_is_named(project):
    project.lock.unlink()
    (found,) = problems(project)
    assert (found.kind, found.what) == ("lock", "there is no lock")


def test_a_partial_build_and_a_source_that_moved_leave_a_lock_that_is_right(project):
    """What the lock says of a source is vouched for by any output, and its place by the Mergefile."""
    project.add_source("e1", dict(random_tensors(7, SHAPES)) | {"ids": np.arange(10)})
    project.build("m")
    assert problems(project) == []
    moved = project.root / "models/moved"
    (project.root / project.sources["e2"]).rename(moved)
    project.sources["e2"] = "models/moved"
    project.save()
    assert problems(project) == []
    project.build("m")
    assert problems(project) == []
    text = project.lock.read_text()
    project.lock.write_text(text.replace("models/moved", "models/movet"))
    assert [problem.facts.get("got") for problem in problems(project)] == ['path = "models/movet"']


def test_another_weight_in_the_mergefile_is_no_damage(project):
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    assert problems(project) == []


# --- directories alone ------------------------------------------------------------------------------------------------


def copy_of(project, tmp_path):
    folder = tmp_path / "elsewhere"
    shutil.copytree(project.folder("m"), folder)
    return folder


def verified(path, **options):
    return verify_directories([path], geometry=TINY, **options)


def test_a_copy_is_verified_with_nothing_but_the_directory(project, tmp_path):
    folder = copy_of(project, tmp_path)
    shutil.rmtree(project.root)
    for place in (folder, folder / "mergepipe.json", str(folder)):
        report = verified(place)
        assert (report.ok, report.lock, report.outputs[0].name) == (True, None, "m")
        assert (report.outputs[0].shards, report.outputs[0].tensors, report.outputs[0].blocks) == (3, 5, 11)
    flip(folder / "model-00001-of-00003.safetensors", 900)
    assert not verified(folder).ok


def test_a_copy_of_links_is_verified_too(project, tmp_path):
    """As a hub's cache keeps it: links to files elsewhere."""
    folder, store = copy_of(project, tmp_path), tmp_path / "store"
    store.mkdir()
    for path in list(folder.iterdir()):
        path.rename(store / path.name)
        path.symlink_to(store / path.name)
    assert verified(folder).ok


def test_what_is_no_output_directory_is_refused(tmp_path, project):
    for path in (tmp_path, tmp_path / "nothing", project.mergefile):
        with pytest.raises(LockError) as caught:
            verified(path)
        assert caught.value.exit_status == 2
        assert str(path) in caught.value.message


def test_in_a_project_a_name_is_an_output_and_a_path_a_directory(project, monkeypatch):
    monkeypatch.chdir(project.root)
    shutil.copytree(project.folder("n"), project.root / "m")
    flip(project.root / "m" / "model.safetensors", 600)
    assert project.open().verify(["m"]).ok
    report = project.open().verify(["./m", "n"])
    assert [(output.name, output.path, not output.problems) for output in report.outputs] == [
        ("n", "build/n", True),
        ("n", "m", False),
    ]
    with pytest.raises(MergefileError, match="`mm` is not an output"):
        project.open().verify(["mm", "n"])
    with pytest.raises(MergefileError, match="--full"):
        project.open().verify(["./m"], VerifyOptions(full=True))


@pytest.mark.parametrize("edit", ["blocks", "shape", "size"])
def test_a_manifest_made_to_mislead_ends_in_problems_alone(project, tmp_path, edit):
    """A manifest that is whole in itself, by somebody else: more blocks than there are, or a shape without end."""
    from dataclasses import replace

    from mergepipe.digest import source_digest, tensor_digest
    from mergepipe.lockfile.manifest import parse_manifest, render_manifest

    folder = copy_of(project, tmp_path)
    path = folder / "mergepipe.json"
    manifest = parse_manifest(path.read_bytes(), path)
    first, *rest = manifest.tensors
    blocks = first.blocks * 3 if edit == "blocks" else first.blocks
    shape = (2**20, 2**30) if edit == "shape" else first.shape
    forged = replace(first, blocks=blocks, shape=shape)
    locked, *others = manifest.output.tensors
    tensors = (replace(locked, digest=tensor_digest(first.dtype, shape, blocks)), *others)
    shards = manifest.output.shards
    if edit == "size":
        shards = tuple(replace(shard, bytes=2**60) for shard in shards)
    output = replace(
        manifest.output, tensors=tensors, shards=shards, digest=source_digest((t.name, t.digest) for t in tensors)
    )
    path.write_bytes(render_manifest(replace(manifest, output=output, tensors=(forged, *rest))))
    assert not verified(folder).ok


def test_an_output_that_is_published_meanwhile_is_no_damage(project, monkeypatch):
    """What was read may be of both; to say which block differs would mislead."""
    real = verify_module.check_shards

    def meanwhile(*arguments):
        project.folder("n").rename(project.root / "retired")
        shutil.copytree(project.root / "retired", project.folder("n"))
        flip(project.folder("n") / "model.safetensors", 600)
        return real(*arguments)

    monkeypatch.setattr(verify_module, "check_shards", meanwhile)
    (found,) = problems(project, "n")
    assert found.what == "another output took its place while it was verified"


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_progress_counts_every_byte_once(project, workers):
    messages = Messages()
    report = project.open(reporter=messages, workers=workers).verify()
    ((phase, total, done, ended),) = messages.phases
    assert (phase, done, ended) == ("verifying", total, True)
    assert sum(output.bytes for output in report.outputs) > total > 0


def test_nothing_is_changed(project):
    def state():
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in project.root.rglob("*")
            if path.is_file()
        }

    flip(project.folder("m") / "model-00001-of-00003.safetensors", 900)
    before = state()
    assert problems(project)
    assert state() == before


# --- sources ----------------------------------------------------------------------------------------------------------


def test_full_hashes_the_sources_and_names_the_block_that_differs(project):
    report = project.open().verify([], VerifyOptions(full=True))
    assert report.ok
    assert {source.name for source in report.sources} == {"base", "e1", "e2"}
    path = project.source_file("e1")
    stamps = path.stat()
    position = next(p for p in range(path.stat().st_size) if tensor_at(path, p) == ("model.layers.1.b", 2))
    flip(path, position)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    assert problems(project) == []
    (found,) = problems(project, full=True)
    assert found.message == "source `e1`: tensor `model.layers.1.b`: block 2 of 4 differs (rows 8 to 11)"
    (found,) = problems(project, "hidden", full=True)
    assert "the lock says" in found.what


def test_a_source_that_is_pinned_by_samples_is_compared_by_what_is_known_of_it(tmp_path):
    project = SmallProject(tmp_path, geometry=Geometry(block_elements=2048))
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, {"model.layers.0.w": (96, 128)}))
    budget = {"expert_reads": "30%", "stats": "sample"}
    project.set_output("m", MERGE | {"budget": budget})
    project.build()
    report = project.open().verify([], VerifyOptions(full=True, sample=100))
    assert report.ok
    pins = {source.name: (source.pinned_by, source.digest[:3]) for source in report.sources}
    assert pins == {"base": ("content", "b3:"), "e1": ("sample", "b3:"), "e2": ("sample", "b3:")}
    (tensor,) = project.manifest("m").tensors
    levels, blocks = tensor.levels[: len(tensor.levels) // 2], len(tensor.blocks) // 32
    runs = {block: sample_runs(2048, block, 128) for block in range(blocks)}
    path = project.source_file("e1")
    for block in range(blocks):
        outside = next(e for e in range(2048) if not any(first <= e < stop for first, stop in runs[block]))
        for element, is_found in ((runs[block][0][0], True), (outside, levels[block] != 0)):
            position = data_start(path) + 4 * (2048 * block + element)
            was = flip(path, position)
            found = [problem.facts["blocks"] for problem in problems(project, full=True)]
            assert found == ([[block, block + 1]] if is_found else []), (block, element)
            write_at(path, position, was)
