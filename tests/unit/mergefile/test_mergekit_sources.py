"""Models by reference: where they are, what they are called, adapters, and documents that use one another."""

from __future__ import annotations

import pytest
from unit.mergefile.mergekit import check, here, imported, nowhere, outputs, problems

from mergepipe.mergefile.mergekit.sources import Found


def linear(*models: str, **keys: str) -> str:
    lines = [f"{key}: {value}" for key, value in keys.items()]
    lines += ["merge_method: linear", "parameters: {weight: 1}", "models:"]
    return "\n".join([*lines, *(f"  - model: {model}" for model in models)]) + "\n"


def sources(text: str, locate=nowhere) -> dict[str, tuple]:
    found = imported(text, locate=locate).mergefile.sources
    return {name: (s.path or s.hub, s.revision, s.on) for name, s in found.items()}


def test_a_model_that_is_not_here_is_a_repository():
    assert sources(linear("org/a", "org/b@main")) == {"a": ("org/a", None, None), "b": ("org/b", "main", None)}


def test_a_model_that_is_here_is_a_path():
    found = imported(linear("org/a@main"), locate=here)
    assert {name: (s.path, s.hub) for name, s in found.mergefile.sources.items()} == {"a": ("models/org/a", None)}
    assert any("a path has no revisions" in note for note in found.notes)
    assert "# `org/a@main`" in found.text


def test_a_path_that_is_not_there_yet_is_said():
    found = imported(linear("./a"), locate=lambda place: Found(path="../a", exists=False))
    assert found.notes == ("`../a` is not there (yet)",)


@pytest.mark.parametrize("model", ["gpt2", "a/b/c", "org/mod el"])
def test_a_model_that_is_nowhere_is_an_error(model):
    text = linear("org/a", model + "@@")
    check(text, f"`{model}` is not here, and no repository", f"`--model {model}=DIR`", locate=nowhere)


def test_an_adapter_is_a_source_on_its_model():
    text = linear("org/m", "org/m+org/lora", "org/m@v1+org/lora@v2", "org/other+org/style")
    assert sources(text) == {
        "m": ("org/m", None, None),
        "lora": ("org/lora", None, "m"),
        "org-m": ("org/m", "v1", None),
        "lora-on-m": ("org/lora", "v2", "org-m"),
        "other": ("org/other", None, None),
        "style": ("org/style", None, "other"),
    }
    (result,) = outputs(text).values()
    assert [expert.source for expert in result.experts] == ["m", "lora", "lora-on-m", "style"]


def test_several_adapters_of_one_base():
    text = """\
merge_method: ties
base_model: org/m
models:
  - {model: org/m+a/math, parameters: {weight: 1}}
  - {model: org/m+b/math, parameters: {weight: 1}}
"""
    assert sources(text) == {
        "m": ("org/m", None, None),
        "math": ("a/math", None, "m"),
        "math-on-m": ("b/math", None, "m"),
    }


def test_names_are_the_last_part_of_the_path_and_unique():
    models = ["x/final", "y/final", "/data/z/final/", "./models/final.safetensors", "q/final@a", "q/final@b"]
    names = list(sources(linear(*models), locate=here))
    assert names == ["final", "y-final", "z-final", "models-final", "q-final", "final-b"]


def test_a_snapshot_of_the_hub_cache_is_named_after_its_repository():
    model = "/cache/models--org--Qwen2-0.5B/snapshots/0123abcd"
    assert list(sources(linear(model), locate=here)) == ["Qwen2-0.5B"]


def test_the_form_with_keys_is_read():
    text = linear("{model: {path: org/a, revision: v1}, lora: {path: org/lora}}")
    assert sources(text) == {"a": ("org/a", "v1", None), "lora": ("org/lora", None, "a")}
    assert sources(linear("{model: org/a@v1, lora: null}")) == {"a": ("org/a", "v1", None)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("a+b+c", "more than one `+`"),
        ("a@b@c", "more than one `@`"),
        ("'@v1'", "lacks a path"),
        ("org/a@", "lacks a revision"),
        ("org/a+", "lacks a path"),
        ("3", "invalid model"),
        ("[a]", "invalid model"),
        ("' '", "invalid model"),
        ('"a\\0b"', "invalid model"),
        ("{model: {path: 3}}", "invalid model"),
        ("{lora: org/a}", "invalid model"),
        ("{model: org/a, lor: org/b}", "unknown key of a model"),
        ("{model: org/a, override_architecture: LlamaForCausalLM}", "none can be forced on it"),
    ],
)
def test_references_that_are_none(model, message):
    check(linear(f"{model} # @@"), message)


# --- several documents ------------------------------------------------------------------------------------------------

TWO = f"""\
{linear("org/a", "org/b", name="first")}
---
{linear("first", "org/c", base_model="first")}
"""


def test_documents_use_one_another_by_name():
    found = imported(TWO).mergefile
    assert list(found.sources) == ["a", "b", "c"]
    first, recipe = found.outputs.values()
    assert (first.name, first.publish, recipe.name, recipe.publish) == ("first", False, "recipe", True)
    assert (recipe.base, [expert.source for expert in recipe.experts]) == ("first", ["first", "c"])


def test_documents_may_come_in_any_order():
    later = "\n---\n".join(reversed(TWO.split("---\n")))
    assert list(outputs(later)) == ["recipe", "first"]
    assert outputs(later) == outputs(TWO)


def test_a_tokenizer_may_come_from_another_document():
    text = f"{linear('org/a', name='one')}---\n{linear('org/b', tokenizer_source='one')}"
    assert outputs(text)["recipe"].write.tokenizer == "one"
    assert outputs(text)["one"].publish is False


def test_an_adapter_on_the_result_of_another_document():
    text = f"{linear('org/a', name='one')}---\n{linear('one+org/lora')}"
    found = imported(text).mergefile
    assert found.sources["lora"].on == "one"
    assert found.outputs["one"].publish is False


def test_a_name_that_is_no_name_here_is_changed_and_said():
    text = linear("org/a", name="'first try!'") + "---\n" + linear("first try!")
    found = imported(text)
    assert list(found.mergefile.outputs) == ["first-try", "recipe"]
    assert "the document `first try!` is called `first-try` here" in found.notes


def test_a_source_gives_way_to_an_output_of_its_name():
    found = imported(linear("org/merged", name="merged")).mergefile
    assert list(found.sources) == ["org-merged"]
    assert list(found.outputs) == ["merged"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (linear("b", name="a@@") + "---\n" + linear("a", name="b"), "a cycle: `a` and `b` need one another"),
        (linear("a", name="a@@"), "`a` refers to itself"),
        (linear("x/a", name="a") + "---\n" + linear("x/b", name="a@@"), "`a` is the name of two documents"),
        (linear("x/a") + "---@@\n" + linear("x/b"), "two documents without a name"),
        (linear("x/a", name="a") + "---\n" + linear("a@v1@@"), "which has no revisions"),
    ],
)
def test_documents_that_do_not_fit_together(text, message):
    if message.startswith("two documents"):
        text = text.replace("---@@\nmerge_method: linear", "---\nmerge_method: linear@@")
    check(text, message)


def test_problems_of_several_documents_are_reported_together():
    text = linear("x/a", dtpe="float16") + "---\n" + linear("x/b", name="b", chat_template="auto")
    found = problems(text)
    assert [error.facts["key_path"] for error in found] == ["documents[0].dtpe", "documents[1].chat_template"]
    assert [error.facts["line"] for error in found] == [1, 8]


def test_an_output_lies_in_no_source():
    text = linear("org/a", name="new")
    found = imported(text, locate=lambda place: Found(path="build/new")).mergefile
    assert found.outputs["new"].path == "merged/new"
