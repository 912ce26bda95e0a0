"""Each kind of mistake: one problem, on the right line, with the key path, what was expected, and a hint that helps.

A case is the text after the sources, where ``@`` ends the line that the problem must name.
"""

import pytest
from unit.mergefile.helpers import SOURCES, only_problem, problems

LINEAR = '[outputs.m]\noperator = "linear"\nexperts = ["math"]\n'
ARITHMETIC = '[outputs.m]\noperator = "task_arithmetic"\nbase = "base"\nexperts = ["math"]\n'
PARAMS = LINEAR + "[outputs.m.params]\n"
RULE = LINEAR + "[[outputs.m.rules]]\n"
REAL = "a finite number, or a list of them over the layers"


def experts(entries):
    return f'[outputs.m]\noperator = "linear"\nexperts = [{entries}]@\n'


def check(body, key_path, what, hint=None):
    """Check the only problem of a Mergefile: its line, its key path and the rest of its message."""
    text = SOURCES + body
    error = only_problem(text.replace("@", ""))
    line = text[: text.index("@")].count("\n") + 1
    place = f"Mergefile.toml:{line}: {key_path}: "
    assert error.message.startswith(place), error.message
    assert error.message.removeprefix(place).replace("\n  ", "; ") == what
    assert (error.facts["line"], error.facts["key_path"]) == (line, key_path)
    if hint is not None:
        assert error.hint is not None
        assert hint in error.hint


SOURCE_KEYS = "`path`, `hub`, `revision`, `on` or `progressive`"
OUTPUT_KEYS = "`operator`, `base`, `experts`, `path`, `params`, `rules`, `budget`, `write`, `slices` or `publish`"
LAYERS = 'layers such as "8..16" (8 to 15: the end is not included)'


@pytest.mark.parametrize(
    ("body", "key_path", "what", "hint"),
    [
        (
            '[sources.x]\npath = "x"\nrevisoin = "y"@\n' + LINEAR,
            "sources.x.revisoin",
            f"unknown key; expected one of {SOURCE_KEYS}",
            "did you mean `revision`?",
        ),
        (LINEAR + 'bas = "base"@', "outputs.m.bas", f"unknown key; expected one of {OUTPUT_KEYS}", "`base`"),
        (LINEAR + 'dtype = "bf16"@', "outputs.m.dtype", f"unknown key; expected one of {OUTPUT_KEYS}", "`write.dtype`"),
        (
            LINEAR + "normalize = true@",
            "outputs.m.normalize",
            f"unknown key; expected one of {OUTPUT_KEYS}",
            "`[outputs.m.params]`",
        ),
        (
            LINEAR + "[outputs.m.budget]\nreads = 1@",
            "outputs.m.budget.reads",
            "unknown key; expected one of `expert_reads`, `max_error`, `stats` or `precision`",
            None,
        ),
        (
            LINEAR + 'write = { dtpe = "bf16" }@',
            "outputs.m.write.dtpe",
            "unknown key; expected one of `dtype`, `shard_size` or `tokenizer`",
            "did you mean `dtype`?",
        ),
        (
            RULE + 'match = "*"\nexpert = {}@',
            "outputs.m.rules[0].expert",
            "unknown key; expected one of `match`, `layers`, `params` or `experts`",
            "did you mean `experts`?",
        ),
        (
            RULE + 'match = "*"\nweight = 0.5@',
            "outputs.m.rules[0].weight",
            "unknown key; expected one of `match`, `layers`, `params` or `experts`",
            "`params` of the rule",
        ),
    ],
)
def test_unknown_keys(body, key_path, what, hint):
    check(body, key_path, what, hint)


@pytest.mark.parametrize(
    ("body", "key_path", "what", "hint"),
    [
        ("[sources.x]@\n" + LINEAR, "sources.x.path", "missing: where the checkpoint is", 'path = "models/NAME"'),
        (
            '[sources.x]\npath = "x"\nrevision = "main"@\n' + LINEAR,
            "sources.x.revision",
            "`revision` goes with a `hub` repository",
            "remove it",
        ),
        (
            "[sources.x]\npath = 3@\n" + LINEAR,
            "sources.x.path",
            "invalid value; expected a path relative to the Mergefile, got 3",
            None,
        ),
        (
            '[sources.x]\npath = " "@\n' + LINEAR,
            "sources.x.path",
            'invalid value; expected a path relative to the Mergefile, got " "',
            None,
        ),
        (
            '[sources.x]\npath = "a\\u0000b"@\n' + LINEAR,
            "sources.x.path",
            'invalid value; expected a path relative to the Mergefile, got "a\\u0000b"',
            None,
        ),
        (
            '[sources.x]\npath = "x"\nprogressive = 1@\n' + LINEAR,
            "sources.x.progressive",
            "invalid value; expected true or false, got 1",
            None,
        ),
        (
            '[sources.x.5]@\npath = "x"\n' + LINEAR,
            "sources.x.5",
            "a name with a dot needs quotes",
            '[sources."x.5"]',
        ),
        (
            '[sources."a b"]@\npath = "x"\n' + LINEAR,
            'sources."a b"',
            "invalid name `a b`; expected letters, digits, `_`, `-` and `.`, and no `-` or `.` first",
            "`a-b`",
        ),
        (
            '[sources.".."]@\npath = "x"\n' + LINEAR,
            'sources.".."',
            "invalid name `..`; expected letters, digits, `_`, `-` and `.`, and no `-` or `.` first",
            "`model`",
        ),
    ],
)
def test_sources(body, key_path, what, hint):
    check(body, key_path, what, hint)


def test_a_source_is_a_table_not_a_path():
    error = only_problem(SOURCES.replace("[sources.base]", '[sources]\nx = "x"\n[sources.base]') + LINEAR)
    assert error.message == 'Mergefile.toml:3: sources.x: invalid value\n  expected a table, got "x"'
    assert "[sources.NAME]" in error.hint


@pytest.mark.parametrize(
    ("body", "key_path", "what", "hint"),
    [
        ('[outputs.m]@\nexperts = ["math"]', "outputs.m.operator", "missing: which merge method to run", "linear"),
        (
            '[outputs.m]\noperator = "linaer"@\nexperts = ["math"]',
            "outputs.m.operator",
            "unknown operator `linaer`",
            "did you mean `linear`?",
        ),
        (
            '[outputs.m]\noperator = "zzz"@\nexperts = ["math"]',
            "outputs.m.operator",
            "unknown operator `zzz`",
            "this release runs `linear`, `task_arithmetic` and `passthrough`",
        ),
        (
            '[outputs.m]\noperator = "dare-ties"@\nbase = "base"\nexperts = ["math"]',
            "outputs.m.operator",
            "unknown operator `dare-ties`",
            "`dare_ties`",
        ),
        (
            "[outputs.m]\noperator = 1@\nexperts = ['math']",
            "outputs.m.operator",
            "invalid value; expected the name of an operator, got 1",
            None,
        ),
        (
            '[outputs.m]@\noperator = "task_arithmetic"\nexperts = ["math"]',
            "outputs.m.base",
            "missing: `task_arithmetic` needs a base",
            'base = "NAME"',
        ),
        (
            LINEAR + 'base = "bsae"@',
            "outputs.m.base",
            "unknown source `bsae`; expected one of `base`, `math`, `code` or `m`",
            "did you mean `base`?",
        ),
        (
            LINEAR + "base = ['base']@",
            "outputs.m.base",
            "invalid value; expected the name of a source, got a list",
            None,
        ),
        (LINEAR + "publish = 'no'@", "outputs.m.publish", 'invalid value; expected true or false, got "no"', None),
        (
            LINEAR + "path = ''@",
            "outputs.m.path",
            'invalid value; expected a path relative to the Mergefile, got ""',
            None,
        ),
        (LINEAR + "params = 3@", "outputs.m.params", "invalid value; expected a table, got 3", None),
        (LINEAR + "write = []@", "outputs.m.write", "invalid value; expected a table, got an empty list", None),
        (
            LINEAR + "[outputs.m.rules]@\nmatch = '*'",
            "outputs.m.rules",
            "invalid value; expected an array of tables, got a table",
            "`[[outputs.m.rules]]`",
        ),
        (
            LINEAR + "rules = [3]@",
            "outputs.m.rules[0]",
            "invalid value; expected a table, got 3",
            "`[[outputs.m.rules]]`",
        ),
    ],
)
def test_outputs(body, key_path, what, hint):
    check(body, key_path, what, hint)


@pytest.mark.parametrize(
    ("body", "key_path", "what", "hint"),
    [
        ('[outputs.m]@\noperator = "linear"', "outputs.m.experts", "missing: what to merge", "experts = ["),
        (experts(""), "outputs.m.experts", "`linear` needs at least 1 expert, and there are none", None),
        (
            experts('"math", { source = "cod" }'),
            "outputs.m.experts[1].source",
            "unknown source `cod`; expected one of `base`, `math`, `code` or `m`",
            "did you mean `code`?",
        ),
        (
            experts('"models/chat"'),
            "outputs.m.experts[0]",
            "unknown source `models/chat`; expected one of `base`, `math`, `code` or `m`",
            'path = "models/chat"',
        ),
        (
            experts('"math", "code", "math"'),
            "outputs.m.experts[2]",
            "`math` is listed twice (it is also `experts[0]`)",
            "one weight",
        ),
        (
            experts('"math", 3'),
            "outputs.m.experts[1]",
            "invalid value; expected the name of a source, or a table with `source` and parameters, got 3",
            None,
        ),
        (experts("{ weight = 1.0 }"), "outputs.m.experts[0].source", "missing: which source the expert is", "source ="),
        (
            experts("{ source = 1 }"),
            "outputs.m.experts[0].source",
            "invalid value; expected the name of a source, got 1",
            None,
        ),
        (
            experts('{ source = "math", wieght = 1.0 }'),
            "outputs.m.experts[0].wieght",
            "unknown parameter of `linear`; expected `weight`",
            "did you mean `weight`?",
        ),
        (
            experts('{ source = "math", params = { weight = 1.0 } }'),
            "outputs.m.experts[0].params",
            "unknown parameter of `linear`; expected `weight`",
            "beside `source`",
        ),
        (
            experts('{ source = "math", normalize = false }'),
            "outputs.m.experts[0].normalize",
            "`normalize` is a parameter of the whole output, not of one expert",
            "`[outputs.m.params]`",
        ),
        (
            experts('{ source = "math", weight = "abc" }'),
            "outputs.m.experts[0].weight",
            f'invalid value; expected {REAL}, got "abc"',
            None,
        ),
        (
            experts('{ source = "math", weight = nan }'),
            "outputs.m.experts[0].weight",
            f"invalid value; expected {REAL}, got nan",
            None,
        ),
        (
            experts('{ source = "math", weight = -inf }'),
            "outputs.m.experts[0].weight",
            f"invalid value; expected {REAL}, got -inf",
            None,
        ),
        (
            experts('{ source = "math", weight = true }'),
            "outputs.m.experts[0].weight",
            f"invalid value; expected {REAL}, got true",
            None,
        ),
        (
            experts('{ source = "math", weight = 2020-01-01 }'),
            "outputs.m.experts[0].weight",
            f"invalid value; expected {REAL}, got a date or time",
            None,
        ),
        (
            experts('{ source = "math", weight = "0.5" }'),
            "outputs.m.experts[0].weight",
            f'invalid value; expected {REAL}, got "0.5"',
            "without quotes",
        ),
        (
            '[outputs.m]\noperator = "linear"\nexperts = "math"@',
            "outputs.m.experts",
            'invalid value; expected a list of names and tables, got "math"',
            "experts = [",
        ),
        (
            '[outputs.m]\noperator = "passthrough"\nexperts = ["math", "code"]@',
            "outputs.m.experts",
            "`passthrough` needs exactly 1 expert, and there are 2",
            None,
        ),
    ],
)
def test_experts(body, key_path, what, hint):
    check(body, key_path, what, hint)


@pytest.mark.parametrize(
    ("body", "key_path", "what", "hint"),
    [
        (
            PARAMS + "normalise = true@",
            "outputs.m.params.normalise",
            "unknown parameter of `linear`; expected one of `normalize` or `weight`",
            "`normalize`",
        ),
        (PARAMS + "normalize = 1@", "outputs.m.params.normalize", "invalid value; expected true or false, got 1", None),
        (
            PARAMS + 'normalize = "True"@',
            "outputs.m.params.normalize",
            'invalid value; expected true or false, got "True"',
            "without quotes",
        ),
        (
            PARAMS + "normalize = [true]@",
            "outputs.m.params.normalize",
            "`normalize` takes one value, not a list; expected true or false, got a list",
            None,
        ),
        (
            PARAMS + "weight = []@",
            "outputs.m.params.weight",
            "a list over the layers needs at least one number; got an empty list",
            None,
        ),
        (
            PARAMS + "weight = [0.5, 'x']@",
            "outputs.m.params.weight[1]",
            'invalid value; expected a finite number, got "x"',
            None,
        ),
        (
            PARAMS + "weight = [0.5, true]@",
            "outputs.m.params.weight[1]",
            "invalid value; expected a finite number, got true",
            None,
        ),
        (
            PARAMS + "weight = [\n0.5,\n[1]@\n]",
            "outputs.m.params.weight[1]",
            "invalid value; expected a finite number, got a list",
            None,
        ),
        (
            PARAMS + "weight = [{ filter = 'mlp', value = 1 }]@",
            "outputs.m.params.weight[0]",
            "invalid value; expected a finite number, got a table",
            "use a rule",
        ),
        (
            PARAMS + "weight.math = 0.4@",
            "outputs.m.params.weight",
            f"invalid value; expected {REAL}, got a table",
            'source = "NAME", weight',
        ),
        (
            PARAMS + "weight = 1e39@",
            "outputs.m.params.weight",
            f"too large for float32; expected {REAL}, got 1e+39",
            None,
        ),
        (
            PARAMS + f"weight = 1{'0' * 400}@",
            "outputs.m.params.weight",
            f"invalid value; expected {REAL}, got an integer of more than 60 digits",
            None,
        ),
        (
            PARAMS + 'missing = "bse"@',
            "outputs.m.params.missing",
            "invalid value; expected one of 'error', 'base', got \"bse\"",
            'did you mean "base"?',
        ),
        (
            PARAMS + "missing = 0@",
            "outputs.m.params.missing",
            "invalid value; expected one of 'error', 'base', got 0",
            None,
        ),
    ],
)
def test_params(body, key_path, what, hint):
    check(body, key_path, what, hint)


@pytest.mark.parametrize(
    ("body", "key_path", "what", "hint"),
    [
        (
            LINEAR + "[[outputs.m.rules]]@\nparams = {}",
            "outputs.m.rules[0].match",
            "missing: which tensors the rule is for",
            "layers",
        ),
        (
            RULE + "match = 3@",
            "outputs.m.rules[0].match",
            "invalid value; expected a glob on tensor names, or a list of them, got 3",
            None,
        ),
        (
            RULE + "match = []@",
            "outputs.m.rules[0].match",
            "invalid value; expected a glob on tensor names, or a list of them, got an empty list",
            None,
        ),
        (
            RULE + "match = ['*', 3]@",
            "outputs.m.rules[0].match[1]",
            "invalid value; expected a glob on tensor names, got 3",
            None,
        ),
        (RULE + "layers = 5@", "outputs.m.rules[0].layers", f"invalid value; expected {LAYERS}, got 5", '"5..6"'),
        (
            RULE + "layers = [8, 16]@",
            "outputs.m.rules[0].layers",
            f"invalid value; expected {LAYERS}, got a list",
            None,
        ),
        (RULE + "layers = '8-16'@", "outputs.m.rules[0].layers", f'invalid value; expected {LAYERS}, got "8-16"', None),
        (
            RULE + "layers = '-1..2'@",
            "outputs.m.rules[0].layers",
            f'invalid value; expected {LAYERS}, got "-1..2"',
            None,
        ),
        (
            RULE + "layers = '3..1'@",
            "outputs.m.rules[0].layers",
            f'empty range of layers; expected {LAYERS}, got "3..1"',
            '"1..3"',
        ),
        (
            RULE + "layers = '2..2'@",
            "outputs.m.rules[0].layers",
            f'empty range of layers; expected {LAYERS}, got "2..2"',
            '"2..3"',
        ),
        (
            RULE + 'match = "*"\nexperts = { mth = { weight = 1 } }@',
            "outputs.m.rules[0].experts.mth",
            "`mth` is not an expert of this output; expected `math`",
            "did you mean `math`?",
        ),
        (
            RULE + 'match = "*"\nexperts = { code = { weight = 1 } }@',
            "outputs.m.rules[0].experts.code",
            "`code` is not an expert of this output; expected `math`",
            None,
        ),
        (
            RULE + 'match = "*"\nexperts = ["math"]@',
            "outputs.m.rules[0].experts",
            "invalid value; expected a table, got a list",
            None,
        ),
        (
            RULE + 'match = "*"\nexperts = { math = 0.5 }@',
            "outputs.m.rules[0].experts.math",
            "invalid value; expected a table, got 0.5",
            "weight",
        ),
        (
            RULE + 'match = "*"\nexperts = { math = { normalize = true } }@',
            "outputs.m.rules[0].experts.math.normalize",
            "`normalize` is a parameter of the whole output, not of one expert",
            "`params` of a rule",
        ),
        (
            RULE + 'match = "a"\n[[outputs.m.rules]]\nmatch = "b"\nparams.wieght = 1@',
            "outputs.m.rules[1].params.wieght",
            "unknown parameter of `linear`; expected one of `normalize` or `weight`",
            "`weight`",
        ),
    ],
)
def test_rules(body, key_path, what, hint):
    check(body, key_path, what, hint)


READS = 'invalid value; expected a share such as "25%", or bytes such as "2 GiB", got '
SIZE = 'invalid value; expected a size such as "5 GB" or "512 MiB", or a number of bytes, got '


@pytest.mark.parametrize(
    ("body", "key_path", "what", "hint"),
    [
        ("[outputs.m.budget]\nexpert_reads = 0.25@", "budget.expert_reads", READS + "0.25", 'write "25%"'),
        ("[outputs.m.budget]\nexpert_reads = 'all'@", "budget.expert_reads", READS + '"all"', None),
        ("[outputs.m.budget]\nexpert_reads = -1@", "budget.expert_reads", READS + "-1", None),
        ("[outputs.m.budget]\nexpert_reads = true@", "budget.expert_reads", READS + "true", None),
        (
            "[outputs.m.budget]\nexpert_reads = '101%'@",
            "budget.expert_reads",
            'out of range; expected at most 100%, got "101%"',
            None,
        ),
        (
            "[outputs.m.budget]\nmax_error = nan@",
            "budget.max_error",
            "invalid value; expected a relative error, a finite number >= 0 such as 1e-3, got nan",
            None,
        ),
        (
            "[outputs.m.budget]\nstats = 'none'@",
            "budget.stats",
            'invalid value; expected one of "full", "sample", got "none"',
            None,
        ),
        (
            "[outputs.m.budget]\nprecision = 8@",
            "budget.precision",
            'invalid value; expected one of "levels", "blocks", got 8',
            None,
        ),
        ("budget = '25%'@", "budget", 'invalid value; expected a table, got "25%"', "[outputs.NAME.budget]"),
        ("[outputs.m.write]\nshard_size = 0@", "write.shard_size", SIZE + "0", None),
        ("[outputs.m.write]\nshard_size = '5 gigs'@", "write.shard_size", SIZE + '"5 gigs"', None),
        ("[outputs.m.write]\nshard_size = 1.5@", "write.shard_size", SIZE + "1.5", None),
        (f"[outputs.m.write]\nshard_size = '{'9' * 400}.5 GB'@", "write.shard_size", f'{SIZE}"{"9" * 57}..."', None),
        (
            "[outputs.m.write]\ndtype = 'float61'@",
            "write.dtype",
            'invalid value; expected one of "float64", "float32", "float16", "bfloat16", "fp64", "fp32", "fp16", "bf16", got "float61"',
            'did you mean "float64"?',
        ),
        (
            "[outputs.m.write]\ntokenizer = 'bse'@",
            "write.tokenizer",
            "unknown source `bse`; expected one of `base`, `math`, `code` or `m`",
            "`base`",
        ),
    ],
)
def test_budget_and_write(body, key_path, what, hint):
    check(LINEAR + body, f"outputs.m.{key_path}", what, hint)


def messages(text):
    return [error.message.removeprefix("Mergefile.toml:") for error in problems(SOURCES + text)]


def test_a_budget_needs_a_base():
    found = messages(LINEAR + "[outputs.m.budget]\nexpert_reads = '25%'\n")
    assert found == [
        "11: outputs.m.budget: a budget needs a base, which takes the place of what is not read",
        "11: outputs.m.budget: `budget` is not supported yet",
    ]


def test_a_budget_has_one_limit():
    found = messages(ARITHMETIC + "[outputs.m.budget]\nexpert_reads = '25%'\nmax_error = 1e-3\n")
    assert found[1] == "14: outputs.m.budget.max_error: a budget has `expert_reads` or `max_error`, not both"


def test_a_required_parameter_may_stand_with_the_output_only_if_it_is_the_outputs():
    body = '[outputs.m]\noperator = "slerp"\nbase = "base"\nexperts = ["math"]\n'
    assert "8: outputs.m.params.t: missing: `slerp` needs `t`" in messages(body)
    assert [m for m in messages(body + "params.t = 0.5\n") if "needs" in m] == []
    assert [m for m in messages(body + "params.t = 'x'\n") if "needs" in m] == []


def test_ranges_are_those_of_the_signature():
    body = '[outputs.m]\noperator = "ties"\nbase = "base"\nexperts = ["math"]\nparams.density = '
    expected = "a finite number > 0 and <= 1, or a list of them over the layers"
    for value in ("1.5", "0", "-1"):
        found = messages(f"{body}{value}\n")
        assert found[0].endswith("`ties` is not supported yet")
        assert found[1] == f"12: outputs.m.params.density: out of range\n  expected {expected}, got {value}"
    assert len(messages(body + "1\n")) == 1
    assert len(messages(body + "[0.1, 2]\n")) == 2


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
