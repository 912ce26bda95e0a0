"""Progressive packs in the cache's care: counted, pruned by age, size and content, and checked whole."""

import os
import shutil

import numpy as np
import pytest

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.code_files import check_code, code_folder, drop_scraps, is_needed
from mergepipe.cache.layout import CODE_FILE, CODE_SCRAP, CacheLayout
from mergepipe.cache.maintenance import PruneLimits, cache_info, plan_prune, prune
from mergepipe.cache.progressive import CodeStore
from mergepipe.fsio.identity import FileIdentity
from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.levels import SUFFIX, pack_key
from mergepipe.progressive.writer import TEMPORARY_SUFFIX, PackWriter

DAY = 86_400 * 10**9
BLOCK = 1024
BASE = b"b" * 32
EXPERTS = tuple(bytes([number]) * 32 for number in range(4))
SHARD = f"{'a' * 64}.safetensors"
SCRAP = f".12-0{TEMPORARY_SUFFIX}"


@pytest.fixture
def catalog(tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.create()
    catalog = Catalog(layout, BLOCK, create=True)
    yield catalog
    catalog.close()


@pytest.fixture
def codes(catalog):
    """Make four packs of the same size; the first was used four days ago, the last one day ago."""
    store = CodeStore(catalog)
    store.make_folder()
    now = FileIdentity.at(catalog.layout.catalog).mtime_ns
    found = []
    for number, expert in enumerate(EXPERTS):
        writer = PackWriter(store.folder, shape=(64, 32), block_elements=BLOCK)
        for block in range(2):
            delta = np.random.default_rng(number).standard_normal(BLOCK).astype(np.float32)
            writer.put(block, encode_block(delta, 32))
        key = store.key(BASE, expert)
        store.record(key, writer.finish(BASE, expert))
        os.utime(store.path(key), ns=(now, now - (4 - number) * DAY))
        found.append(store.path(key))
    store.flush()
    return found


def know(catalog, *digests):
    """Have these digests of tensors in the catalog, as those of a source file."""
    with catalog.transaction() as db:
        db.execute("INSERT INTO files VALUES (1, x'00', 1024, 1, 1, 1, 1, x'00', 1, x'00')")
        rows = [(1, str(number), digest, b"", b"") for number, digest in enumerate(digests)]
        db.executemany("INSERT INTO tensors VALUES (?, ?, ?, ?, ?)", rows)


def keys_of(catalog):
    return {key for (key,) in catalog.rows("SELECT key FROM codes", ())}


def left(paths):
    return [number for number, path in enumerate(paths) if path.exists()]


def test_names_are_those_that_packs_have(codes):
    assert SUFFIX == ".planes"
    assert all(CODE_FILE.fullmatch(path.name) for path in codes)
    writer = PackWriter(codes[0].parent, shape=(64, 32), block_elements=BLOCK)
    writer.put(0, encode_block(np.ones(BLOCK, np.float32), 32))
    assert [name for name in os.listdir(codes[0].parent) if CODE_SCRAP.fullmatch(name)]
    writer.abandon()


def test_codes_are_counted_apart_from_packs(catalog, codes):
    (catalog.layout.packs / SHARD).write_bytes(bytes(100))
    info = cache_info(catalog)
    assert (info["packs"], info["pack_bytes"]) == (1, 100)
    assert (info["codes"], info["code_bytes"]) == (4, sum(path.stat().st_size for path in codes))


@pytest.mark.parametrize(
    ("sizes", "max_age_days", "kept"),
    [(None, None, [0, 1, 2, 3]), (4, None, [0, 1, 2, 3]), (3.5, None, [1, 2, 3]), (1, None, [3]), (0, None, []),
     (None, 2.5, [2, 3]), (1, 2.5, [3]), (None, 0, [])],
)  # fmt: skip
def test_codes_go_by_age_and_size_the_longest_unused_first(catalog, codes, sizes, max_age_days, kept):
    size = codes[0].stat().st_size
    limits = PruneLimits(max_bytes=None if sizes is None else int(sizes * size), max_age_days=max_age_days)
    told = plan_prune(catalog, limits)
    assert left(codes) == [0, 1, 2, 3], "a plan removes nothing"
    done = prune(catalog, limits)
    assert done == told
    assert left(codes) == kept
    gone = 4 - len(kept)
    assert (len(done.codes), done.removed_bytes, done.kept_bytes) == (gone, gone * size, len(kept) * size)
    assert len(keys_of(catalog)) == 4, "plans need no packs: what they come to stays known"


def test_what_the_catalog_need_not_be_told_goes_first(catalog, codes, monkeypatch):
    """On a full disk a row can be dropped only when something else has gone."""
    unknown, seen = catalog.layout.packs / SHARD, []
    unknown.write_bytes(bytes(100))
    told = type(catalog).drop_all_staged
    monkeypatch.setattr(
        type(catalog), "drop_all_staged", lambda it: (seen.append((left(codes), unknown.exists())), told(it))
    )
    prune(catalog, PruneLimits(max_bytes=0))
    assert seen == [([], False)]


def test_codes_go_before_packs(catalog, codes):
    path, size = catalog.layout.packs / SHARD, codes[0].stat().st_size
    path.write_bytes(bytes(2 * size))
    catalog.record_pack(path.stem, FileIdentity.at(path), [], "s")
    done = prune(catalog, PruneLimits(max_bytes=3 * size))
    assert (left(codes), path.exists(), done.kept_bytes) == ([3], True, 3 * size)
    done = prune(catalog, PruneLimits(max_bytes=size))
    assert (left(codes), path.exists(), [pack.file for pack in done.packs]) == ([3], False, [SHARD])


def test_codes_of_content_that_no_source_has_go_with_what_is_known_of_them(catalog, codes):
    know(catalog, BASE, EXPERTS[1], EXPERTS[2])
    codes[2].chmod(0o644)
    codes[2].write_bytes(b"damaged")
    done = prune(catalog, PruneLimits(keep=()))
    assert {code.reason for code in done.codes} == {"unreferenced"}
    assert left(codes) == [1]
    assert keys_of(catalog) == {pack_key(BASE, EXPERTS[1], BLOCK)}


def test_without_the_base_no_code_is_needed(catalog, codes):
    know(catalog, *EXPERTS)
    assert len(prune(catalog, PruneLimits(keep=())).codes) == 4


def test_what_killed_builds_left_always_goes_and_files_of_others_stay(catalog, codes):
    folder = codes[0].parent
    mine = [f"{'A' * 64}{SUFFIX}", f"x{SUFFIX}", f"{'a' * 64}{SUFFIX}.bak", ".12-x.planes-tmp", "notes.txt"]
    for name in mine:
        (folder / name).write_bytes(b"mine")
    (folder / SCRAP).write_bytes(bytes(10))
    catalog.layout.quarantine.mkdir()
    shutil.copyfile(codes[0], catalog.layout.quarantine / codes[0].name)
    size = codes[0].stat().st_size
    assert cache_info(catalog)["quarantined_bytes"] == size
    assert prune(catalog, PruneLimits()).leftover_bytes == size + 10
    assert left(codes) == [0, 1, 2, 3]
    prune(catalog, PruneLimits(max_bytes=0, max_age_days=0, keep=()))
    assert sorted(path.name for path in folder.iterdir()) == sorted(mine)
    assert code_folder(catalog.layout).foreign == len(mine)


def test_what_killed_processes_were_writing_goes_alone(catalog, codes):
    folder = codes[0].parent
    for name in (SCRAP, ".12-x.planes-tmp"):
        (folder / name).write_bytes(b"left")
    drop_scraps(catalog.layout)
    assert {path.name for path in folder.iterdir()} == {code.name for code in codes} | {".12-x.planes-tmp"}
    shutil.rmtree(folder)
    drop_scraps(catalog.layout)


def test_a_pack_that_was_read_from_goes_later(catalog, codes):
    CodeStore(catalog).note_use(pack_key(BASE, EXPERTS[0], BLOCK))
    prune(catalog, PruneLimits(max_bytes=2 * codes[0].stat().st_size))
    assert left(codes) == [0, 3]
    CodeStore(catalog).note_use(bytes(32))  # of one that is gone nothing is noted


def change(path, at):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped chunk": (lambda path: change(path, -3), "digest"),
    "a flipped header": (lambda path: change(path, 100), "header"),
    "another one's": (lambda path: (path.unlink(), shutil.copyfile(min(path.parent.iterdir()), path)), "name"),
    "cut": (lambda path: (path.chmod(0o644), os.truncate(path, path.stat().st_size - 1)), "bytes"),
    "a link": (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "link"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "not a file"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "not a file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_byte_of_a_pack_is_checked(catalog, codes, damage):
    assert [check_code(code).fault for code in code_folder(catalog.layout).codes] == [None] * 4
    last = max(codes)
    spoil, word = DAMAGE[damage]
    spoil(last)
    *right, wrong = [check_code(code) for code in code_folder(catalog.layout).codes]
    assert {check.fault for check in right} == {None}
    assert word in wrong.fault
    assert str(last) not in wrong.fault
    if damage in ("a link", "a folder", "a pipe"):
        assert not is_needed(wrong.code, {BASE, *EXPERTS})
