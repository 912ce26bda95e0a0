"""The Mergefile that a project starts with: valid for any names and paths, also after its examples are uncommented."""

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st
from unit.mergefile.helpers import PATH, parse
from unit.mergefile.signatures import SIGNATURES

from mergepipe.errors import MergefileError
from mergepipe.mergefile.names import clean_name, is_name
from mergepipe.mergefile.parse import parse_mergefile
from mergepipe.mergefile.template import render_template, toml_key, toml_string

THREE = {"base": "models/base", "math": "models/math", "code": "models/code"}


def only_output(text):
    (found,) = parse(text).outputs.values()
    return found


def uncommented(text):
    """Return the template with its commented examples made real; sentences stay comments."""
    lines = []
    for line in text.split("\n"):
        body = line.removeprefix("# ")
        is_example = line.startswith("# ") and (body.startswith("[") or " = " in body.split("(")[0][:20])
        lines.append(body if is_example and not body[0].isupper() and not body.startswith("weight") else line)
    return "\n".join(lines)


def test_with_a_base_it_is_task_arithmetic_over_the_others():
    found = only_output(render_template(THREE, "base"))
    assert (found.operator, found.base, found.path) == ("task_arithmetic", "base", "build/merged")
    assert [(expert.source, expert.params) for expert in found.experts] == [
        ("math", {"weight": 0.5}),
        ("code", {"weight": 0.5}),
    ]


def test_without_a_base_it_is_an_average_of_all():
    found = only_output(render_template(THREE, None))
    assert (found.operator, found.base) == ("linear", None)
    assert [(expert.source, expert.params) for expert in found.experts] == [(name, {"weight": 1.0}) for name in THREE]


def test_with_nothing_found_there_are_placeholders():
    assert set(parse(render_template({}, None)).sources) == {"base", "math", "code"}


def test_a_base_alone_is_still_a_valid_mergefile():
    assert [expert.source for expert in only_output(render_template({"b": "b"}, "b")).experts] == ["b"]


@pytest.mark.parametrize("base", [None, "base"])
def test_the_examples_in_comments_are_valid_too(base):
    text = uncommented(render_template(THREE, base))
    found = only_output(text)
    assert found.rules
    assert found.budget.is_full_read
    assert found.write.dtype == "BF16"
    assert set(found.params) == {"normalize"}


def test_every_section_is_explained_in_a_comment():
    text = render_template(THREE, "base")
    for word in ("Sources", "Outputs", "Parameters", "Rules", "budget", "written"):
        assert any(word in line for line in text.split("\n") if line.startswith("#")), word
    assert max(map(len, text.split("\n"))) <= 120


@pytest.mark.parametrize(
    ("sources", "path"),
    [
        ({"merged": "a"}, "build/merged-2"),
        ({"x": "build/merged"}, "outputs/merged"),
        ({"x": "build"}, "outputs/merged"),
        ({"x": "."}, "../merged"),
        ({"x": "build/merged/sub", "y": "./outputs/"}, "../merged"),
    ],
)
def test_the_output_keeps_clear_of_the_sources(sources, path):
    assert only_output(render_template(sources, None)).path == path


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(st.dictionaries(TEXTS.map(clean_name), TEXTS.map(lambda path: "models/" + path.replace("\0", "")), min_size=1))
def test_any_names_and_paths_are_written_so_that_they_read_back(sources):
    text = render_template(sources, next(iter(sources)))
    data = tomli.loads(text)
    assert {name: entry["path"] for name, entry in data["sources"].items()} == sources
    if not any(".." in path for path in sources.values()):
        assert parse_mergefile(text, PATH, SIGNATURES).sources.keys() == sources.keys()


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_strings_and_keys_read_back(key, value):
    assert tomli.loads(f"{toml_key('a', key)} = {toml_string(value)}\n") == {"a": {key: value}}


@given(st.text())
def test_a_clean_name_is_a_name(text):
    assert is_name(clean_name(text))


@pytest.mark.parametrize(
    ("text", "name"), [("Qwen 2.5 (math)", "Qwen-2.5-math"), ("..", "model"), ("-x", "x"), ("модель 1", "модель-1")]
)
def test_clean_names_stay_close_to_the_folder(text, name):
    assert clean_name(text) == name


def test_a_file_name_that_is_not_unicode_is_refused():
    with pytest.raises(MergefileError, match="not UTF-8"):
        render_template({"a": "models/\udcff"}, None)
