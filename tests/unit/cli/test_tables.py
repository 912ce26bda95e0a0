import click
import pytest

from mergepipe.cli.tables import duration, fact, pad, plain, plain_lines, rows, share, width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (2.409, "2.41 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (185.4, "3 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7380, "2 h 03 min"),
    ],
)
def test_durations_in_words(seconds, text):
    assert duration(seconds) == text


def test_shares():
    assert share(1, 3) == "33.3%"
    assert share(0, 0) == "0.0%"


def test_facts_break_between_parts_only():
    lines = fact("read", [f"expert number {i} 1.20 GB" for i in range(5)])
    assert lines[0].startswith("  read      expert number 0 1.20 GB, expert")
    assert all(line.startswith(" " * 12 + "expert") for line in lines[1:])
    assert all(line.endswith(",") for line in lines[:-1])
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines).count("1.20 GB") == 5


def test_a_part_that_is_too_long_stands_on_a_line_of_its_own():
    assert fact("path", ["a", "b" * 100, "c"]) == ["  path      a,", " " * 12 + "b" * 100 + ",", " " * 12 + "c"]


def test_columns_line_up_whatever_the_cells_are():
    table = [("a", click.style("up", fg="green"), "x"), ("模型", "down", "y")]
    first, second = rows(table)
    assert click.unstyle(first) == "a     up    x"
    assert click.unstyle(second) == "模型  down  y"
    assert width(first) == width(second)


def test_a_table_of_nothing_has_no_lines():
    assert rows([]) == []


def test_padding_never_cuts():
    assert pad("abc", 2) == "abc"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("é模", "é模"),
        ("a\nb", "a\\nb"),
        ("\x1b[1m", "\\x1b[1m"),
        ("\udcff", "\\udcff"),
        ("\u202e", "\\u202e"),
    ],
)
def test_what_does_not_print_is_escaped(text, shown):
    assert plain(text) == shown


def test_line_breaks_of_a_message_stay():
    assert plain_lines("a\n\tb\x00") == "a\n    b\\x00"
