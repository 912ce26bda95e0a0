"""The command line in processes of its own: start-up, and what only real streams show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import random_tensors, write_checkpoint
from support.cli import COMMAND, clean_environment, run_mergepipe, run_process

from mergepipe._version import __version__
from mergepipe.errors import CancelledError

FULL = Path("/dev/full")
HEAVY = ("numpy", "torch", "networkx", "rich", "msgspec", "ml_dtypes", "sqlite3")
PROBE = f"""
import sys
sys.argv = ["mergepipe", *sys.argv[1:]]
from mergepipe.cli.main import main
try:
    main()
finally:
    loaded = [name for name in {HEAVY} if name in sys.modules]
    print("loaded:", *loaded, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "argv", [("--version",), ("--help",), ("build", "--help"), ("init", "--help"), ("bild",)], ids=" ".join
)
def test_start_up_imports_nothing_heavy(tmp_path, argv):
    result = run_process((sys.executable, "-c", PROBE, *argv), tmp_path)
    assert result.stderr.endswith("loaded:\n")


def test_the_version(tmp_path):
    result = run_mergepipe(["--version"], tmp_path)
    assert (result.code, result.stdout, result.stderr) == (0, f"mergepipe {__version__}\n", "")


@pytest.mark.parametrize("argv", [(), ("--help",)], ids=["nothing", "help"])
def test_the_help(tmp_path, argv):
    result = run_mergepipe(argv, tmp_path)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: mergepipe [OPTIONS] COMMAND\n")


@pytest.mark.parametrize("command", [("build",), ("plan",), ("status",), ("cache", "info")], ids=" ".join)
def test_no_mergefile(tmp_path, command):
    result = run_mergepipe(command, tmp_path)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: there is no `Mergefile.toml` in ")


def test_a_named_mergefile_that_is_not_there(tmp_path):
    result = run_mergepipe(["build", "-f", "other.toml", "--json"], tmp_path)
    assert (result.code, result.stdout) == (2, "")
    assert "other.toml" in json.loads(result.stderr)["error"]["message"]


def test_an_unknown_option_with_json(tmp_path):
    result = run_mergepipe(["build", "--lockd", "--json"], tmp_path)
    assert (result.code, result.stdout) == (2, "")
    assert json.loads(result.stderr)["error"]["hint"] == "did you mean `--locked`?"


@pytest.mark.parametrize("argv", [("--help",), ("init", "--json")], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error_worth_a_word(tmp_path, argv):
    write_checkpoint(tmp_path / "base", random_tensors(1, {"a": (2, 2)}))
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            (*COMMAND, *argv), cwd=tmp_path, env=clean_environment(), stdout=write, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("argv", [("--help",), ("init",)], ids=" ".join)
def test_a_result_that_cannot_be_written_is_an_error(tmp_path, argv):
    write_checkpoint(tmp_path / "base", random_tensors(1, {"a": (2, 2)}))
    with FULL.open("wb") as full:
        result = subprocess.run(
            (*COMMAND, *argv), cwd=tmp_path, env=clean_environment(), stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: ")
    assert b"No space left on device" in result.stderr
    assert b"Exception ignored" not in result.stderr


def test_messages_that_nobody_reads_do_not_fail_a_command(tmp_path):
    for name in ("one", "two"):
        write_checkpoint(tmp_path / name, random_tensors(1, {"a": (2, 2)}))
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            (*COMMAND, "init"), cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=write, check=False
        )
    finally:
        os.close(write)
    assert result.returncode == 0
    assert result.stdout.startswith(b"wrote Mergefile.toml\n")


def test_names_beyond_the_encoding_of_the_stream_are_escaped(tmp_path):
    for name in ("模型", "base"):
        write_checkpoint(tmp_path / name, random_tensors(1, {"a": (2, 2)}))
    result = run_mergepipe(["init"], tmp_path, {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert result.code == 0
    assert "\\u6a21\\u578b" in result.stdout
    assert 'path = "模型"' in (tmp_path / "Mergefile.toml").read_text(encoding="utf-8")


def test_shells_can_complete_commands(tmp_path):
    env = {"_MERGEPIPE_COMPLETE": "bash_complete", "COMP_WORDS": "mergepipe pl", "COMP_CWORD": "1"}
    assert "plan" in run_mergepipe([], tmp_path, env).stdout


# The command line is imported, and stopped there, as by Ctrl-C.
_STOPPED = """
import signal, sys
import mergepipe.__main__
class Stop:
    def find_spec(self, name, *rest):
        if name == "mergepipe.cli.build":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Stop())
sys.argv = ["mergepipe", *sys.argv[1:]]
mergepipe.__main__.main()
"""


def test_an_interrupt_while_the_command_line_is_imported_is_told_in_words(tmp_path):
    result = run_process((sys.executable, "-c", _STOPPED, "status"), tmp_path)
    assert (result.code, result.stdout, result.stderr) == (130, "", "error: interrupted\n")
    result = run_process((sys.executable, "-c", _STOPPED, "status", "--json"), tmp_path)
    assert (result.code, json.loads(result.stderr)["error"]) == (130, CancelledError("interrupted").as_json())


def test_an_interrupt_after_the_end_of_a_command_changes_nothing(tmp_path):
    late = "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT)\n"
    code = f"{late}import sys; sys.argv = ['mergepipe', '--version']; import mergepipe.__main__ as m; m.main()"
    result = run_process((sys.executable, "-c", code), tmp_path)
    assert (result.code, result.stdout, result.stderr) == (0, f"mergepipe {__version__}\n", "")
