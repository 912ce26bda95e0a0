"""Completion: what shells offer, asked of real ones where they are installed."""

import contextlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from support.cli import run_process

from mergepipe.cli.completion import SHELLS, VARIABLE, completion_script
from mergepipe.cli.main import mergepipe
from mergepipe.cli.options import GlobalOptions
from mergepipe.cli.session import Session

MERGEFILE = """\
version = 1
[sources.base]
path = "b"
[outputs.average]
[outputs.assistant]
[outputs."docs 1"]
[outputs."v1.5-ü"]
"""
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a Mergefile that cannot be built: only its names are looked at."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "Mergefile.toml").write_text(MERGEFILE, encoding="utf-8")
    return tmp_path


def offered(folder, line):
    """Return what a shell is told to offer at the end of a command line."""
    *words, incomplete = [*line.split(), *([""] if line.endswith(" ") else [])]
    with contextlib.chdir(folder):
        shell = BashComplete(mergepipe, {"obj": Session(GlobalOptions())}, "mergepipe", VARIABLE)
        found = shell.get_completions(words[1:], incomplete)
    return [f"{item.type},{item.value}" for item in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mergepipe bu", ["plain,build"]),
        ("mergepipe cache ", ["plain,info", "plain,prune", "plain,verify"]),
        ("mergepipe build --lo", ["plain,--locked"]),
        ("mergepipe build --color al", ["plain,always"]),
        ("mergepipe build --color=al", ["plain,always"]),
        ("mergepipe completion ", ["plain,bash", "plain,zsh", "plain,fish"]),
        ("mergepipe build ", ["plain,average", "plain,assistant", "plain,v1.5-ü"]),
        ("mergepipe build a", ["plain,average", "plain,assistant"]),
        ("mergepipe build average a", ["plain,assistant"]),
        ("mergepipe sweep as", ["plain,assistant"]),
        ("mergepipe plan --json av", ["plain,average"]),
        ("mergepipe init --base mod", ["dir,mod"]),
        ("mergepipe import re", ["file,re"]),
        ("mergepipe -f Mer", ["file,Mer"]),
        ("mergepipe build -C s", ["dir,s"]),
        ("mergepipe help cac", ["plain,cache"]),
        ("mergepipe help cache p", ["plain,prune"]),
        ("mergepipe help build ", []),
    ],
)
def test_what_is_offered(folder, line, expected):
    assert offered(folder, line) == expected


def test_outputs_are_those_of_the_mergefile_that_the_line_names(folder):
    (folder / "other.toml").write_text("[outputs.other]\n")
    assert offered(folder / "sub", "mergepipe build as") == ["plain,assistant"], "the nearest one above"
    assert offered(Path("/"), f"mergepipe -C {folder} build as") == ["plain,assistant"]
    assert offered(folder, "mergepipe -f other.toml build ") == ["plain,other"]
    assert offered(folder, "mergepipe build -f other.toml ") == ["plain,other"]


NESTED = "a=" + "[" * 9999
BROKEN = ["", "outputs = 1", "[outputs", "\udc80", '[outputs."\\u001b[31m"]', '[outputs."a\\nplain,b"]', NESTED]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_mergefile_that_cannot_be_read_offers_no_names_and_says_nothing(folder, text):
    (folder / "Mergefile.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert offered(folder, "mergepipe build ") == []


def test_completing_imports_nothing_heavy(folder):
    code = "import sys, mergepipe.cli.main as m\ntry: m.main()\nfinally: print(*sorted(sys.modules), file=sys.stderr)"
    env = {"_MERGEPIPE_COMPLETE": "bash_complete", "COMP_WORDS": "mergepipe build a", "COMP_CWORD": "2"}
    result = run_process([sys.executable, "-c", code], folder, env)
    assert result.stdout.splitlines() == ["plain,average", "plain,assistant"]
    imported = {name.partition(".")[0] for name in result.stderr.split()}
    assert {"mergepipe", "click"} <= imported
    assert imported & {"torch", "numpy", "networkx", "rich", "msgspec", "yaml"} == set()


# --- the scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_printed(cli, shell):
    result = cli("completion", shell)
    assert (result.code, result.stdout, result.stderr) == (0, completion_script(shell), "")
    assert "_MERGEPIPE_COMPLETE" in result.stdout
    assert json.loads(cli("completion", shell, "--json").stdout) == {"shell": shell, "script": result.stdout}


def test_another_shell_is_refused_with_those_that_there_are(cli):
    result = cli("completion", "tcsh")
    assert result.code == 2
    assert all(f"`{shell}`" in result.stderr for shell in SHELLS)
    assert cli("completion").code == 2


def run_shell(shell, script, folder):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    result = run_process([shell, *options, "-c", script], folder, {"PATH": PATH, "HOME": str(folder)})
    assert result.code == 0, result.text
    return result.stdout.splitlines()


def test_bash_completes(folder):
    lines = ["mergepipe bu", "mergepipe build --lock", "mergepipe build ", "mergepipe cache pr"]
    calls = []
    for line in lines:
        words = [*line.split(), *([""] if line.endswith(" ") else [])]
        quoted = " ".join(shlex.quote(word) for word in words)
        calls.append(f"COMPREPLY=(); COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}")
        calls.append('"${BASH_REMATCH[1]}" mergepipe; echo "${COMPREPLY[@]}"')
    script = rf"""
        eval "$(mergepipe completion bash)"
        handler=$(complete -p mergepipe)
        [[ $handler =~ -F\ ([_a-z]+)\ mergepipe ]]
        {"; ".join(calls)}
    """
    assert run_shell("bash", script, folder) == ["build", "--locked", "average assistant v1.5-ü", "prune"]


def test_zsh_takes_the_script(folder):
    script = 'autoload -U compinit; compinit -D; eval "$(mergepipe completion zsh)"; print $_comps[mergepipe]'
    assert run_shell("zsh", script, folder) == ["_mergepipe_completion"]


def test_fish_completes(folder):
    script = 'mergepipe completion fish | source; complete --do-complete "mergepipe build a"'
    assert sorted(run_shell("fish", script, folder)) == ["assistant", "average"]
