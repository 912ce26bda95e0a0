"""Whatever an editor leaves behind, the parser ends with a Mergefile or with an error of ours, never with another."""

import tomlkit
from hypothesis import example, given
from hypothesis import strategies as st
from unit.mergefile.helpers import DESIGN_EXAMPLE, PATH, SOURCES
from unit.mergefile.signatures import SIGNATURES

from mergepipe.errors import CollectedErrors, MergepipeError
from mergepipe.mergefile.parse import load_mergefile, parse_mergefile

VALID = (
    SOURCES
    + """\
[outputs.m]
operator = "task_arithmetic"
base = "base"
experts = ["math", { source = "code", weight = [0.2, 0.6] }]
params = { lambda = 0.9, normalize = false }
[[outputs.m.rules]]
match = ["*.mlp.*", "lm_head.*"]
layers = "0..8"
params.weight = 0.5
experts.math.weight = 1
[outputs.m.budget]
expert_reads = "100%"
[outputs.m.write]
dtype = "bfloat16"
shard_size = "5 GB"
tokenizer = "base"
"""
)
PIECES = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["[", "]", "[[", "]]", "{", "}", "=", ".", ",", '"', "'", '"""', "\n", "\\", "#", "nan", "1e999", "true", "[]"]
    ),
    st.sampled_from(VALID.split("\n")),
)


def outcome(text):
    """Parse; check the errors' form. Anything but an error of ours fails the test by itself."""
    try:
        return parse_mergefile(text, PATH, SIGNATURES)
    except MergepipeError as error:
        check_form(error)
        return None


def check_form(error):
    assert error.exit_status == 2
    assert error.as_json()["message"]
    for member in error.errors if isinstance(error, CollectedErrors) else (error,):
        assert member.message.startswith("Mergefile.toml:")
        assert "\x1b" not in member.message
        assert not member.message.split("\n")[0].endswith(".")


@st.composite
def edited(draw):
    """Return a valid text after some edits: pieces removed, put in, doubled."""
    text = draw(st.sampled_from([VALID, DESIGN_EXAMPLE]))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 2, 5, 20, 80])))
        text = text[:start] + draw(st.one_of(PIECES, st.just(text[start:end] * 2))) + text[end:]
    return text


@given(edited())
@example(VALID.replace("\n", "\r"))
@example("a." * 2000 + "b = 1")
@example("version = 1\n[sources" + ".a" * 900 + "]\n")
@example("version = 1\n[outputs" + ".a" * 900 + ']\npath = "x"\n')
@example("version = 1\nx = " + "[" * 300 + "]" * 300)
@example("version = 1\nx = " + "{a = " * 300 + "1" + "}" * 300)
def test_edits_of_a_valid_text_end_well(text):
    outcome(text)


@given(edited(), st.integers(0, 400), st.integers(0, 255))
def test_edits_of_the_bytes_end_well(tmp_path_factory, text, position, byte):
    data = bytearray(text.encode())
    data[min(position, len(data) - 1)] = byte
    path = tmp_path_factory.mktemp("fuzz") / "Mergefile.toml"
    path.write_bytes(data)
    try:
        load_mergefile(path, SIGNATURES)
    except MergepipeError as error:
        check_form(error)


SCALARS = st.one_of(
    st.none().map(lambda _: "x"),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from(["base", "math", "m", "linear", "ties", "25%", "5 GB", "0..4", "", "*", "bfloat16", "..", "a/b"]),
    st.dates(),
)
KEYS = st.sampled_from(
    [
        "version",
        "sources",
        "outputs",
        "operators",
        "path",
        "hub",
        "revision",
        "on",
        "progressive",
        "operator",
        "base",
        "experts",
        "params",
        "rules",
        "budget",
        "write",
        "slices",
        "publish",
        "source",
        "weight",
        "density",
        "lambda",
        "normalize",
        "match",
        "layers",
        "base_layers",
        "expert_reads",
        "max_error",
        "stats",
        "precision",
        "dtype",
        "shard_size",
        "tokenizer",
        "python",
        "m",
        "math",
        "x",
    ]
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, TREES, max_size=4), st.booleans())
def test_documents_of_the_right_words_in_the_wrong_places_end_well(data, with_version):
    text = tomlkit.dumps({**data, "version": 1} if with_version else data)
    outcome(text)


ENTRY = st.dictionaries(KEYS, TREES, max_size=6)


@given(st.dictionaries(KEYS, ENTRY, max_size=3), st.dictionaries(KEYS, ENTRY, max_size=3))
def test_sources_and_outputs_of_any_content_end_well(sources, outputs):
    outcome(tomlkit.dumps({"version": 1, "sources": sources, "outputs": outputs}))


def test_the_texts_that_edits_start_from_are_what_they_should_be():
    assert outcome(VALID) is not None
    assert outcome(DESIGN_EXAMPLE) is None
