"""Statistics by content: what was entered comes back, in order, whatever was known before; damage is a miss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.maintenance import PruneLimits, prune
from mergepipe.cache.statistics import CHUNK, StatisticStore, statistic_bytes
from mergepipe.digest import record_digest
from mergepipe.errors import CacheError, InternalError


@pytest.fixture
def catalog(tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.create()
    catalog = Catalog(layout, 64, create=True)
    yield catalog
    catalog.close()


def key(content):
    return record_digest("test", content)


def fill(store, contents, size=10, recipe=b"r" * 32, owner=b"o" * 32):
    """Enter the numbers of blocks with these contents; return what had to be measured, and what comes out."""
    table = store.table(recipe, b"p" * 32, owner, len(contents))
    measured = []
    for block, content in enumerate(contents):
        known = table.holds(key(content))
        if not known:
            measured.append(content)
        table.enter(block, key(content), None if known else value(content, size))
    assert table.complete
    return measured, list(table)


def value(content, size):
    return f"{content}".encode() * (content % size)


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3 * CHUNK), min_size=1, max_size=4), st.booleans())
def test_numbers_come_back_in_order_and_are_measured_once(tmp_path_factory, rounds, flush):
    layout = CacheLayout(tmp_path_factory.mktemp("cache"))
    layout.create()
    catalog = Catalog(layout, 64, create=True)
    store = StatisticStore(catalog)
    for contents in rounds:
        _, found = fill(store, contents)
        assert found == [value(content, 10) for content in contents]
        if flush:
            store.flush()
        assert fill(store, contents) == ([], found)
    catalog.close()


def test_a_changed_block_is_measured_alone(catalog):
    store = StatisticStore(catalog)
    contents = list(range(200))
    fill(store, contents)
    store.flush()
    contents[77] = 1000
    assert fill(StatisticStore(catalog), contents)[0] == [1000]


def test_large_numbers_are_read_again_from_the_catalog(catalog):
    store = StatisticStore(catalog)
    contents = list(range(2000, 2150))
    _, first = fill(store, contents, size=3000)
    store.flush()
    assert fill(StatisticStore(catalog), contents, size=3000) == ([], first)


def test_another_recipe_has_numbers_of_its_own(catalog):
    store = StatisticStore(catalog)
    fill(store, [1, 2, 3])
    assert fill(store, [1, 2, 3], recipe=b"s" * 32)[0] == [1, 2, 3]


def test_the_numbers_of_many_experts_are_kept_beside_one_another(catalog):
    contents = {bytes([expert]) * 32: [expert * 1000 + n for n in range(70)] for expert in range(20)}
    store = StatisticStore(catalog)
    for owner, own in contents.items():
        assert fill(store, own, owner=owner)[0] == own
        store.flush()
    for owner, own in contents.items():
        assert fill(StatisticStore(catalog), own, owner=owner)[0] == []


def test_a_source_under_another_name_has_its_numbers_still(catalog):
    store = StatisticStore(catalog)
    fill(store, [1, 2, 3])
    store.flush()
    assert fill(StatisticStore(catalog), [1, 2, 3], owner=b"n" * 32)[0] == []


def test_what_a_table_goes_through_is_not_forgotten_meanwhile(catalog):
    store = StatisticStore(catalog)
    contents = list(range(2000, 2064))  # too large to be kept in memory
    tables = []
    for version in range(8):
        own = [content + 100 * version for content in contents]
        table = store.table(b"r" * 32, b"p" * 32, b"o" * 32, len(own))
        for block, content in enumerate(own):
            table.enter(block, key(content), value(content, 3000))
        store.flush()
        tables.append((table, [value(content, 3000) for content in own]))
    for table, values in tables:
        assert list(table) == values


def test_old_versions_of_a_chunk_are_forgotten(catalog):
    for number in range(20):
        store = StatisticStore(catalog)
        fill(store, [number, 500])
        store.flush()
    assert catalog.count("statistics") == 4
    assert fill(StatisticStore(catalog), [19, 500])[0] == []
    assert fill(StatisticStore(catalog), [0, 500])[0] == [0]


def test_damaged_numbers_are_measured_again(catalog):
    store = StatisticStore(catalog)
    fill(store, [7, 8, 9])
    store.flush()
    with catalog.transaction() as db:
        db.execute("UPDATE statistics SET data = data || x'00'")
    assert fill(StatisticStore(catalog), [7, 8, 9])[0] == [7, 8, 9]


def test_numbers_that_vanish_while_they_are_used_are_an_error_in_words(catalog):
    store = StatisticStore(catalog)
    contents = list(range(2000, 2064))  # too large to be kept in memory
    fill(store, contents, size=3000)
    store.flush()
    table = StatisticStore(catalog).table(b"r" * 32, b"p" * 32, b"o" * 32, len(contents))
    for block, content in enumerate(contents):
        table.enter(block, key(content), None)
    with catalog.transaction() as db:
        db.execute("DELETE FROM statistics")
    with pytest.raises(CacheError, match="vanished or were damaged"):
        list(table)


def test_an_incomplete_table_is_not_gone_through(catalog):
    table = StatisticStore(catalog).table(b"r" * 32, b"p" * 32, b"o" * 32, 2)
    table.enter(0, key(1), b"1")
    assert not table.complete
    with pytest.raises(InternalError):
        list(table)


def test_pruning_everything_drops_the_numbers_and_shrinks_the_catalog(catalog):
    store = StatisticStore(catalog)
    fill(store, list(range(3000)), size=3000)
    store.flush()
    size, held = catalog.layout.catalog.stat().st_size, statistic_bytes(catalog)
    assert held > 100_000
    report = prune(catalog, PruneLimits(max_bytes=held))
    assert (report.removed_bytes, statistic_bytes(catalog)) == (0, held)
    report = prune(catalog, PruneLimits(max_bytes=0))
    assert (report.removed_bytes, report.kept_bytes, statistic_bytes(catalog)) == (held, 0, 0)
    assert catalog.layout.catalog.stat().st_size < size - held // 2
