"""Differences told from their causes: complete, attributed, and in as few words as there are groups."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.diffs import NEW, OLD, digest, of_layers, output, source, tensors
from support.quick import examples
from unit.lockfile.samples import LOCK, MANIFEST, SLICED, STAGED, experts, locks, outputs, rules

from mergepipe.checkpoints.layers import LayerMap
from mergepipe.digest import sampled_pin
from mergepipe.lockfile.compare import DifferenceKind, compare_locks
from mergepipe.lockfile.diff import EMPTY_LOCK, diff_sides, manifest_side
from mergepipe.lockfile.diff_groups import module_of, places_of, ranges
from mergepipe.lockfile.diff_params import resolver_of
from mergepipe.lockfile.diff_values import Side
from mergepipe.lockfile.records import LockedExpert, LockedRule, Lockfile
from mergepipe.operators.registry import signatures

NAMES = st.lists(
    st.sampled_from(
        [
            *(f"model.layers.{i}.{m}" for i in range(12) for m in ("mlp.up.weight", "mlp.experts.3.w.weight", "norm")),
            *(f"{part}.block.{i}.q.weight" for part in ("encoder", "decoder") for i in range(3)),
            "lm_head.weight",
            "7.x.weight",
            "weight",
            ".weight",
            "",
        ]
    ),
    unique=True,
)


def side(lock: Lockfile, name: str = "x") -> Side:
    return Side(name=name, kind="lock", lock=lock)


def diff(old: Lockfile, new: Lockfile):
    return diff_sides(side(old), side(new), signatures())


def change(old, new, *sources):
    """Return how one output changed."""
    locked = tuple(sources) or tuple(map(source, ("base", "code", "math")))
    found = diff(*(Lockfile(geometry=1, sources=locked, outputs=(entry,)) for entry in (old, new)))
    return found.outputs[0]


SOURCES = {name: source(name).digest for name in ("base", "code", "math")}
PLAIN = output("merged", SOURCES, tensors("merged"))


def changed(**changes):
    """Return the output with other tensors in two layers, and these changes."""
    return replace(output("merged", SOURCES, tensors("merged", of_layers(range(2), "mlp.up_proj"))), **changes)


def causes(found) -> list[tuple[str, str, int]]:
    return [(cause.kind, cause.name, count) for cause, count in found.causes]


# --- it is complete ------------------------------------------------------------------------------------------------

known_operators = outputs.flatmap(
    lambda o: st.sampled_from(["ties", "linear"]).map(lambda name: replace(o, operator=name))
)
known_locks = st.lists(known_operators, max_size=2, unique_by=lambda o: o.name).map(
    lambda found: Lockfile(geometry=1, sources=(), outputs=tuple(found))
)


@settings(deadline=None, max_examples=examples(60))
@given(locks | known_locks, locks | known_locks)
def test_there_is_a_difference_exactly_where_a_locked_build_sees_one(one, other):
    assert diff(one, one).is_empty
    found = diff(one, other)
    assert found.is_empty == (compare_locks(one, other) == ())
    json.dumps(found.as_json())


@settings(deadline=None, max_examples=examples(60))
@given(known_locks, st.data())
def test_every_tensor_that_differs_has_a_cause_and_is_in_one_group(lock, data):
    entries = []
    for entry in lock.outputs:
        touched = [replace(t, digest=digest("new")) if data.draw(st.booleans()) else t for t in entry.tensors]
        entries.append(replace(entry, tensors=tuple(touched)))
    for found in diff(lock, replace(lock, outputs=tuple(entries))).outputs:
        assert all(tensor.causes for tensor in found.tensors)
        grouped = Counter(group.change for group in found.groups for _ in range(group.count))
        assert grouped == Counter(tensor.change for tensor in found.tensors)
        counts = Counter(index for tensor in found.tensors for index in tensor.causes)
        assert [count for _, count in found.causes] == [counts[i] for i in range(len(found.causes))]


def test_the_order_of_what_is_found_is_that_of_names():
    found = diff(OLD, NEW)
    assert [entry.name for entry in found.sources] == ["code", "extra", "math"]
    assert [entry.name for entry in found.outputs] == ["assistant", "final", "former", "fresh", "plain"]
    assert found.unchanged == ("average",)
    assert diff(OLD, NEW) == found


# --- causes --------------------------------------------------------------------------------------------------------


def test_a_source_of_other_content_is_the_cause():
    new = changed(sources=SOURCES | {"math": digest("math 2")})
    assert causes(change(PLAIN, new)) == [("source", "math", 2)]


def test_a_fingerprint_in_place_of_a_digest_is_no_other_content():
    new = changed(sources=SOURCES | {"math": sampled_pin(digest("math 1"))}, budget="25%")
    assert causes(change(PLAIN, new)) == [("declared", "budget", 2)]
    newer = changed(sources=SOURCES | {"math": sampled_pin(digest("math 2"))})
    old = replace(PLAIN, sources=new.sources)
    assert causes(change(old, newer)) == [("source", "math", 2)]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"operator": "linear"}, "operator"),
        ({"operator_version": 2}, "operator_version"),
        ({"code": {"task_arithmetic": digest("code")}}, "code"),
        ({"numerics": "float64"}, "numerics"),
        ({"base": "code"}, "base"),
        ({"budget": "25%"}, "budget"),
        ({"experts": tuple(reversed(PLAIN.experts))}, "experts"),
        ({"write": PLAIN.write | {"dtype": "bfloat16"}}, "write.dtype"),
    ],
)
def test_what_is_declared_for_the_whole_output_is_a_cause(changes, name):
    assert ("declared", name, 2) in causes(change(PLAIN, changed(**changes)))


def test_what_cannot_change_a_tensor_is_no_cause():
    new = changed(path="elsewhere", write=PLAIN.write | {"shard_size": 1, "tokenizer": "math"})
    assert causes(change(PLAIN, new)) == [("unknown", "unknown", 2)]


def test_a_parameter_is_a_cause_only_where_its_value_differs():
    rule = LockedRule(match=("*.layers.1.*",), layers=None, params={"lambda": 2.0}, experts={"math": {"weight": 0.5}})
    found = change(PLAIN, changed(rules=(rule,)))
    assert causes(found) == [("parameter", "lambda", 1), ("unknown", "unknown", 1)]
    assert [(p.name, p.tensors) for p in found.parameters] == [("lambda", 4)]  # 0.5 is what it was


def test_a_parameter_written_in_another_way_is_no_change_of_values():
    found = change(PLAIN, replace(PLAIN, params={"lambda": 1.0}))
    assert (found.parameters, found.tensors) == ((), ())
    assert [fact.key for fact in found.declared] == ["params.lambda"]


def test_defaults_of_an_operator_that_is_new_are_not_listed():
    new = changed(operator="ties", params={"density": 0.5})
    # Both have `normalize`, with other defaults, so that its value changed.
    assert [p.name for p in change(PLAIN, new).parameters] == ["normalize", "density[math]", "density[code]"]


def test_parameters_of_experts_that_are_new_or_gone_are_no_changes_of_their_own():
    experts = (PLAIN.experts[1], LockedExpert(source="base", params={"weight": 0.25}))
    found = change(PLAIN, changed(experts=experts))
    assert found.parameters == ()
    assert causes(found) == [("declared", "experts", 2)]


def test_a_gradient_is_told_by_layer():
    found = change(PLAIN, replace(PLAIN, params={"lambda": (1.0, 12.0)}))
    (parameter,) = found.parameters
    assert [(group.new, [place.layers for place in group.places]) for group in parameter.groups] == [
        (float(layer + 1), [str(layer)]) for layer in range(1, 12)
    ]
    assert all(place.complete for group in parameter.groups for place in group.places)


def test_without_the_operator_parameters_count_as_a_whole():
    old, new = (replace(entry, operator="my_merge") for entry in (PLAIN, changed(params={"lambda": 2.0})))
    found = change(old, new)
    assert found.parameters is None
    assert causes(found) == [("declared", "parameters", 2)]


def test_a_tensor_that_is_gone_is_not_put_down_to_the_budget():
    gone = replace(output("merged", SOURCES, tensors("merged", {"lm_head.weight": ""})), budget="25%")
    assert causes(change(PLAIN, gone)) == [("unknown", "unknown", 1)]
    assert causes(change(PLAIN, replace(gone, base="math"))) == [("declared", "base", 1)]


def chain(version: int, *touched: str):
    """Return three outputs, each made from the one before, of which some tensors are changed."""
    made, sources = [], {"math": source("math", version).digest}
    for name in ("first", "second", "third"):
        changed = dict.fromkeys(touched, str(version))
        made.append(output(name, sources, tensors(name, changed), experts=(LockedExpert(source="x", params={}),)))
        sources = {name: made[-1].digest, "code": source("code").digest}
    return Lockfile(geometry=1, sources=(source("math", version), source("code")), outputs=tuple(made))


def test_causes_are_followed_through_stages():
    found = diff(chain(1), chain(2, "lm_head.weight", "model.norm.weight"))
    assert [entry.name for entry in found.outputs] == ["first", "second", "third"]
    assert [[(c.name, c.via, n) for c, n in entry.causes] for entry in found.outputs] == [
        [("math", (), 2)],
        [("math", ("first",), 2)],
        [("math", ("first", "second"), 2)],
    ]


def test_a_stage_is_a_cause_only_of_the_tensors_that_it_changed():
    new = chain(2, "lm_head.weight")
    third = replace(new.outputs[2], tensors=tensors("third", {"lm_head.weight": "2", "model.norm.weight": "2"}))
    found = diff(chain(1), replace(new, outputs=(*new.outputs[:2], third))).outputs[2]
    assert causes(found) == [("source", "math", 1), ("unknown", "unknown", 1)]
    third = replace(third, params={"lambda": 2.0})
    found = diff(chain(1), replace(new, outputs=(*new.outputs[:2], third))).outputs[2]
    by_name = {t.name: [found.causes[i][0].name for i in t.causes] for t in found.tensors}
    assert by_name == {"lm_head.weight": ["math", "lambda"], "model.norm.weight": ["lambda"]}


def test_locks_that_go_in_a_circle_are_no_endless_story():
    one = output("one", {"two": digest("a")}, tensors("one"))
    two = output("two", {"one": digest("a")}, tensors("two"))
    new = [
        replace(one, sources={"two": digest("b")}, tensors=tensors("one", {"lm_head.weight": "2"})),
        replace(two, sources={"one": digest("b")}, tensors=tensors("two", {"lm_head.weight": "2"})),
    ]
    found = diff(*(Lockfile(geometry=1, sources=(), outputs=tuple(some)) for some in ((one, two), new)))
    assert all(tensor.causes for entry in found.outputs for tensor in entry.tensors)


def test_other_blocks_are_a_cause():
    found = diff(OLD, replace(OLD, geometry=2))
    assert found.geometry is not None
    assert not found.is_empty


# --- manifests -----------------------------------------------------------------------------------------------------


def with_input(manifest, tensor: str, origin: str, **changes):
    """Return a manifest in which a tensor has another result, and another input from one source."""
    found = []
    for entry in manifest.tensors:
        if entry.name == tensor:
            inputs = tuple(replace(i, digest=digest("other")) if i.source == origin else i for i in entry.inputs)
            entry = replace(entry, inputs=inputs)
        found.append(entry)
    locked = tuple(replace(t, digest=digest("result")) if t.name == tensor else t for t in manifest.output.tensors)
    sources = {**manifest.output.sources, "math": digest("m"), "code": digest("c")}
    return replace(
        manifest, output=replace(manifest.output, tensors=locked, sources=sources, **changes), tensors=tuple(found)
    )


def test_with_manifests_a_tensor_is_put_down_to_its_own_inputs():
    new = with_input(MANIFEST, "lm_head.weight", "code")
    found = diff_sides(manifest_side("a", MANIFEST), manifest_side("b", new), signatures())
    assert causes(found.outputs[0]) == [("source", "code", 1)]
    (tensor,) = found.outputs[0].tensors
    assert (tensor.dtypes, tensor.shapes) == (("BF16", "BF16"), ((1024, 512), (1024, 512)))


def test_outputs_of_other_names_are_compared():
    new = with_input(MANIFEST, "lm_head.weight", "code", name="renamed", path="build/renamed")
    found = diff_sides(manifest_side("a", MANIFEST), manifest_side("b", new), signatures())
    (entry,) = found.outputs
    assert (entry.name, entry.change, len(entry.tensors)) == ("renamed", "changed", 1)


def test_of_a_lock_only_the_output_of_the_manifest_counts():
    lock = side(LOCK)
    assert diff_sides(lock, manifest_side("b", MANIFEST), signatures()).is_empty
    assert diff_sides(manifest_side("b", MANIFEST), lock, signatures()).is_empty
    found = diff_sides(side(SLICED), manifest_side("b", MANIFEST), signatures())
    assert [(entry.name, entry.change) for entry in found.outputs] == [("assistant", "added")]


def test_files_of_sources_count_where_both_sides_have_them():
    bare = replace(LOCK, sources=tuple(replace(s, files=()) for s in LOCK.sources))
    assert diff_sides(side(bare), manifest_side("b", MANIFEST), signatures()).is_empty
    assert not diff_sides(
        side(LOCK), manifest_side("b", replace(MANIFEST, sources=(bare.sources[0],))), signatures()
    ).is_empty
    moved = tuple(replace(s, files=s.files[:1]) for s in MANIFEST.sources)
    found = diff_sides(manifest_side("a", MANIFEST), manifest_side("b", replace(MANIFEST, sources=moved)), signatures())
    assert [fact.kind for entry in found.sources for fact in entry.facts] == [DifferenceKind.LAYOUT]


def test_the_stages_of_a_manifest_are_compared_with_those_of_a_lock():
    found = diff_sides(side(LOCK), manifest_side("b", STAGED), signatures())
    assert found.unchanged == ()
    assert [entry.name for entry in found.outputs] == ["assistant", "blend"]
    assert [fact.key for fact in found.outputs[0].declared] == ["publish", "path"]


def test_against_nothing_everything_is_new():
    empty = Side(name="/dev/null", kind="empty", lock=EMPTY_LOCK)
    found = diff_sides(empty, side(LOCK), signatures())
    assert {entry.change for entry in (*found.sources, *found.outputs)} == {"added"}
    assert found.geometry is None
    assert {e.change for e in diff_sides(side(LOCK), empty, signatures()).outputs} == {"removed"}


# --- words ---------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(NAMES)
def test_every_tensor_is_in_one_place(names):
    places = places_of(names, LayerMap(names))
    assert sum(place.count for place in places) == len(names)
    assert len({place.layers for place in places}) == len(places)


def test_a_place_is_complete_where_it_has_all_tensors():
    names = [f"model.layers.{layer}.{module}.weight" for layer in range(3) for module in ("q", "v")] + [
        "lm_head.weight"
    ]
    layers = LayerMap(names)
    assert [place.complete for place in places_of(names, layers, names)] == [True, True]
    assert [place.complete for place in places_of(names[:4], layers, names)] == [True]
    assert [place.complete for place in places_of(names[1:], layers, names)] == [False, False, True]


@given(st.sets(st.integers(0, 40)))
def test_ranges_say_each_number_once(numbers):
    found = []
    for part in ranges(sorted(numbers)).split(", ") if numbers else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(numbers)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.3.mlp.down_proj.weight", "mlp.down_proj"),
        ("model.layers.3.mlp.down_proj.bias", "mlp.down_proj.bias"),
        ("model.layers.3.mlp.experts.7.w1.weight", "mlp.experts.*.w1"),
        ("lm_head.weight", "lm_head"),
        ("model.layers.3", "model.layers.*"),
    ],
)
def test_modules_are_named_as_people_name_them(name, module):
    assert module_of(name, LayerMap([name, "model.layers.0.mlp.down_proj.weight"])) == module


def test_an_encoder_is_not_a_decoder():
    names = ["encoder.block.0.q.weight", "decoder.block.0.q.weight"]
    assert [module_of(name, LayerMap(names)) for name in names] == ["encoder.block.q", "decoder.block.q"]


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(experts, max_size=3), st.lists(rules, max_size=3))
def test_odd_parameters_of_an_edited_lock_are_not_resolved_or_resolved(found, declared):
    entry = replace(PLAIN, experts=tuple(found), rules=tuple(declared))
    names = [tensor.name for tensor in entry.tensors]
    resolve = resolver_of(entry, (), signatures(), LayerMap(names))
    assert resolve is None or all(isinstance(resolve(name), dict) for name in names[:5])
