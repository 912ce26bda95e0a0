"""Passwords, tokens and places on a disk do not get into what is shown or published."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import random_tensors
from support.projects import SmallProject

from mergepipe.checkpoints.geometry import GEOMETRY_1
from mergepipe.cli.main import run
from mergepipe.errors import MergepipeError, SourceError, redacted
from mergepipe.publish.sidefiles import without_private

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
SECRETS = [
    (f"https://me:{TOKEN}@example.org/m", "https://***@example.org/m"),
    ("https://s3cr3t@example.org/m", "https://***@example.org/m"),
    ("https:/me:s3cr3t@example.org/m", "https:/***@example.org/m"),
    ("git+ssh://me:s3cr3t@example.org/m.git", "git+ssh://***@example.org/m.git"),
    ("https://example.org/m?token=s3cr3t&x=1", "https://example.org/m?token=***&x=1"),
    ("https://example.org/m?x=1&access_token=s3cr3t#y", "https://example.org/m?x=1&access_token=***#y"),
    ("s3://b/m?X-Amz-Signature=s3cr3t", "s3://b/m?X-Amz-Signature=***"),
    ("https://example.org/m?api_key=s3cr3t", "https://example.org/m?api_key=***"),
    (f"models/{TOKEN}", "models/hf_***"),
]


@pytest.mark.parametrize(("text", "shown"), SECRETS)
def test_secrets_of_a_url_are_left_out(text, shown):
    assert redacted(text) == shown
    assert redacted(f"`{text}` is not there") == f"`{shown}` is not there"
    error = SourceError(f"no `{text}`", hint=f"see {text}", path=text, files=[text], count=3)
    assert redacted(json.dumps(error.as_json())) == json.dumps(error.as_json())
    assert shown in error.message
    assert str(error) == error.message
    assert error.facts == {"path": shown, "files": [shown], "count": 3}


@pytest.mark.parametrize(
    "text",
    ["models/base", "C:/me@home/x", "me@example.org", "a=b&key", "layers.0", "see https://example.org/a?b=c", "hf_x"],
)
def test_other_text_stays_as_it_is(text):
    assert redacted(text) == text


@given(st.text(alphabet=":/@?&=token hf_Aa1\\\"'`", max_size=60))
def test_nothing_is_left_to_leave_out_and_json_stays_json(text):
    assert redacted(redacted(text)) == redacted(text)
    json.loads(redacted(json.dumps({"x": text})))


@pytest.mark.parametrize("options", [[], ["--json"], ["--debug"]])
@pytest.mark.parametrize("key", ["path", "hub"])
def test_a_url_is_no_source_and_its_token_is_not_told(tmp_path, capfd, monkeypatch, key, options):
    monkeypatch.chdir(tmp_path)
    url = f"https://me:{TOKEN}@example.org/org/m?token=s3cr3t"
    (tmp_path / "Mergefile.toml").write_text(
        f'version = 1\n[sources.a]\n{key} = "{url}"\n[outputs.m]\noperator = "linear"\nexperts = ["a"]\n'
    )
    assert run(["build", *options]) == 2
    told = "".join(capfd.readouterr())
    assert "sources.a" in told
    assert TOKEN not in told
    assert "s3cr3t" not in told


def test_a_syntax_error_beside_a_token_does_not_tell_it(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Mergefile.toml").write_text(f'version = 1\n[sources.a]\npath = "https://me:{TOKEN}@example.org" x\n')
    assert run(["plan"]) == 2
    assert TOKEN not in "".join(capfd.readouterr())


def test_an_output_is_not_published_to_a_url(tmp_path):
    project = SmallProject(tmp_path)
    project.add_source("a", random_tensors(0, {"a": (2, 2)}))
    project.set_output("m", {"operator": "linear", "experts": ["a"], "path": f"https://me:{TOKEN}@example.org/m"})
    with pytest.raises(MergepipeError, match=r"outputs\.m\.path: a URL"):
        project.build()


CONFIG = {
    "_name_or_path": "/home/alice/private/model",
    "text_config": {"_name_or_path": "C:\\Users\\alice\\model"},
    "architectures": ["X"],
    "source": f"https://alice:{TOKEN}@example.org/m",
}
TOKENIZER = {"name_or_path": "~/private/tokenizer", "tokenizer_file": "/home/alice/tokenizer.json", "pad": "<pad>"}


def built(tmp_path):
    project = SmallProject(tmp_path / "very-private-place", geometry=GEOMETRY_1)
    side_files = {
        "tokenizer_config.json": json.dumps(TOKENIZER),
        "README.md": f"---\nlicense: mit\nbase_model: https://alice:{TOKEN}@example.org/m\n---\n/home/alice\n",
    }
    for number, name in enumerate(("base", "a")):
        project.add_source(name, random_tensors(number, {"a.0.w": (2, 2)}), config=CONFIG, side_files=side_files)
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["a"]})
    project.build()
    return project


def test_what_is_published_names_no_place_that_the_mergefile_does_not(tmp_path, monkeypatch):
    project = built(tmp_path)
    monkeypatch.chdir(project.root)
    assert run(["report", "m", "-o", "report.html"]) == 0
    assert run(["sweep", "m", "--budgets", "50", "--html", "sweep.html"]) == 0
    texts = [
        project.lock,
        *(project.root / f"{name}.html" for name in ("report", "sweep")),
        *project.folder("m").iterdir(),
    ]
    assert len(texts) >= 7
    for path in texts:
        data = path.read_bytes()
        for secret in ("very-private-place", "alice", TOKEN, "private/tokenizer"):
            assert secret.encode() not in data, f"{secret} in {path.name}"


def test_configs_keep_everything_else(tmp_path):
    folder = built(tmp_path).folder("m")
    config = json.loads((folder / "config.json").read_text())
    assert config["_name_or_path"] == config["text_config"]["_name_or_path"] == ""
    assert config["architectures"] == ["X"]
    assert config["source"] == "https://***@example.org/m"
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer == {"name_or_path": "", "tokenizer_file": "", "pad": "<pad>"}


@pytest.mark.parametrize(
    "data", [b'{"_name_or_path": "org/model", "x": [1,  2]}\n', b'{"_name_or_path": ""}', b"{}", b"\xff\xfe", b""]
)
def test_a_config_without_anything_private_keeps_its_bytes(data):
    assert without_private(data) == data


def test_a_config_with_half_of_a_surrogate_pair_can_be_changed(tmp_path):
    project = SmallProject(tmp_path)
    folder = project.add_source("a", random_tensors(0, {"a": (2, 2)}))
    (folder / "config.json").write_text('{"torch_dtype": "float16", "x": "\\ud800"}')
    project.set_output("m", {"operator": "linear", "experts": ["a"]})
    project.build()
    written = (project.folder("m") / "config.json").read_text()
    assert json.loads(written) == {"torch_dtype": "float32", "x": "\ud800"}
