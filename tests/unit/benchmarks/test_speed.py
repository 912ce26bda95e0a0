"""The benchmark of speed: what its tables say is what was measured, and no bar is passed over or met by nothing."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.families import SHAPES, write_family
from benchmarks.speed import compare, mergekit, report, rows, runner
from benchmarks.speed.bars import bars
from benchmarks.speed.floor import jobs
from benchmarks.speed.ground import FLOOR_PROGRAM, Ground
from benchmarks.speed.merges import mergefile
from benchmarks.speed.plot import draw
from benchmarks.speed.process import CommandError, empty_page_cache, measure
from benchmarks.speed.ratios import ratio, ratios
from benchmarks.speed.results import RESULTS, OtherRunError, Results
from benchmarks.speed.rows import COLD, MODES, ROWS, WARM, Rounds, choose, participants
from benchmarks.speed.steps import EDITED, changed, edit, steps
from mergepipe.mergefile.parse import load_mergefile
from mergepipe.operators.registry import signatures

ROOT = Path(__file__).parents[3]
SPARE = {"cpu": 1.0, "read": 10, "written": 5, "disk_read": 0, "disk_written": 0, "load": 1.0}


def figures(wall=1.0, rss=100_000_000, **other):
    return {"wall": wall, "rss": rss} | SPARE | other


def built(wall=1.0, *, statistics=False, digest="b3:1", read=0, **other):
    counts = {"blocks": 3, "expert_bytes": read, "base_bytes": read, "index_bytes": 0, "digest": digest}
    return figures(wall, statistics=statistics, **counts, **other)


def everything(wall_of):
    """Return figures of all rows, three rounds each, with wall times by (row, mode, who)."""
    found = {"rows": {}}
    for name, row in ROWS.items():
        facts = {"shape": "tiny", "machine": "a machine", "date": "2026-01-01", "emptied": "all", "runs": []}
        found["rows"][name] = facts
        for number in range(3):
            for mode in row.modes:
                for who in participants(row):
                    own = {"statistics": who == rows.BEFORE, "expected_bytes": 0}
                    run = built(wall_of(name, mode, who) * (1 + number / 10)) | own
                    facts["runs"].append({"round": number, "mode": mode, "who": who} | run)
    return found


def good(name, mode, who):
    """Return wall times with which every bar is met."""
    slow = {rows.BEST: 20.0, rows.DEFAULT: 22.0, rows.FULL: 5.0, rows.NOTHING: 0.1}
    return {**slow, rows.BUDGET: 0.3}.get(who, 1.0)


# --- ratios and bars ------------------------------------------------------------------------------------------------


def test_a_ratio_is_that_of_the_medians_and_its_spread_that_of_the_rounds():
    found = {"rows": {"linear": {"runs": []}}}
    for number, (ours, theirs) in enumerate([(1.0, 5.0), (2.0, 8.0), (4.0, 9.0)]):
        for who, wall in ((rows.OURS, ours), (rows.BEST, theirs)):
            found["rows"]["linear"]["runs"].append({"round": number, "mode": WARM, "who": who, **figures(wall)})
    one = ratio(found, "linear", WARM, rows.BEST, rows.OURS)
    assert (one.value, one.low, one.high) == (4.0, 2.25, 5.0)
    assert ratio(found, "linear", COLD, rows.BEST, rows.OURS) is None
    assert [(r.of, r.by) for r in ratios(found)] == [(rows.BEST, rows.OURS)]


def test_rounds_that_only_one_has_count_in_its_median_alone():
    found = everything(good)
    row = found["rows"]["ties"]
    row["runs"] = [run for run in row["runs"] if not (run["who"] == rows.BEST and run["round"] > 0)]
    one = ratio(found, "ties", WARM, rows.BEST, rows.OURS)
    assert (one.value, one.low, one.high) == (pytest.approx(20 / 1.1), 20.0, 20.0)


def test_without_figures_every_bar_is_there_and_none_is_met():
    found = bars({})
    assert {bar.met for bar in found} == {None}
    assert {bar.verdict for bar in found} == {"not measured"}
    assert [bar.what for bar in found] == [bar.what for bar in bars(everything(good))]


def test_with_good_figures_every_bar_is_met_but_that_of_another_run():
    assert [bar.what for bar in bars(everything(good)) if bar.met is not True] == [bars({})[-1].what]


def spoilt(name, change):
    """Return the bars that are not met when the runs of a row are changed."""
    found = everything(good)
    for run in found["rows"][name]["runs"]:
        run.update(change(run))
    return {f"{bar.what}" for bar in bars(found) if bar.met is False}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.kind == "full"])
def test_each_merge_has_bars_for_speed_floor_and_memory(name):
    slow = spoilt(name, lambda run: {"wall": 9.0} if run["who"] == rows.OURS else {})
    title = ROWS[name].title
    for mode in MODES:
        assert f"{title}, {mode}: mergekit's best flags / mergepipe" in slow
        assert f"{title}, {mode}: mergepipe / I/O floor" in slow
    assert "peak memory of every full merge" in spoilt(
        name, lambda run: {"rss": 400_000_000} if run["who"] == rows.OURS else {}
    )


@pytest.mark.parametrize(
    ("row", "who", "change", "what"),
    [
        ("task_arithmetic-8", rows.BUDGET, {"wall": 0.45}, "10%, deltas measured, warm: / mergepipe's full read"),
        ("task_arithmetic-8", rows.BUDGET, {"wall": 3.0}, "10%, deltas measured, cold: mergekit's best flags"),
        ("second-output", rows.TWO, {"wall": 1.6}, "a second output over the same sources, cold"),
        ("changes", rows.NOTHING, {"index_bytes": 1}, "nothing changed: bytes of weights read"),
        ("changes", rows.NOTHING, {"wall": 0.4}, "nothing changed: wall time"),
        ("changes", rows.TENSOR, {"expert_bytes": 7}, "one tensor of one expert changed: expert bytes"),
        ("changes", rows.TENSOR, {"wall": 2.0}, "one tensor of one expert changed: / full build"),
        ("parameter-slerp", "t changed", {"statistics": True}, "`t` of `slerp` changed"),
        ("parameter-ties", "density changed", {"statistics": True}, "`density` of `ties` changed"),
        ("memory", "ties", {"rss": 120_000_000}, "peak memory of `ties` with a shape"),
        ("dare_ties", rows.L1, {"wall": 3.0}, "mergepipe, rescale l1"),
    ],
)
def test_a_bar_that_is_missed_is_said_to_be(row, who, change, what):
    missed = spoilt(row, lambda run: change if run["who"] == who else {})
    assert any(what in one for one in missed)


def test_fewer_rounds_than_five_are_said_to_be():
    found = everything(good)
    row = found["rows"]["ties"]
    row["runs"] = [run for run in row["runs"] if not (run["who"] == rows.BEST and run["round"] > 0)]
    measured = {bar.what: bar.measured for bar in bars(found)}
    assert measured["`ties`, 4 experts, warm: mergekit's best flags / mergepipe"].endswith(", 1 and 3 rounds")
    assert measured["`ties`, 4 experts, warm: mergepipe / I/O floor"].endswith(", 3 rounds")


def test_no_statistics_pass_shows_nothing_where_the_first_build_took_none():
    found = everything(good)
    for run in found["rows"]["parameter-ties"]["runs"]:
        run["statistics"] = False
    assert {bar.met for bar in bars(found) if "of `ties` changed" in bar.what} == {None}


# --- two runs -------------------------------------------------------------------------------------------------------


def slower(share):
    return lambda name, mode, who: good(name, mode, who) * (share if (name, who) == ("slerp", rows.OURS) else 1.0)


def test_runs_are_compared_by_ratios_and_not_by_times():
    before = everything(good)
    assert compare.summary(before, everything(lambda *at: 3 * good(*at)))["worst"] == pytest.approx(0.0)
    apart = compare.summary(before, everything(slower(1.3)))["apart"]
    assert {label.split(":")[0] for label, _, _ in apart} == {"slerp, cold", "slerp, warm"}
    assert not compare.summary(before, everything(slower(1.2)))["apart"]


def test_the_comparison_fails_where_ratios_are_apart_and_is_kept_where_that_is_asked_for(tmp_path, capsys):
    for name, one in (("a", everything(good)), ("b", everything(slower(1.3))), ("c", everything(slower(1.1)))):
        results = Results(tmp_path / f"{name}.json")
        results.found.update(one)
        results.save()
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    assert main(["compare", a, b]) == 1
    assert "MORE THAN 25%" in capsys.readouterr().out
    assert main(["compare", a, c, "--record"]) == 0
    assert bars(json.loads(Path(c).read_text()))[-1].met is True
    assert main(["compare", a, str(tmp_path / "none.json")]) == 1
    assert "has no figures" in capsys.readouterr().err


# --- rounds and resuming --------------------------------------------------------------------------------------------


class Fake:
    """Stands for the participants of a row: says who ran, and fails when it is told to."""

    def __init__(self, monkeypatch, fail_at=None):
        self.ran, self.fail_at = [], fail_at
        monkeypatch.setattr(runner, "steps", lambda row, _: {who: self.step(who) for who in participants(row)})
        for name in ("prepare", "clear", "check_hashed"):
            monkeypatch.setattr(Ground, name, lambda *_: None)

    def step(self, who):
        def run(mode):
            if len(self.ran) == self.fail_at:
                raise KeyboardInterrupt
            self.ran.append((mode, who))
            return built()

        return run

    def go(self, tmp_path, names, rounds, *, resume=False, modes=MODES, shape="tiny"):
        ground = Ground(folder=tmp_path, shape=shape, python="python")
        results = Results(tmp_path / "r.json")
        runner.run(choose(names), ground, rounds, modes, results, resume=resume)
        return Results(tmp_path / "r.json")


def test_all_who_take_part_run_in_turn_and_mergekit_less_often_where_it_is_slow(tmp_path, monkeypatch):
    fake = Fake(monkeypatch)
    fake.go(tmp_path, "ties", Rounds(ours=3, slow=2, slow_default=1))
    first = [(mode, who) for mode in MODES for who in (rows.FLOOR, rows.OURS, rows.BEST, rows.DEFAULT)]
    second = [(mode, who) for mode in MODES for who in (rows.FLOOR, rows.OURS, rows.BEST)]
    assert fake.ran == first + second + [(mode, rows.OURS) for mode in MODES]


def test_an_interrupted_run_is_not_lost_and_goes_on_from_its_last_complete_round(tmp_path, monkeypatch):
    rounds = Rounds(ours=3, default=1)
    whole = Fake(monkeypatch)
    expected = whole.go(tmp_path / "whole", "linear", rounds).rows["linear"]["runs"]
    for fail_at in (1, 5, 12, len(whole.ran) - 1):
        folder = tmp_path / str(fail_at)
        with pytest.raises(KeyboardInterrupt):
            Fake(monkeypatch, fail_at).go(folder, "linear", rounds)
        assert len(Results(folder / "r.json").rows["linear"]["runs"]) == fail_at
        rest = Fake(monkeypatch)
        done = rest.go(folder, "linear", rounds, resume=True).rows["linear"]["runs"]
        place = [(run["round"], run["mode"], run["who"]) for run in done]
        assert place == [(run["round"], run["mode"], run["who"]) for run in expected]
        assert len(rest.ran) <= len(whole.ran) - fail_at + 3
    again = Fake(monkeypatch)
    again.go(tmp_path / "whole", "linear", rounds, resume=True)
    assert again.ran == []


def test_a_row_begins_anew_without_resume_and_others_stay(tmp_path, monkeypatch):
    fake = Fake(monkeypatch)
    fake.go(tmp_path, "linear,slerp", Rounds(ours=2))
    found = fake.go(tmp_path, "slerp", Rounds(ours=1))
    assert len(found.rows["linear"]["runs"]) == 2 * 2 * 3 + 2
    assert {(run["round"], run["mode"]) for run in found.rows["slerp"]["runs"]} == {(0, COLD), (0, WARM)}


@pytest.mark.parametrize("same_day", [True, False])
def test_a_row_of_one_mode_leaves_what_there_is_of_the_other_on_the_same_day(tmp_path, monkeypatch, same_day):
    fake = Fake(monkeypatch)
    first = fake.go(tmp_path, "slerp", Rounds(ours=2))
    if not same_day:
        first.rows["slerp"]["date"] = "2026-01-01"
        first.save()
    found = fake.go(tmp_path, "slerp", Rounds(ours=1), modes=[WARM])
    assert {(run["round"], run["mode"]) for run in found.rows["slerp"]["runs"]} == {
        (0, WARM),
        *([(0, COLD), (1, COLD)] if same_day else []),
    }


def test_rounds_of_another_shape_are_no_rounds_of_the_same_row(tmp_path, monkeypatch):
    fake = Fake(monkeypatch)
    fake.go(tmp_path, "linear", Rounds(ours=1))
    with pytest.raises(OtherRunError, match="another shape \\(tiny, now small\\)"):
        fake.go(tmp_path, "linear", Rounds(ours=2), resume=True, shape="small")


def test_builds_that_differ_from_round_to_round_are_no_benchmark(tmp_path, monkeypatch):
    fake = Fake(monkeypatch)
    digests = itertools.count()
    monkeypatch.setattr(Fake, "step", lambda self, who: lambda mode: built(digest=f"b3:{next(digests)}"))
    with pytest.raises(CommandError, match="in an earlier run"):
        fake.go(tmp_path, "parameter-slerp", Rounds(few=2))


def test_a_row_that_is_not_there_is_named_with_those_that_are(capsys):
    assert main(["speed", "--rows", "linear,tise", "--no-docs"]) == 1
    assert "no row `tise`; there are: linear, task_arithmetic" in capsys.readouterr().err


# --- what is measured -----------------------------------------------------------------------------------------------


def test_bytes_of_children_count_and_those_of_the_launcher_do_not(tmp_path):
    (tmp_path / "in").write_bytes(bytes(5_000_000))
    child = "open('out', 'wb').write(open('in', 'rb').read())"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-S', '-c', {child!r}])"
    found = measure([sys.executable, "-I", "-S", "-c", parent], tmp_path)
    assert 5_000_000 <= found.read < 9_000_000
    assert 5_000_000 <= found.written < 5_100_000
    assert found.rss > 5_000_000
    assert 0 < found.cpu < 2 * found.wall + 1


def test_a_command_that_fails_says_what_it_printed(tmp_path):
    with pytest.raises(CommandError, match=r"failed with 3:\n.*no way"):
        measure([sys.executable, "-c", "import sys; print('no way', file=sys.stderr); sys.exit(3)"], tmp_path)
    with pytest.raises(CommandError, match="there is no `no-such-program`"):
        measure(["no-such-program"], tmp_path)


def test_the_floor_reads_and_writes_every_byte_once(tmp_path):
    sizes = {3: 2_500_000, 4: 7}
    for kind, total in ((lambda fd: fd >= 0, 2_500_007), (lambda fd: fd < 0, 1_048_577)):
        assert sum(size for fd, _, size in jobs(sizes, 1_048_577) if kind(fd)) == total
    (tmp_path / "a").write_bytes(bytes(2_500_000))
    command = [sys.executable, "-S", "-E", str(FLOOR_PROGRAM), "2", str(tmp_path / "out"), "1048577"]
    found = measure([*command, str(tmp_path / "a")], tmp_path)
    assert 2_500_000 <= found.read < 4_500_000
    assert 1_048_577 <= found.written < 1_100_000
    assert set(json.loads(found.output)) == {"flush"}
    assert not (tmp_path / "out").exists()


def test_where_the_page_cache_may_not_be_emptied_the_files_are_dropped_from_it(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(100))

    def refused(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refused)
    assert empty_page_cache([tmp_path / "a"]) == "files"


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.kind == "full"])
def test_both_sides_are_asked_for_the_same_merge(name, tmp_path):
    merge = ROWS[name].merge
    sources = {one: Path("/some where", one) for one in merge.inputs}
    theirs = mergekit.config(merge, sources)
    (tmp_path / "Mergefile.toml").write_text(mergefile(sources, {"merged": merge}))
    ours = load_mergefile(tmp_path / "Mergefile.toml", signatures()).outputs["merged"]
    assert ours.operator == theirs["merge_method"]
    assert [str(sources[expert.source]) for expert in ours.experts] == [
        model["model"] for model in theirs["models"] if model["model"] != theirs.get("base_model")
    ]
    assert theirs.get("base_model") == (str(sources["base"]) if ours.base else None)


def test_the_best_flags_are_those_with_the_smallest_medians():
    def tried(flags, *walls, row="linear", dtype="bfloat16"):
        return [{"row": row, "flags": flags, "dtype": dtype, "wall": wall} for wall in walls]

    runs = tried("", 3.0, 3.1, 3.2) + tried("-j 1", 2.0, 3.0, 9.0) + tried("-j 2", 1.0, 3.3, 3.4)
    found = {"flags": {"shape": "tiny", "runs": runs}}
    assert mergekit.best(found, "tiny") == "-j 1"
    assert mergekit.best(found, "small") == mergekit.best({}, "tiny") == mergekit.SPARING
    runs += (
        tried("", 5.0, row="slerp") + tried("-j 1", 5.5, row="slerp") + tried("-j 2", 0.1, row="slerp", dtype="float32")
    )
    assert mergekit.best(found, "tiny") == ""


def test_flags_are_tried_before_everything_is_measured_and_only_once(tmp_path, monkeypatch):
    called = []

    def tried(ground, names, count, results):
        called.append((tuple(names), count))
        runs = [{"row": "linear", "flags": "-j 1", "dtype": "bfloat16", "wall": 1.0}]
        results.found["flags"] = {"shape": ground.shape, "runs": runs}
        results.save()

    monkeypatch.setattr("benchmarks.__main__._check_mergekit", lambda _: None)
    monkeypatch.setattr(runner, "try_flags", tried)
    monkeypatch.setattr(runner, "run", lambda chosen, ground, *_, **__: called.append((len(chosen), ground.flags)))
    options = ["--shape", "tiny", "--mergekit", "python", "--results", str(tmp_path / "r.json")]
    assert [main(["speed", *options, *more]) for more in (["--rows", "slerp"], [], [])] == [0, 0, 0]
    assert called == [(1, mergekit.SPARING), (("linear",), 2), (len(ROWS), "-j 1"), (len(ROWS), "-j 1")]


def test_flags_may_begin_with_variables():
    command, variables = mergekit.command("/venv/bin/python", Path("c"), Path("o"), "OMP_NUM_THREADS=1 -j 2 --x=3")
    assert command == ["/venv/bin/mergekit-yaml", "c", "o", "-j", "2", "--x=3"]
    assert variables["OMP_NUM_THREADS"] == "1"


def test_the_environment_of_mergekit_is_pinned():
    lines = (ROOT / "benchmarks" / "mergekit.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert f"mergekit=={mergekit.VERSION}" in pins
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9_.]*", pin) for pin in pins)


def test_a_changed_tensor_is_changed_back_by_changing_it_again(tmp_path):
    write_family(SHAPES["tiny"], tmp_path, 0)
    path = tmp_path / "base" / "model.safetensors"
    before = path.read_bytes()
    assert edit(path, EDITED) == 2 * 256 * 1024
    after = path.read_bytes()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 256 * 1024
    edit(path, EDITED)
    assert path.read_bytes() == before


def test_a_changed_parameter_is_another_one():
    for row in (ROWS["parameter-slerp"], ROWS["parameter-ties"]):
        for parameter in rows.parameters(row):
            assert changed(row.merge, parameter).table() != row.merge.table()


def test_everybody_who_takes_part_in_a_row_has_something_to_do(tmp_path):
    ground = Ground(folder=tmp_path, shape="tiny", python="python")
    for row in ROWS.values():
        assert tuple(steps(row, ground)) == participants(row)
    ground.python = None
    assert set(participants(ROWS["ties"])) - set(steps(ROWS["ties"], ground)) == {rows.BEST, rows.DEFAULT}


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", report.SECTIONS)
def test_the_page_has_the_committed_figures(name):
    text = report.SECTIONS[name](Results(RESULTS).found)
    assert f"<!-- begin: speed {name} -->\n{text}\n<!-- end: speed {name} -->" in report.PAGE.read_text()


def test_a_row_of_the_table_has_the_metrics_in_their_order():
    text = report.runs_table(everything(good))
    assert (
        "| mergekit, warm | 10 B | 0 B | 5 B | 3 | 100 MB | 1.00 | 22.00 (20.00 to 24.00) | 3 |"
        " 20.00 (20.00 to 20.00) of mergepipe |"
    ) in text
    assert text.count("### ") == len(ROWS)


def test_the_same_figures_make_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib")
    found = everything(good)
    found["rows"] = {name: found["rows"][name] for name in ("linear", "ties")}
    for name in ("one.svg", "other.svg"):
        draw(found, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
    assert "mergekit, best flags" in (tmp_path / "one.svg").read_text()


@pytest.mark.slow
def test_a_quick_look_measures_what_it_says(tmp_path):
    figures = tmp_path / "r.json"
    names = "linear,changes,parameter-slerp,parameter-ties"
    options = ["--shape", "tiny", "--rounds", "2", "--warm", "--folder", str(tmp_path), "--results", str(figures)]
    assert main(["speed", "--rows", names, *options]) == 0
    found = json.loads(figures.read_text())
    met = {bar.what: bar.met for bar in bars(found)}
    assert met["nothing changed: bytes of weights read"] is True
    assert met["one tensor of one expert changed: expert bytes read to merge"] is True
    for parameter in ("`t` of `slerp`", "`lambda` of `ties`", "`density` of `ties`"):
        assert met[f"{parameter} changed"] is True
    assert {run["who"] for run in found["rows"]["linear"]["runs"]} == {rows.FLOOR, rows.OURS}
    assert not list((tmp_path / "work").iterdir())
