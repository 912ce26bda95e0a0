"""The excerpt of a Mergefile declares the same output as the whole, and says nothing of a machine."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.mergefile.excerpt import excerpt, shown_location
from mergepipe.mergefile.parse import parse_mergefile
from mergepipe.operators.registry import signatures

PATH = Path("/project/Mergefile.toml")
WHOLE = """\
version = 1

[sources.base]
path = "models/base"

[sources."v1.5"]
path = "models/m 5"

[sources.lora]
path = "models/lora"
on = "base"

[sources.other]
path = "models/other"

[outputs.everything]
operator = "ties"
base = "base"
experts = ["v1.5", { source = "lora", weight = [0.25, 1.0] }]
path = "out/here"
params = { density = 0.5, lambda = 0.75, weight = 0.5 }
rules = [
    { match = "*.mlp.*", layers = "0..2", params = { density = 1.0 }, experts = { lora = { weight = 0.0 } } },
    { match = ["a*", '"b" \\ c'], experts = { "v1.5" = { weight = 1e-07 } } },
]
budget = { expert_reads = "12.5%" }
write = { dtype = "float16", shard_size = "1 GB", tokenizer = "base" }

[outputs.stacked]
operator = "passthrough"
publish = false

[[outputs.stacked.slices]]
source = "base"
layers = "0..3"

[[outputs.stacked.slices]]
operator = "slerp"
base = "base"
base_layers = "1..4"
experts = [{ source = "v1.5", layers = "5..8" }]
layers = "0..3"
params = { t = [0.0, 0.5] }
rules = [{ layers = "3..4", params = { t = 0.25 } }]

[outputs.bytes]
operator = "mine"
experts = ["everything", "other"]
base = "base"
budget = { max_error = 1e-3 }
params = { numerics = "float64" }

[operators.mine]
python = "ops.py:merge"
"""


def parse(text):
    return parse_mergefile(text, PATH, signatures())


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("everything", ["base", "v1.5", "lora"]),
        ("stacked", ["base", "v1.5"]),
        ("bytes", ["base", "everything", "other"]),
    ],
)
def test_it_declares_the_same_output(name, sources):
    whole = parse(WHOLE)
    text = excerpt(whole, name, sources)
    if "everything" in sources:  # of another output only the name is there
        assert "\n# outputs.everything is another output of the same Mergefile\n" in text
        text += '\n[outputs.everything]\noperator = "linear"\nexperts = ["base"]\n'
    found = parse(text)
    assert found.outputs[name] == whole.outputs[name]
    assert {source: found.sources[source] for source in sources if source != "everything"} == {
        source: whole.sources[source] for source in sources if source != "everything"
    }
    assert list(found.operators) == (["mine"] if name == "bytes" else [])
    assert "other" not in text or "other" in sources


def test_it_is_in_a_canonical_form():
    whole = parse(WHOLE)
    text = excerpt(whole, "everything", ["base", "v1.5", "lora"])
    assert excerpt(parse(text), "everything", ["base", "v1.5", "lora"]) == text


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/models/math", "math"),
        ("/home/me/models/math/", "math"),
        ("~/models/math", "math"),
        ("~me/math", "math"),
        ("C:\\models\\math", "math"),
        ("models/math", "models/math"),
        ("../math", "../math"),
    ],
)
def test_a_place_on_a_machine_is_not_in_it(path, shown):
    assert shown_location(path) == shown
    text = excerpt(parse(WHOLE.replace('"models/other"', f"'{path}'")), "bytes", ["other"])
    note = "  # elsewhere on the machine of the build" if shown != path else ""
    assert [line for line in text.splitlines() if line.startswith("path = ")] == [f'path = "{shown}"{note}']
    text = excerpt(parse(WHOLE.replace('"out/here"', "'/home/me/secret/out'")), "everything", ["base"])
    assert 'path = "out"  # elsewhere' in text
    assert "secret" not in text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0./"), min_size=1, max_size=40))
def test_any_path_comes_back_and_stays_on_its_line(path):
    quoted = "".join(f"\\U{ord(character):08x}" for character in path)
    whole, path = parse(WHOLE.replace("models/base", f"m/{quoted}")), f"m/{path}"
    text = excerpt(whole, "everything", ["base", "v1.5", "lora"])
    assert parse(text).sources["base"].path == path
    assert text.count("\n") == excerpt(parse(WHOLE), "everything", ["base", "v1.5", "lora"]).count("\n")
    assert "\u202e" not in text
