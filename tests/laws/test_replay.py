"""Law 9: a manifest and the sources alone give the same bytes again, for every operator, with and without budgets."""

import json
import shutil
import textwrap

import numpy as np
import pytest
from laws.test_every_operator import family
from laws.test_slices import MIXED, STACK, add_sources
from support.adapters import factors, write_adapter
from support.checkpoints import random_tensors, read_checkpoint
from support.every_operator import RECIPES
from support.projects import SmallProject
from support.replays import assert_replays, leave_sources_alone, replay_alone
from support.stages import declare, merged

BASED = {name: recipe for name, recipe in RECIPES.items() if recipe["operator"] != "passthrough"}
BUDGETS = (
    {"expert_reads": "40%", "precision": "blocks"},
    {"expert_reads": 3000, "precision": "blocks"},
    {"max_error": 0.2, "precision": "blocks"},
    {"expert_reads": "100%"},
    {"expert_reads": "50%", "stats": "sample"},
)
SHARE, *OTHER_BUDGETS = BUDGETS


def budgeted(recipe, budget):
    return recipe | {"base": "base", "budget": budget}


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    """Return a project with an output for every operator, and for all but one another with a budget."""
    project = SmallProject(tmp_path_factory.mktemp("operators"))
    for name, tensors in family().items():
        project.add_source(name, tensors, shards=1 + (name == "e1"), config={"torch_dtype": "bfloat16"})
    project.outputs |= {name: recipe | {"write": {"dtype": "float32"}} for name, recipe in RECIPES.items()}
    project.outputs |= {f"{name}-cheap": budgeted(recipe, SHARE) for name, recipe in BASED.items()}
    project.outputs |= {f"sum-{n}": budgeted(RECIPES["task_arithmetic"], b) for n, b in enumerate(OTHER_BUDGETS)}
    project.save()
    return project


@pytest.fixture
def sources_alone(operators, tmp_path):
    """Return a folder with the sources of that project and nothing else."""
    folder = tmp_path / "sources-alone"
    folder.mkdir()
    (folder / "models").symlink_to(operators.root / "models")
    return folder


def some(names, every):
    """Keep every so many names for the quick tests; the others are slow."""
    return [name if n % every == 0 else pytest.param(name, marks=pytest.mark.slow) for n, name in enumerate(names)]


@pytest.mark.parametrize("name", some(RECIPES, 3))
def test_every_operator_gives_the_same_bytes_again(operators, sources_alone, tmp_path, name):
    operators.build(name)
    assert_replays(operators, name, tmp_path / "empty", base_dir=sources_alone)


@pytest.mark.parametrize("name", some([f"{name}-cheap" for name in BASED], 4))
def test_the_recorded_access_set_is_what_a_budget_replays(operators, sources_alone, tmp_path, name):
    operators.build(name)
    report = assert_replays(operators, name, tmp_path / "empty", base_dir=sources_alone)
    assert report.budget == "40%"
    left_out = [t for t in operators.manifest(name).tensors if t.levels is not None]
    assert left_out, "a budget that leaves nothing out shows nothing"


@pytest.mark.parametrize("number", range(len(OTHER_BUDGETS)))
def test_every_kind_of_budget_replays(operators, sources_alone, tmp_path, number):
    operators.build(f"sum-{number}")
    report = assert_replays(operators, f"sum-{number}", tmp_path / "empty", base_dir=sources_alone)
    sampled = "stats" in OTHER_BUDGETS[number]
    assert any(digest.startswith("sample:") for digest in report.sources.values()) == sampled


@pytest.fixture
def project(tmp_path):
    return SmallProject(tmp_path / "project")


@pytest.mark.parametrize("recipe", [STACK, MIXED], ids=["stack", "mixed"])
def test_slices_give_the_same_bytes_again(project, tmp_path, recipe):
    add_sources(project, ("float32", "bfloat16"))
    project.set_output("m", recipe)
    project.build()
    leave_sources_alone(project)
    assert_replays(project, "m", tmp_path / "empty")


@pytest.mark.parametrize("recipe", [STACK, {"operator": "passthrough", "experts": ["a"]}], ids=["slices", "whole"])
def test_a_base_that_the_operator_ignores_need_not_be_there(project, tmp_path, recipe):
    add_sources(project)
    project.set_output("m", recipe | {"base": "base"})
    project.build()
    leave_sources_alone(project)
    shutil.rmtree(project.root / "models/base")
    report = assert_replays(project, "m", tmp_path / "empty")
    assert list(report.sources) == ["a"]


def test_what_the_policies_decide_and_how_it_is_written_is_the_same_again(project, tmp_path):
    """Missing tensors, rows in common, tensors that are dropped or copied, another dtype, many shards, a tokenizer."""
    shapes = {f"model.layers.{n}.w": (10, 16) for n in range(3)} | {"model.embed_tokens.weight": (14, 8)}
    for seed, name in enumerate(("base", "e1", "e2", "chat")):
        tensors = random_tensors(seed, shapes, "float32") | {"ids": np.arange(100)}
        if name == "e2":
            tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:9]
            tensors["value_head"] = tensors.pop("model.layers.1.w")
        side = {"tokenizer.json": json.dumps(name), "README.md": f"---\nlicense: mit\n---\n{name}"}
        project.add_source(name, tensors, shards=seed + 1, config={"torch_dtype": "float32"}, side_files=side)
    recipe = merged({"source": "e1", "weight": [0.2, 0.8]}, {"source": "e2", "weight": 0.4})
    recipe |= {
        "params": {"missing": "base", "rows": "common", "normalize": True},
        "rules": [{"match": "*.2.*", "layers": "0..3", "experts": {"e2": {"weight": -0.1}}}],
        "write": {"dtype": "bfloat16", "shard_size": 500, "tokenizer": "chat"},
    }
    project.set_output("m", recipe)
    project.build()
    manifest = project.manifest("m")
    assert [place.name for place in manifest.places] == ["chat"]
    assert len(manifest.output.shards) > 3
    leave_sources_alone(project)
    report = assert_replays(project, "m", tmp_path / "empty")
    assert "tokenizer.json" in report.side_files["equal"]


@pytest.mark.parametrize("operator", ["task_arithmetic", "linear"])
@pytest.mark.parametrize("budget", [None, {"expert_reads": "50%", "precision": "blocks"}], ids=["full", "budget"])
def test_adapters_give_the_same_bytes_again(project, tmp_path, operator, budget):
    shapes = {"model.layers.0.q.weight": (16, 16), "model.layers.0.k.weight": (16, 16), "model.norm.weight": (16,)}
    for seed, name in enumerate(("base", "other", "full")):
        project.add_source(name, random_tensors(seed, shapes), config={})
    for seed, (name, on) in enumerate({"lora": "base", "far": "other"}.items()):
        pairs = factors(seed, "model.layers.0.q", 16, 16) | factors(seed + 5, "model.layers.0.k", 16, 16)
        write_adapter(project.root / f"models/{name}", pairs, target_modules=["q", "k"], lora_alpha=5)
        project.sources[name] = f"models/{name}"
        project.adapters[name] = on
    recipe = merged("lora", {"source": "far", "weight": 0.3}, "full", operator=operator)
    project.set_output("m", recipe | ({"budget": budget} if budget else {}))
    project.build()
    leave_sources_alone(project)
    assert_replays(project, "m", tmp_path / "empty")


def test_a_tokenizer_of_an_adapter_comes_from_its_folder_and_what_it_applies_to(project, tmp_path):
    shapes = {"model.layers.0.q.weight": (16, 16), "model.norm.weight": (16,)}
    for seed, name in enumerate(("base", "other", "e1")):
        side = {"generation_config.json": json.dumps({"of": name})}
        project.add_source(name, random_tensors(seed, shapes), config={}, side_files=side)
    folder = write_adapter(project.root / "models/lora", factors(1, "model.layers.0.q", 16, 16))
    (folder / "tokenizer.json").write_text("{}")
    project.sources["lora"], project.adapters["lora"] = "models/lora", "other"
    project.set_output("m", merged("e1", write={"tokenizer": "lora"}))
    project.build()
    assert [place.name for place in project.manifest("m").places] == ["other", "lora"]
    leave_sources_alone(project)
    report = assert_replays(project, "m", tmp_path / "empty")
    assert {"generation_config.json", "tokenizer.json"} <= {*report.side_files["equal"]}


def test_an_output_that_is_made_from_outputs_needs_its_own_manifest_alone(tmp_path):
    """Two levels below it, one of them not published, one with a budget; a tokenizer from an output as well."""
    project = declare(tmp_path / "project", publish=False)
    project.set_output("cheap", merged("stage", "e3", budget={"expert_reads": "50%", "precision": "blocks"}))
    project.set_output("top", merged("cheap", {"source": "stage", "weight": 0.2}, "e1", operator="linear"))
    project.set_output("lent", merged("e1", write={"tokenizer": "top"}))
    project.build()
    leave_sources_alone(project)
    assert [stage.output.name for stage in project.manifest("top").stages] == ["stage", "cheap"]
    report = assert_replays(project, "top", tmp_path / "empty")
    assert list(report.stages) == ["stage", "cheap"]
    # Of `top` only the tokenizer is taken: it is planned, and neither built nor read.
    assert_replays(project, "lent", tmp_path / "lent")


@pytest.mark.parametrize(
    ("output", "tokenizer"), [("stage", "base"), ("stage", "e1"), ("final", "stage"), ("final", "base")]
)
def test_a_tokenizer_that_was_declared_gives_the_same_card(tmp_path, output, tokenizer):
    """The record does not tell a tokenizer that was declared from one that is so by itself."""
    project = declare(tmp_path / "project")
    project.set_output("final", merged("e3", base="stage", operator="task_arithmetic"))
    project.set_output(output, project.outputs[output] | {"write": {"tokenizer": tokenizer}})
    project.build()
    leave_sources_alone(project)
    assert replay_alone(project, output, tmp_path / "first").generated == ()
    assert_replays(project, output, tmp_path / "empty")


def test_a_stage_that_was_not_touched_is_in_the_manifest_too(tmp_path):
    project = declare(tmp_path / "project")
    project.build()
    project.set_output("final", project.outputs["final"] | {"operator": "linear"})
    report = project.build()
    assert report.outputs["stage"].state == "unchanged"
    leave_sources_alone(project)
    assert_replays(project, "final", tmp_path / "empty")


CODE = '''
    from shared import half

    def midpoint(base, experts, *, pull: float = half):
        """Between the base and the mean of the experts."""
        return base + pull * (sum(experts) / len(experts) - base)
'''


@pytest.fixture
def custom(tmp_path):
    project = SmallProject(tmp_path / "project")
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, {"model.layers.0.w": (12, 16)}))
    folder = project.root / "code"
    folder.mkdir()
    (folder / "ops.py").write_text(textwrap.dedent(CODE))
    (folder / "shared.py").write_text("half = 0.5\n")
    project.set_output("m", merged("e1", "e2", operator="mid"))
    with project.mergefile.open("a") as file:
        file.write('[operators.mid]\npython = "code/ops.py:midpoint"\n')
    project.build(allow_custom=True)
    leave_sources_alone(project)
    return project


def test_custom_operators_replay_with_their_code(custom, tmp_path):
    assert_replays(custom, "m", tmp_path / "empty", allow_custom=True)


def test_sources_and_code_may_have_moved(custom, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    custom.root.rename(elsewhere)
    custom.root = elsewhere
    given = {name: elsewhere / path for name, path in custom.sources.items()}
    (elsewhere / "models").rename(elsewhere / "checkpoints")
    given = {name: elsewhere / "checkpoints" / name for name in given}
    assert_replays(custom, "m", tmp_path / "empty", base_dir=None, sources=given, code=elsewhere, allow_custom=True)


def test_the_same_content_in_other_files_is_the_same_source(tmp_path):
    project = declare(tmp_path / "project")
    project.build()
    before = project.raw("final")
    for name in ("base", "e1", "e3"):
        folder = project.root / project.sources[name]
        tensors = read_checkpoint(folder)
        side = {path.name: path.read_text() for path in folder.glob("*.json") if path.name != "config.json"}
        config = json.loads((folder / "config.json").read_text())
        project.add_source(name, tensors, shards=3, config=config, side_files=side)
    leave_sources_alone(project)
    report = replay_alone(project, "final", tmp_path / "empty")
    assert report.path is not None
    shutil.rmtree(project.folder("final"))
    shutil.copytree(tmp_path / "empty/out", project.folder("final"))
    assert project.raw("final") == before
