"""The catalog: what it trusts of source files, and what it gives back of results, packs, staging and outputs."""

import dataclasses
import sqlite3
import threading
from pathlib import Path

import pytest

from mergepipe.cache import database
from mergepipe.cache.catalog import Catalog
from mergepipe.cache.database import CatalogState
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.records import Published, Result, SourceFile, StagedTensor, TensorDigests, TensorSamples
from mergepipe.cache.schema import SCHEMA_VERSION
from mergepipe.errors import CacheError, StorageError
from mergepipe.fsio.identity import COARSE_GRANULARITY_NS, FINE_GRANULARITY_NS, FileIdentity

WRITTEN = 1_700_000_000_123_456_789
IDENTITY = FileIdentity(size=100, mtime_ns=WRITTEN, ctime_ns=WRITTEN, inode=7)
LATER = WRITTEN + FINE_GRANULARITY_NS
DIGESTS = [TensorDigests(name=name, digest=name.encode() * 32, blocks=name.encode() * 64) for name in "ab"]


def record_pack(catalog, name, identity, results, staged):
    """Record a pack that is there: results are found only in those."""
    (catalog.layout.packs / f"{name}.safetensors").touch()
    catalog.record_pack(name, identity, results, staged)


@pytest.fixture
def catalog(tmp_path):
    layout = CacheLayout(tmp_path / "project/.mergecache")
    layout.create()
    catalog = Catalog(layout, 64, create=True)
    yield catalog
    catalog.close()


def file_at(path, identity=IDENTITY, header=b"h" * 32):
    return SourceFile(path=path, identity=identity, header=header)


def result(key=b"k", tensor="t", **changes):
    made = Result(
        key=key * 32,
        output="m",
        tensor=tensor,
        dtype="F32",
        shape=(2, 3),
        recipe=b"r" * 32,
        digest=b"d" * 32,
        block_keys=b"b" * 64,
        block_digests=b"c" * 64,
        pack="p1",
        offset=8,
    )
    return dataclasses.replace(made, **changes)


# --- source files -------------------------------------------------------------------------------------------------


def test_what_is_left_of_a_file_whose_row_was_removed_by_hand_is_not_taken_for_another_files(catalog, tmp_path):
    old, new = file_at(tmp_path / "old"), file_at(tmp_path / "new")
    samples = [TensorSamples(name="s", samples=b"s" * 8, blocks=b"s" * 32)]
    catalog.record_tensors(old, LATER, DIGESTS, samples)
    with sqlite3.connect(catalog.layout.catalog) as other:  # which knows of no foreign keys, as sqlite's own tool
        other.execute("DELETE FROM files")
    other.close()
    catalog.record_tensors(new, LATER, DIGESTS[:1])
    assert set(catalog.tensor_digests(new)) == {"a"}
    assert catalog.tensor_digests(old) == {}
    with sqlite3.connect(catalog.layout.catalog) as other:
        assert other.execute("SELECT count(*) FROM samples").fetchone() == (0,)
    other.close()


def test_what_was_recorded_of_a_file_is_known_while_it_is_the_same(catalog, tmp_path):
    file = file_at(tmp_path / "x")
    catalog.record_tensors(file, LATER, DIGESTS)
    assert catalog.tensor_digests(file) == {"a": b"a" * 32, "b": b"b" * 32}
    assert catalog.block_digests(file)["a"] == b"a" * 64
    assert "other" not in catalog.block_digests(file)


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode"])
def test_a_file_that_differs_in_any_mark_is_not_trusted(catalog, tmp_path, field):
    catalog.record_tensors(file_at(tmp_path / "x"), LATER, DIGESTS)
    other = dataclasses.replace(IDENTITY, **{field: getattr(IDENTITY, field) - 1})
    assert catalog.tensor_digests(file_at(tmp_path / "x", other)) == {}
    assert catalog.block_digests(file_at(tmp_path / "x", other)) == {}


def test_a_file_with_another_header_or_path_is_not_trusted(catalog, tmp_path):
    catalog.record_tensors(file_at(tmp_path / "x"), LATER, DIGESTS)
    assert catalog.tensor_digests(file_at(tmp_path / "x", header=b"i" * 32)) == {}
    assert catalog.tensor_digests(file_at(tmp_path / "y")) == {}


@pytest.mark.parametrize(
    ("read_after", "trusted"), [(FINE_GRANULARITY_NS - 1, False), (FINE_GRANULARITY_NS, True), (-10, False)]
)
def test_a_file_read_within_the_granularity_of_its_change_is_not_trusted(catalog, tmp_path, read_after, trusted):
    file = file_at(tmp_path / "x")
    catalog.record_tensors(file, WRITTEN + read_after, DIGESTS)
    assert (catalog.tensor_digests(file) != {}) == trusted


@pytest.mark.parametrize(("read_after", "trusted"), [(COARSE_GRANULARITY_NS - 1, False), (COARSE_GRANULARITY_NS, True)])
def test_whole_seconds_are_taken_for_coarse_timestamps(catalog, tmp_path, read_after, trusted):
    second = WRITTEN // 10**9 * 10**9
    file = file_at(tmp_path / "x", FileIdentity(size=1, mtime_ns=second, ctime_ns=second, inode=1))
    catalog.record_tensors(file, second + read_after, DIGESTS)
    assert (catalog.tensor_digests(file) != {}) == trusted


def test_an_mtime_in_the_future_says_nothing(catalog, tmp_path):
    file = file_at(tmp_path / "x", dataclasses.replace(IDENTITY, mtime_ns=WRITTEN * 2))
    catalog.record_tensors(file, LATER, DIGESTS)
    assert catalog.tensor_digests(file)


def test_records_of_an_unchanged_file_add_up(catalog, tmp_path):
    file = file_at(tmp_path / "x")
    for digest in DIGESTS:
        catalog.record_tensors(file, LATER, [digest])
    assert len(catalog.tensor_digests(file)) == 2
    assert catalog.count("files") == 1


def test_records_of_a_changed_file_replace_the_old_ones(catalog, tmp_path):
    catalog.record_tensors(file_at(tmp_path / "x"), LATER, DIGESTS)
    changed = file_at(tmp_path / "x", dataclasses.replace(IDENTITY, inode=8))
    catalog.record_tensors(changed, LATER, DIGESTS[:1])
    assert set(catalog.tensor_digests(changed)) == {"a"}
    assert catalog.tensor_digests(file_at(tmp_path / "x")) == {}
    assert (catalog.count("files"), catalog.count("tensors")) == (1, 1)


def test_a_forgotten_file_is_unknown(catalog, tmp_path):
    catalog.record_tensors(file_at(tmp_path / "x"), LATER, DIGESTS)
    catalog.forget_file(tmp_path / "x")
    assert catalog.tensor_digests(file_at(tmp_path / "x")) == {}
    assert catalog.count("tensors") == 0


def test_block_sizes_are_kept_apart(catalog, tmp_path):
    file = file_at(tmp_path / "x")
    catalog.record_tensors(file, LATER, DIGESTS)
    other = Catalog(catalog.layout, 128, create=True)
    assert other.tensor_digests(file) == {}
    other.record_tensors(file, LATER, DIGESTS[:1])
    assert (len(other.tensor_digests(file)), len(catalog.tensor_digests(file))) == (1, 2)
    other.close()


def test_paths_inside_the_project_are_kept_relative_to_it(catalog, tmp_path):
    inside, outside = file_at(tmp_path / "project/models/x"), file_at(tmp_path / "elsewhere/x")
    catalog.record_tensors(inside, LATER, DIGESTS)
    catalog.record_tensors(outside, LATER, DIGESTS)
    catalog.close()
    (tmp_path / "project").rename(tmp_path / "moved")
    moved = Catalog(CacheLayout(tmp_path / "moved/.mergecache"), 64, create=False)
    assert moved.tensor_digests(file_at(tmp_path / "moved/models/x"))
    assert moved.tensor_digests(outside)
    assert not moved.tensor_digests(inside)
    moved.close()


# --- results and packs --------------------------------------------------------------------------------------------


def test_a_result_is_found_by_its_key(catalog):
    results = [result(), result(b"l", "u", offset=0)]
    record_pack(catalog, "p1", IDENTITY, results, "staged")
    assert [catalog.result(key * 32) for key in (b"k", b"l", b"x")] == [*results, None]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4)])
def test_a_shape_comes_back_as_it_was(catalog, shape):
    record_pack(catalog, "p1", IDENTITY, [result(shape=shape)], "staged")
    assert catalog.result(b"k" * 32).shape == shape


def test_a_result_of_which_the_pack_was_removed_is_not_there(catalog):
    record_pack(catalog, "p1", IDENTITY, [result()], "staged")
    (catalog.layout.packs / "p1.safetensors").unlink()
    assert catalog.result(b"k" * 32) is None
    assert catalog.candidates("m", "t", b"r" * 32, (2, 3)) == ()
    record_pack(catalog, "p2", IDENTITY, [result(pack="p2")], "staged")
    assert catalog.result(b"k" * 32).pack == "p2"


def test_equal_tensors_of_one_pack_are_all_kept(catalog):
    record_pack(catalog, "p1", IDENTITY, [result(tensor="t"), result(tensor="u", offset=99)], "staged")
    assert [len(catalog.candidates("m", name, b"r" * 32, (2, 3))) for name in ("t", "u", "v")] == [1, 1, 0]


def test_a_result_may_lie_in_several_packs_and_outlives_one(catalog):
    for name in ("p1", "p2"):
        record_pack(catalog, name, IDENTITY, [result(pack=name)], "staged")
    catalog.drop_pack("p1")
    assert catalog.result(b"k" * 32).pack == "p2"
    catalog.drop_pack("p2")
    assert catalog.result(b"k" * 32) is None
    assert catalog.count("results") == 0


def test_results_of_a_pack_that_is_not_known_are_refused(catalog):
    with pytest.raises(CacheError):
        catalog.record_results([result(pack="nowhere")])
    assert catalog.count("results") == 0


def test_candidates_are_the_outputs_own_results_first_and_then_the_newest(catalog):
    for number, output in enumerate(["m", "n", "m", "n", "o"]):
        made = result(bytes([number]), output=output, pack=f"p{number}")
        record_pack(catalog, f"p{number}", IDENTITY, [made], "staged")
    found = catalog.candidates("m", "t", b"r" * 32, (2, 3))
    assert [candidate.pack for candidate in found] == ["p2", "p0", "p4", "p3", "p1"]


@pytest.mark.parametrize("other", [("u", b"r" * 32, (2, 3)), ("t", b"s" * 32, (2, 3)), ("t", b"r" * 32, (3, 2))])
def test_a_result_of_another_tensor_recipe_or_shape_is_no_candidate(catalog, other):
    record_pack(catalog, "p1", IDENTITY, [result()], "staged")
    assert catalog.candidates("m", "t", b"r" * 32, (2, 3))
    assert catalog.candidates("m", *other) == ()


def test_many_results_of_other_outputs_leave_room_for_the_own_one(catalog):
    record_pack(catalog, "own", IDENTITY, [result(pack="own")], "staged")
    for number in range(40):
        made = result(bytes([number]), output=f"o{number}", pack=f"p{number}")
        record_pack(catalog, f"p{number}", IDENTITY, [made], "staged")
    assert catalog.candidates("m", "t", b"r" * 32, (2, 3))[0].pack == "own"


def test_a_packs_identity_is_the_last_one_recorded(catalog):
    record_pack(catalog, "p1", IDENTITY, [result()], "staged")
    other = dataclasses.replace(IDENTITY, ctime_ns=1)
    catalog.record_pack_identity("p1", other)
    assert catalog.pack_identity("p1") == other
    assert catalog.pack_identity("p2") is None
    assert catalog.result(b"k" * 32)  # its results stay


def test_packs_are_listed_least_recently_used_first(catalog):
    for name in ("p1", "p2", "p3"):
        record_pack(catalog, name, IDENTITY, [], "staged")
    catalog.record_pack_identity("p1", IDENTITY)
    assert [name for name, _ in catalog.pack_names()] == ["p2", "p3", "p1"]


# --- staging and outputs ------------------------------------------------------------------------------------------


def test_staging_rows_are_replaced_and_go_with_the_pack_that_they_become(catalog):
    for digest in (b"1", b"2"):
        catalog.record_staged("s", [StagedTensor(tensor="t", block_keys=b"k" * 32, block_digests=digest * 32)])
    assert catalog.staged("s")["t"].block_digests == b"2" * 32
    catalog.record_staged("other", [StagedTensor(tensor="t", block_keys=b"", block_digests=b"")])
    record_pack(catalog, "p1", IDENTITY, [], "s")
    assert catalog.staged("s") == {}
    assert set(catalog.staged("other")) == {"t"}
    catalog.drop_staged(["other"])
    assert catalog.count("staged") == 0


def test_what_was_published_is_known_by_directory(catalog, tmp_path):
    published = Published(key=b"k", files=b"f", record=b"r")
    catalog.record_published(tmp_path / "project/build/m", published)
    assert catalog.published(tmp_path / "project/build/m") == published
    assert catalog.published(tmp_path / "project/build/n") is None


# --- transactions and files ---------------------------------------------------------------------------------------


def test_a_transaction_that_fails_leaves_nothing(catalog, tmp_path):
    def fail():
        with catalog.transaction():
            catalog.record_tensors(file_at(tmp_path / "x"), LATER, DIGESTS)
            record_pack(catalog, "p1", IDENTITY, [result()], "s")
            raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        fail()
    assert (catalog.count("files"), catalog.count("packs"), catalog.count("results")) == (0, 0, 0)
    record_pack(catalog, "p1", IDENTITY, [result()], "s")
    assert catalog.count("packs") == 1


def test_what_one_transaction_writes_another_reader_sees_at_once_or_not_at_all(catalog):
    reader = Catalog(catalog.layout, 64, create=False)
    with catalog.transaction():
        record_pack(catalog, "p1", IDENTITY, [result()], "s")
        assert reader.result(b"k" * 32) is None
    assert reader.result(b"k" * 32)
    reader.close()


def test_a_reader_of_a_missing_catalog_finds_nothing_and_makes_nothing(tmp_path):
    catalog = Catalog(CacheLayout(tmp_path / "cache"), 64, create=False)
    assert catalog.result(b"k" * 32) is None
    assert catalog.tensor_digests(file_at(tmp_path / "x")) == {}
    assert (catalog.count("packs"), catalog.count("measured"), catalog.pack_names()) == (0, 0, ())
    catalog.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("garbage", [b"", b"x" * 5000, b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_catalog_that_is_none_is_set_aside_and_begun_anew(tmp_path, garbage):
    layout = CacheLayout(tmp_path / "cache")
    layout.create()
    layout.catalog.write_bytes(garbage)
    reader = Catalog(layout, 64, create=False)
    assert reader.count("packs") == 0
    reader.close()
    assert layout.catalog.read_bytes() == garbage
    catalog = Catalog(layout, 64, create=True)
    record_pack(catalog, "p1", IDENTITY, [result()], "s")
    catalog.close()
    again = Catalog(layout, 64, create=True)
    assert again.result(b"k" * 32)
    again.close()


def with_version(catalog, version, script=""):
    """Close a catalog and make it one of another version."""
    record_pack(catalog, "p1", IDENTITY, [result()], "s")
    catalog.close()
    with sqlite3.connect(catalog.layout.catalog) as db:
        db.executescript(f"{script}; PRAGMA user_version = {version};")
    db.close()
    return catalog.layout


_NEW = {3: ("samples", "codes", "budgets"), 4: ("codes", "budgets"), 5: ("budgets",)}


@pytest.mark.parametrize("version", _NEW)
def test_a_catalog_of_a_version_before_is_taken_over(catalog, version):
    layout = with_version(catalog, version, "; ".join(f"DROP TABLE {name}" for name in _NEW[version]))
    reader = Catalog(layout, 64, create=False)
    assert (reader.count("packs"), reader.state) == (0, CatalogState.OLDER)
    assert "from the next build on" in reader.notice
    again = Catalog(layout, 64, create=True)
    assert again.result(result().key) == result()
    assert again.count("samples") == again.count("codes") == again.count("budgets") == 0
    assert "taken over" in again.notice
    again.close()
    assert Catalog(layout, 64, create=False).notice is None
    assert not layout.catalog.with_name("catalog.db.unusable").exists()


def test_samples_that_lie_at_other_places_now_are_not_taken_over(catalog):
    columns = "id, path, block_elements, size, mtime_ns, ctime_ns, inode, header, read_at_ns, seal"
    file = f"INSERT INTO files ({columns}) VALUES (1, x'00', 64, 1, 1, 1, 1, x'00', 1, x'00')"
    sample = "INSERT INTO samples VALUES (1, 'w', x'00', x'00', x'00')"
    layout = with_version(catalog, 4, f"DROP TABLE codes; DROP TABLE budgets; {file}; {sample}")
    again = Catalog(layout, 64, create=True)
    assert (again.count("samples"), again.count("files"), again.count("packs")) == (0, 1, 1)
    assert "taken over" in again.notice
    again.close()


def test_a_catalog_of_the_version_before_that_turns_out_to_be_damaged_is_set_aside(catalog):
    layout = with_version(catalog, 3)  # it has the table already that it should not have yet
    again = Catalog(layout, 64, create=True)
    assert again.count("packs") == 0
    assert "set aside" in again.notice
    again.close()


@pytest.mark.parametrize("version", [0, 1, 2, -1, 2**31 - 1, 1001])
def test_a_catalog_of_a_version_that_nobody_knows_is_set_aside_and_begun_anew(catalog, version):
    layout = with_version(catalog, version)
    assert "next build begins a new one" in Catalog(layout, 64, create=False).notice
    again = Catalog(layout, 64, create=True)
    assert again.count("packs") == 0
    assert "`catalog.db.unusable`" in again.notice
    again.close()
    assert layout.catalog.with_name("catalog.db.unusable").exists()


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 1000])
@pytest.mark.parametrize("create", [True, False])
def test_a_catalog_of_a_newer_mergepipe_is_refused_and_stays(catalog, version, create):
    layout = with_version(catalog, version)
    before = layout.catalog.read_bytes()
    with pytest.raises(CacheError, match="newer mergepipe") as caught:
        Catalog(layout, 64, create=create)
    assert "upgrade" in caught.value.hint
    assert "--cache-dir" in caught.value.hint
    assert layout.catalog.read_bytes() == before


def test_a_catalog_whose_folder_is_missing_is_an_error_in_words(tmp_path):
    with pytest.raises((CacheError, StorageError), match=r"catalog\.db"):
        Catalog(CacheLayout(tmp_path / "missing"), 64, create=True)


DAMAGE = [
    ("results", "digest = x'00'"),
    ("results", "offset = offset + 1"),
    ("results", "block_keys = zeroblob(64)"),
    ("results", "pack = 'p2'"),
    ("files", "read_at_ns = read_at_ns + 1"),
    ("files", "ctime_ns = ctime_ns - 1"),
    ("tensors", "digest = zeroblob(32)"),
    ("tensors", "name = 'c'"),
    ("published", "record = x'00'"),
    ("published", "files = x'00'"),
]


@pytest.mark.parametrize(("table", "damage"), DAMAGE)
def test_a_damaged_row_counts_as_absent(catalog, tmp_path, table, damage):
    file, directory = file_at(tmp_path / "x"), tmp_path / "out"
    catalog.record_tensors(file, LATER, DIGESTS[:1])
    for pack in ("p1", "p2"):
        record_pack(catalog, pack, IDENTITY, [result()] if pack == "p1" else [], "s")
    catalog.record_published(directory, Published(key=b"k", files=b"f", record=b"r"))
    with catalog.transaction() as db:
        db.execute(f"UPDATE {table} SET {damage}")
    assert (catalog.result(b"k" * 32) is None) == (table == "results")
    assert (catalog.candidates("m", "t", b"r" * 32, (2, 3)) == ()) == (table == "results")
    assert (catalog.tensor_digests(file) == {}) == (table in ("files", "tensors"))
    assert (catalog.published(directory) is None) == (table == "published")


def test_a_catalog_may_be_read_from_another_thread(catalog):
    record_pack(catalog, "p1", IDENTITY, [result()], "s")
    found = []
    thread = threading.Thread(target=lambda: found.append(catalog.result(b"k" * 32)))
    thread.start()
    thread.join()
    assert found == [result()]


def test_a_damaged_index_sets_the_catalog_aside(monkeypatch):
    """SQLite tells what is damaged in the higher bytes of its code; the lowest says that something is."""

    class DamagedError(sqlite3.DatabaseError):
        sqlite_errorcode = 779  # SQLITE_CORRUPT_INDEX

    aside = []
    monkeypatch.setattr(database, "_set_aside", aside.append)
    with pytest.raises(CacheError), database.guarded(Path("catalog.db"), owner=True):
        raise DamagedError("database disk image is malformed")
    assert aside == [Path("catalog.db")]
