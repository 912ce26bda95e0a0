"""Each kind of mistake: one problem, on the right line, with the key path, what was expected, and a hint that helps.

A case is the text after the sources, where ``@`` ends the line that the problem must name.
"""

import pytest
from unit.mergefile.helpers import SOURCES, check, only_problem

LINEAR = '[outputs.m]\noperator = "linear"\nexperts = ["math"]\n'
PARAMS = LINEAR + "[outputs.m.params]\n"
RULE = LINEAR + "[[outputs.m.rules]]\n"
REAL = "a finite number, or a list of them over the layers"


def experts(entries):
    return f'[outputs.m]\noperator = "linear"\nexperts = [{entries}]@\n'


SOURCE_KEYS = "`path`, `hub`, `revision`, `on` or `progressive`"
OUTPUT_KEYS = "`operator`, `base`, `experts`, `path`, `params`, `rules`, `budget`, `write`, `slices` or `publish`"


@pytest.mark.parametrize(
    ("body", "key_path", "what", "hint"),
    [
        (
            '[sources.x]\npath = "x"\nrevisoin = "y"@\n' + LINEAR,
            "sources.x.revisoin",
            f"unknown key; expected {SOURCE_KEYS}",
            "did you mean `revision`?",
        ),
        (LINEAR + 'bas = "base"@', "outputs.m.bas", f"unknown key; expected {OUTPUT_KEYS}", "`base`"),
        (LINEAR + 'dtype = "bf16"@', "outputs.m.dtype", f"unknown key; expected {OUTPUT_KEYS}", "`write.dtype`"),
        (
            LINEAR + "normalize = true@",
            "outputs.m.normalize",
            f"unknown key; expected {OUTPUT_KEYS}",
            "`[outputs.m.params]`",
        ),
        (
            LINEAR + "[outputs.m.budget]\nreads = 1@",
            "outputs.m.budget.reads",
            "unknown key; expected `expert_reads`, `max_error`, `stats` or `precision`",
            None,
        ),
        (
            LINEAR + 'write = { dtpe = "bf16" }@',
            "outputs.m.write.dtpe",
            "unknown key; expected `dtype`, `shard_size` or `tokenizer`",
            "did you mean `dtype`?",
        ),
        (
            RULE + 'match = "*"\nexpert = {}@',
            "outputs.m.rules[0].expert",
            "unknown key; expected `match`, `layers`, `params` or `experts`",
            "did you mean `experts`?",
        ),
        (
            RULE + 'match = "*"\nweight = 0.5@',
            "outputs.m.rules[0].weight",
            "unknown key; expected `match`, `layers`, `params` or `experts`",
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
            "[sources.x]\nprogressive = 1@\n" + LINEAR,
            "sources.x.progressive",
            "invalid value; expected a path relative to the Mergefile, got 1",
            None,
        ),
        (
            '[sources.x]\npath = "x"\nprogressive = "y"@\n' + LINEAR,
            "sources.x.progressive",
            "a source has a `path` or a `progressive` checkpoint, not both",
            "remove `path` to read the progressive checkpoint, or `progressive` to read the other",
        ),
        (
            '[sources.x]\nprogressive = "y"\non = "base"@\n' + LINEAR,
            "sources.x.on",
            "an adapter is no progressive checkpoint: `on` goes with a `path`",
            None,
        ),
        (
            '[sources.x.5]@\npath = "x"\n' + LINEAR,
            "sources.x.5",
            "a name with a dot needs quotes",
            '[sources."x.5"]',
        ),
        (
            '[sources.x]\npath = "x"\non = "base"\n[sources.y]\npath = "y"\non = "bas2"@\n' + LINEAR,
            "sources.y.on",
            "unknown source `bas2`; expected `base`, `math` or `code`",
            "did you mean `base`?",
        ),
        (
            '[sources.x]\npath = "x"\non = "base"\n[sources.y]\npath = "y"\non = "x2"@\n' + LINEAR,
            "sources.y.on",
            "unknown source `x2`; expected `base`, `math` or `code`",
            None,
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
            "the operators are `linear`, `task_arithmetic`, `passthrough`, `ties`, ",
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
            "unknown source `bsae`; expected `base`, `math` or `code`",
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
            "unknown source `cod`; expected `base`, `math` or `code`",
            "did you mean `code`?",
        ),
        (
            experts('"models/chat"'),
            "outputs.m.experts[0]",
            "unknown source `models/chat`; expected `base`, `math` or `code`",
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
            "unknown parameter of `linear`; expected `weight` or `normalize`",
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
            'invalid value; expected one of "error", "base", got "bse"',
            'did you mean "base"?',
        ),
        (
            PARAMS + "missing = 0@",
            "outputs.m.params.missing",
            'invalid value; expected one of "error", "base", got 0',
            None,
        ),
    ],
)
def test_params(body, key_path, what, hint):
    check(body, key_path, what, hint)
