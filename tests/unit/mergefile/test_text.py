"""What is not a readable TOML document: each kind has a message of its own, with the line where there is one."""

import pytest
import tomli
from unit.mergefile.helpers import DESIGN_EXAMPLE, PATH, SOURCES, errors_of, only_problem, parse
from unit.mergefile.signatures import SIGNATURES

from mergepipe.errors import MergefileError, MergepipeError, StorageError
from mergepipe.mergefile.parse import load_mergefile
from mergepipe.mergefile.text import _position, parse_toml

VALID = SOURCES + '[outputs.m]\noperator = "linear"\nexperts = ["math"]\n'


def load_problem(path):
    with pytest.raises(MergepipeError) as caught:
        load_mergefile(path, SIGNATURES)
    (error,) = errors_of(caught.value)
    return error


@pytest.mark.parametrize(
    ("text", "line", "column", "what"),
    [
        ('version = 1\npath = "C:\\models"\n', 2, 13, "unescaped `\\` in a string"),
        ("version = 1\nx = \n", 2, 5, "invalid value"),
        ("version = 1\nflag = True\n", 2, 8, "invalid value"),
        ("version = 1\n[a]\nx = 1\n[b]\n[a]\n", 5, 3, "the table `a` is declared twice"),
        ("[a.b]\n[a.c]\n[a.b]\n", 3, 5, "the table `a.b` is declared twice"),
        ("x = 1\nx = 2\n", 2, 6, "a key is given twice"),
        ("x = {a = 1, a = 2}\n", 1, 18, "a key is given twice"),
        ("x = [1]\n[[x]]\n", 2, 4, "a table in braces cannot be added to"),
        ("version 1\n", 1, 9, "expected '=' after a key in a key/value pair"),
        ('x = "\n', 1, 6, "illegal character '\\n'"),
        ('a = 1\nx = "abc', 2, 9, "unterminated string"),
    ],
)
def test_a_syntax_error_names_line_and_column(text, line, column, what):
    error = only_problem(text)
    assert error.message.startswith(f"Mergefile.toml:{line}:{column}: not valid TOML: {what}")
    assert (error.facts["line"], error.facts["column"]) == (line, column)
    assert error.facts["file"] == str(PATH)


def test_a_syntax_error_shows_the_line_and_marks_the_column():
    error = only_problem('version = 1\n\tpath = "C:\\models"\n')
    assert error.message.split("\n")[1:] == ['   path = "C:\\models"', "               ^"]
    assert "single quotes" in error.hint


def test_a_very_long_line_is_not_shown():
    assert "\n" not in only_problem("x = " + "y" * 500).message


def test_the_position_is_found_in_the_words_of_older_parsers_too():
    lines = ["a = 1", "b = ", ""]
    assert _position(ValueError("Invalid value (at line 2, column 5)"), lines) == ("Invalid value", 2, 5)
    assert _position(ValueError("Unterminated string (at end of document)"), lines) == ("Unterminated string", 2, 5)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_merge_conflict_markers_are_recognised(newline):
    text = VALID + "<<<<<<< HEAD\npath = 'a'\n=======\npath = 'b'\n>>>>>>> theirs\n"
    error = only_problem(text.replace("\n", newline))
    line = VALID.count("\n") + 1
    assert error.message == f"Mergefile.toml:{line}: merge conflict marker `<<<<<<<`"
    assert error.facts["line"] == line
    assert "resolve the conflict" in error.hint


def test_a_conflict_marker_inside_a_string_is_text():
    text = VALID + '[sources.odd]\npath = """\nx\n=======\ny"""\n'
    assert "=======" in parse(text).sources["odd"].path


def test_too_deep_nesting_is_a_message():
    assert "nested too deeply" in only_problem("a = " + "[" * 100_000).message


def test_an_integer_of_thousands_of_digits_is_a_message():
    assert "not valid TOML" in only_problem("version = 1" + "0" * 5000).message


def test_crlf_and_a_byte_order_mark_are_accepted(tmp_path):
    path = tmp_path / "Mergefile.toml"
    path.write_bytes(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode())
    assert load_mergefile(path, SIGNATURES).outputs == parse(VALID).outputs
    assert parse("\ufeff" + VALID) == parse(VALID)


def test_bytes_that_are_not_utf8_name_the_line(tmp_path):
    path = tmp_path / "Mergefile.toml"
    path.write_bytes(b"version = 1\n# caf\xe9\n")
    error = load_problem(path)
    assert error.message == "Mergefile.toml:2: is not UTF-8 text (byte 0xe9 at offset 17)"
    assert error.facts["line"] == 2
    assert "UTF-8" in error.hint


def test_utf16_is_named_as_such(tmp_path):
    path = tmp_path / "Mergefile.toml"
    path.write_bytes("version = 1\n".encode("utf-16"))
    assert "UTF-16" in load_problem(path).message


@pytest.mark.parametrize("name", ["Mergefile.toml", "no/such/Mergefile.toml"])
def test_a_missing_file_points_to_init(tmp_path, name):
    error = load_problem(tmp_path / name)
    assert error.message == f"there is no Mergefile at `{tmp_path / name}`"
    assert "`mergepipe init`" in error.hint


def test_a_directory_is_not_a_mergefile(tmp_path):
    error = load_problem(tmp_path)
    assert error.message == f"`{tmp_path}` is a directory, not a Mergefile"
    (tmp_path / "Mergefile.toml").write_text(VALID)
    assert load_problem(tmp_path).hint == f"did you mean `{tmp_path / 'Mergefile.toml'}`?"


def test_what_the_system_refuses_to_read_is_a_storage_error(tmp_path):
    loop = tmp_path / "Mergefile.toml"
    loop.symlink_to(loop)
    with pytest.raises(StorageError, match="cannot read"):
        load_mergefile(loop, SIGNATURES)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "\ufeff"])
def test_an_empty_file_says_so_and_points_to_init(text):
    error = only_problem(text)
    assert error.message == "Mergefile.toml: is empty: it declares no sources and no outputs"
    assert "`mergepipe init`" in error.hint


def test_toml_data_is_returned_unchanged():
    assert parse_toml(DESIGN_EXAMPLE, PATH) == tomli.loads(DESIGN_EXAMPLE)
    assert isinstance(MergefileError("x"), Exception)
