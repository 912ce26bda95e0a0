import json
from dataclasses import replace

import pytest
from unit.cli.fakes import MATH, PLANNED, PLANNED_BUDGET, PLANS, UNCHANGED_PLAN, assert_golden

from mergepipe.cli.tables import width
from mergepipe.project.reports import Bound


def test_says_what_a_build_would_read_and_write(cli):
    result = cli("plan")
    assert (result.code, result.stderr) == (0, "")
    assert_golden("plan.txt", result.stdout)


def test_verbose_adds_the_digest_and_every_experts_bytes(cli):
    assert_golden("plan-verbose.txt", cli("plan", "-v").stdout)


def test_json_is_the_report_alone(cli):
    result = cli("plan", "assistant", "--json")
    assert json.loads(result.stdout)["outputs"]["assistant"] == PLANNED.as_json()
    assert cli.project.calls == [("plan", {"outputs": ("assistant",)})]


def test_quiet_prints_nothing(cli):
    result = cli("plan", "--quiet")
    assert (result.stdout, result.stderr, result.code) == ("", "", 0)


def plans_with(experts):
    """Return a report over an output with these experts."""
    output = replace(PLANNED_BUDGET, experts=experts)
    return replace(PLANS, outputs={output.name: output})


@pytest.mark.parametrize("verbose", [[], ["-v"]])
@pytest.mark.parametrize("length", [1, 20, 90])
def test_many_experts_with_long_names_stay_aligned_within_80_columns(cli, verbose, length):
    names = [f"{number:02d}" + "x" * length for number in range(20)]
    cli.project.result = plans_with(dict.fromkeys(names, replace(MATH, cached=0, blocks=1_234_567, omitted=1_000_000)))
    lines = cli("plan", *verbose).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    start = next(number for number, line in enumerate(lines) if line.startswith("  experts "))
    table = lines[start : start + 22]
    assert [line[4:6] for line in table[1:21]] == [name[:2] for name in names], "a row for each, and none in two lines"
    for unit in ("2.40 GB", "0 B", "1.20 GB"):
        assert len({line.index(unit) + len(unit) for line in table[1:21]}) == 1


def test_wide_characters_count_twice_and_escapes_do_not_reach_the_terminal(cli):
    cli.project.result = plans_with({"数学" * 30: MATH, "a\x1b[2Jb": MATH})
    text = cli("plan").stdout
    assert "\x1b" not in text
    assert max(width(line) for line in text.splitlines()) <= 80


def test_the_limits_of_the_build_are_those_of_the_plan(cli):
    cli("plan", "--memory", "2 GiB", "-j", "3")
    assert (cli.project.opened["memory"], cli.project.opened["workers"]) == (2 << 30, 3)


def test_a_disk_without_room_is_warned_of(cli):
    text = cli("plan").stdout
    assert "warning: 500 MB are missing for this build at build/assistant" in text
    disks = json.loads(cli("plan", "--json").stdout)["disks"]
    assert [disk["fits"] for disk in disks] == [True, False]


def test_where_nothing_is_to_be_done_no_disk_is_shown(cli):
    cli.project.result = replace(PLANS, outputs={"average": UNCHANGED_PLAN}, disks=())
    assert "disk" not in cli("plan").stdout


def test_bound_and_expected_error_have_one_unit(cli):
    """The update has norm 50 here: 10 is 20% of it."""
    bound = Bound(kind="certified", absolute=10.0, relative_to_update=0.2)
    output = replace(PLANNED_BUDGET, bound=bound, expected_error=5.0, expected_error_uncertainty=0.5)
    cli.project.result = replace(PLANS, outputs={output.name: output})
    stdout = cli("plan").stdout
    assert "certified: at most 20% of the update" in stdout
    assert "error about 10 ± 1% of the update (an estimate)" in " ".join(stdout.split())
