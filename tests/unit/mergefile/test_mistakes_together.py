"""Mistakes that show in more than one way: how many problems they are, and that none hides another."""

from unit.mergefile.helpers import SOURCES, parse, problems

LINEAR = '[outputs.m]\noperator = "linear"\nexperts = ["math"]\n'
ARITHMETIC = '[outputs.m]\noperator = "task_arithmetic"\nbase = "base"\nexperts = ["math"]\n'


def messages(text):
    return [error.message.removeprefix("Mergefile.toml:") for error in problems(SOURCES + text)]


def test_a_budget_needs_a_base():
    found = messages(LINEAR + "[outputs.m.budget]\nexpert_reads = '25%'\n")
    assert found == [
        "11: outputs.m.budget: a budget needs a base, which takes the place of what is not read",
    ]


def test_a_budget_has_one_limit():
    found = messages(ARITHMETIC + "[outputs.m.budget]\nexpert_reads = '25%'\nmax_error = 1e-3\n")
    assert found[0] == "14: outputs.m.budget.max_error: a budget has `expert_reads` or `max_error`, not both"


def test_a_required_parameter_may_stand_with_the_output_only_if_it_is_the_outputs():
    body = '[outputs.m]\noperator = "slerp"\nbase = "base"\nexperts = ["math"]\n'
    assert "8: outputs.m.params.t: missing: `slerp` needs `t`" in messages(body)
    assert parse(SOURCES + body + "params.t = 0.5\n").outputs["m"].params == {"t": 0.5}
    assert [m for m in messages(body + "params.t = 'x'\n") if "needs" in m] == []


def test_ranges_are_those_of_the_signature():
    body = '[outputs.m]\noperator = "ties"\nbase = "base"\nexperts = ["math"]\nparams.density = '
    expected = "a finite number > 0 and <= 1, or a list of them over the layers"
    for value in ("1.5", "0", "-1"):
        (found,) = messages(f"{body}{value}\n")
        assert found == f"12: outputs.m.params.density: out of range\n  expected {expected}, got {value}"
    assert parse(f"{SOURCES}{body}1\n").outputs["m"].params == {"density": 1.0}
    assert len(messages(body + "[0.1, 2]\n")) == 1


def test_a_misspelled_operator_is_checked_as_the_one_that_was_meant():
    found = messages('[outputs.m]\noperator = "Task-Arithmetic"\nexperts = ["math"]\nparams.lamda = 1\n')
    assert [message.split(": ")[1] for message in found] == [
        "outputs.m.base",
        "outputs.m.operator",
        "outputs.m.params.lamda",
    ]


def test_parameters_of_an_unknown_operator_must_still_be_values():
    body = '[outputs.m]\noperator = "zzz"\nexperts = [{ source = "math", anything = [0, 1] }]\n[outputs.m.params]\n'
    assert len(messages(body + 'a = "x"\nb = true\nc = 1\nd = 0.5\n')) == 1
    found = messages(body + "a = nan\nb = {}\nc = []\nd = ['x']\n")
    assert [message.split(": ")[1][-1] for message in found[1:]] == ["a", "b", "c", "d"]


def test_what_is_under_a_mistyped_key_is_not_missed_too():
    found = messages('[outputs.m]\nmerge_method = "linear"\nmodels = ["math"]\n')
    assert [message.split(": ")[1] for message in found] == ["outputs.m.merge_method", "outputs.m.models"]


def test_several_dotted_names_without_quotes_are_each_understood():
    text = '[sources.qwen2.5]\npath = "a"\n[sources.qwen2.0.x]\npath = "b"\n'
    found = messages(text + '[outputs.m]\noperator = "linear"\nexperts = ["qwen2.5", "qwen2.0.x"]\n')
    assert len(found) == 2
    assert all(message.endswith("a name with a dot needs quotes") for message in found)


def test_a_table_of_unknown_tables_is_not_taken_for_a_dotted_name():
    found = messages("[outputs.m.parms]\nweight = 1\n" + LINEAR.replace("[outputs.m]", "[outputs.n]"))
    assert [message.split(": ")[1] for message in found] == [
        "outputs.m.parms",
        "outputs.m.operator",
        "outputs.m.experts",
    ]


def test_every_problem_has_its_own_error_and_all_are_reported():
    body = '[outputs.m]\noperator = "task_arithmetic"\nexperts = ["x", "y"]\npath = ""\nparams.lambda = "z"\n'
    assert len(messages(body)) == 5


def test_a_custom_operator_without_a_function_is_asked_for_one_and_can_still_be_used():
    (found,) = messages("[operators.mine]\n" + LINEAR.replace('"linear"', '"mine"'))
    assert found == "8: operators.mine.python: missing: the function that merges"


def test_an_operator_without_parameters_of_an_expert_says_so():
    body = '[outputs.m]\noperator = "model_stock"\nbase = "base"\nexperts = ["math", { source = "code", weight = 1 }]\n'
    assert messages(body) == [
        "11: outputs.m.experts[1].weight: unknown parameter of `model_stock`\n  expected no parameters here"
    ]


def test_a_checkpoint_beside_an_expert_is_sent_to_the_sources():
    (error,) = problems(SOURCES + LINEAR.replace('"math"', '{ source = "math", path = "models/math" }'))
    assert "`[sources.NAME]`" in error.hint


def test_integers_have_64_bits_and_a_range():
    body = '[outputs.m]\noperator = "dare_ties"\nbase = "base"\nexperts = ["math"]\nparams.seed = '
    assert parse(f"{SOURCES}{body}{2**63 - 1}\n").outputs["m"].params == {"seed": 2**63 - 1}
    for value, expected in ((2**63, "an integer >= 0 of 64 bits: at most 2^63 - 1"), (-1, "an integer >= 0")):
        (found,) = messages(f"{body}{value}\n")
        assert found == f"12: outputs.m.params.seed: out of range\n  expected {expected}, got {value}"
    (found,) = messages(body + "1.0\n")
    assert "invalid value" in found
    (found,) = messages(body + "[1, 2]\n")
    assert "takes one value, not a list" in found
