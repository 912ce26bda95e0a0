"""Valid Mergefiles: every key of the schema becomes a value, in its own type and with its default."""

from pathlib import Path

import pytest
from unit.mergefile.helpers import DESIGN_EXAMPLE, PATH, SOURCES, line_of, only_problem, output, parse, problems
from unit.mergefile.signatures import SIGNATURES

from mergepipe.mergefile.checks import references
from mergepipe.mergefile.parse import _load_none as load_none
from mergepipe.mergefile.parse import _read, load_mergefile
from mergepipe.mergefile.schema import Budget, CustomOperator, ExpertRef, Output, Rule, Slice, Source, Write

LINEAR = '[outputs.m]\noperator = "linear"\nexperts = ["math", "code"]\n'


def understood(text):
    """Return the values of a text, whatever is wrong with it."""
    return _read(text, PATH, SIGNATURES, load_none)[0]


def test_the_smallest_mergefile_has_all_the_defaults():
    mergefile = parse(SOURCES + LINEAR)
    assert mergefile.sources["math"] == Source(name="math", path="models/math")
    assert mergefile.outputs["m"] == Output(
        name="m",
        operator="linear",
        experts=(ExpertRef(source="math"), ExpertRef(source="code")),
        path="build/m",
        write=Write(dtype=None, shard_size=5 * 10**9, tokenizer=None),
    )
    found = mergefile.outputs["m"]
    assert (found.base, found.params, found.rules, found.budget, found.slices, found.publish) == (
        (None, {}, (), None, None, True)
    )


def test_sources_and_outputs_keep_the_order_of_the_file():
    text = 'version = 1\n[sources.z]\npath = "z"\n[sources.a]\npath = "a"\n'
    text += "".join(f'[outputs.{name}]\noperator = "linear"\nexperts = ["z", "a"]\n' for name in ("y", "b"))
    mergefile = parse(text)
    assert list(mergefile.sources) == ["z", "a"]
    assert list(mergefile.outputs) == ["y", "b"]


def test_every_key_of_the_schema_is_read():
    text = f"""{SOURCES}
[sources.lora]
path = "models/lora"
on = "base"
[sources.packed]
progressive = "packed/math"
[sources.chat]
hub = "org/model"
revision = "0123abcd"
[operators.mine]
python = "ops.py:my_merge"
[outputs.all]
operator = "ties"
base = "base"
experts = ["math", {{ source = "lora", weight = 1, density = [1, 0.5] }}]
path = "out/all"
publish = false
params = {{ lambda = 2, normalize = false, rescale = false, missing = "base" }}
slices = [
  {{ source = "math", layers = "0..8" }},
  {{ experts = ["math", {{ source = "code", weight = -1 }}], layers = " 8 .. 16 " }},
]
[[outputs.all.rules]]
match = ["*.mlp.*", "*.q_proj.*"]
layers = "8..16"
params = {{ weight = 0 }}
experts = {{ lora = {{ weight = 3e-1 }} }}
[[outputs.all.rules]]
layers = "0..1"
[outputs.all.budget]
expert_reads = "2 GiB"
stats = "sample"
precision = "blocks"
[outputs.all.write]
dtype = "bf16"
shard_size = 1000
tokenizer = "math"
"""
    mergefile = understood(text)
    assert mergefile.sources["lora"] == Source(name="lora", path="models/lora", on="base")
    assert mergefile.sources["packed"] == Source(name="packed", progressive="packed/math")
    assert mergefile.sources["chat"] == Source(name="chat", hub="org/model", revision="0123abcd")
    assert mergefile.operators == {"mine": CustomOperator(name="mine", file="ops.py", function="my_merge")}
    assert mergefile.outputs["all"] == Output(
        name="all",
        operator="ties",
        base="base",
        experts=(
            ExpertRef(source="math"),
            ExpertRef(source="lora", params={"weight": 1.0, "density": (1.0, 0.5)}),
        ),
        path="out/all",
        params={"lambda": 2.0, "normalize": False, "rescale": False, "missing": "base"},
        rules=(
            Rule(
                match=("*.mlp.*", "*.q_proj.*"),
                layers=(8, 16),
                params={"weight": 0.0},
                experts={"lora": {"weight": 0.3}},
            ),
            Rule(layers=(0, 1)),
        ),
        budget=Budget(expert_reads=2 * 2**30, stats="sample", precision="blocks"),
        write=Write(dtype="BF16", shard_size=1000, tokenizer="math"),
        slices=(
            Slice(layers=(0, 8), experts=(ExpertRef(source="math"),)),
            Slice(
                layers=(8, 16), experts=(ExpertRef(source="math"), ExpertRef(source="code", params={"weight": -1.0}))
            ),
        ),
        publish=False,
    )


def test_every_reference_of_an_output_is_known_with_its_place():
    assert [name for name, _ in references(understood(DESIGN_EXAMPLE).outputs["assistant"])] == [
        "base",
        "math",
        "code",
        "chat",
        "base",
    ]


@pytest.mark.parametrize("spelling", ["0.3", "0.30", "3e-1", "+0.3", "0.3_0"])
def test_every_spelling_of_a_number_is_one_value(spelling):
    found = output(f'[outputs.m]\noperator = "linear"\nexperts = [{{ source = "math", weight = {spelling} }}]\n')
    assert found.experts[0].params == {"weight": 0.3}


@pytest.mark.parametrize("spelling", ["1", "1.0", "10e-1", "0x1", "1_0e-1"])
def test_an_integer_for_a_real_parameter_is_a_float(spelling):
    found = output(f"{LINEAR}[outputs.m.params]\nweight = {spelling}\n")
    assert found.params == {"weight": 1.0}
    assert type(found.params["weight"]) is float


def test_there_is_one_zero():
    found = output(LINEAR + "[outputs.m.params]\nweight = [-0.0, 0]\n")
    assert [str(value) for value in found.params["weight"]] == ["0.0", "0.0"]


@pytest.mark.parametrize("weight", ["0", "-2.5", "17", "1e30"])
def test_weights_may_be_negative_large_or_zero(weight):
    assert output(f"{LINEAR}[outputs.m.params]\nweight = {weight}\n").params == {"weight": float(weight)}


def test_experts_may_be_written_as_an_array_of_tables():
    found = output('[outputs.m]\noperator = "linear"\n[[outputs.m.experts]]\nsource = "math"\nweight = 2\n')
    assert found.experts == (ExpertRef(source="math", params={"weight": 2.0}),)


def test_the_base_may_be_among_the_experts():
    found = output('[outputs.m]\noperator = "task_arithmetic"\nbase = "base"\nexperts = ["base", "math"]\n')
    assert [expert.source for expert in found.experts] == ["base", "math"]


@pytest.mark.parametrize("budget", ['expert_reads = "100%"', 'expert_reads = "100.0 %"', 'stats = "sample"', ""])
def test_a_budget_that_limits_nothing_is_the_full_read_and_needs_no_base(budget):
    found = output(f"{LINEAR}[outputs.m.budget]\n{budget}\n")
    assert found.budget.is_full_read


@pytest.mark.parametrize(
    ("size", "expected"), [('"5 GB"', 5 * 10**9), ('"512MiB"', 512 * 2**20), ("1024", 1024), ('"1.5 kb"', 1500)]
)
def test_shard_sizes(size, expected):
    assert output(f"{LINEAR}[outputs.m.write]\nshard_size = {size}\n").write.shard_size == expected


def test_names_may_hold_letters_digits_and_some_signs():
    text = 'version = 1\n[sources."qwen2.5-0.5B_x"]\npath = "a"\n[sources."модель"]\npath = "b"\n'
    text += '[outputs."v1.0"]\noperator = "linear"\nexperts = ["qwen2.5-0.5B_x", "модель"]\n'
    assert parse(text).outputs["v1.0"].path == "build/v1.0"


def test_paths_start_at_the_mergefile_and_the_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("MODELS", "/srv/models")
    text = 'version = 1\n[sources.a]\npath = "~/a b"\n[sources.b]\npath = "$MODELS/b"\n[sources.c]\npath = "/abs/c"\n'
    mergefile = parse(text + '[outputs.m]\noperator = "linear"\nexperts = ["a", "b", "c"]\n')
    assert mergefile.root == Path("/project")
    assert mergefile.source_path("a") == Path("/home/ann/a b")
    assert mergefile.source_path("b") == Path("/project/$MODELS/b")
    assert mergefile.source_path("c") == Path("/abs/c")
    assert mergefile.output_path("m") == Path("/project/build/m")


def test_the_path_of_a_mergefile_is_absolute(tmp_path, monkeypatch):
    (tmp_path / "Mergefile.toml").write_text(SOURCES + LINEAR)
    monkeypatch.chdir(tmp_path)
    assert load_mergefile(Path("Mergefile.toml"), SIGNATURES).path == tmp_path / "Mergefile.toml"


def test_values_know_the_line_of_their_declaration():
    text = SOURCES + LINEAR + '[[outputs.m.rules]]\nmatch = "*"\n'
    mergefile = parse(text)
    assert mergefile.sources["math"].line == line_of(text, "[sources.math]")
    assert mergefile.outputs["m"].line == line_of(text, "[outputs.m]")
    assert mergefile.outputs["m"].rules[0].line == line_of(text, "[[outputs.m.rules]]")
    assert parse("\n" + text) == mergefile


def test_a_newer_version_is_the_only_thing_said():
    error = only_problem("version = 2\nunheard_of = true\n")
    assert error.message == "Mergefile.toml:1: version: this Mergefile needs a newer mergepipe\n  expected 1, got 2"


@pytest.mark.parametrize("version", ["0", "true", '"1"', "1.0"])
def test_a_version_that_never_was_is_wrong(version):
    text = (SOURCES + LINEAR).replace("version = 1", f"version = {version}")
    assert only_problem(text).message.startswith("Mergefile.toml:1: version: invalid value\n  expected 1, got ")


def test_a_missing_version_is_asked_for():
    error = only_problem((SOURCES + LINEAR).replace("version = 1\n", ""))
    assert error.message == "Mergefile.toml:1: version: missing: the version of the Mergefile's format"
    assert error.hint == "write `version = 1` at the top"


def test_a_file_without_sources_and_outputs_says_both():
    assert [error.facts["key_path"] for error in problems("version = 1\n")] == ["sources", "outputs"]


def test_a_mistyped_section_is_one_problem():
    error = only_problem((SOURCES + LINEAR).replace("[outputs.m]", "[output.m]"))
    assert error.facts["key_path"] == "output"
    assert error.hint == "did you mean `outputs`?"


def test_facts_say_where():
    error = only_problem(SOURCES + LINEAR + "colour = 1\n")
    assert error.facts == {
        "file": str(PATH),
        "line": (SOURCES + LINEAR).count("\n") + 1,
        "key_path": "outputs.m.colour",
    }
    assert error.as_json()["kind"] == "mergefile"
