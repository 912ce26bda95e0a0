"""`replay`: run as a user would, in an empty directory with a manifest, and what it prints."""

import json
import shutil

import click
import pytest
from support.cli import run_mergepipe
from support.projects import SmallProject
from support.stages import declare
from unit.cli.fakes import assert_golden

from mergepipe.checkpoints.geometry import GEOMETRY_1
from mergepipe.cli.replay import _lines, _warnings
from mergepipe.project.replay_report import ReplayReport

DIGEST = "b3:" + "0123456789abcdef" * 4
REPORT = ReplayReport(
    name="assistant",
    operator="ties",
    digest=DIGEST,
    path="/srv/replayed/assistant",
    mergepipe="0.1.0",
    budget="25%",
    sources={"base": DIGEST, "math\x1b": DIGEST},
    stages={"stage": DIGEST},
    inputs=588,
    input_blocks=23_456,
    tensors=147,
    blocks=5_864,
    shards=3,
    side_files={"equal": ("config.json", "tokenizer.json"), "missing": ("merges.txt",), "extra": ("vocab.json",)},
    generated=("README.md",),
    bytes={"experts": 3 * 10**9, "base": 3 * 10**9, "index": 12 * 10**9, "written": 3 * 10**9},
    seconds=73.2,
)


@pytest.mark.parametrize("verbose", [False, True])
def test_the_report_is_printed_as_it_is_in_the_golden_file(verbose):
    text = click.unstyle("\n".join(_lines(REPORT, verbose=verbose)) + "\n")
    assert_golden(f"replay{'-verbose' if verbose else ''}.txt", text)


def test_what_is_not_as_it_was_beside_the_weights_is_warned_of():
    assert len(list(_warnings(REPORT))) == 3
    assert "merges.txt" in next(_warnings(REPORT))


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> SmallProject:
    project = declare(tmp_path_factory.mktemp("project"), publish=False)
    project.geometry = GEOMETRY_1
    project.build()
    return project


def test_an_empty_directory_a_manifest_and_the_sources_are_enough(project, tmp_path):
    shutil.copy(project.folder("final") / "mergepipe.json", tmp_path)
    missing = run_mergepipe(["replay", "mergepipe.json"], tmp_path)
    assert missing.code == 2
    assert "--source base=PATH" in missing.stderr
    sources = [f"--source={name}={project.root / path}" for name, path in project.sources.items()]
    done = run_mergepipe(["replay", "mergepipe.json", *sources, "--json"], tmp_path)
    assert (done.code, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["equal"] is True
    assert report["path"] == str(tmp_path / "replayed/final")
    made = (tmp_path / "replayed/final/model.safetensors").read_bytes()
    assert made == (project.folder("final") / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mergepipe.json", "replayed"]


def test_a_changed_source_ends_with_2_and_words(project, tmp_path):
    path = tmp_path / "e3"
    shutil.copytree(project.root / "models/e3", path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    args = ["replay", str(project.folder("final")), "--check", "--source", f"e3={path}"]
    failed = run_mergepipe(args, tmp_path)
    assert (failed.code, failed.stdout) == (2, "")
    assert "error: tensor `model.v` of source `e3` is not what the output was made from: block 0 of 1" in failed.stderr
    failed = run_mergepipe([*args, "--json"], tmp_path)
    assert json.loads(failed.stderr)["error"]["tensor"] == "model.v"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["m", "--check", "--out", "x"], "`--check` writes no output"),
        (["m", "--source", "math"], "`--source math` names no source and path"),
        (["m", "--source", "a=x", "--source", "a=y"], "`--source a=...` is given twice"),
        (["m", "--base-dir", "nowhere"], "`--base-dir`: there is no directory"),
        (["m"], "there is no manifest at"),
        ([""], "is not a path"),
    ],
)
def test_mistakes_on_the_command_line(cli, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    result = cli("replay", *args)
    assert result.code == 2
    assert message in result.stderr
