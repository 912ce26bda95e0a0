"""Line numbers of keys: every way of writing a key in TOML, and what happens where the text cannot be followed."""

import tomli
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.mergefile.locate import locate

DOCUMENT = '''\
top = 1

[a.b]            # line 3
c = """
[not.a.header]
x = 1"""
d.e = 2          # line 7
"quoted.key" = 3
'literal key' = 4
"esc\\u0061ped" = 5

[a]              # line 12
list = [
    1,
    # a comment ]
    { x = 1, "y]" = [ "a", "b#" ] },
    [2,
     3],
]
time = 1979-05-27 07:32:00
after = QQQit's ]"QQQ
last.inline = { one = 1, two.three = 2 }

[[array]]        # line 24
k = 1
[[array]]
k = 2
[array.sub]
k = 3
[[array.inner]]
k = 4
'''.replace("QQQ", "'" * 3)

EXPECTED = {
    ("top",): 1,
    ("a",): 12,
    ("a", "b"): 3,
    ("a", "b", "c"): 4,
    ("a", "b", "d"): 7,
    ("a", "b", "d", "e"): 7,
    ("a", "b", "quoted.key"): 8,
    ("a", "b", "literal key"): 9,
    ("a", "b", "escaped"): 10,
    ("a", "list"): 13,
    ("a", "list", 0): 14,
    ("a", "list", 1): 16,
    ("a", "list", 1, "x"): 16,
    ("a", "list", 1, "y]", 1): 16,
    ("a", "list", 2): 17,
    ("a", "list", 2, 1): 18,
    ("a", "time"): 20,
    ("a", "after"): 21,
    ("a", "last", "inline", "two", "three"): 22,
    ("array",): 24,
    ("array", 0): 24,
    ("array", 0, "k"): 25,
    ("array", 1): 26,
    ("array", 1, "k"): 27,
    ("array", 1, "sub"): 28,
    ("array", 1, "sub", "k"): 29,
    ("array", 1, "inner", 0, "k"): 31,
}


def test_every_way_of_writing_a_key_has_its_line():
    tomli.loads(DOCUMENT)
    lines = locate(DOCUMENT)
    assert {path: lines.line(path) for path in EXPECTED} == EXPECTED


def test_crlf_line_ends_count_once():
    lines = locate(DOCUMENT.replace("\n", "\r\n"))
    assert {path: lines.line(path) for path in EXPECTED} == EXPECTED


def test_a_path_that_is_not_there_has_the_line_of_the_table_around_it():
    lines = locate(DOCUMENT)
    assert lines.line(("a", "b", "missing")) == 3
    assert lines.line(("array", 1, "sub", "x", 4, "y")) == 28
    assert lines.line(("nowhere",)) == 1
    assert lines.line(()) == 1


def test_a_table_has_the_line_of_its_own_header_though_it_was_mentioned_before():
    lines = locate("[x.y]\na = 1\n[x]\nb = 2\n")
    assert lines.line(("x",)) == 3


def test_a_text_that_cannot_be_followed_keeps_the_lines_up_to_there():
    lines = locate("a = 1\nb = [1, 2\nc = 3\n")
    assert lines.line(("b", 1)) == 2
    assert lines.line(("c",)) == 1


def test_deep_nesting_is_no_error():
    lines = locate("a = 1\nb = " + "[" * 5000 + "]" * 5000 + "\n")
    assert lines.line(("b", 0, 0)) == 2


KEYS = st.one_of(
    st.sampled_from(["a", "b", "path", "qwen2-5", "a.b", "with space", "ключ", 'q"uote', "it's", "#x", "[x]", ""]),
    st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=4),
)
VALUES = st.recursive(
    st.one_of(
        st.integers(-5, 5),
        st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(["", "x", "]", "}", "#", '"', "'''", '"""', "a\nb", "\\", "x = 1"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)


def paths_of(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_of(inner, (*path, key))


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_every_key_of_any_document_is_found_on_a_line_that_shows_it(data):
    text = tomlkit.dumps(data)
    lines, written = locate(text), text.split("\n")
    for path in paths_of(tomli.loads(text)):
        line = lines.line(path)
        if path and isinstance(path[-1], str):
            key = path[-1]
            shown = [key, key.replace("\\", "\\\\").replace('"', '\\"')]
            assert any(form in written[line - 1] for form in shown), (path, line, text)
        # Found itself, not only the table around it.
        assert path in lines._lines or not path
