"""README and docs say what is so: their Mergefiles parse, their commands exist, their output is real.

Set ``UPDATE_GOLDEN=1`` to write the output in README anew, and review the difference.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from support.cli import run_mergepipe, run_process

from mergepipe import errors
from mergepipe.cli import errors as cli_errors
from mergepipe.cli.main import mergepipe as command_line
from mergepipe.cli.options import global_options
from mergepipe.dtypes import WRITE_DTYPES
from mergepipe.mergefile.outputs import OUTPUT_KEYS
from mergepipe.mergefile.parse import parse_mergefile
from mergepipe.mergefile.sources import SOURCE_KEYS
from mergepipe.operators.registry import signatures
from mergepipe.signatures import COMMON_PARAMS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = ROOT / "docs" / "reference" / "mergefile.md"
OPERATORS = ROOT / "docs" / "reference" / "operators.md"
CLI_REFERENCE = ROOT / "docs" / "reference" / "cli.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
STARTED = ROOT / "docs" / "getting-started.md"
ERRORS = ROOT / "docs" / "reference" / "errors.md"
PYTHON_API = ROOT / "docs" / "reference" / "python-api.md"

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_SECONDS = re.compile(r"\b\d+\.\d+ s\b")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fences(page: Path, *languages: str) -> list[str]:
    """Return the bodies of a page's fenced blocks of some languages, in order."""
    return [match["body"] for match in _FENCE.finditer(read(page)) if match["language"] in languages]


def parse(text: str):
    """Parse a Mergefile with the real operators: what is not supported yet is an error."""
    return parse_mergefile(text, ROOT / "Mergefile.toml", signatures())


def is_mergefile(text: str) -> bool:
    """Return whether a block is a whole Mergefile (a lock has a geometry)."""
    return text.startswith("version = ") and "[outputs." in text and "geometry" not in text


# --- Mergefiles -------------------------------------------------------------------------------------------------------

WHOLE = [
    pytest.param(text, id=f"{name_of(page)}-{number}")
    for page in PAGES
    for number, text in enumerate(fences(page, "toml"))
    if is_mergefile(text)
]
FRAGMENTS = [
    pytest.param(whole[-1], text, id=f"{name_of(page)}-{number}")
    for page in PAGES
    for number, text in enumerate(fences(page, "toml"))
    if (whole := [t for t in fences(page, "toml")[:number] if is_mergefile(t)]) and not is_mergefile(text)
]


@pytest.mark.parametrize("text", WHOLE)
def test_a_mergefile_in_the_docs_parses(text):
    assert parse(text).outputs


@pytest.mark.parametrize(("whole", "fragment"), FRAGMENTS)
def test_a_part_of_a_mergefile_fits_the_one_before_it(whole, fragment):
    assert parse(f"{whole}\n{fragment}") != parse(whole)


def test_there_are_mergefiles_in_readme_guide_and_reference():
    pages = {param.id.rpartition("-")[0] for param in WHOLE}
    assert {"README.md", "docs/guides/first-merge.md", "docs/reference/mergefile.md"} <= pages
    assert FRAGMENTS


def test_the_reference_has_every_key_of_the_schema():
    text = read(REFERENCE)
    budget = ("expert_reads", "max_error", "stats", "precision")
    keys = (*SOURCE_KEYS, *OUTPUT_KEYS, *budget, "dtype", "shard_size", "tokenizer", "match", "layers", "python")
    assert [key for key in keys if f"`{key}" not in text] == []


def test_the_reference_has_every_operator_parameter_and_dtype():
    text = read(REFERENCE)
    common = [spec.name for spec in COMMON_PARAMS]
    assert [name for name in (*signatures(), *common, *WRITE_DTYPES) if f"`{name}`" not in text] == []
    params = {name for signature in signatures().values() for name in signature.all_params()}
    assert [name for name in sorted(params) if f"\n| `{name}` |" not in read(OPERATORS)] == []


def test_readme_names_every_operator():
    assert [name for name in signatures() if f"`{name}`" not in read(README)] == []


def test_the_reference_marks_what_is_not_supported_yet():
    lines = [line for line in read(REFERENCE).splitlines() if "*Not supported yet*" in line]
    assert {re.match(r"\| `([^`]+)`", line)[1] for line in lines} == {"hub"}
    table = read(REFERENCE).partition("## What is not supported yet")[2]
    rows = re.findall(r"^\| (?!---|what)(.+?) \|", table, re.MULTILINE)
    assert [row for row in rows if not any(word in row for word in ("hub", "adapter"))] == []
    assert len(rows) == 2


_SUPPORTED = """\
version = 1
[sources.base]
path = "a"
[sources.math]
path = "b"
[outputs.merged]
operator = "linear"
base = "base"
experts = ["math"]
"""


@pytest.mark.parametrize(
    "text",
    [
        _SUPPORTED.replace('path = "b"', 'hub = "org/model"'),
        _SUPPORTED.replace('path = "b"', 'path = "b"\non = "lora"\n[sources.lora]\npath = "c"\non = "base"'),
        _SUPPORTED.replace('path = "b"', 'path = "b"\non = "merged"').replace('["math"]', '["base"]'),
    ],
)
def test_what_the_reference_calls_not_supported_is_refused(text):
    assert parse(_SUPPORTED).outputs
    with pytest.raises(errors.MergepipeError, match="not supported yet") as caught:
        parse(text)
    assert caught.value.exit_status == 2


# --- commands ---------------------------------------------------------------------------------------------------------


def command_lines(page: Path) -> list[list[str]]:
    """Return the shell commands in a page's bash blocks, word by word, comments left out."""
    lines = [line for block in fences(page, "bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def parse_command(args: list[str]) -> click.Context:
    """Parse a command line as `mergepipe` would, without running it."""
    context = command_line.make_context("mergepipe", list(args))
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context


USES = [
    pytest.param(words[1:], id=f"{name_of(page)}: {shlex.join(words)}")
    for page in PAGES
    for words in command_lines(page)
    if words[0] == "mergepipe"
]


@pytest.mark.parametrize("args", USES)
def test_a_command_in_the_docs_is_one_that_exists(args):
    parse_command(args)


@pytest.mark.parametrize("args", [["biuld"], ["build", "--lokced"], ["cache"], ["cache", "prune", "--max-size", "x"]])
def test_a_command_that_does_not_exist_would_be_found(args):
    with pytest.raises((click.UsageError, errors.MergepipeError, IndexError)):
        parse_command(args)


def test_the_docs_use_most_commands():
    used = {param.values[0][0] for param in USES}
    assert used == set(command_line.commands)


def test_the_architecture_names_every_module_of_the_engine():
    table = read(ARCHITECTURE).split("| module of `engine` |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `")))
    modules = {path.stem for path in (ROOT / "mergepipe" / "engine").glob("*.py")} - {"__init__"}
    assert sorted(named) == sorted(modules)


def test_make_targets_in_the_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    used = {word for page in PAGES for words in command_lines(page) if words[0] == "make" for word in words[1:]}
    assert used <= targets
    assert {"demo", "test"} <= used


def leaf_commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", found) for inner, found in leaf_commands(command))
        else:
            yield name, command


def test_the_command_reference_is_complete():
    text = read(CLI_REFERENCE)
    shared = {option for parameter in global_options() for option in parameter.opts} | {"--help"}
    assert [option for option in sorted(shared) if f"{option}" not in text] == []
    for name, command in leaf_commands(command_line):
        row = next((line for line in text.splitlines() if line.startswith(f"| `{name}")), "")
        own = [max(p.opts, key=len) for p in command.params if isinstance(p, click.Option) and p.opts[0] not in shared]
        assert row, f"no row for `{name}`"
        assert [option for option in own if option not in row] == [], name


def test_the_exit_codes_are_those_of_the_errors():
    classes = [*vars(errors).values(), *vars(cli_errors).values()]
    statuses = {c.exit_status for c in classes if isinstance(c, type) and issubclass(c, errors.MergepipeError)}
    table = read(CLI_REFERENCE).partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == {0, *statuses}


# --- what is printed --------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path):
    """Return a copy of the example at the root of the repository, with its lock."""
    folder = tmp_path / "example"
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("Mergefile.toml", "Mergefile.lock"):
        shutil.copy(ROOT / name, folder)
    return folder


def without_times(text: str) -> str:
    return _SECONDS.sub("N s", text).strip()


def replace_printed(page: Path, outputs: list[str]) -> None:
    bodies = iter(outputs)

    def block(match: re.Match[str]) -> str:
        return f"```text\n{next(bodies).strip()}\n```" if match["language"] == "text" else match[0]

    page.write_text(_FENCE.sub(block, read(page)), encoding="utf-8")


def test_the_committed_lock_is_current(example):
    result = run_mergepipe(["build", "--locked"], example)
    assert result.code == 0, result.text


def test_readme_shows_what_the_demo_prints(example):
    printed = [run_mergepipe(["build"], example) for _ in range(2)]
    assert [result.code for result in printed] == [0, 0], printed[0].text
    if os.environ.get("UPDATE_GOLDEN"):
        replace_printed(README, [result.stdout for result in printed])
    shown = fences(README, "text")
    assert [without_times(text) for text in shown] == [without_times(result.stdout) for result in printed]


def test_the_command_reference_shows_the_keys_of_the_json(example):
    printed = run_mergepipe(["build", "--json"], example)
    shown = next(text for text in fences(CLI_REFERENCE, "json") if text.startswith('{\n  "lock"'))
    assert keys_of(json.loads(shown)) == keys_of(json.loads(printed.stdout))


def test_the_command_reference_shows_what_explain_prints(example):
    command, (shown, *_) = next(b for b in commands_and_texts(CLI_REFERENCE) if b[0].startswith("mergepipe explain"))
    built = run_mergepipe(["build"], example)
    printed = run_mergepipe(shlex.split(command)[1:], example)
    assert (built.code, printed.code, printed.stdout) == (0, 0, shown)


def keys_of(value: object) -> object:
    """Return the structure of JSON data: keys in order; of the outputs, only the one that the docs show."""
    if not isinstance(value, dict):
        return None
    return {key: keys_of(inner) for key, inner in value.items() if key not in ("average", "docs-boost")}


def test_the_guide_can_be_followed(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    guide = ROOT / "docs" / "guides" / "first-merge.md"
    first, *_ = fences(guide, "bash")
    models = tmp_path / "try" / "models"
    assert "cp -r examples/family/base examples/family/expert-* try/models/" in first
    for folder in (tmp_path / "examples" / "family").iterdir():
        if folder.name.startswith(("base", "expert-")):
            shutil.copytree(folder, models / folder.name)
    assert run_mergepipe(["init"], models.parent).code == 0
    assert run_mergepipe(["build"], models.parent).code == 0

    whole, rule = fences(guide, "toml")
    mergefile = models.parent / "Mergefile.toml"
    mergefile.write_text(whole, encoding="utf-8")
    assert run_mergepipe(["build"], models.parent).code == 0
    again = json.loads(run_mergepipe(["build", "--json"], models.parent).stdout)["outputs"]["merged"]
    assert again["state"] == "unchanged"
    mergefile.write_text(f"{whole}\n{rule}", encoding="utf-8")
    status = json.loads(run_mergepipe(["status", "--json"], models.parent).stdout)["outputs"]["merged"]
    assert status["state"] == "stale"
    assert status["reasons"]
    changed = json.loads(run_mergepipe(["build", "--json"], models.parent).stdout)["outputs"]["merged"]
    assert changed["blocks"]["computed"] == 8, "the four projections of two layers"
    assert run_mergepipe(["build", "--locked"], models.parent).code == 0


def test_the_guide_to_publishing_can_be_followed(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    guide = ROOT / "docs" / "guides" / "publish-an-expert.md"
    here, there, commands = fences(guide, "bash")
    (mergefile,) = fences(guide, "toml")
    (tmp_path / "mergefile").write_text(mergefile, encoding="utf-8")
    env = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    script = f"set -e\n{here}\n{there}\ncp {tmp_path}/mergefile Mergefile.toml\n{commands}"
    result = run_process(["bash", "--norc", "-c", script], tmp_path, env)
    assert result.code == 0, result.text
    folder = tmp_path / "try" / "there"
    again = json.loads(run_mergepipe(["build", "--json"], folder).stdout)["outputs"]["merged"]
    assert again["state"] == "unchanged"
    assert 0 < again["expert_bytes"]["planned"] <= 0.1 * again["expert_bytes"]["full"]
    assert again["bound"]["kind"] == "certified"


def commands_and_texts(page: Path) -> list[tuple[str, list[str]]]:
    """Return a page's bash blocks, each with what is shown behind it."""
    found: list[tuple[str, list[str]]] = []
    for match in _FENCE.finditer(read(page)):
        if match["language"] == "bash":
            found.append((match["body"], []))
        elif match["language"] == "text":
            found[-1][1].append(match["body"])
    return found


def test_getting_started_can_be_followed_and_shows_what_is_printed(tmp_path):
    """Every line is run in one shell, as it stands; the last lines of a block print what is shown behind it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    blocks = commands_and_texts(STARTED)
    printed, script = tmp_path / "printed", []
    for block, (body, _) in enumerate(blocks):
        for number, line in enumerate(body.splitlines()):
            allowed = 1 if line == "mergepipe diff" else 0  # there are differences
            script.append(f"{{ {line}\n}} >{printed}-{block}-{number}; [ $? -eq {allowed} ] || exit 9")
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
    env = dict.fromkeys(names, "somebody@example.org") | {"HOME": str(tmp_path)}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    result = run_process(["bash", "--norc", "-c", "\n".join(script)], tmp_path, env)
    assert result.code == 0, result.text
    shown = [text for _, texts in blocks for text in texts]
    real = []
    for block, (body, texts) in enumerate(blocks):
        outputs = [Path(f"{printed}-{block}-{number}").read_text() for number in range(len(body.splitlines()))]
        real += [text for text in outputs if text][-len(texts) :] if texts else []
    if os.environ.get("UPDATE_GOLDEN"):
        replace_printed(STARTED, real)
    assert [without_times(text) for text in shown] == [without_times(text) for text in real]


def test_the_examples_of_the_python_api_run(example):
    code = "\n".join(fences(PYTHON_API, "python"))
    result = run_process([sys.executable, "-W", "error", "-c", code], example)
    assert result.code == 0, result.text
    assert "python 0.5 outputs.assistant.rules[0].experts.python.weight" in result.stdout


def test_the_errors_that_are_shown_are_printed(tmp_path):
    (mergefile,) = fences(ROOT / "docs" / "index.md", "toml")
    (tmp_path / "Mergefile.toml").write_text(mergefile.replace('source = "code"', 'source = "cod"'), encoding="utf-8")
    printed = [run_mergepipe(["build", *args], tmp_path) for args in ([], ["--json"])]
    assert [result.code for result in printed] == [2, 2]
    real = [result.stderr.replace(f"{tmp_path}/", "") for result in printed]
    if os.environ.get("UPDATE_GOLDEN"):
        replace_printed(ERRORS, real)
    assert fences(ERRORS, "text") == real


def test_the_example_of_the_errors_runs(tmp_path):
    (code,) = fences(ERRORS, "python")
    result = run_process([sys.executable, "-c", code], tmp_path)
    assert (result.code, result.stdout.split()[0]) == (0, "mergefile"), result.text


# --- references -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    targets = [match["target"].partition("#")[0] for match in _LINK.finditer(read(page))]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return what the headings of a page are called in links to them."""
    body = _FENCE.sub("", read(page))
    titles = re.findall(r"^#+ (.+)$", body, re.MULTILINE)
    plain = [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_headings_lead_to_headings(page):
    targets = [match["target"].partition("#") for match in _LINK.finditer(read(page)) if "://" not in match["target"]]
    named = [(page.parent / path if path else page, anchor) for path, _, anchor in targets if anchor]
    pages = [(path, anchor) for path, anchor in named if path.suffix == ".md"]
    assert [f"{path.name}#{anchor}" for path, anchor in pages if anchor not in anchors(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_of_this_repository_exist(page):
    named = re.findall(r"`((?:tests|docs|examples|mergepipe|\.ci)/[\w./-]+)`", read(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_in_the_docs_is_python(page):
    for text in fences(page, "python"):
        ast.parse(text)


def test_every_law_is_in_the_architecture_and_says_where_it_is_tested():
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", read(ARCHITECTURE), re.MULTILINE)
    rows = [row for row in rows if "`tests/" in row[2] or "not yet" in row[2]]
    assert [int(number) for number, *_ in rows] == list(range(1, 11))


def error_classes() -> dict[str, type[errors.MergepipeError]]:
    """Return by kind every class of errors in the package that is not private."""
    found = {}
    known = {"MergepipeError"}
    declared = re.compile(r"^class (\w+)\((\w+)\):", re.MULTILINE)
    classes = [(path, *pair) for path in (ROOT / "mergepipe").rglob("*.py") for pair in declared.findall(read(path))]
    for _ in range(4):  # deeper than the tree of errors is
        known |= {name for _, name, base in classes if base in known}
    for path, name, _ in classes:
        if name in known - {"MergepipeError", "CollectedErrors"} and not name.startswith("_"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            kind = getattr(importlib.import_module(module), name)
            found[kind.kind()] = kind
    return found


def test_the_errors_are_all_there_with_their_kinds_and_exit_codes():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (.+) \| (.+) \|$", read(ERRORS), re.MULTILINE)
    assert len(rows) > 10
    documented = {kind: (name, int(code)) for kind, name, code, *_ in rows}
    assert len(documented) == len(rows), "each kind has one row"
    assert documented == {kind: (found.__name__, found.exit_status) for kind, found in error_classes().items()}


def test_the_tree_of_errors_is_the_one_that_the_module_shows():
    drawn = dict(re.findall(r"(\w+Error) +(\d+)", errors.__doc__ or ""))
    real = {name: found.exit_status for name, found in vars(errors).items() if name.endswith("Error")}
    assert {name: int(code) for name, code in drawn.items()} == real


def nav_pages(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from nav_pages(inner)


def test_the_site_has_every_page_once():
    # The base loader takes the tags of mkdocs.yml for what they are to us: nothing.
    config = yaml.load(read(ROOT / "mkdocs.yml"), yaml.BaseLoader)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.is_relative_to(ROOT / "docs")]
    assert sorted(nav_pages(config["nav"])) == sorted(pages)
    assert config["theme"]["font"] == "false", "nothing is loaded from elsewhere"


def test_readme_is_short():
    assert len(read(README).splitlines()) < 200
