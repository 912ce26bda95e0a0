"""`mergepipe import`: where it reads and writes, where models are, and what it says."""

from __future__ import annotations

import json
import os

import pytest
from unit.cli.fakes import assert_golden

from mergepipe.cli.main import run
from mergepipe.mergefile.mergekit.yamltext import LARGEST_FILE
from mergepipe.mergefile.parse import parse_mergefile
from mergepipe.operators.registry import signatures

LINEAR = """\
merge_method: linear
models:
  - model: models/math
    parameters: {weight: 0.5}
  - model: org/code@v1
    parameters: {weight: 0.25}
dtype: bfloat16
"""
LOCAL = LINEAR.replace("org/code@v1", "models/code")


@pytest.fixture
def here(cli, tmp_path):
    """The current folder: two models, a configuration, and no Mergefile."""
    (tmp_path / "Mergefile.toml").unlink()
    for name in ("math", "code"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "average.yml").write_text(LINEAR, encoding="utf-8")
    (tmp_path / "local.yml").write_text(LOCAL, encoding="utf-8")
    return tmp_path


def sources(path):
    """Return the sources of a Mergefile that a build could read."""
    found = parse_mergefile(path.read_text(encoding="utf-8"), path, signatures()).sources
    return {name: source.path for name, source in found.items()}


def test_writes_a_mergefile_and_says_what_comes_next(cli, here):
    result = cli("import", "local.yml")
    assert result.code == 0
    assert_golden("import.txt", result.stdout)
    assert sources(here / "Mergefile.toml") == {"math": "models/math", "code": "models/code"}
    assert result.stderr.startswith("note: `dtype: bfloat16`: mergekit computes in it")


def test_a_model_that_is_not_here_is_a_repository_and_that_is_not_supported_yet(cli, here):
    result = cli("import", "average.yml")
    assert result.code == 0
    assert 'hub = "org/code"\nrevision = "v1"\n' in (here / "Mergefile.toml").read_text(encoding="utf-8")
    assert result.stderr.endswith("warning: `hub` is not supported yet (`sources.code.hub`)\n")


@pytest.mark.parametrize("name", ["org/code", "org/code@v1"])
def test_model_says_where_a_model_is(cli, here, name):
    result = cli("import", "average.yml", "--model", f"{name}=models/code")
    assert result.code == 0
    assert sources(here / "Mergefile.toml") == {"math": "models/math", "code": "models/code"}
    assert "note: `org/code@v1` is taken from `models/code` as it is there" in result.stderr


def test_model_says_where_an_adapter_is(cli, here):
    (here / "adapted.yml").write_text(LINEAR.replace("org/code@v1", "models/math+org/lora"), encoding="utf-8")
    assert cli("import", "adapted.yml", "--model", "org/lora=models/code").code == 0
    assert sources(here / "Mergefile.toml") == {"math": "models/math", "lora": "models/code"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("org/code", "is not NAME=PATH"),
        ("org/code=", "is not NAME=PATH"),
        ("org/code=nowhere", "there is no `nowhere`"),
        ("org/coed=models/code", "the configuration has no model of this name\nhint: did you mean `org/code`?"),
        ("zzz=models/code", "its models are: models/math, org/code, org/code@v1"),
    ],
)
def test_a_model_option_that_is_of_no_use(cli, here, option, message):
    result = cli("import", "average.yml", "--model", option)
    assert result.code == 2
    assert message in result.stderr
    assert not (here / "Mergefile.toml").exists()


def test_paths_are_relative_to_the_mergefile(cli, here):
    (here / "recipes").mkdir()
    assert cli("import", "local.yml", "-o", "recipes/average.toml").code == 0
    assert sources(here / "recipes" / "average.toml") == {"math": "../models/math", "code": "../models/code"}


def test_models_beside_the_configuration_are_found(cli, here):
    (here / "work").mkdir()
    assert cli("-C", "work", "import", "../local.yml").code == 0
    assert sources(here / "work" / "Mergefile.toml") == {"math": "../models/math", "code": "../models/code"}


def test_the_current_folder_comes_before_that_of_the_configuration(cli, here):
    for name in ("math", "code"):
        (here / "work" / "models" / name).mkdir(parents=True)
    assert cli("-C", "work", "import", "../local.yml").code == 0
    assert sources(here / "work" / "Mergefile.toml") == {"math": "models/math", "code": "models/code"}


def test_an_absolute_path_elsewhere_stays_absolute(cli, here, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    text = LOCAL.replace("models/math", str(elsewhere)).replace("models/code", str(here / "models" / "code"))
    (here / "local.yml").write_text(text, encoding="utf-8")
    assert cli("import", "local.yml").code == 0
    assert sources(here / "Mergefile.toml") == {elsewhere.name: str(elsewhere), "code": "models/code"}


@pytest.mark.parametrize(("path", "written"), [("./gone", "gone"), ("../gone", "../gone"), ("~/gone", "~/gone")])
def test_a_path_that_leads_nowhere_is_said(cli, here, path, written):
    (here / "local.yml").write_text(LOCAL.replace("models/code", path), encoding="utf-8")
    result = cli("import", "local.yml")
    assert result.code == 0
    assert sources(here / "Mergefile.toml")["gone"] == written
    assert f"note: `{written}` is not there (yet)\n" in result.stderr


def test_a_mergefile_that_is_there_stays(cli, here):
    (here / "Mergefile.toml").write_text("mine", encoding="utf-8")
    result = cli("import", "local.yml")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: `Mergefile.toml` exists already\nhint: `--force` replaces it, `-o FILE` writes another\n"
    )
    assert (here / "Mergefile.toml").read_text(encoding="utf-8") == "mine"
    assert cli("import", "local.yml", "--force").code == 0
    assert sources(here / "Mergefile.toml")
    assert sorted(os.listdir(here)) == ["Mergefile.toml", "average.yml", "local.yml", "models"]


def test_a_directory_in_the_place_of_the_mergefile_stays(cli, here):
    (here / "Mergefile.toml").mkdir()
    assert cli("import", "local.yml", "--force").code == 2


def test_file_names_the_mergefile_too(cli, here):
    assert cli("import", "local.yml", "-f", "other.toml").code == 0
    assert sources(here / "other.toml")


def test_it_can_be_printed(cli, here):
    (here / "Mergefile.toml").write_text("mine", encoding="utf-8")
    result = cli("import", "local.yml", "-o", "-")
    assert result.code == 0
    assert (here / "Mergefile.toml").read_text(encoding="utf-8") == "mine"
    assert cli("import", "local.yml", "-o", "new.toml").code == 0
    assert result.stdout == (here / "new.toml").read_text(encoding="utf-8")


def test_json_says_what_was_written(cli, here):
    result = cli("import", "average.yml", "--json")
    notes = json.loads(result.stdout).pop("notes")
    assert json.loads(result.stdout) == {
        "path": "Mergefile.toml",
        "outputs": ["average"],
        "sources": {"math": "models/math", "code": "org/code@v1"},
        "notes": notes,
    }
    assert [note[:7] for note in notes] == ["`dtype:", "`hub` i"]
    printed = json.loads(cli("import", "average.yml", "--json", "-o", "-").stdout)
    assert printed["path"] is None
    assert printed["text"] == (here / "Mergefile.toml").read_text(encoding="utf-8")


def test_what_is_wrong_is_told_in_one_go_and_nothing_is_written(cli, here):
    text = LINEAR + "chat_template: auto\ntokenizer_source: union\nmodles: []\n"
    (here / "bad.yml").write_text(text, encoding="utf-8")
    result = cli("import", "bad.yml")
    assert (result.code, result.stdout) == (2, "")
    assert [line[:18] for line in result.stderr.splitlines() if line.startswith("error")] == [
        "error: bad.yml:8: ",
        "error: bad.yml:9: ",
        "error: bad.yml:10:",
    ]
    assert result.stderr.endswith("3 problems found\n")
    assert not (here / "Mergefile.toml").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.yml", None, "there is no file `gone.yml`"),
        ("models", None, "`models` is a directory"),
        ("models/math/x.yml", None, "there is no file `models/math/x.yml`"),
        ("average.yml/x", None, "there is no file `average.yml/x`"),
        ("empty.yml", b"", "empty.yml: is empty"),
        ("tab.yml", b"a:\n\t- 1\n", "tab.yml:2:1: not valid YAML: a tab where YAML wants spaces"),
        ("large.yml", b"a: 1 #" + b"x" * LARGEST_FILE, "is larger than"),
    ],
)
def test_a_configuration_that_cannot_be_read(cli, here, name, content, message):
    if content is not None:
        (here / name).write_bytes(content)
    result = cli("import", name)
    assert result.code == 2
    assert message in result.stderr


@pytest.mark.parametrize("name", ["two words", "模型", 'quo"te', "~home", "it's"])
def test_odd_folder_names_are_written_so_that_they_are_found_again(cli, here, name):
    (here / name).mkdir()
    text = LOCAL.replace("models/code", json.dumps(name, ensure_ascii=False))
    (here / "local.yml").write_text(text, encoding="utf-8")
    assert cli("import", "local.yml").code == 0
    path = here / "Mergefile.toml"
    mergefile = parse_mergefile(path.read_text(encoding="utf-8"), path, signatures())
    assert (here / name) in [mergefile.source_path(source).resolve() for source in mergefile.sources]


def test_an_import_without_a_file_is_a_mistake(cli, here):
    assert run(["import"]) == 2


def test_only_import_needs_yaml(cli, here):
    import sys

    from support.cli import run_process

    code = "import sys; from mergepipe.cli.main import run; run(sys.argv[1:]); print('yaml' in sys.modules)"
    assert run_process([sys.executable, "-c", code, "import", "--help"], here).stdout.endswith("False\n")
    assert run_process([sys.executable, "-c", code, "import", "local.yml"], here).stdout.endswith("True\n")
