"""Did-you-mean and literals in messages."""

import pytest

from mergepipe.mergefile.suggest import closest, code, did_you_mean, listing, quoted, respelled, short_listing


@pytest.mark.parametrize(
    ("word", "name"),
    [("densty", "density"), ("dare-ties", "dare_ties"), ("Linear", "linear"), ("lamda", "lambda"), ("zzz", None)],
)
def test_the_nearest_name_is_found(word, name):
    assert closest(word, ["dare_linear", "dare_ties", "density", "lambda", "linear"]) == name


def test_case_and_dashes_are_no_difference():
    assert respelled("DARE-ties", ["ties", "dare_ties"]) == "dare_ties"
    assert respelled("dareties", ["ties", "dare_ties"]) is None


def test_the_hint_is_a_question():
    assert did_you_mean("bsae", ["base", "math"]) == "did you mean `base`?"
    assert did_you_mean("xyz", ["base", "math"]) is None


def test_names_are_listed_where_they_are_few():
    assert listing(["a"]) == "`a`"
    assert listing(["a", "b", "c"]) == "`a`, `b` or `c`"
    assert short_listing([]) is None
    assert short_listing(f"a-long-name-{number}" for number in range(50)) is None


def test_what_does_not_print_is_escaped():
    assert code("a\x1b[31mb\u202e") == "`a\\u001b[31mb\\u202e`"
    assert quoted('say "hi"\n') == '"say \\"hi\\"\\n"'
    assert quoted("данные") == '"данные"'
