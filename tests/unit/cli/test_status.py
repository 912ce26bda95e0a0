import json
from dataclasses import replace

from unit.cli.fakes import STATUS, assert_golden


def test_says_what_is_up_to_date_and_why_the_rest_is_not(cli):
    result = cli("status")
    assert (result.code, result.stderr) == (0, "")
    assert_golden("status.txt", result.stdout)


def test_the_state_is_in_words_and_in_colour(cli):
    coloured = cli("status", "--color", "always").stdout
    assert "\x1b[32mup-to-date\x1b[0m" in coloured
    assert "\x1b[33mstale\x1b[0m" in coloured


def test_columns_line_up_with_and_without_colour(cli):
    import click

    assert click.unstyle(cli("status", "--color", "always").stdout) == cli("status").stdout


def test_json_is_the_report_alone(cli):
    result = cli("status", "average", "--json")
    assert json.loads(result.stdout) == STATUS.as_json()
    assert cli.project.calls == [("status", {"outputs": ("average",)})]


def test_a_lock_that_is_not_verified_says_which_outputs_are_not_known(cli):
    cli.project.result = replace(STATUS, lock_state="unverified")
    last = cli("status").stdout.splitlines()[-1]
    assert last == "Mergefile.lock is not verified: `assistant` is stale, `cheap` is unbuilt; a build tells"
