"""What is remembered of how long work took."""

import math

import pytest

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.speeds import record_seconds, recorded_seconds


@pytest.fixture
def catalog(tmp_path):
    layout = CacheLayout(tmp_path / ".mergecache")
    layout.create()
    catalog = Catalog(layout, 64, create=True)
    yield catalog
    catalog.close()


def test_a_first_measurement_is_taken_as_it_is_and_a_later_one_moves_it_half_of_the_way(catalog):
    record_seconds(catalog, {"read": 4.0, "merge ties": 2.0})
    record_seconds(catalog, {"read": 1.0})
    assert recorded_seconds(catalog) == {"merge ties": 2.0, "read": 2.0}


def test_one_build_on_a_busy_machine_is_forgotten_after_some(catalog):
    for took in (1.0, 1.0, 30.0, 1.0, 1.0, 1.0):
        record_seconds(catalog, {"read": took})
    assert recorded_seconds(catalog)["read"] < 2


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_duration_is_not_kept(catalog, value):
    record_seconds(catalog, {"read": value})
    assert recorded_seconds(catalog) == {}


def test_damaged_values_and_those_of_other_versions_are_left_out(catalog):
    rows = [("seconds:a", -2.0), ("seconds:b", math.inf), ("seconds:c", "text"), ("throughput", 5.0), ("seconds:d", 3)]
    with catalog.transaction() as db:
        db.executemany("INSERT INTO measured VALUES (?, ?)", rows)
    assert recorded_seconds(catalog) == {"d": 3.0}


def test_without_a_catalog_nothing_is_known(tmp_path):
    catalog = Catalog(CacheLayout(tmp_path / "cache"), 64, create=False)
    assert recorded_seconds(catalog) == {}
    catalog.close()
