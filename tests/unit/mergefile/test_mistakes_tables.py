"""Mistakes in rules, budgets and what is written: one problem each, on the right line, with a hint that helps.

A case is the text after the sources, where ``@`` ends the line that the problem must name.
"""

import pytest
from unit.mergefile.helpers import check

LINEAR = '[outputs.m]\noperator = "linear"\nexperts = ["math"]\n'
RULE = LINEAR + "[[outputs.m.rules]]\n"
LAYERS = 'layers such as "8..16" (8 to 15: the end is not included)'


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
            "unknown parameter of `linear`; expected `weight` or `normalize`",
            "`weight`",
        ),
    ],
)
def test_rules(body, key_path, what, hint):
    check(body, key_path, what, hint)


READS = 'invalid value; expected a share such as "25%", or bytes such as "2 GiB", got '
DTYPES = '"float64", "float32", "float16", "bfloat16", "fp64", "fp32", "fp16", "bf16"'
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
            "[outputs.m.budget]\nmax_error = '10%'@",
            "budget.max_error",
            'invalid value; expected a relative error, a finite number >= 0 such as 1e-3, got "10%"',
            "write 0.1",
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
            f'invalid value; expected one of {DTYPES}, got "float61"',
            'did you mean "float64"?',
        ),
        (
            "[outputs.m.write]\ntokenizer = 'bse'@",
            "write.tokenizer",
            "unknown source `bse`; expected `base`, `math` or `code`",
            "`base`",
        ),
    ],
)
def test_budget_and_write(body, key_path, what, hint):
    check(LINEAR + body, f"outputs.m.{key_path}", what, hint)
