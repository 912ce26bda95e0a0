"""Every operator, slices and adapters over stages: what comes out is what the same merges give one after the other."""

import shutil

import pytest
from support.adapters import add_adapter, factors
from support.every_operator import RECIPES
from support.projects import edit_tensor
from support.quick import every
from support.stages import SHAPES, A, declare, merged, states

SLICES = {
    "layers of stages": [{"source": "stage", "layers": "1..2"}, {"source": "e3", "layers": "0..1"}],
    "a stage as the base": [
        {"layers": "0..1", "operator": "task_arithmetic", "base": "stage", "experts": ["e3", "other"]},
        {"source": "other", "layers": "1..2"},
    ],
}


def with_stages(recipe):
    """Return a recipe with a stage in the place of the first expert, and another in that of the base."""

    def put(expert):
        names = {"e1": "stage"}
        if isinstance(expert, str):
            return names.get(expert, expert)
        return expert | {"source": names.get(expert["source"], expert["source"])}

    base = {"base": "other"} if "base" in recipe else {}
    return recipe | {"experts": [put(expert) for expert in recipe["experts"]]} | base


def staged(root, recipe, shapes=SHAPES):
    """Return a project with two stages that are not published, and an output that is made from both."""
    project = declare(root, publish=False, order=("stage",), shapes=shapes)
    project.set_output("other", merged("e3", {"source": "stage", "weight": 0.1}, operator="linear", publish=False))
    project.set_output("final", recipe)
    return project


def one_after_the_other(project, root):
    """Return the same project with every stage published first, and declared as a source then."""
    plain = project.clone(root)
    for name in ("stage", "other"):
        plain.outputs = {name: project.outputs[name] | {"publish": True}}
        plain.save()
        plain.build()
        shutil.move(plain.folder(name), plain.root / "models" / name)
        plain.sources[name] = f"models/{name}"
    plain.outputs = {"final": project.outputs["final"]}
    plain.save()
    plain.build()
    return plain


def check(project, root):
    """Check an output against the merges one after the other, now and after a change of a source of the first."""
    project.build()
    plain = one_after_the_other(project, root / "apart")
    assert project.raw("final") == plain.raw("final")
    configs = [made.folder("final") / "config.json" for made in (project, plain)]
    assert configs[0].read_bytes() == configs[1].read_bytes()
    assert set(states(project.build()).values()) == {"unchanged"}
    edit_tensor(project.source_file("e1"), A, 70, 9.0)
    report = project.build().outputs["final"]
    assert report.blocks["computed"] + report.blocks["copied"] <= 5  # not those of the other tensors
    assert project.raw("final") == one_after_the_other(project, root / "changed").raw("final")


@pytest.mark.parametrize("name", every(RECIPES))
def test_every_operator_takes_a_stage_for_an_expert_and_for_a_base(tmp_path, name):
    check(staged(tmp_path / "project", with_stages(RECIPES[name])), tmp_path)


@pytest.mark.parametrize("name", SLICES)
def test_slices_take_layers_of_stages(tmp_path, name):
    recipe = {"operator": "passthrough", "slices": SLICES[name]}
    project = staged(tmp_path / "project", recipe)
    check(project, tmp_path)


@pytest.mark.parametrize("recipe", [merged("stage", "e3"), merged("lora", "e3", base="other"), merged("lora", "other")])
def test_adapters_are_merged_into_a_stage_and_onto_one(tmp_path, recipe):
    shapes = {"model.layers.0.a.weight": (16, 16), "model.layers.1.b.weight": (16, 16)}
    project = staged(tmp_path / "project", recipe, shapes)
    add_adapter(project, "lora", factors(7, "model.layers.1.b", 16, 16))
    project.set_output("stage", merged("lora", "e1", publish=False))
    project.build()
    assert project.raw("final") == one_after_the_other(project, tmp_path / "apart").raw("final")
    edit_tensor(project.source_file("e1"), "model.layers.0.a.weight", 0, 9.0)
    report = project.build().outputs["final"]
    assert report.blocks["computed"] <= 4
    assert project.raw("final") == one_after_the_other(project, tmp_path / "changed").raw("final")
