"""Names of tensors, folders and files are anybody's: they are shown as they are, and steer nothing."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from support.checkpoints import random_tensors, write_checkpoint
from support.projects import quicken

from mergepipe.cli.main import run
from mergepipe.errors import SourceError

# What sets a terminal's title or colours, ends a line, turns the direction of writing, hides, or is markup somewhere.
BAD = "\x1b]0;owned\x07\x1b[31m\r\n\u202e<script>alert(1)</script><img src=x onerror=alert(1)>&\"'|`*_[x](javascript:1)"
BAD += "\u2028\x9b31m\u200b\U000e0041end"
STEERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e0fff]")
FOLDER = BAD.replace("/", "_")[:100]
TENSORS = [f"model.layers.{layer}.{BAD}.weight" for layer in range(2)] + ["\x1b[2Jx\0", "lm_head.weight"]


def toml(text):
    return '"' + "".join(c if (c.isalnum() and c.isascii()) or c in "/. " else f"\\U{ord(c):08x}" for c in text) + '"'


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        root = tmp_path_factory.mktemp("names")
        config = {"architectures": [BAD], "model_type": BAD}
        for number, name in enumerate(("base", "a", "b")):
            tensors = random_tensors(number, dict.fromkeys(TENSORS, (4, 4)))
            if name != "base":
                tensors[f"extra{BAD}"] = tensors["lm_head.weight"]
            write_checkpoint(
                root / "models" / (name + FOLDER),
                tensors,
                config=config,
                side_files={"README.md": f"---\nlicense: {BAD}\n---\n"},
            )
        sources = "".join(
            f"[sources.{name}]\npath = {toml('models/' + name + FOLDER)}\n" for name in ("base", "a", "b")
        )
        match = toml("*" + BAD.replace("[", "?").replace("*", "?") + "*")
        text = f"""version = 1
{sources}
[outputs.one]
operator = "task_arithmetic"
base = "base"
experts = [{{ source = "a", weight = 0.5 }}, "b"]
path = {toml("build/one" + FOLDER)}
[[outputs.one.rules]]
match = {match}
params = {{ lambda = 0.5 }}
[outputs.two]
operator = "ties"
base = "base"
experts = ["a", "b"]
budget = {{ expert_reads = "50%" }}
"""
        (root / "Mergefile.toml").write_text(text, encoding="utf-8")
        patch.chdir(root)
        assert run(["build", "-q"]) == 0
        shutil.copy(root / "Mergefile.lock", root / "old.lock")
        (root / "Mergefile.toml").write_text(text.replace("weight = 0.5", "weight = 0.7"), encoding="utf-8")
        assert run(["build", "-q"]) == 0
        # Quick as long as anything looks at the build: what a quick build took for settled is in doubt for a usual one.
        yield root


def check(text):
    assert [(hex(ord(found[0])), text[max(0, found.start() - 30) :][:60]) for found in STEERS.finditer(text)] == []
    # What follows the line break of a name never begins a line.
    assert not re.search(r"\n\s*(\\u202e|<script)", text)


ONE = "build/one" + FOLDER
COMMANDS = [
    ["plan"], ["plan", "--json"], ["build", "--force"], ["build", "-v"], ["status", "-v"], ["status", "--json"],
    ["explain", "one"], ["explain", "one", "-v"], ["explain", "two", "--json"], ["explain", "one", TENSORS[0]],
    ["explain", "one", TENSORS[0] + "x"], ["explain", "\x1b[31m\nx"], ["verify"], ["verify", ONE],
    ["verify", "--full", "-v"], ["verify", "--json"], ["verify", "\x1b[31m\nx"],
    ["replay", ONE, "--check"], ["replay", "\x1b[31m\nx"],
    ["diff", "old.lock", "Mergefile.lock"], ["diff", "old.lock", "Mergefile.lock", "--format", "markdown"],
    ["diff", "old.lock", "Mergefile.lock", "--json"], ["diff", "\x1b[31m", "x"], ["sweep", "two", "--budgets", "50"],
    ["build", "x\x1b[31m"], ["bu\x1b[31mild"], ["--no\x1b[31m"], ["-C", "no\x1b[31m", "status"],
    ["import", "\x1b[31m.yml"], ["init", "models/a" + FOLDER, "-o", "new.toml"],
    ["report", "one", "-o", "no\x1b[31m/x.html"], ["cache", "info"],
]  # fmt: skip


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: ascii(" ".join(argv))[:60])
def test_no_command_writes_what_steers_a_terminal(project, monkeypatch, capfd, argv):
    monkeypatch.chdir(project)
    code = run(argv)
    out, err = capfd.readouterr()
    assert code in (0, 1, 2)
    assert "internal error" not in err
    for text in (out, err):
        if "--json" in argv and text.strip():
            assert text.isascii()
            for line in text.splitlines():
                json.loads(line)
        else:
            check(text)


class Elements(HTMLParser):
    """Collects the elements of a page, and its attributes that run code."""

    def __init__(self):
        super().__init__()
        self.images, self.handlers, self.scripts = 0, [], 0

    def handle_starttag(self, tag, attrs):
        self.images += tag == "img"
        self.scripts += tag == "script"
        self.handlers += [name for name, value in attrs if name.startswith("on") or "javascript:" in (value or "")]


@pytest.mark.parametrize("argv", [["report", "one"], ["report", "two"], ["sweep", "two", "--budgets", "50"]])
def test_a_page_holds_names_as_text(project, monkeypatch, capfd, argv):
    monkeypatch.chdir(project)
    assert run([*argv, "--html" if argv[0] == "sweep" else "-o", "page.html"]) == 0
    page = (project / "page.html").read_text(encoding="utf-8")
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert not STEERS.search(page)
    elements = Elements()
    elements.feed(page)
    assert elements.handlers == []
    assert elements.images == 0
    assert elements.scripts <= 2


def test_records_and_cards_hold_names_as_text(project):
    for path in [
        project / "Mergefile.lock",
        *project.glob("build/*/README.md"),
        *project.glob("build/*/mergepipe.json"),
    ]:
        check(path.read_text(encoding="utf-8"))
    card = next(project.glob("build/two/README.md")).read_text(encoding="utf-8")
    assert "license:" not in card
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", card, flags=re.DOTALL)  # code spans and fenced blocks
    assert "<script" not in outside
    assert "javascript:" not in outside


def test_a_name_of_several_lines_is_on_one_in_a_message():
    error = SourceError("no `a\nerror: b` there\nexpected: x", tensor="a\nerror: b")
    assert error.message == "no `a\\nerror: b` there\nexpected: x"
