"""The harness from end to end, over hand-made cases and a toy in mergepipe's place."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from support.cases import waiting
from support.cases.case import load_case
from support.cases.errors import CaseError, CheckError
from support.cases.launch import can_mount
from support.cases.runner import find_cases, run_case
from support.cases.samples import FAILS, MERGED, MERGED_V2, RECIPE, TOY, toy_with, write_case

RUN = {"op": "run", "expected": MERGED}
REPLACE = {"op": "replace", "path": "expert/model.safetensors", "with": "_alt/expert_v2.safetensors"}
NO_EXPERT = {**RECIPE, "experts": [{"path": "absent", "weight": 1.0}]}


@pytest.fixture
def run(tmp_path):
    """Return a function that writes a case and runs it."""

    def run(command=TOY, **entries):
        workdir = Path(tempfile.mkdtemp(dir=tmp_path))
        return run_case(load_case(write_case(workdir / "case", **entries)), workdir, command)

    return run


def test_a_plain_case_passes(run):
    assert run() == []


def test_a_wrong_result_fails_and_the_report_shows_what_was_printed(run):
    with pytest.raises(CheckError, match=r"(?s)run 0:\n- w: 64 of 64 values differ.*stdout:\nbuilt out"):
        run(toy_with("shifted"))


def test_an_expected_error_passes(run):
    run(recipe=NO_EXPERT, expected={**FAILS, "error_should_mention": ["absent"]})


@pytest.mark.parametrize("fault", ["traceback", "silent", "half", "touch_lock"])
def test_a_bad_error_fails(run, fault):
    with pytest.raises(CheckError):
        run(toy_with(fault), recipe=NO_EXPERT, expected=FAILS)


def test_litter_fails(run):
    with pytest.raises(CheckError, match=r"left `leftover.tmp` behind"):
        run(toy_with("litter"))


@pytest.mark.parametrize("kind", ["recipe", "cache"])
def test_errors_of_recipes_must_come_at_once(run, monkeypatch, kind):
    monkeypatch.setattr("support.cases.runner.AT_ONCE", 0.001)
    if kind == "recipe":
        with pytest.raises(CheckError, match=r"expected less than 0.001 s"):
            run(kind=kind, recipe=NO_EXPERT, expected=FAILS)
    else:
        run(kind=kind, recipe=NO_EXPERT, expected=FAILS)


def test_more_runs_are_compared_with_earlier_ones(run):
    other = {**RECIPE, "experts": RECIPE["experts"][:1]}
    run(
        more_runs=[
            {"recipe": RECIPE, "expected": {"outcome": "success", "bit_equal_to_run": 0}},
            {"recipe": other, "expected": {"outcome": "success", "differs_from_run": 1}},
        ]
    )


def test_a_run_that_should_equal_an_earlier_one_and_does_not_fails(run):
    other = {**RECIPE, "experts": RECIPE["experts"][:1]}
    with pytest.raises(CheckError, match="run 1"):
        run(more_runs=[{"recipe": other, "expected": {"outcome": "success", "bit_equal_to_run": 0}}])


def test_for_each_runs_once_for_every_file(tmp_path):
    expert = {"path": "bad/<each file>", "weight": 1.0}
    expected = {**FAILS, "for_each": ["bad/a.bin", "b.bin"], "error_should_mention": ["<file name>"]}
    case = load_case(write_case(tmp_path / "case", recipe={**RECIPE, "experts": [expert]}, expected=expected))
    assert [run.recipe["experts"][0]["path"] for run in case.runs] == ["bad/a.bin", "bad/b.bin"]
    assert [run.expected["error_should_mention"] for run in case.runs] == [["a.bin"], ["b.bin"]]
    run_case(case, tmp_path, TOY)


def test_steps_take_the_place_of_the_plain_run(run):
    run(steps=[RUN, REPLACE, {"op": "run", "expected": MERGED_V2}], expected=MERGED_V2)


def test_the_state_after_the_last_step_is_checked(run):
    with pytest.raises(CheckError, match="after the last step"):
        run(steps=[RUN, REPLACE, {"op": "run"}])


def test_a_last_run_that_fails_leaves_the_state_to_the_steps(run):
    run(steps=[RUN, {"op": "delete", "path": "expert"}, {"op": "run", "expected": FAILS}], expected=MERGED_V2)


def test_each_step_list_starts_from_a_fresh_copy(run):
    run(steps=[RUN, REPLACE], more_step_lists=[[RUN], [RUN]])


@pytest.mark.parametrize("how", ["rename", "in_place"])
def test_a_stale_result_is_found(run, how):
    steps = [RUN, {**REPLACE, "keep_mtime_ns": True, "how": how}, {"op": "run", "expected": MERGED_V2}]
    run(steps=steps)
    with pytest.raises(CheckError, match="step 2"):
        run(toy_with("stale"), steps=steps)


def test_settings_and_spellings_hold_for_one_step(run):
    cached = {"op": "run", "expect_all_cached": True}
    run(
        steps=[
            {"op": "run"},
            {**cached, "spell_weight_as": "25e-2"},
            {**cached, "spell_weight_as": "0.250", "add_comment": True},
            {"op": "touch", "path": "expert/model.safetensors"},
            cached,
            {"op": "move_project", "to": "elsewhere"},
            cached,
            {"op": "run", "set": {"weights": [0.5, 0.5]}, "expected": MERGED_V2},
            {"op": "run", "set": {"dtype": "bfloat16"}, "expected": {"outcome": "success", "dtypes": {"w": "BF16"}}},
            {**cached, "expected": MERGED},
        ]
    )


def test_needless_work_fails(run):
    with pytest.raises(CheckError, match="expected none to be computed"):
        run(toy_with("recompute"), steps=[RUN, {"op": "run", "expect_all_cached": True}])


def test_an_edited_output_or_a_damaged_pack_must_not_come_back(run):
    edit = {"op": "overwrite_bytes", "path": "out/model.safetensors", "at": "middle", "count": 100, "in_place": True}
    damage = {"op": "damage_one_cache_entry"}
    steps = [RUN, edit, RUN, {"op": "delete", "path": "out"}, RUN, damage, {"op": "delete", "path": "<out>"}, RUN]
    run(steps=steps)


@pytest.mark.parametrize(
    "damage",
    [{"op": "damage_one_cache_entry"}, {"op": "overwrite_bytes", "path": "out/model.safetensors", "count": 100}],
)
def test_damage_that_comes_back_fails(run, damage):
    with pytest.raises(CheckError, match="step 2"):
        run(toy_with("trusting"), steps=[RUN, damage, RUN])


def test_users_files_are_checked(run):
    steps = [RUN, {"op": "write", "path": "out/notes.txt", "text": "mine"}, RUN, {"op": "check"}]
    expected = {**MERGED, "files_present": ["notes.txt"]}
    run(steps=steps, expected=expected)


def test_lost_files_of_users_fail(run):
    steps = [RUN, {"op": "write", "path": "out/notes.txt", "text": "mine"}, RUN, {"op": "check"}]
    with pytest.raises(CheckError, match="step 3"):
        run(toy_with("lose_notes"), steps=steps, expected={**MERGED, "files_present": ["notes.txt"]})


def test_locked_builds(run):
    locked = {"op": "run", "flags": ["--locked"]}
    refused = {**FAILS, "error_should_mention": ["Mergefile.lock"], "lock_unchanged": True}
    run(
        steps=[
            {"op": "lock"},
            {**locked, "expected": MERGED, "lock_unchanged": True},
            {**locked, "set": {"weights": [0.5, 0.5]}, "expected": refused},
            *({"op": "rewrite_lock", "how": "crlf"}, locked, {"op": "rewrite_lock", "how": "key_order"}, locked),
            REPLACE,
            {**locked, "expected": {**refused, "exit_code": 3}},
            {"op": "lock"},
            {**locked, "expected": MERGED_V2},
            *({"op": "rewrite_lock", "how": "newer_version"}, {**locked, "expected": refused}),
            *({"op": "rewrite_lock", "how": "conflict_markers"}, {**locked, "expected": refused}),
            *({"op": "delete", "path": "Mergefile.lock"}, {**locked, "expected": refused}),
        ]
    )


def test_a_changed_lock_fails_where_it_must_not_change(run):
    step = {"op": "run", "lock_unchanged": True}
    with pytest.raises(CheckError, match=r"`Mergefile.lock` was changed"):
        run(steps=[step])


def test_kills_at_several_moments(run):
    steps = [{"op": "run", "kill_after": [0.0, 0.05, 0.1, 0.5]}, {"op": "check_no_partial_output"}, RUN]
    run(steps=steps)


def test_a_failure_before_the_kill_fails(run):
    with pytest.raises(CheckError, match="failed before it was killed"):
        run(recipe=NO_EXPERT, steps=[{"op": "run", "kill_after": [30.0]}])


def test_a_limit_on_file_sizes(run):
    error = {**FAILS, "error_should_mention": [["space", "too large"]]}
    limited = {"op": "run", "limit_file_size": 4096, "expected": error}
    run(elements=4096, steps=[limited, {"op": "check_no_partial_output"}, RUN])


def test_a_small_disk(run):
    if not can_mount():
        pytest.skip("nothing can be mounted here")
    full = {"op": "run", "output_on_tmpfs_bytes": 16384, "expected": {**FAILS, "error_should_mention": ["space"]}}
    run(steps=[full, RUN])


def test_a_small_disk_that_cannot_be_mounted_is_said(run, monkeypatch):
    monkeypatch.setattr("support.cases.runner.can_mount", lambda: False)
    (message,) = run(steps=[RUN], more_step_lists=[[{"op": "run", "output_on_tmpfs_bytes": 16384}]])
    assert message.startswith("step list 1 ")


@pytest.mark.slow
def test_changes_during_a_build(run):
    expected = {
        "outcome": "either",
        "error_should_mention": ["expert/model.safetensors", ["changed", "modified"]],
        "one_of": ["expected.safetensors", "expected_v2.safetensors"],
    }
    during = {"op": "run", "during": {**REPLACE, "how": "in_place"}, "expected": expected}
    run(steps=[during, {"op": "run", "expected": MERGED_V2}], expected=MERGED_V2)


def test_builds_together(run):
    run(steps=[{"op": "run_together", "count": 3, "expected": MERGED}, {"op": "check"}])


def test_builds_together_that_all_fail(run):
    with pytest.raises(CheckError, match="none of the builds succeeded"):
        run(recipe=NO_EXPERT, steps=[{"op": "run_together"}])


@pytest.mark.parametrize(
    "entries",
    [
        {"colour": "red"},
        {"recipe": {**RECIPE, "device": "cpu"}},
        {"expected": {"outcome": "success", "fast": True}},
        {"more_runs": [{"recipe": RECIPE, "expected": MERGED, "twice": True}]},
        {"more_runs": [{"recipe": RECIPE}]},
        {"steps": [{"op": "reboot"}]},
        {"steps": [{"op": "run", "fast": True}]},
        {"steps": [{"op": "touch"}]},
        {"steps": [{"op": "run", "expected": {"outcome": "success", "fast": True}}]},
        {"steps": [{"op": "run", "during": {"op": "reboot"}}]},
        {"more_step_lists": [[{"op": "reboot"}]]},
        {"expected": {**FAILS, "for_each": ["a"]}},
    ],
)
def test_what_the_harness_does_not_know_is_refused(tmp_path, entries):
    folder = write_case(tmp_path / "case", **entries)
    with pytest.raises(CaseError):
        load_case(folder)


def test_notes_are_allowed_everywhere(run):
    run(notes="x", recipe={**RECIPE, "notes": "y"}, steps=[{**RUN, "comment": "z"}])


def test_cases_are_found_by_their_file(tmp_path):
    write_case(tmp_path / "B-case")
    write_case(tmp_path / "A-case")
    (tmp_path / "other").mkdir()
    assert find_cases(tmp_path) == ["A-case", "B-case"]


def test_waiting_lists_go_by_the_start_of_the_id(monkeypatch):
    monkeypatch.setattr(waiting, "WAITING", {"Z09": "magic"})
    assert waiting.waits_for("Z09-something") == "magic"
    assert waiting.waits_for("Z10-something") is None


def test_a_run_that_waits_must_fail(run, monkeypatch):
    monkeypatch.setattr(waiting, "WAITING_RUNS", {("Z01", 1): "magic"})
    run(more_runs=[{"recipe": NO_EXPERT, "expected": MERGED}])


def test_a_run_that_waits_and_passes_is_a_failure(run, monkeypatch):
    monkeypatch.setattr(waiting, "WAITING_RUNS", {("Z01", 1): "magic"})
    with pytest.raises(CaseError, match="still names it"):
        run(more_runs=[{"recipe": RECIPE, "expected": MERGED}])
