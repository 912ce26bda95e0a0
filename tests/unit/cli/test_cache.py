import json

import pytest
from unit.cli.fakes import CACHE, assert_golden

from mergepipe.project.reports import PruneReport


def test_info_says_what_the_cache_holds(cli):
    result = cli("cache", "info")
    assert (result.code, result.stderr) == (0, "")
    assert_golden("cache-info.txt", result.stdout)


def test_info_json_is_the_report_alone(cli):
    assert json.loads(cli("cache", "info", "--json").stdout) == CACHE.as_json()


def test_prune_says_what_was_removed(cli):
    assert cli("cache", "prune").stdout == "removed 2 packs, 3.00 GB in all\n512 B of packs left\n"


def test_prune_says_that_there_was_nothing(cli):
    cli.project.result = PruneReport(removed=0, removed_bytes=0, kept_bytes=0)
    assert cli("cache", "prune").stdout == "nothing to remove\n0 B of packs left\n"


def test_prune_json_is_the_report_alone(cli):
    report = {"removed": 2, "removed_bytes": 3 * 10**9, "kept_bytes": 512}
    assert json.loads(cli("cache", "--json", "prune").stdout) == report


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), {"max_bytes": None, "max_age_days": None}),
        (("--max-size", "20 GB"), {"max_bytes": 20 * 10**9, "max_age_days": None}),
        (("--max-size", "0"), {"max_bytes": 0, "max_age_days": None}),
        (("--max-age", "1.5"), {"max_bytes": None, "max_age_days": 1.5}),
    ],
)
def test_prune_limits_reach_the_project(cli, argv, expected):
    assert cli("cache", "prune", *argv).code == 0
    assert cli.project.calls == [("cache_prune", expected)]


@pytest.mark.parametrize("argv", [("--max-size", "big"), ("--max-age", "-1"), ("--max-age", "old")])
def test_prune_refuses_limits_that_are_none(cli, argv):
    result = cli("cache", "prune", *argv)
    assert result.code == 2
    assert result.stderr.startswith(f"error: invalid value for `{argv[0]}`: ")
    assert cli.project.calls == []
