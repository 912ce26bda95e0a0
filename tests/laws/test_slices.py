"""Outputs made of slices: their numbers are those of the slow reference, and a change touches its own layers alone."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import random_tensors, read_checkpoint
from support.projects import SmallProject, edit_tensor
from support.quick import examples

from mergepipe.errors import LockDiffersError

DEPTHS = {"base": 6, "a": 6, "b": 5, "c": 4}
OUTSIDE = {"model.embed_tokens.weight": (9, 8), "model.norm.weight": (8,), "lm_head.weight": (9, 8)}
INSIDE = {"self_attn.q_proj.weight": (16, 8), "mlp.up_proj.weight": (8, 8), "input_layernorm.weight": (8,)}


def shapes(depth):
    layers = {f"model.layers.{n}.{name}": shape for n in range(depth) for name, shape in INSIDE.items()}
    return OUTSIDE | layers


def add_sources(project, dtypes=("float32",)):
    for seed, (name, depth) in enumerate(DEPTHS.items()):
        config = {"num_hidden_layers": depth, "layer_types": [f"{name}{n}" for n in range(depth)]}
        tensors = random_tensors(seed, shapes(depth), dtypes[seed % len(dtypes)])
        project.add_source(name, tensors, config=config)


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    add_sources(project)
    return project


STACK = {"operator": "passthrough", "slices": [{"source": "a", "layers": "0..3"}, {"source": "a", "layers": "1..4"}]}
MIXED = {
    "operator": "task_arithmetic",
    "base": "base",
    "params": {"lambda": [0.2, 1.0], "weight": 0.7},
    "slices": [
        {"experts": ["a", {"source": "b", "weight": [0.1, 0.9]}], "layers": "1..4", "params": {"normalize": True}},
        {"source": "c", "layers": "3..4", "operator": "passthrough", "params": {"scale": 0.5}},
        {
            "operator": "linear",
            "layers": "2..6",
            "base": "c",
            "base_layers": "0..4",
            "experts": [{"source": "a", "weight": 0.25}, {"source": "b", "layers": "1..5", "weight": [0.0, 1.0, 0.5]}],
            "rules": [{"match": "*.mlp.*", "experts": {"b": {"weight": 2.0}}}],
        },
        {"experts": [{"source": "b", "layers": "0..2"}, "a"], "layers": "4..6"},
    ],
    "rules": [
        {"layers": "2..6", "match": "*q_proj*", "params": {"weight": [0.5, 1.5], "scale": 2.0}},
        {"match": "lm_head.weight", "experts": {"a": {"weight": -1.0}}},
    ],
}


@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16", "float32", "float16", "float64")])
def test_slices_of_several_operators_ranges_gradients_and_rules_equal_the_reference(tmp_path, dtypes):
    project = SmallProject(tmp_path)
    add_sources(project, dtypes)
    project.set_output("m", MIXED)
    project.build()
    project.check("m")
    assert len(project.tensors("m")) == len(shapes(3 + 1 + 4 + 2))


def test_passthrough_slices_are_the_sources_layers_bit_for_bit_under_other_numbers(project):
    project.set_output("m", STACK)
    project.build()
    made, source = project.raw("m"), {n: t.tobytes() for n, t in read_checkpoint(project.root / "models/a").items()}
    for number, layer in enumerate([0, 1, 2, 1, 2, 3]):
        for name in INSIDE:
            assert made[f"model.layers.{number}.{name}"][2] == source[f"model.layers.{layer}.{name}"]
    assert {name: made[name][2] for name in OUTSIDE} == {name: source[name] for name in OUTSIDE}
    assert len(made) == len(shapes(6))


def test_one_slice_of_all_layers_is_the_output_without_slices(project):
    plain = {"operator": "linear", "params": {"weight": [0.2, 0.9], "normalize": False}}
    project.set_output("plain", plain | {"experts": ["base", "a"]})
    project.set_output("sliced", plain | {"slices": [{"experts": ["base", "a"], "layers": "0..6"}]})
    report = project.build()
    assert project.raw("plain") == project.raw("sliced")
    assert report.outputs["plain"].expert_bytes["full"] == report.outputs["sliced"].expert_bytes["full"]


def test_the_base_at_other_layers_is_an_expert_and_at_its_own_none(project):
    slices = [{"experts": ["a", {"source": "base", "layers": "1..3"}], "layers": "0..2"}]
    recipe = {"operator": "task_arithmetic", "base": "base", "slices": slices, "params": {"normalize": True}}
    project.set_output("moved", recipe)
    project.set_output("same", recipe | {"slices": [{"experts": ["a", "base"], "layers": "0..2"}]})
    project.build()
    project.check("moved")
    project.check("same")


def test_a_build_without_changes_does_nothing_and_a_changed_layer_reruns_its_copies(project):
    slices = [*STACK["slices"], {"experts": ["a", "b"], "layers": "1..3", "operator": "linear"}]
    project.set_output("m", {"operator": "passthrough", "slices": slices})
    first = project.build_one("m")
    assert 0 < first.expert_bytes["read"] <= first.expert_bytes["planned"]
    again = project.build_one("m")
    assert again.state == "unchanged"
    edit_tensor(project.source_file("a"), "model.layers.1.mlp.up_proj.weight", 3, 7.0)
    changed = project.build_one("m")
    project.check("m")
    # Layer 1 of `a` is copied to layers 1 and 3 and merged into layer 6; its tensor has one block.
    assert (changed.blocks["copied"], changed.blocks["computed"]) == (2, 1)
    assert changed.blocks["cached"] == changed.blocks["total"] - 3
    edit_tensor(project.source_file("a"), "model.layers.5.mlp.up_proj.weight", 3, 7.0)
    unused = project.build_one("m")
    assert unused.blocks["cached"] == unused.blocks["total"]


def test_a_layer_that_is_moved_is_found_in_the_cache_only_under_its_name_and_is_right(project):
    project.set_output("m", STACK)
    project.build()
    project.set_output("m", STACK | {"slices": STACK["slices"][::-1]})
    project.build()
    project.check("m")


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        ({"layers": "1..5"}, "outputs.m.slices[1].layers"),
        ({"source": "b"}, "outputs.m.slices[1].experts[0]"),
        ({"params": {"scale": 1.0}}, "outputs.m.slices[1].params.scale"),
        ({"operator": "linear"}, "outputs.m.slices[1].operator"),
    ],
)
def test_a_changed_slice_is_named_by_a_locked_build_and_refused(project, change, entry):
    project.set_output("m", STACK)
    project.build()
    project.build(locked=True)
    project.set_output("m", STACK | {"slices": [STACK["slices"][0], STACK["slices"][1] | change]})
    with pytest.raises(LockDiffersError) as caught:
        project.build(locked=True)
    assert entry in [difference["entry"] for difference in caught.value.facts["differences"]]


def test_the_manifest_says_which_tensor_of_which_source_each_came_from(project):
    project.set_output("m", STACK)
    project.build()
    tensors = {tensor.name: tensor for tensor in project.manifest("m").tensors}
    moved, kept = (tensors[f"model.layers.{n}.mlp.up_proj.weight"].inputs for n in (4, 2))
    assert [(i.source, i.tensor) for i in moved] == [("a", "model.layers.2.mlp.up_proj.weight")]
    assert [(i.source, i.tensor) for i in kept] == [("a", None)]
    assert [part.layers for part in project.manifest("m").output.slices] == ["0..3", "1..4"]


def test_the_config_has_the_number_of_layers_and_what_it_says_of_each(project):
    slices = [{"source": "c", "layers": "2..4"}, STACK["slices"][0]]
    project.set_output("m", {"operator": "passthrough", "slices": slices})
    project.build()
    config = json.loads((project.folder("m") / "config.json").read_text())
    assert config == {"num_hidden_layers": 5, "layer_types": ["c2", "c3", "a0", "a1", "a2"]}


def gradients(low, high):
    return st.floats(low, high, width=32) | st.lists(st.floats(low, high, width=32), min_size=1, max_size=3)


@st.composite
def ranges(draw, source, length):
    start = draw(st.integers(0, DEPTHS[source] - length))
    return f"{start}..{start + length}"


@st.composite
def slices(draw):
    """Slices that any of the sources can give."""
    length = draw(st.integers(1, 4))
    operator = draw(st.sampled_from(["linear", "task_arithmetic", "passthrough"]))
    count = 1 if operator == "passthrough" else draw(st.integers(1, 3))
    names = draw(st.lists(st.sampled_from(list(DEPTHS)), min_size=count, max_size=count, unique=True))
    layers = draw(ranges("c", length))
    key = "scale" if operator == "passthrough" else "weight"
    experts = [{"source": name, "layers": draw(ranges(name, length)), key: draw(gradients(0.5, 1))} for name in names]
    part = {"operator": operator, "layers": layers, "experts": experts}
    if operator == "task_arithmetic" or draw(st.booleans()):
        base = draw(st.sampled_from(list(DEPTHS)))
        part |= {"base": base, "base_layers": draw(ranges(base, length))}
    if operator != "passthrough" and draw(st.booleans()):
        part["params"] = {"normalize": draw(st.booleans())}
    if draw(st.booleans()):
        rule = {"match": "*.mlp.*", "params": {key: draw(gradients(0.5, 1))}}
        part["rules"] = [rule, {"match": "*.norm.*", "experts": {names[0]: {key: 0.25}}}][: 1 + (length == 4)]
    return part


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(parts=st.lists(slices(), min_size=1, max_size=4), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_any_slices_equal_the_reference(tmp_path_factory, parts, dtype):
    project = SmallProject(tmp_path_factory.mktemp("slices"))
    add_sources(project, (dtype,))
    used = {rule["match"] for part in parts for rule in part.get("rules", ())}
    for part in (p for p in parts[:-1] if "*.norm.*" in used and "rules" in p):
        part["rules"] = [rule for rule in part["rules"] if rule["match"] != "*.norm.*"]  # of the last slice alone
    project.set_output("m", {"operator": "passthrough", "slices": parts})
    report = project.build_one("m")
    project.check("m", zero_signs=False)
    assert report.expert_bytes["read"] <= report.expert_bytes["planned"]


def test_a_stack_is_a_stage_like_any_other_and_is_made_of_stages(project):
    project.set_output("half", {"operator": "linear", "experts": ["a", "base"], "publish": False})
    project.set_output("stack", STACK | {"slices": [*STACK["slices"], {"source": "half", "layers": "4..6"}]})
    thirds = [{"experts": ["stack", {"source": "a", "layers": "2..6"}], "layers": "4..8"}]
    project.set_output("m", {"operator": "linear", "slices": thirds})
    project.build()
    project.check("stack")
    project.check("m")
    config = json.loads((project.folder("m") / "config.json").read_text())
    assert config == {"num_hidden_layers": 4, "layer_types": ["a2", "a3", "a4", "a5"]}
