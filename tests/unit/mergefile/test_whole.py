"""What only the whole file shows: names used twice, cycles, directories in one another, what is not supported yet."""

import pytest
from unit.mergefile.helpers import DESIGN_EXAMPLE, SOURCES, only_problem, parse, problems
from unit.mergefile.signatures import SIGNATURES

from mergepipe.mergefile.parse import load_mergefile

LINEAR = '[outputs.m]\noperator = "linear"\nexperts = ["math"]\n'


def outputs(**experts):
    """Return outputs with the given experts, each a chain of names."""
    bodies = [
        f'[outputs.{name}]\noperator = "linear"\nexperts = [{", ".join(repr(x) for x in of.split())}]\n'
        for name, of in experts.items()
    ]
    return SOURCES + "".join(bodies)


def cycles(text):
    found = [error for error in problems(text) if "not supported yet" not in error.message]
    return [error.message.split(": ", 1)[1] for error in found]


def test_outputs_that_need_each_other_are_a_cycle():
    assert cycles(outputs(a="b math", b="c", c="a")) == [
        "outputs.a: a cycle: `a` needs `b` needs `c` needs `a`",
    ]


def test_a_cycle_starts_at_its_first_output_in_the_file():
    assert cycles(outputs(z="m", m="k", k="m")) == ["outputs.m: a cycle: `m` needs `k` needs `m`"]


def test_every_separate_cycle_is_reported():
    assert cycles(outputs(a="b", b="a", c="d a", d="c", e="e")) == [
        "outputs.a: a cycle: `a` needs `b` needs `a`",
        "outputs.c: a cycle: `c` needs `d` needs `c`",
        "outputs.e: `e` refers to itself",
    ]


def test_an_output_of_an_output_is_no_cycle():
    assert list(parse(outputs(a="math", b="a", c="a b")).outputs) == ["a", "b", "c"]


def test_bases_and_tokenizers_take_part_in_cycles():
    text = SOURCES + LINEAR + 'write.tokenizer = "n"\n' + LINEAR.replace(".m]", ".n]") + 'base = "m"\n'
    assert cycles(text) == ["outputs.m: a cycle: `m` needs `n` needs `m`"]


def test_an_adapter_on_itself_is_a_cycle():
    text = SOURCES + '[sources.lora]\npath = "x"\non = "lora"\n' + LINEAR
    assert cycles(text) == ["sources.lora.on: `lora` refers to itself"]


def test_a_name_is_a_source_or_an_output():
    error = only_problem(SOURCES + LINEAR.replace("outputs.m", "outputs.math"))
    assert error.facts["key_path"] == "outputs.math"
    assert "`math` is the name of a source too" in error.message


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("models/math", "is also that of source `math`"),
        ("./models/../models//math/", "is also that of source `math`"),
        ("/project/models/math", "is also that of source `math`"),
        ("models/math/merged", "lies inside that of source `math`"),
        ("models/base", "is also that of source `base`"),
        (".", "would hold the Mergefile itself"),
        ("..", "would hold the Mergefile itself"),
        ("/", "would hold the Mergefile itself"),
        ("build/other", "is also that of output `other`"),
        ("build/other/x", "lies inside that of output `other`"),
    ],
)
def test_an_outputs_directory_is_its_own(path, what):
    text = SOURCES + LINEAR.replace("outputs.m", "outputs.other") + LINEAR + f'path = "{path}"\n'
    error = only_problem(text)
    assert error.facts["key_path"] == "outputs.m.path"
    assert error.message.endswith(f"the output's directory {what}")
    assert error.hint.endswith('`path = "build/m"`')


def test_an_output_around_several_sources_names_each():
    found = [error.message for error in problems(SOURCES + LINEAR + 'path = "models"\n')]
    assert [message.split("directory ")[1] for message in found] == [
        f"would hold that of source `{name}`" for name in ("base", "math", "code")
    ]


def test_the_home_folder_is_the_same_place_however_it_is_written(monkeypatch):
    monkeypatch.setenv("HOME", "/project")
    assert "source `math`" in only_problem(SOURCES + LINEAR + 'path = "~/models/math"\n').message


def test_directories_that_only_start_alike_are_different():
    assert parse(SOURCES + LINEAR + 'path = "models/math-2"\n').outputs["m"].path == "models/math-2"


def test_sources_may_lie_in_one_another_and_go_unused():
    text = SOURCES + '[sources.inner]\npath = "models/math/checkpoint-1"\n' + LINEAR
    assert "inner" in parse(text).sources


def test_an_output_that_is_not_published_takes_no_directory():
    output = parse(SOURCES + LINEAR + 'path = "models/math"\npublish = false\n').outputs["m"]
    assert not output.publish  # and no complaint that the directory is a source


@pytest.mark.parametrize(
    ("body", "key_path", "what", "feature"),
    [
        ('[sources.x]\nhub = "org/x"\nrevision = "main"\n' + LINEAR, "sources.x.hub", "`hub`", "hub"),
        (
            '[sources.x]\npath = "x"\non = "base"\n[sources.y]\npath = "y"\non = "x"\n' + LINEAR,
            "sources.y.on",
            "an adapter on an adapter",
            "adapter",
        ),
        (
            '[sources.x]\npath = "x"\non = "m"\n' + LINEAR,
            "sources.x.on",
            "an adapter on an output",
            "adapter",
        ),
    ],
)
def test_what_later_releases_execute_gives_one_clear_problem(body, key_path, what, feature):
    error = only_problem(SOURCES + body)
    assert error.facts["key_path"] == key_path
    assert error.message.endswith(f": {what} is not supported yet")
    assert error.facts["unsupported"] == feature


def test_the_example_of_the_documentation_waits_for_one_feature_and_has_no_mistakes():
    found = problems(DESIGN_EXAMPLE)
    assert [(error.facts["line"], error.facts["unsupported"]) for error in found] == [(14, "hub")]


@pytest.mark.parametrize(
    ("python", "valid"),
    [("ops.py:f", True), ("a/b c.py:_f1", True), ("ops.py", False), ("ops:f", False), ("a.py:1f", False)],
)
def test_custom_operators_are_a_file_and_a_function(python, valid):
    text = f'{SOURCES}[operators.mine]\npython = "{python}"\n{LINEAR}'
    if valid:
        found = parse(text).operators["mine"]
        assert f"{found.file}:{found.function}" == python
    else:
        error = only_problem(text)
        assert "operators.mine.python: invalid value" in error.message


def test_the_parameters_of_a_custom_operator_are_not_judged_without_its_code():
    body = LINEAR.replace('"linear"', '"mine"\nparams.any = 1\nparams.other = "word"')
    found = parse(f'{SOURCES}[operators.mine]\npython = "ops.py:f"\n{body}').outputs["m"]
    assert found.params == {"any": 1, "other": "word"}


def test_custom_operators_do_not_hide_built_in_ones():
    found = problems(SOURCES + '[operators.linear]\npython = "ops.py:f"\n' + LINEAR)
    assert "`linear` is a built-in operator" in found[0].message


def test_what_a_path_holds_is_left_to_who_opens_it(tmp_path):
    path = tmp_path / "Mergefile.toml"
    path.write_text(SOURCES + LINEAR)
    (tmp_path / "models" / "code").mkdir(parents=True)
    (tmp_path / "models" / "code" / "adapter_config.json").write_text("{}")
    assert load_mergefile(path, SIGNATURES).sources["code"].on is None


def test_a_path_that_no_file_system_takes_is_left_to_who_opens_it(tmp_path):
    path = tmp_path / "Mergefile.toml"
    path.write_text(SOURCES + f'[sources.long]\npath = "{"x" * 5000}"\n' + LINEAR)
    assert "long" in load_mergefile(path, SIGNATURES).sources
