"""The checkpoint that an output will be is the one that is opened when it is there."""

import pytest
from support.checkpoints import random_tensors
from support.projects import SmallProject

from mergepipe.checkpoints.checkpoint import open_checkpoint
from mergepipe.project.gather import select_outputs, with_stages
from mergepipe.project.stages import Plans

SHAPES = {
    "model.layers.2.w": (16, 16),
    "model.layers.10.w": (16, 16),
    "model.scale": (),
    "model.empty": (0, 4),
    "model.odd": (7,),
}
CONFIG = {"architectures": ["M"], "torch_dtype": "bfloat16", "rope": [1.0, float("inf")]}


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, (name, dtype) in enumerate([("base", "bfloat16"), ("e1", "float32"), ("e2", "float16")]):
        project.add_source(name, random_tensors(seed, SHAPES, dtype), config=CONFIG)
    return project


def merged(*experts, **entries):
    return {"operator": "linear", "experts": list(experts)} | entries


def plans_of(project, *names) -> Plans:
    opened = project.open()
    return opened._plans(select_outputs(opened.mergefile, names))


WRITES = [{}, {"shard_size": 300}, {"dtype": "float32"}, {"dtype": "float16", "shard_size": 1}]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("definer", ["base", "e1"])
def test_a_planned_checkpoint_is_what_is_opened_once_it_is_published(project, write, definer):
    project.set_output("stage", merged(definer, "e2", write=write))
    project.set_output("final", merged("stage", "e1"))
    planned = plans_of(project).stages["stage"].checkpoint
    project.build("stage")
    opened = open_checkpoint(project.folder("stage"), label="stage")
    assert list(planned.tensors) == list(opened.tensors)
    assert planned.tensors == opened.tensors
    assert planned.config == opened.config
    assert (planned.label, planned.is_folder, planned.nbytes) == (opened.label, opened.is_folder, opened.nbytes)
    facts = [(file.name, file.identity.size, file.header_size, file.header_digest) for file in opened.files]
    assert [(f.name, f.identity.size, f.header_size, f.header_digest) for f in planned.files] == facts


def test_plans_come_in_levels_and_each_behind_what_it_is_made_from(project):
    project.set_output("last", merged("middle", "one", write={"tokenizer": "two"}))
    project.set_output("middle", merged("one", "e1"))
    project.set_output("one", merged("base", "e1"))
    project.set_output("two", merged("base", "e2"))
    project.set_output("apart", merged("e2"))
    plans = plans_of(project)
    assert [plan.output.name for plan in plans.plans] == ["one", "middle", "two", "last", "apart"]
    levels = [[plan.output.name for plan in level] for level in plans.levels()]
    assert levels == [["one", "two", "apart"], ["middle"], ["last"]]
    assert set(plans.stages) == {"one", "middle", "two"}
    assert plans.stages_of(plans.plans[3]) == ("middle", "one")
    assert [plan.output.name for plan in plans_of(project, "last").plans] == ["one", "middle", "last"]
    assert [plan.output.name for plan in plans_of(project, "two").plans] == ["two"]


def test_a_base_that_an_operator_does_not_use_is_no_reason_to_build_it(project):
    project.set_output("one", merged("base", "e1"))
    project.set_output("copy", {"operator": "passthrough", "base": "one", "experts": ["e2"]})
    plans = plans_of(project, "copy")
    assert [plan.output.name for plan in plans.plans] == ["copy"]
    assert set(plans.stages) == {"one"}


def test_a_long_chain_needs_no_deep_stack(project):
    project.set_output("m0", merged("e1", "e2"))
    for number in range(1, 400):
        project.outputs[f"m{number}"] = merged(f"m{number - 1}")
    project.save()
    mergefile = project.open().mergefile
    ordered = with_stages(mergefile, select_outputs(mergefile, ["m399"]))
    assert [output.name for output in ordered] == [f"m{number}" for number in range(400)]


def test_an_output_that_many_refer_to_is_planned_once(project):
    project.set_output("m0", merged("e1"))
    for number in range(1, 12):  # each is made from all before: 2 ** 11 ways through
        project.outputs[f"m{number}"] = merged(*(f"m{before}" for before in range(number)))
    project.save()
    assert [plan.output.name for plan in plans_of(project, "m11").plans] == [f"m{number}" for number in range(12)]
