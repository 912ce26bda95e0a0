"""YAML with its traps: what is read means what it means to mergekit, what is not is an error in words with its line."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from unit.mergefile.mergekit import check, imported, only_problem, output

from mergepipe.errors import CollectedErrors, MergefileError, MergepipeError
from mergepipe.mergefile.mergekit.yamltext import LARGEST_FILE, LARGEST_TREE, read_documents

LINEAR = """\
merge_method: linear
models:
  - model: org/a
    parameters: {weight: 1.0}
  - model: org/b
    parameters:
      weight: 0.5
"""


def data(text: str | bytes) -> list:
    content = text if isinstance(text, bytes) else text.encode()
    return [document.data for document in read_documents(content, "x.yml", "x.yml")]


def fails(text: str | bytes) -> MergefileError:
    with pytest.raises(MergefileError) as caught:
        data(text)
    assert caught.value.message.startswith("x.yml:")
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        LINEAR,
        "a: 1\nb: [1.5, -2, +3, 0x1F, 010, 1_000, 1:30, 1e5, 1.0e5, 1.0e+5, .5, .inf, -.inf]",
        "a: [yes, no, on, Off, TRUE, 'yes', ~, null, '']",
        "a: &x [1, 2]\nb: *x\nc: &y {k: *x}\nd: {<<: *y, z: 1}\ne: {<<: [*y, {k: 3, z: 4}], q: 1}",
        "a: {q: 1, <<: {q: 2}}",
        "a: |\n  two\n  lines\nb: >\n  one\n  line\nc: 'it''s'\nd: \"\\u00e9\\t\"",
        "? a\n: 1",
        "{a: 1, b: {c: []}}",
        "---\na: 1\n...\n---\nb: 2\n",
        "%YAML 1.1\n---\na: 1",
    ],
)
def test_what_is_read_is_what_the_safe_loader_reads(text):
    assert data(text) == list(yaml.safe_load_all(text))


def test_lines_are_those_of_the_keys():
    (document,) = read_documents(LINEAR.encode(), "x.yml", "x.yml")
    lines = document.lines
    assert [lines["models",], lines["models", 1], lines["models", 1, "parameters", "weight"]] == [2, 5, 7]
    merged = b"a: &x\n  k: 1\nb:\n  <<: *x\n  z: 1\n"
    (document,) = read_documents(merged, "x.yml", "x.yml")
    assert (document.lines["b", "z"], document.lines["b", "k"]) == (5, 2)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1e5", "-2e-3", "5e-1"])
def test_numbers_that_yaml_takes_for_strings_are_numbers(text):
    assert isinstance(yaml.safe_load(text), str)
    found = output(f"merge_method: linear\nmodels: [{{model: org/a, parameters: {{weight: [{text}, {text}]}}}}]")
    assert found.experts[0].params["weight"] == (float(text), float(text))


@pytest.mark.parametrize(
    "text", ["\ufeff" + LINEAR, LINEAR.replace("\n", "\r\n"), LINEAR + "---\n---\n", "---\n" + LINEAR]
)
def test_what_editors_leave_in_a_file_is_no_trouble(text):
    assert output(text) == output(LINEAR)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "the key `a` is given twice (first in line 1)"),
        ("a: 1\nb:\n\t- 1\n", 3, "a tab where YAML wants spaces"),
        ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
        ("a: 'x\n", 2, "without its closing quote"),
        ("a: b: c\n", 1, "a `:` that starts no value"),
        ("a:\n  - *\n", 2, "`*` begins an alias here"),
        ("a: *x\n", 1, "without its anchor"),
        ("a: @x\n", 1, "cannot start with `@`"),
        ("a: 1\n1: 2\n", 2, "the key `1` is not a string"),
        ("on: 2\n", 1, "the key `on` is not a string"),
        ("~: 2\n", 1, "the key `~` is not a string"),
        ("? [a]\n: 2\n", 1, "a key is a list or a mapping"),
        ("a: 2024-01-31\n", 1, "`2024-01-31` is a date"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "the tag `python/object/apply:os.system` is not supported"),
        ("a: !mine 3\n", 1, "the tag `!mine` is not supported"),
        ("a: !!set {b, c}\n", 1, "the tag `set` is not supported"),
        ("a: !!binary aGk=\n", 1, "the tag `binary` is not supported"),
        ("a: =\n", 1, "`=` alone has a meaning"),
        ("a: !!int x\n", 1, "`x` is not a number"),
        ("a: !!bool x\n", 1, "`x` is not a number"),
        ("a: !!int ''\n", 1, "is not a number"),
        ("x: 1\na: &a\n  - *a\n", 2, "holds an alias to itself"),
        ('a: "\\ud800"\n', 1, "half of a surrogate pair"),
        ("a: {<<: 3}\n", 1, "`<<` takes a mapping"),
        ("a: \x00\n", 1, "a character that YAML does not allow (U+0000)"),
        ("a: 1\nb: \x07\n", 2, "a character that YAML does not allow (U+0007)"),
        ("a: " + "9" * 5000 + "\n", 1, "is not a number that can be read"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_line(text, line, message):
    error = fails(text)
    assert error.message.startswith(f"x.yml:{line}:"), error.message
    assert message in error.message
    assert error.facts["line"] == line


def test_text_in_another_encoding_is_an_error_with_its_line():
    assert "x.yml:2: is not UTF-8 text (byte 0xe9" in fails(b"a: 1\nb: caf\xe9\n").message
    assert "UTF-16" in fails("a: 1".encode("utf-16")).message


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n---\n", "~\n"])
def test_a_file_without_a_document_is_empty(text):
    assert "is empty" in fails(text).message


@pytest.mark.parametrize("text", ["[" * 2000, "[" * 2000 + "]" * 2000, "- " * 2000, "{a: " * 1500 + "1" + "}" * 1500])
def test_deep_nesting_is_an_error(text):
    assert "nested too deeply" in fails(text).message


def test_aliases_do_not_multiply_without_end():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    error = fails("\n".join(lines))
    assert f"more than {LARGEST_TREE} values" in error.message
    merges = ["b0: &b0 {k0: 1}"] + [f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}]}}" for n in range(1, 9)]
    assert f"more than {LARGEST_TREE} values" in fails("\n".join(merges)).message


def test_a_file_that_is_too_large_is_not_parsed():
    assert "is larger than 1.0" in fails(b"a: " + b"x" * LARGEST_FILE).message


def test_aliases_and_merge_keys_are_followed():
    text = """\
merge_method: linear
models:
  - model: org/a
    parameters: &half
      weight: 0.5
  - {model: org/b, parameters: *half}
  - {model: org/c, parameters: {<<: *half}}
  - {model: org/d, parameters: {<<: *half, weight: 2}}
"""
    assert [expert.params["weight"] for expert in output(text).experts] == [0.5, 0.5, 0.5, 2.0]


def test_yes_and_no_are_true_and_false():
    base = "merge_method: ties\nbase_model: org/base\nmodels: [{model: org/a}]\n"
    assert output(base + "parameters: {weight: 1, normalize: no}").params["normalize"] is False
    check(base + "parameters: {weight: yes}@@", "true and false are no numbers", "`yes` and `on` are true in YAML")


def test_a_document_that_is_no_mapping_is_an_error():
    for text in ("- a\n", "just words\n", "3\n"):
        assert "a document is a mapping" in only_problem(text).message


PIECES = st.sampled_from(
    ["\t", "\n", ": ", "- ", "[", "]", "{", "}", "&x ", "*x", "<<: *x", "!!int ", "!", "'", '"', "#", "|", ">", "---\n",
     "null", "1e-5", "yes", "\x00", "\ud800", "é", "filter: ", "value: ", "layer_range: [0, 1]", "models", "slices:\n"]
)  # fmt: skip
SLICED = """\
name: x
merge_method: dare_ties
base_model: org/base@main
slices:
  - sources:
      - {model: org/base@main, layer_range: [0, 8]}
      - model: org/a+org/lora
        layer_range: [4, 12]
        parameters: {weight: [{filter: mlp, value: [0, 1]}, {value: 1e-1}]}
    parameters: {density: 0.5}
tokenizer: {source: base}
parameters: {int8_mask: true}
dtype: bfloat16
"""


@st.composite
def edited(draw):
    """Return a valid text after some edits: pieces removed, put in, doubled."""
    text = draw(st.sampled_from([LINEAR, SLICED]))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 2, 5, 20, 80])))
        text = text[:start] + draw(st.one_of(PIECES, st.text(max_size=6), st.just(text[start:end] * 2))) + text[end:]
    return text


@given(edited())
@example(SLICED)
@example("merge_method: linear\nmodels: [{model: [], parameters: {weight: [[], {}, null]}}]")
@example("merge_method: [linear]\nmodels: 3\nslices: x\nparameters: [1]\nname: {}\ndtype: []\ntokenizer: 3")
@example("merge_method: linear\nmodels: [{model: {model: {path: 3}}, parameters: {weight: {value: {value: 1}}}}]")
@example('merge_method: linear\nmodels: [{model: "\\ud800", parameters: {weight: 1}}]')
@example(
    'merge_method: linear\nmodels: [{model: a/b, parameters: {weight: [{filter: "\\ud800", value: 1}, {value: 1}]}}]'
)
def test_edits_of_a_valid_text_end_well(text):
    try:
        imported(text.encode("utf-8", "surrogatepass"))
    except MergepipeError as error:
        check_form(error)


def check_form(error: MergepipeError) -> None:
    assert error.exit_status == 2
    for member in error.errors if isinstance(error, CollectedErrors) else (error,):
        assert member.message.startswith("recipe.yml"), member.message
        assert "\x1b" not in member.message
        assert not member.message.split("\n")[0].endswith(".")
