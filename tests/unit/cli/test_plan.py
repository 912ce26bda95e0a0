import json

from unit.cli.fakes import PLANNED, assert_golden


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
