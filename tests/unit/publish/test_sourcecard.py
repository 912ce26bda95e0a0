"""The cards of sources are written by anybody: what they state is taken over only where it has the form that counts."""

import os
import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.place import Place
from mergepipe.mergefile.schema import Source
from mergepipe.publish.carried import CardSource, Carried, carry
from mergepipe.publish.escaping import code_span, fenced, yaml_scalar
from mergepipe.publish.sourcecard import SourceCard, parse_source_card, read_source_card

WHOLE = b"""\
---
license: apache-2.0
language:
- en
- "no"
pipeline_tag: text-generation
base_model: org/base
model-index: [{name: x}]
---
# A model
license: mit
"""


def card(front):
    return parse_source_card(f"---\n{front}\n---\ntext\n".encode())


def test_the_keys_that_count_are_read():
    expected = SourceCard(
        license="apache-2.0", languages=("en", "no"), pipeline_tag="text-generation", base_models=("org/base",)
    )
    assert parse_source_card(WHOLE) == expected
    assert parse_source_card(WHOLE.replace(b"\n", b"\r\n")) == expected
    assert parse_source_card(b"\xef\xbb\xbf" + WHOLE) == expected


def test_norwegian_is_a_language():
    assert card("language: no").languages == ("no",)
    assert yaml.safe_load(f"language: {yaml_scalar('no')}") == {"language": "no"}


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("license: [mit]", SourceCard(license="mit")),
        ("license: [mit, gpl-3.0]", SourceCard()),
        ("base_model:\n- a/b\n- ../c\n- d\n- /e\n- https://me:secret@host/x\n- a/b", SourceCard(base_models=("a/b",))),
        ("base_model: {a: b}", SourceCard()),
        ("language: [en, 'x\\ny: 1']", SourceCard()),
        ("license: 'mit\"\\n---'\npipeline_tag: ok-tag", SourceCard(pipeline_tag="ok-tag")),
        ("license_link: https://user:secret@host/LICENSE", SourceCard()),
        ("license_link: https://host/LICENSE?token=secret", SourceCard()),
        ("license_link: file:///etc/passwd", SourceCard()),
        ("license: {broken\nlanguage: en", SourceCard(languages=("en",))),
        ("license: !!python/object/apply:os.system [touch pwned]", SourceCard()),
        ("license: &a [*a]", SourceCard()),
        ("license: " + "[" * 3000, SourceCard()),
        ("license: " + "a" * 5000, SourceCard()),
        ("x: &a [1]\nlicense: *a", SourceCard()),
        ("license: !!timestamp nonsense", SourceCard(license="nonsense")),
        ("license: Apache-2.0\nlicense_name: 'a b'", SourceCard(license="apache-2.0")),
        ("  license: mit", SourceCard()),
    ],
)  # fmt: skip
def test_what_has_not_the_form_that_counts_is_left_out(front, expected):
    assert card(front) == expected


@pytest.mark.parametrize(
    "data", [b"", b"---", b"---\nlicense: mit\n", b"# no front\n---\nlicense: mit\n---\n", b"\xff\xfe\x00", b"\0" * 99]
)  # fmt: skip
def test_a_text_without_front_matter_states_nothing(data):
    assert parse_source_card(data) == SourceCard()


@given(st.binary(max_size=300), st.text(max_size=300))
def test_no_card_is_an_error(data, text):
    parse_source_card(data)
    parse_source_card(b"---\nlicense: " + data + b"\n---\n")
    found = card(f"language: {text}\nbase_model: {text}\nlicense: {text}")
    stated = [*found.languages, *found.base_models, found.license]
    assert all(c in string.ascii_letters + string.digits + "_./+-" for value in stated for c in value)


def test_what_is_no_plain_file_is_no_card(tmp_path):
    place = Place(label="m", root=tmp_path, shown="m")
    assert read_source_card(place) == SourceCard()
    os.mkfifo(tmp_path / "README.md")
    assert read_source_card(place) == SourceCard()
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").mkdir()
    assert read_source_card(place) == SourceCard()


def test_a_card_of_any_length_is_read_at_its_beginning(tmp_path):
    (tmp_path / "README.md").write_bytes(WHOLE + b"x" * (3 << 20))
    assert read_source_card(Place(label="m", root=tmp_path, shown="m")).license == "apache-2.0"


# --- what is taken over -----------------------------------------------------------------------------------------------


def source(name, path="m", origin="", **stated):
    return CardSource(declared=Source(name=name, path=path), origin=origin, card=SourceCard(**stated))


def test_what_all_state_alike_is_taken_over():
    stated = {"license": "mit", "languages": ("en", "de"), "pipeline_tag": "text-generation"}
    other = stated | {"languages": ("de", "en")}
    found = carry([source("a", "x/a", **stated), source("b", "x/b", **other)])
    assert (found.license, found.languages, found.pipeline_tag) == ("mit", ("en", "de"), "text-generation")
    assert found.licenses == {"a": "mit", "b": "mit"}


def test_what_they_state_differently_is_left_out():
    found = carry([source("a", license="mit", languages=("en",)), source("b", license="gpl-3.0", languages=("de",))])
    assert (found.license, found.languages) == ("", ())


def test_a_license_that_one_of_them_does_not_state_is_not_known():
    found = carry([source("a", license="mit", pipeline_tag="text-generation"), source("b")])
    assert (found.license, found.pipeline_tag) == ("", "text-generation")
    assert carry([]) == Carried()


def test_a_license_of_its_own_needs_a_name():
    named = {"license": "other", "license_name": "my-license", "license_link": "https://host/LICENSE"}
    found = carry([source("a", **named), source("b", **named)])
    assert (found.license, found.license_name, found.license_link) == ("other", "my-license", "https://host/LICENSE")
    assert carry([source("a", license="other"), source("b", license="other")]).license == ""
    assert carry([source("a", **named), source("b", **(named | {"license_name": "another"}))]).license == ""


@pytest.mark.parametrize(
    ("path", "origin", "stated", "expected"),
    [
        ("/root/.cache/huggingface/hub/models--org--name/snapshots/0123", "other/one", (), ("org/name",)),
        ("models/math", "org/name", (), ("org/name",)),
        ("models/math", "models/base", (), ("math",)),
        ("models/math", "org/checkpoint-500", (), ("math",)),
        ("models/math", "/home/me/secret/base", (), ("math",)),
        ("models/math", "../base", ("org/a", "org/b"), ("org/a", "org/b")),
        ("/home/me/math/model.safetensors", "", (), ("math",)),
        ("models/my model", "https://user:token@host/x", (), ()),
        ("models/--x", "", (), ()),
        ("..", "", (), ()),
    ],
)  # fmt: skip
def test_a_source_is_named_as_a_hub_knows_it_else_as_its_folder(path, origin, stated, expected):
    assert source("s", path, origin, base_models=stated).models == expected


def test_a_repository_is_named_once():
    found = carry([source("a", origin="org/base"), source("b", origin="org/base"), source("c", "models/c")])
    assert found.base_models == ("org/base", "c")


# --- text of anybody's in Markdown and YAML -------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_a_value_of_the_front_matter_is_read_back_by_every_loader(text):
    for loader in (yaml.SafeLoader, yaml.BaseLoader):
        read = yaml.load(f"key: {yaml_scalar(text)}\nlist:\n- {yaml_scalar(text)}\n", loader)
        assert read == {"key": text, "list": [text]}


@given(st.text(max_size=60))
def test_a_code_span_stays_in_its_cell_and_line(text):
    span = code_span(text)
    assert span.isprintable() or all(c.isprintable() or ord(c) > 0x2FF for c in span)
    assert "\n" not in span
    assert "|" not in span.replace("\\|", "")
    fence = span[: len(span) - len(span.lstrip("`"))]
    assert fence
    assert span.endswith(fence)
    assert fence not in span[len(fence) : -len(fence)].replace("\\|", "|").split(" ")[1:-1]


@given(st.text(alphabet="`~ab\n", max_size=60))
def test_a_block_is_ended_by_its_fence_alone(text):
    first, *body, last = fenced(text, "toml")
    assert not any(line.strip().startswith(last) for line in body)
    assert first == f"{last}toml"
