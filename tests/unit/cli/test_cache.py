import json

import pytest
from unit.cli.fakes import CACHE, PRUNED, assert_golden

from mergepipe.project.caches_report import CacheCheck, CacheProblem, CheckedPacks
from mergepipe.project.reports import PruneReport

NOTHING = {"max_bytes": None, "max_age_days": None, "unreferenced": False, "keep": (), "dry_run": False}
DAMAGED = CacheCheck(
    path="/models/.mergecache",
    packs=CheckedPacks(checked=3, bytes=36 * 10**8, damaged=1, missing=1, unknown=2),
    catalog="repaired",
    rows={"files": 8, "results": 1170, "published": 2, "tensors": 900},
    problems=(
        CacheProblem(kind="pack", where="packs/ab.safetensors", what="its header is damaged", repair="moved away"),
        CacheProblem(kind="missing", where="packs/cd\x1b[2J.safetensors", what="it is not there", repair="dropped"),
    ),
    seconds=2.5,
    dry_run=False,
)


def test_info_says_what_the_cache_holds(cli):
    result = cli("cache", "info")
    assert (result.code, result.stderr) == (0, "")
    assert_golden("cache-info.txt", result.stdout)


def test_info_json_is_the_report_alone(cli):
    assert json.loads(cli("cache", "info", "--json").stdout) == CACHE.as_json()


@pytest.mark.parametrize("command", ["info", "prune"])
def test_a_mergefile_that_is_wrong_is_not_looked_at(cli, command):
    (cli.project.root / "Mergefile.toml").write_text("this is no [ TOML", encoding="utf-8")
    assert cli("cache", command).code == 0
    assert cli.project.opened["lock_path"].name == "Mergefile.lock"


def test_a_cache_without_a_mergefile_is_found(cli):
    (cli.project.root / "Mergefile.toml").unlink()
    assert "`--cache-dir`" not in cli("cache", "info", "--cache-dir", "elsewhere").stderr
    assert (str(cli.project.opened["path"]), cli.project.opened["lock_path"]) == ("elsewhere", None)
    (cli.project.root / ".mergecache").mkdir()
    (cli.project.root / "below").mkdir()
    assert cli("-C", "below", "cache", "info").code == 0
    assert cli.project.opened["path"].parts == ("..", ".mergecache")


def test_neither_a_mergefile_nor_a_cache_is_an_error(cli):
    (cli.project.root / "Mergefile.toml").unlink()
    result = cli("cache", "info")
    assert result.code == 2
    assert "there is no `Mergefile.toml`" in result.stderr
    result = cli("cache", "info", "-f", "other.toml")
    assert result.code == 2
    assert "no Mergefile `other.toml`, and no cache beside it" in result.stderr


def test_prune_says_what_was_removed(cli):
    assert_golden("cache-prune.txt", cli("cache", "prune").stdout)


def test_prune_verbosely_names_the_packs(cli):
    assert_golden("cache-prune-verbose.txt", cli("cache", "prune", "-v").stdout)


def test_prune_says_that_there_was_nothing(cli):
    cli.project.result = PruneReport()
    assert cli("cache", "prune").stdout == "nothing to remove\nnothing left\n"


def test_prune_tells_packs_codes_and_statistics_apart(cli):
    kept = {"packs": 7_000_000, "codes": 8_000_000, "statistics": 6_000}
    cli.project.result = PruneReport(removed_bytes=900, leftover_bytes=900, kept_bytes=15_006_000, kept=kept)
    first, *_, last = cli("cache", "prune").stdout.splitlines()
    assert (first, last) == ("removed 900 B", "7.00 MB of packs, 8.00 MB of codes, 6.00 KB of statistics left")
    codes = (("ab.planes", 500, "size"),)
    cli.project.result = PruneReport(removed_bytes=500, codes=codes, kept={"statistics": 6_000}, dry_run=True)
    first, *_, last = cli("cache", "prune").stdout.splitlines()
    assert (first, last) == ("would remove 1 code, 500 B in all", "6.00 KB of statistics would be left")


def test_prune_json_is_the_report_alone(cli):
    report = json.loads(cli("cache", "--json", "prune").stdout)
    assert report == PRUNED.as_json()
    assert (report["removed"], report["removed_bytes"], report["kept_bytes"]) == (2, 3 * 10**9, 512)
    assert report["packs"][0] == {"file": "ab" * 32 + ".safetensors", "bytes": 2 * 10**9, "reason": "age"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), {}),
        (("--max-size", "20 GB"), {"max_bytes": 20 * 10**9}),
        (("--max-size", "0"), {"max_bytes": 0}),
        (("--max-age", "1.5"), {"max_age_days": 1.5}),
        (("--max-age", "30d"), {"max_age_days": 30}),
        (("--max-age", "12h"), {"max_age_days": 0.5}),
        (("--max-age", "36 hours"), {"max_age_days": 1.5}),
        (("--max-age", "2W"), {"max_age_days": 14}),
        (("--max-age", "0"), {"max_age_days": 0}),
        (("--unreferenced", "--keep", "a.lock", "--keep", "b"), {"unreferenced": True, "keep": ("a.lock", "b")}),
        (("--dry-run",), {"dry_run": True}),
    ],
)
def test_prune_limits_reach_the_cache(cli, argv, expected):
    assert cli("cache", "prune", *argv).code == 0
    assert cli.project.calls == [("prune", NOTHING | expected)]


@pytest.mark.parametrize(
    "argv", [("--max-size", "big"), ("--max-age", "-1"), ("--max-age", "old"), ("--max-age", "3 y"), ("--max-age", "d")]
)
def test_prune_refuses_limits_that_are_none(cli, argv):
    result = cli("cache", "prune", *argv)
    assert result.code == 2
    assert result.stderr.startswith(f"error: invalid value for `{argv[0]}`: ")
    assert cli.project.calls == []


def test_keep_alone_is_refused(cli):
    result = cli("cache", "prune", "--keep", "a.lock")
    assert (result.code, cli.project.calls) == (2, [])
    assert "hint: add `--unreferenced`" in result.stderr


def test_verify_says_what_is_damaged_and_what_was_done(cli):
    cli.project.result = DAMAGED
    result = cli("cache", "verify", "-j", "3")
    assert result.code == 1
    assert cli.project.opened["workers"] == 3
    assert cli.project.calls == [("verify", {"targets": (), "options": None, "dry_run": False})]
    assert "\x1b" not in result.stderr
    assert_golden("cache-verify.txt", result.stdout + result.stderr)


def test_verify_json_is_the_report_alone(cli):
    cli.project.result = DAMAGED
    result = cli("cache", "verify", "--dry-run", "--json")
    assert (result.code, result.stderr) == (1, "")
    report = json.loads(result.stdout)
    assert list(report) == ["path", "ok", "dry_run", "packs", "codes", "catalog", "problems", "seconds"]
    assert report["problems"][0] == {
        "kind": "pack", "where": "packs/ab.safetensors", "message": "its header is damaged", "repair": "moved away"
    }  # fmt: skip
    assert cli.project.calls[0][1]["dry_run"]
