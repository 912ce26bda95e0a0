"""Differences of two locks: complete, in a stable order, with the key path, and short for people."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.lockfile.samples import ASSISTANT, BASE, BLEND, CODE, LOCK, MATH, SLICED, STACK, digest, locks

from mergepipe.digest import format_digest, sampled_pin
from mergepipe.lockfile.compare import DifferenceKind, compare_locks, declared_differences
from mergepipe.lockfile.compare_text import render_differences
from mergepipe.lockfile.records import (
    UNKNOWN_DIGEST,
    LockedExpert,
    LockedFile,
    LockedRule,
    LockedSideFile,
    LockedTensor,
    Lockfile,
)
from mergepipe.lockfile.writer import render_lock

PATH = Path("Mergefile.lock")


def with_output(**changes):
    return dataclasses.replace(LOCK, outputs=(dataclasses.replace(ASSISTANT, **changes), BLEND))


def with_math(**changes):
    return dataclasses.replace(LOCK, sources=(BASE, CODE, dataclasses.replace(MATH, **changes)))


def facts(differences):
    return [(difference.entry, difference.old, difference.new) for difference in differences]


@settings(deadline=None)
@given(locks, locks)
def test_locks_differ_exactly_where_their_texts_do(one, other):
    assert compare_locks(one, one) == ()
    assert (compare_locks(one, other) == ()) == (render_lock(one) == render_lock(other))


@settings(deadline=None)
@given(locks, st.data())
def test_a_change_of_any_one_field_is_a_difference(lock, data):
    records = [("sources", index) for index in range(len(lock.sources))]
    records += [("outputs", index) for index in range(len(lock.outputs))]
    other = data.draw(locks)
    if not records or not other.sources or not other.outputs:
        return
    part, index = data.draw(st.sampled_from(records))
    items = list(getattr(lock, part))
    field = data.draw(st.sampled_from([f.name for f in dataclasses.fields(items[index]) if f.name != "name"]))
    items[index] = dataclasses.replace(items[index], **{field: getattr(getattr(other, part)[0], field)})
    changed = dataclasses.replace(lock, **{part: tuple(items)})
    assert (compare_locks(lock, changed) == ()) == (render_lock(lock) == render_lock(changed))


@pytest.mark.parametrize(
    ("new", "entry", "old_text", "new_text"),
    [
        (dataclasses.replace(LOCK, geometry=2), "geometry", "1", "2"),
        (
            with_math(digest=digest("other")),
            "sources.math.digest",
            format_digest(MATH.digest),
            format_digest(digest("other")),
        ),
        (with_math(location={"path": "elsewhere"}), "sources.math.path", '"models/math"', '"elsewhere"'),
        (with_math(tensors=5), "sources.math.tensors", "4", "5"),
        (with_math(bytes=5), "sources.math.bytes", "3408896", "5"),
        (with_output(path="x"), "outputs.assistant.path", '"build/assistant"', '"x"'),
        (with_output(operator="sce"), "outputs.assistant.operator", '"ties"', '"sce"'),
        (with_output(operator_version=3), "outputs.assistant.operator_version", "2", "3"),
        (with_output(numerics="float64"), "outputs.assistant.numerics", '"float32"', '"float64"'),
        (with_output(base=None), "outputs.assistant.base", '"base"', None),
        (with_output(budget="25%"), "outputs.assistant.budget", '"full"', '"25%"'),
        (with_output(params={**ASSISTANT.params, "lambda": 1}), "outputs.assistant.params.lambda", "1.0", "1"),
        (with_output(params={**ASSISTANT.params, "a.b": "x"}), 'outputs.assistant.params."a.b"', None, '"x"'),
        (with_output(write={**ASSISTANT.write, "dtype": "F32"}), "outputs.assistant.write.dtype", '"BF16"', '"F32"'),
        (
            with_output(sources={**ASSISTANT.sources, "math": digest("x")}),
            "outputs.assistant.sources.math",
            format_digest(MATH.digest),
            format_digest(digest("x")),
        ),
        (
            with_output(experts=(ASSISTANT.experts[0], LockedExpert(source="code", params={"density": 0.4}))),
            "outputs.assistant.experts[1].weight",
            "[0.2, 0.6]",
            None,
        ),
        (
            with_output(experts=tuple(reversed(ASSISTANT.experts))),
            "outputs.assistant.experts",
            "math, code",
            "code, math",
        ),
        (
            with_output(expert_bytes_planned=1),
            "outputs.assistant.expert_bytes_planned",
            "6162432",
            "1",
        ),
        (with_output(bound={**ASSISTANT.bound, "absolute": 0.5}), "outputs.assistant.bound.absolute", "0.0", "0.5"),
        (
            with_output(shards=tuple(reversed(ASSISTANT.shards))),
            "outputs.assistant.shards",
            "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors",
            "model-00002-of-00002.safetensors, model-00001-of-00002.safetensors",
        ),
        (
            with_output(side_files=ASSISTANT.side_files[:1]),
            'outputs.assistant.side_files."model.safetensors.index.json"',
            format_digest(digest("index")),
            None,
        ),
        (
            with_output(side_files=(*ASSISTANT.side_files, LockedSideFile(name="vocab", digest=digest("v")))),
            "outputs.assistant.side_files.vocab",
            None,
            format_digest(digest("v")),
        ),
    ],
)
def test_one_change_is_one_difference_with_its_key_path(new, entry, old_text, new_text):
    (difference,) = compare_locks(LOCK, new)
    assert (difference.entry, difference.old, difference.new) == (entry, old_text, new_text)
    assert difference.reason
    (back,) = compare_locks(new, LOCK)
    assert (back.entry, back.old, back.new) == (entry, new_text, old_text)


def test_a_rule_is_compared_fact_by_fact():
    first, second, third = ASSISTANT.rules
    rules = (
        dataclasses.replace(first, experts={"math": {"weight": 0.5}}),
        dataclasses.replace(second, match=("lm_head.*",)),
        dataclasses.replace(third, layers=None, experts={"code": {"weight": 2.0}}),
        LockedRule(match=("x",), layers="0..1", params={"density": 1.0}, experts={"math": {}}),
    )
    assert facts(compare_locks(LOCK, with_output(rules=rules))) == [
        ("outputs.assistant.rules[0].experts.math.weight", "0.9", "0.5"),
        ("outputs.assistant.rules[1].match", '["lm_head.*", "*.embed_tokens.*"]', '["lm_head.*"]'),
        ("outputs.assistant.rules[2].experts.code.weight", None, "2.0"),
        ("outputs.assistant.rules[3].match", None, '["x"]'),
        ("outputs.assistant.rules[3].layers", None, '"0..1"'),
        ("outputs.assistant.rules[3].params.density", None, "1.0"),
        ("outputs.assistant.rules[3].experts.math", None, "{}"),
        ("outputs.assistant.rules[2].layers", '"8..16"', None),
        ("outputs.assistant.rules[2].experts.code", "{}", None),
    ]


def test_a_slice_is_compared_fact_by_fact():
    first, second = STACK.slices
    math, code = second.experts
    slices = (
        dataclasses.replace(first, layers="0..6"),
        dataclasses.replace(
            second,
            operator="linear",
            operator_version=2,
            base=None,
            base_layers=None,
            experts=(math, dataclasses.replace(code, layers="4..12")),
            params={},
            rules=(dataclasses.replace(second.rules[0], params={"lambda": 2.0}),),
        ),
        first,
    )
    changed = dataclasses.replace(SLICED, outputs=(dataclasses.replace(STACK, slices=slices),))
    assert facts(compare_locks(SLICED, changed)) == [
        ("outputs.stack.slices[0].layers", '"0..8"', '"0..6"'),
        ("outputs.stack.slices[1].operator", '"task_arithmetic"', '"linear"'),
        ("outputs.stack.slices[1].operator_version", "1", "2"),
        (
            "outputs.stack.slices[1].experts[1]",
            '{ source = "code", layers = "0..8", weight = 0.3 }',
            '{ source = "code", layers = "4..12", weight = 0.3 }',
        ),
        ("outputs.stack.slices[1].rules[0].params.lambda", "1.0", "2.0"),
        ("outputs.stack.slices[2].layers", None, '"0..8"'),
        ("outputs.stack.slices[2].experts[0]", None, '{ source = "base" }'),
        ("outputs.stack.slices[1].base", '"base"', None),
        ("outputs.stack.slices[1].base_layers", '"4..12"', None),
        ("outputs.stack.slices[1].params.lambda", "[0.0, 0.5]", None),
    ]
    (version,) = [d for d in compare_locks(SLICED, changed) if d.entry.endswith("operator_version")]
    assert version.reason == "this mergepipe computes the operator differently"


def test_an_expert_put_in_front_leaves_the_others_alone():
    experts = (LockedExpert(source="chat", params={"weight": 1.0}), ASSISTANT.experts[0], ASSISTANT.experts[1])
    assert facts(compare_locks(LOCK, with_output(experts=experts))) == [
        ("outputs.assistant.experts", "math, code", "chat, math, code")
    ]
    experts = (experts[0], LockedExpert(source="math", params={"weight": 0.1}), experts[2])
    assert facts(compare_locks(LOCK, with_output(experts=experts)))[1:] == [
        ("outputs.assistant.experts[1].weight", "1.0", "0.1")
    ]


def test_the_order_of_tensors_in_a_lock_is_no_difference():
    assert compare_locks(LOCK, with_output(tensors=tuple(reversed(ASSISTANT.tensors)))) == ()


def test_files_of_a_source_are_marked_as_layout():
    (difference,) = compare_locks(LOCK, with_math(files=(LockedFile(name="model.safetensors", bytes=3_409_281),)))
    assert difference.entry == 'sources.math.files."model.safetensors"'
    assert difference.kind is DifferenceKind.LAYOUT
    assert "same tensors" in difference.reason
    both = compare_locks(LOCK, with_math(files=(), digest=digest("other")))
    assert [difference.kind for difference in both] == [DifferenceKind.SOURCE, DifferenceKind.LAYOUT]
    assert "same tensors" not in both[1].reason


def test_without_an_old_lock_everything_is_new():
    assert facts(compare_locks(None, LOCK)) == [
        ("sources.base", None, format_digest(BASE.digest)),
        ("sources.code", None, format_digest(CODE.digest)),
        ("sources.math", None, format_digest(MATH.digest)),
        ("outputs.assistant", None, '"ties"'),
        ("outputs.blend", None, '"linear"'),
    ]


def test_what_is_gone_from_the_mergefile_is_said_to_be():
    differences = compare_locks(LOCK, Lockfile(geometry=1, sources=(BASE, CODE), outputs=(ASSISTANT,)))
    assert facts(differences) == [
        ("sources.math", format_digest(MATH.digest), None),
        ("outputs.blend", '"linear"', None),
    ]
    assert all("no longer" in difference.reason for difference in differences)


def test_sources_come_before_declarations_and_these_before_results():
    new = Lockfile(
        geometry=2,
        sources=(BASE, CODE, dataclasses.replace(MATH, digest=digest("x"), files=())),
        outputs=(
            dataclasses.replace(ASSISTANT, digest=digest("y"), budget="1%", tensors=ASSISTANT.tensors[1:]),
            dataclasses.replace(BLEND, digest=digest("z"), path="x"),
        ),
    )
    assert [difference.entry for difference in compare_locks(LOCK, new)] == [
        "geometry",
        "sources.math.digest",
        'sources.math.files."model.safetensors"',
        "outputs.assistant.budget",
        "outputs.blend.path",
        "outputs.assistant.digest",
        'outputs.assistant.tensors."lm_head.weight"',
        "outputs.blend.digest",
    ]


def test_a_declared_output_has_no_results():
    declared = ASSISTANT.declared()
    assert declared == dataclasses.replace(BLEND, **{f: getattr(ASSISTANT, f) for f in DECLARED}).declared()
    assert not declared.tensors
    assert not declared.shards
    assert declared.digest == UNKNOWN_DIGEST


DECLARED = (
    *("name", "path", "operator", "operator_version", "numerics", "base", "experts", "params", "rules", "budget"),
    *("write", "sources"),
)


def test_declared_differences_leave_results_out():
    new = dataclasses.replace(LOCK, outputs=(ASSISTANT.declared(), BLEND.declared()))
    assert declared_differences(LOCK, new) == ()
    assert len(compare_locks(LOCK, new)) > 0
    new = dataclasses.replace(LOCK, outputs=(dataclasses.replace(ASSISTANT.declared(), operator="sce"), BLEND))
    assert facts(declared_differences(LOCK, new)) == [("outputs.assistant.operator", '"ties"', '"sce"')]


def test_digests_that_are_not_known_yet_are_not_compared():
    unknown = dataclasses.replace(MATH, digest=UNKNOWN_DIGEST)
    output = dataclasses.replace(ASSISTANT.declared(), sources={**ASSISTANT.sources, "math": UNKNOWN_DIGEST})
    new = Lockfile(geometry=1, sources=(BASE, CODE, unknown), outputs=(output, BLEND))
    assert declared_differences(LOCK, new) == ()


def test_an_unknown_digest_of_something_new_is_a_difference():
    unknown = dataclasses.replace(MATH, name="chat", digest=UNKNOWN_DIGEST)
    output = dataclasses.replace(ASSISTANT, sources={**ASSISTANT.sources, "chat": UNKNOWN_DIGEST})
    other = dataclasses.replace(BLEND, name="other", sources={"chat": UNKNOWN_DIGEST})
    new = Lockfile(geometry=1, sources=(*LOCK.sources, unknown), outputs=(output, BLEND, other))
    expected = [
        ("sources.chat", None, "unknown"),
        ("outputs.assistant.sources.chat", None, "unknown"),
        ("outputs.other", None, '"linear"'),
    ]
    assert facts(declared_differences(LOCK, new)) == expected
    assert len(declared_differences(None, new)) == 7


def test_no_difference_is_said_so():
    assert render_differences((), PATH) == "`Mergefile.lock` is up to date"


def test_differences_are_shown_with_short_digests_and_tensors_in_one_line():
    tensors = tuple(
        LockedTensor(name=tensor.name, digest=digest("other"), read=tensor.read, total=tensor.total)
        for tensor in ASSISTANT.tensors
    )
    output = dataclasses.replace(ASSISTANT, tensors=tensors, params={"lambda": 0.5, "normalize": True})
    new = Lockfile(
        geometry=1, sources=(BASE, CODE, dataclasses.replace(MATH, digest=digest("x"))), outputs=(output, BLEND)
    )
    assert render_differences(compare_locks(LOCK, new), PATH).splitlines() == [
        "`Mergefile.lock` would change in 7 entries",
        f"  sources.math.digest: b3:{MATH.digest.hex()[:12]} -> b3:{digest('x').hex()[:12]} (its content changed)",
        "  outputs.assistant.params.lambda: 1.0 -> 0.5 (declared differently)",
        "  outputs.assistant.params.seed: 7 -> none (declared differently)",
        (
            "  outputs.assistant.tensors: 4 tensors: `lm_head.weight`, `model.layers.0.mlp.up_proj.weight`, "
            "`model.layers.10.self_attn.q_proj.weight` and 1 more (the result differs)"
        ),
    ]


def test_a_single_tensor_is_shown_with_its_values():
    (tensor, *rest) = ASSISTANT.tensors
    new = with_output(tensors=(dataclasses.replace(tensor, read=3), *rest))
    text = render_differences(compare_locks(LOCK, new), PATH)
    short = f"b3:{tensor.digest.hex()[:12]}"
    assert text.endswith(f'tensors."lm_head.weight": {short} 4/4 -> {short} 3/4 (the result differs)')


def test_tensors_of_two_outputs_do_not_share_a_line():
    new = dataclasses.replace(LOCK, outputs=tuple(dataclasses.replace(output, tensors=()) for output in LOCK.outputs))
    lines = render_differences(compare_locks(LOCK, new), PATH).splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        "  outputs.assistant.tensors",
        '  outputs.blend.tensors."model.norm.weight"',
    ]


def test_long_lists_are_cut_and_counted():
    params = {f"p{index:02}": index for index in range(30)}
    differences = compare_locks(with_output(params={}), with_output(params=params))
    lines = render_differences(differences, PATH, limit=5).splitlines()
    assert len(lines) == 7
    assert lines[-1] == "  and 25 more differences"
    assert len(render_differences(differences, PATH).splitlines()) == 22


def test_a_difference_is_json_ready():
    (difference,) = compare_locks(LOCK, dataclasses.replace(LOCK, geometry=2))
    assert difference.as_json() == {
        "entry": "geometry",
        "old": "1",
        "new": "2",
        "reason": "blocks are cut differently",
    }


def test_a_pin_of_another_kind_is_not_said_to_be_other_content():
    fingerprint = sampled_pin(digest("samples of math"))
    one = with_math(digest=fingerprint)
    assistant = dataclasses.replace(ASSISTANT, sources={**ASSISTANT.sources, "math": fingerprint})
    one = dataclasses.replace(one, outputs=(assistant, BLEND))
    entries = ["sources.math.digest", "outputs.assistant.sources.math"]
    for old, new, reason in (
        (LOCK, one, "it is known by samples now"),
        (one, LOCK, "all of its content is known now"),
    ):
        assert [(d.entry, d.reason) for d in compare_locks(old, new)] == [(entry, reason) for entry in entries]
