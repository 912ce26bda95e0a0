"""`pack`: what it prints, and that a user gets on with it alone."""

import json

import click
import numpy as np
import pytest
from support.checkpoints import write_checkpoint
from support.cli import run_mergepipe
from unit.cli.fakes import assert_golden

from mergepipe.cli.main import run
from mergepipe.cli.pack import _lines
from mergepipe.project.pack import PackedLevel, PackReport

DIGEST = "b3:" + "0123456789abcdef" * 4
REPORT = PackReport(
    path="/srv/packed-math",
    base=DIGEST,
    expert=DIGEST,
    expert_bytes=988_000_000,
    coded=168,
    exact=122,
    code_bytes=494_000_000,
    exact_bytes=109_000,
    levels=(
        PackedLevel(level=1, bits=1, bytes=62_500_000, error=0.5776),
        PackedLevel(level=2, bits=2, bytes=124_000_000, error=0.3211),
        PackedLevel(level=7, bits=8, bytes=493_000_000, error=None),
    ),
    seconds=21.3,
)


def test_the_report_is_printed_as_it_is_in_the_golden_file():
    assert_golden("pack.txt", click.unstyle("\n".join(_lines(REPORT, "packed-math\x1b")) + "\n"))


def test_the_json_is_that_of_the_golden_file():
    assert_golden("pack.json", json.dumps(REPORT.as_json(), indent=2) + "\n")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a base, an expert and no Mergefile."""
    rng = np.random.default_rng(0)
    base = {"a.weight": rng.normal(size=(200, 128)).astype(np.float32), "b.bias": np.ones(4, np.float32)}
    write_checkpoint(tmp_path / "qwen", base)
    write_checkpoint(tmp_path / "math", {**base, "a.weight": base["a.weight"] + np.float32(0.01)})
    return tmp_path


MERGEFILE = """\
version = 1
[sources.base]
path = "qwen"
[sources.expert]
{}
[outputs.merged]
operator = "linear"
base = "base"
experts = ["expert"]
[outputs.merged.budget]
expert_reads = "10%"
precision = "levels"
"""


def test_it_works_without_a_mergefile_and_with_the_names_of_one(folder, monkeypatch, capsys):
    alone = run_mergepipe(["pack", "math", "--base", "./qwen", "--out", "packed"], folder)
    assert alone.code == 0
    assert "1 tensor as codes" in alone.stdout
    (folder / "Mergefile.toml").write_text(MERGEFILE.format('path = "math"'))
    monkeypatch.chdir(folder)
    assert run(["pack", "expert", "--base", "base", "--out", "named", "--json", "-j", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == {"coded": 1, "exact": 1}
    files = [{p.relative_to(top): p.read_bytes() for p in top.rglob("*") if p.is_file()}
             for top in (folder / "packed", folder / "named")]  # fmt: skip
    assert files[0] == files[1]
    (folder / "Mergefile.toml").write_text(MERGEFILE.format('progressive = "packed"'))
    assert run(["build"]) == 0
    assert run(["explain", "merged"]) == 0
    assert "an expert is a progressive checkpoint" in capsys.readouterr().out


def test_a_name_that_is_another_checkpoint_here_is_taken_for_the_source_with_a_warning(folder, monkeypatch, capsys):
    (folder / "Mergefile.toml").write_text(MERGEFILE.format('path = "math"'))
    (folder / "here").mkdir()
    (folder / "qwen").rename(folder / "here/base")
    (folder / "qwen").symlink_to("here/base")
    (folder / "here/expert").symlink_to("base")
    monkeypatch.chdir(folder / "here")
    assert run(["pack", "expert", "--base", "base", "--out", "packed"]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert f"`expert` is taken for the source of that name at `{folder / 'math'}`" in warning
    assert "`./expert`" in warning
    assert run(["pack", "./expert", "--base", "base", "--out", "same"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing", "--base", "qwen", "--out", "x"], 2, "`nothing` does not exist"),
        (["math", "--base", "qwen", "--out", "qwen"], 2, "overlaps with source `qwen`"),
        (["math", "--base", "qwen", "--out", "."], 2, "overlaps with source `math`"),
        (["math", "--base", "qwen", "--out", "file/x"], 2, "is a file, not a directory"),
        (["math", "--base", "qwen", "--out", "x", "--memory", "1 MB"], 2, "is too small"),
        (["math", "--out", "x"], 2, "--base"),
    ],
)
def test_what_cannot_be_is_refused(folder, monkeypatch, capsys, arguments, code, message):
    (folder / "file").write_text("x")
    monkeypatch.chdir(folder)
    assert run(["pack", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not (folder / "x").exists()
    assert run(["pack", *arguments, "--json"]) == code
    assert json.loads(capsys.readouterr().err)["error"]["message"]
