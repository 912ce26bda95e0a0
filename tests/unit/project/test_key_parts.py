"""Why a tensor was rebuilt, would be, or was reused: the first part of its action key that differs, named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.budgets import percent
from support.checkpoints import random_tensors
from support.projects import SmallProject, edit_tensor

from mergepipe.digest import content_digest, sampled_pin
from mergepipe.mergefile.problems import key_path
from mergepipe.project.budgets import PENDING
from mergepipe.project.explained import parsed_path
from mergepipe.project.key_parts import BuildParts, Change, ParamSet, TensorParts, first_change, shortened

SHAPES = {"model.norm.weight": (16,)} | {f"model.layers.{n}.mlp.weight": (24, 16) for n in range(2)}
NORM, FIRST, SECOND = "model.norm.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight"


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "math", "code")):
        project.add_source(name, random_tensors(seed, SHAPES))
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["math", "code"]})
    return project


def state(project, tensor=FIRST):
    """Return what became of a tensor, and why, in words without the digits of digests."""
    build = project.open().explain("m", tensor, measure=False).build
    return build.state, build.change


def changed(project, **recipe):
    project.set_output("m", project.outputs["m"] | recipe)


def both(project, tensor=FIRST):
    """Return what is said before a build and after it; the part that differs is the same."""
    before = state(project, tensor)
    project.build()
    after = state(project, tensor)
    assert before[1] == after[1]
    return before[0], after[0], after[1]


def test_before_and_after_the_first_build(project):
    assert state(project) == ("unbuilt", Change(part="first"))
    project.build()
    assert state(project) == ("rebuilt", Change(part="first"))
    project.build()  # nothing changed: the record stays that of the build that made it
    assert state(project)[1].text() == "first build"


def test_a_weight_is_named_with_its_expert_and_both_values(project):
    project.build()
    changed(project, experts=[{"source": "math", "weight": 0.6}, "code"])
    assert both(project)[:2] == ("stale", "rebuilt")
    assert state(project)[1].text() == "weight of `math` 1 -> 0.6"


def test_a_rule_changes_the_tensors_that_it_is_for(project):
    project.build()
    changed(project, rules=[{"layers": "1..2", "params": {"lambda": 0.5}}])
    assert both(project, SECOND) == (
        "stale", "rebuilt", Change(part="parameter", parameter="lambda", before="1", after="0.5"),
    )  # fmt: skip
    assert state(project, FIRST) == ("reused", Change(part="none"))


def test_an_input_is_named_with_both_digests(project):
    project.build()
    edit_tensor(project.source_file("math"), FIRST, 5, 2.5)
    unread = state(project)
    assert (unread[0], unread[1].part, unread[1].subject) == ("stale", "unknown", "math")
    project.build()
    found = state(project)[1]
    assert (found.part, found.subject) == ("input", "math")
    assert found.text() == f"input `math` changed: {found.before[:15]} -> {found.after[:15]}"
    assert state(project, NORM) == ("reused", Change(part="none"))


def test_an_expert_more_is_an_input_more(project):
    project.build()
    project.add_source("legal", random_tensors(9, SHAPES))
    changed(project, experts=["math", "code", "legal"])
    project.build()
    found = state(project)[1]
    assert (found.part, found.subject, found.before) == ("input", "legal", None)
    assert found.text().startswith("input `legal` is new: b3:")


def test_the_order_of_experts_is_a_part(project):
    project.build()
    changed(project, experts=["code", "math"])
    assert both(project)[2] == Change(part="recipe", before="base, math, code", after="base, code, math")


def test_another_operator_comes_first(project):
    project.build()
    changed(project, operator="ties", params={"density": 0.5})
    found = both(project)[2]
    assert found.text() == "operator changed: task_arithmetic (version 1) -> ties (version 1)"


def test_a_budget_shows_in_the_blocks_that_are_read(project):
    project.build()
    changed(project, budget=percent(50))
    project.build()
    parts = {state(project, tensor)[1].part for tensor in SHAPES}
    assert "access" in parts
    texts = {state(project, tensor)[1].text() for tensor in SHAPES}
    assert "blocks that the budget reads changed: now some are left out" in texts


def test_a_budget_that_grows_tells_at_which_levels_blocks_are_read_now(project):
    """Also with the record of a version that kept no levels: then nothing that could not be looked up is said."""
    changed(project, budget=percent(25))
    project.build()
    changed(project, budget=percent(60))
    assert both(project, NORM)  # the same before and after
    moves = [found for found in (state(project, tensor)[1] for tensor in SHAPES) if found.detail]
    assert moves, "some tensor is read in part by both"
    for found in moves:
        assert found.text() == f"blocks that the budget reads changed: {found.detail}"
    levels = [[bytes([0, 3, 3, 255]), None], [bytes([255, 5, 5, 255]), bytes([255, 255, 255, 0])]]
    one, other = (replace(made([], text), tensors={"t": with_levels(made([], text), some)})
                  for text, some in zip(("a", "b"), levels, strict=True))  # fmt: skip
    found = first_change(one, other, "t")
    assert found.detail == "2 blocks from level 3 to level 5, 1 from left out to exact, 1 from exact to left out"
    assert first_change(made([], "a"), made([], "b"), "t").text() == "blocks that the budget reads changed"


def with_levels(parts, levels):
    return replace(parts.tensors["t"], levels=levels)


def parts(project):
    return {state(project, tensor)[1].part for tensor in SHAPES}


def last(project):
    return project.open().explain("m", measure=False).summary.last


def sampled(share):
    return percent(share) | {"stats": "sample"}


@pytest.mark.parametrize("before", [percent(50), {"max_error": 0.7, "precision": "blocks"}, sampled(60)])
@pytest.mark.parametrize("after", [None, sampled(25), percent(25)])
def test_what_a_budget_knows_of_inputs_is_no_change_of_them(project, before, after):
    """A fingerprint stands where a digest stood, or the digest of a part: the content is the same."""
    for budget in (before, after):
        project.set_output("m", {k: v for k, v in project.outputs["m"].items() if k != "budget"})
        changed(project, **({"budget": budget} if budget else {}))
        found = [*reasons(project), *(project.build() and last(project).reasons)]
    assert [reason for reason in found if not reason.startswith("the budget changed: ")] in ([], [PENDING])
    assert parts(project) <= {"none", "access", "samples"}


def test_blocks_that_come_from_the_cache_are_not_rebuilt(project):
    project.build()
    changed(project, budget=sampled(25))
    project.build()
    assert last(project).tensors["rebuilt"] > 0
    del project.outputs["m"]["budget"]
    changed(project)
    built = project.build_one("m")
    assert built.blocks["computed"] == 0
    assert last(project).tensors == {"rebuilt": 0, "reused": 3}
    states = {state(project, tensor)[0] for tensor in SHAPES}
    assert states == {"reused"}
    assert "access" in parts(project), "why its key changed is told all the same"


def test_a_source_that_changed_with_the_budget_is_named(project):
    project.build()
    changed(project, budget=sampled(25))
    assert reasons(project) == ("the budget changed: full -> 25% by samples",)
    edit_tensor(project.source_file("math"), FIRST, 5, 2.5)
    assert reasons(project) == (
        "source `math` changed on disk, or was not read before",
        "the budget changed: full -> 25% by samples",
    )
    changed(project, budget=percent(50))
    project.build()
    edit_tensor(project.source_file("code"), FIRST, 5, 2.5)
    other = project.outputs["m"]
    project.set_output("n", other)
    project.build("n")  # now its digest is known, and no samples of it
    changed(project, budget=sampled(25))
    assert [reason.partition(": ")[0] for reason in reasons(project)] == [
        "source `code` has other content",
        "the budget changed",
    ]


def test_an_input_known_in_another_way_is_no_other_input():
    """A tensor all of whose blocks a budget reads, by samples and not."""
    whole, part = digest("whole"), sampled_pin(digest("part"))
    first, second = (made([("base", "b", digest("b")), ("expert", "e", pin)]) for pin in (whole, part))
    found = first_change(first, second, "t")
    assert found == Change(part="samples", subject="e", before="read whole", after="known by samples")
    assert found.text() == "the budget changed: input `e` was read whole, and is known by samples now"
    assert first_change(second, first, "t").after == "read whole"
    other = made([("base", "b", digest("b")), ("expert", "e", sampled_pin(digest("other")))])
    assert first_change(second, other, "t").part == "input", "the same blocks are read, and they are others"
    moved = made([("base", "b", digest("b")), ("expert", "e", sampled_pin(digest("other")))], "more")
    assert first_change(second, moved, "t").part == "access"


def made(inputs, access="some"):
    tensor = TensorParts(operator="x", code=b"", params=0, inputs=inputs, access=digest(access), form="F32 4")
    return BuildParts(geometry=1, params=[ParamSet(values={}, experts=[])], tensors={"t": tensor})


def digest(text):
    return content_digest(text.encode())


def test_the_dtype_is_part_of_the_form(project):
    project.build()
    changed(project, write={"dtype": "bfloat16"})
    assert both(project)[2] == Change(
        part="form", before="F32 24 x 16, computed in float32", after="BF16 24 x 16, computed in float32"
    )


def test_what_lies_beside_the_weights_changes_no_tensor(project):
    project.build()
    before = project.open().explain("m", FIRST, measure=False)
    changed(project, write={"shard_size": "1 KB"})
    project.build()
    found = project.open().explain("m", FIRST, measure=False)
    assert (found.build.state, found.digest) == ("reused", before.digest)
    summary = project.open().explain("m", measure=False).summary
    assert summary.last.reasons[0].startswith("the way it is written (dtype, shard size, tokenizer) changed")
    assert summary.last.tensors == {"rebuilt": 0, "reused": 3}


def test_a_record_without_parts_says_that_it_does_not_know(project, monkeypatch):
    """A cache that an earlier version wrote."""
    import mergepipe.project.publication as publication
    from mergepipe.project.facts import encode_published

    monkeypatch.setattr(
        publication, "encode_published", lambda *args: encode_published(*args[:-2], None, args[-1])
    )
    project.build()
    assert state(project) == ("rebuilt", Change(part="recipe"))
    assert project.open().report(["m"]).outputs["m"].tensors[0].why is None


# --- status -----------------------------------------------------------------------------------------------------------


def reasons(project):
    return project.open().status().outputs["m"].reasons


def test_status_names_what_was_declared_differently(project):
    project.build()
    changed(project, experts=[{"source": "math", "weight": 0.25}, "code"], params={"lambda": 0.5})
    assert reasons(project) == (
        "weights, parameters or rules changed: `lambda` none -> 0.5, weight of `math` none -> 0.25",
    )


def test_status_counts_what_it_does_not_name(project):
    project.build()
    rules = [{"match": f"*.{n}.*", "params": {"lambda": 0.5}} for n in range(2)]
    changed(project, rules=rules, params={"lambda": 0.5})
    (reason,) = reasons(project)
    assert reason.startswith("weights, parameters or rules changed: `lambda` none -> 0.5, rules[0]")
    assert reason.endswith("and 2 more")


def test_status_names_operator_budget_and_form(project):
    project.build()
    changed(project, operator="linear", budget=percent(25))
    assert reasons(project)[0] == "which blocks its budget reads is not known yet" or len(reasons(project)) == 2
    changed(project, operator="linear", budget=percent(100), write={"dtype": "float16"})
    found = reasons(project)
    assert 'the operator or its version changed: "task_arithmetic" -> "linear"' in found
    assert 'the way it is written (dtype, shard size, tokenizer) changed: `dtype` none -> "float16"' in found


def test_status_names_a_source_with_both_digests(project):
    project.build()
    other = project.outputs["m"]
    edit_tensor(project.source_file("math"), FIRST, 5, 2.5)
    project.set_output("n", other)
    project.build("n")  # now the content is known, and `m` is not built from it yet
    (reason,) = reasons(project)
    head, _, digests = reason.partition(": ")
    assert head == "source `math` has other content"
    before, after = digests.split(" -> ")
    assert before != after
    assert all(digest.startswith("b3:") and len(digest) == 15 for digest in (before, after))


def test_what_the_mergefile_says_otherwise_of_a_source_is_named(project):
    project.build()
    project.add_source("math", random_tensors(1, SHAPES), path="models/math-2")
    project.add_source("docs", random_tensors(7, SHAPES))
    changed(project, experts=["math", "code", {"source": "docs", "weight": 0.25}])
    found = (
        "source `math` is declared otherwise: path models/math -> models/math-2",
        "source `docs` is new",
        "weights, parameters or rules changed: experts math, code -> math, code, docs, weight of `docs` 0.25",
    )
    assert reasons(project) == found
    project.build()
    assert reasons(project) == ()
    assert tuple(last(project).reasons) == found


# --- texts ------------------------------------------------------------------------------------------------------------


def test_only_whole_digests_are_shortened():
    digest = "b3:" + "0123456789abcdef" * 4
    assert shortened(digest) == "b3:0123456789ab"
    assert [shortened(text) for text in (None, "b3:12", "float32")] == [None, "b3:12", "float32"]


NAMES = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.one_of(st.integers(0, 99), NAMES), min_size=1, max_size=5))
def test_a_key_path_can_be_read_again(parts):
    path = ("outputs", *parts)
    assert parsed_path(key_path(path)) == path
