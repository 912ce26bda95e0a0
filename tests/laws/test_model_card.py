"""The model card of an output: what it says, on which machine ever, and whose it is when somebody changed it.

Set ``UPDATE_GOLDEN=1`` to write the golden cards anew, and review the difference.
"""

import os
import shutil
from pathlib import Path

import pytest
import yaml
from support.adapters import add_adapter, factors
from support.checkpoints import random_tensors
from support.projects import SmallProject

from mergepipe.publish.card import is_own_card

GOLDEN = Path(__file__).parents[1] / "golden" / "card"
SHAPES = {f"model.layers.{n}.w.weight": (8, 8) for n in range(4)} | {"model.embed_tokens.weight": (10, 8)}
STATED = "---\nlicense: apache-2.0\nlanguage: [en, 'no']\npipeline_tag: text-generation\n---\n"


def add(project, name, seed, *, card=None, config=None):
    tensors = random_tensors(seed, SHAPES, "bfloat16") | random_tensors(7, {"position_ids": (4,)}, "int64")
    files = {"README.md": card} if card is not None else {}
    project.add_source(name, tensors, config=config or {"architectures": ["M"]}, side_files=files)


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    add(project, "base", 0, card=STATED, config={"_name_or_path": "org/base", "torch_dtype": "bfloat16"})
    add(project, "e1", 1, card=STATED)
    add(project, "e2", 2, card=STATED)
    recipe = {
        "operator": "task_arithmetic",
        "base": "base",
        "experts": ["e1", {"source": "e2", "weight": [0.25, 0.5]}],
        "params": {"lambda": 0.75},
        "rules": [{"match": "*.0.*", "experts": {"e1": {"weight": 0.5}}}],
    }
    project.set_output("m", recipe)
    return project


def read(project, output="m"):
    return (project.folder(output) / "README.md").read_text(encoding="utf-8")


def front(text):
    return yaml.safe_load(text.split("---\n")[1])


def check_golden(text, name):
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


# --- what it says ---------------------------------------------------------------------------------------------------


def test_a_full_read(project):
    project.build()
    check_golden(read(project), "full.md")


def test_a_budget_is_stated_with_its_bound(project):
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "50%", "precision": "blocks"}})
    project.build()
    text = read(project)
    check_golden(text, "budget.md")
    assert "\nMade under a budget (`50%`): " in text


def test_a_source_that_was_not_read_whole_is_marked(project):
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "25%", "stats": "sample"}})
    project.build()
    text = read(project)
    check_golden(text, "sampled.md")
    assert "`sample:b3:" in text
    assert "by estimate at most" in text


def test_slices_and_a_stage(project):
    slices = [{"source": "m", "layers": "0..3"}, {"source": "e1", "layers": "2..4"}]
    project.set_output("stack", {"operator": "passthrough", "slices": slices})
    project.build()
    text = read(project, "stack")
    check_golden(text, "slices.md")
    assert front(text)["base_model"] == ["org/base", "e1", "e2"], "those of the stage, through it"
    assert front(text)["license"] == "apache-2.0"


def test_an_adapter(project):
    tensors = factors(5, "model.layers.0.w", 8, 8)
    folder = add_adapter(project, "lora", tensors, target_modules=["w"])
    (folder / "README.md").write_text(f"{STATED[:-4]}base_model: org/other\n---\n")
    project.set_output("m", {"operator": "linear", "experts": ["lora"]})
    project.build()
    assert front(read(project))["base_model"] == ["org/other", "org/base"]
    assert front(read(project))["license"] == "apache-2.0"


def test_the_front_matter_is_what_the_hub_takes(project):
    hub = pytest.importorskip("huggingface_hub")
    project.build()
    card = hub.ModelCard(read(project))
    assert card.data.to_dict() == {
        "base_model": ["org/base", "e1", "e2"],
        "base_model_relation": "merge",
        "library_name": "transformers",
        "license": "apache-2.0",
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "tags": ["merge", "mergepipe", "task_arithmetic"],
    }
    hub.ModelCardData(**card.data.to_dict())


def test_without_a_config_it_names_no_library(project):
    for name in project.sources:
        (project.root / project.sources[name] / "config.json").unlink()
    project.build()
    assert "library_name" not in front(read(project))


def test_a_license_that_they_do_not_share_is_not_stated_and_each_one_is_named(project):
    (project.root / "models/e1/README.md").write_text("---\nlicense: gpl-3.0\n---\n")
    project.build()
    text = read(project)
    assert "license" not in front(text)
    assert "none is stated for this merge" in text
    assert "| expert | `e1` | `models/e1` | `gpl-3.0` |" in text


# --- what it does not say, and on what it does not depend -----------------------------------------------------------


def test_no_place_of_this_machine_and_no_secret_is_in_it(project, tmp_path_factory):
    outside = tmp_path_factory.mktemp("secret-place")
    shutil.copytree(project.root / "models/e1", outside / "math")
    project.sources["e1"] = str(outside / "math")
    add(project, "e2", 2, config={"_name_or_path": "https://me:hf_secret@host/org/name"})
    project.set_output("m", project.outputs["m"] | {"path": str(outside / "out")})
    project.build()
    text = (outside / "out/README.md").read_text()
    for word in (str(outside), "secret", str(project.root), "/tmp"):
        assert word not in text
    assert '\npath = "math"  # elsewhere' in text
    assert "| expert | `e1` | `math` |" in text
    assert "math" in front(text)["base_model"]


def test_the_same_merge_elsewhere_has_the_same_card(project, tmp_path):
    project.build()
    other = project.clone(tmp_path / "other")
    other.build(workers=1)
    assert read(other) == read(project)


def test_names_from_outside_stay_what_they_are(tmp_path):
    project = SmallProject(tmp_path)
    path = "models/a|b `x`\u202e <script> ```"
    for seed, name in enumerate(("__base__", "e")):
        project.add_source(name, random_tensors(seed, {"w": (4, 4)}), path=path if name == "e" else None)
    rule = {"match": "*", "params": {"lambda": 0.5}}
    project.set_output("__m__", {"operator": "task_arithmetic", "base": "__base__", "experts": ["e"], "rules": [rule]})
    project.build()
    text = read(project, "__m__")
    assert "\n# `__m__`\n" in text
    assert "\u202e" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| expert")]
    assert row.count("|") - row.count("\\|") == 5
    assert is_own_card(text.encode())


# --- whose it is ------------------------------------------------------------------------------------------------------


def test_a_card_that_the_user_changed_is_left_alone(project):
    project.build()
    card = project.folder("m") / "README.md"
    card.write_text(read(project).replace("# m\n", "# My merge\n"))
    changed = card.read_text()
    assert project.build_one("m").blocks["computed"] == 0
    assert project.open().status().outputs["m"].state == "up-to-date"
    assert "README.md" not in project.manifest("m").files
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    assert project.build_one("m").state == "built"
    project.build(force=True)
    shutil.rmtree(project.cache)
    project.build()
    assert card.read_text() == changed
    card.unlink()
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.25}})
    project.build()
    assert is_own_card(card.read_bytes())
    assert "README.md" in project.manifest("m").files


def test_a_card_that_was_changed_and_changed_back_is_ours_again(project):
    project.build()
    card = project.folder("m") / "README.md"
    written = card.read_bytes()
    card.write_bytes(written.replace(b"# m\n", b"# n\n"))
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    project.build()
    assert "README.md" not in project.manifest("m").files
    card.write_bytes(written)
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.25}})
    project.build()
    assert is_own_card(card.read_bytes())
    assert "README.md" in project.manifest("m").files


@pytest.mark.parametrize("force", [False, True], ids=["", "forced"])
def test_a_card_of_the_users_own_is_left_alone(project, force):
    project.build()
    card = project.folder("m") / "README.md"
    card.unlink()
    card.write_text("---\nlicense: mit\n---\n# Mine\n")
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    project.build(force=force)
    assert card.read_text().endswith("# Mine\n")


def test_a_card_in_a_directory_that_is_taken_over_by_force_stays(project):
    folder = project.folder("m")
    folder.mkdir(parents=True)
    (folder / "README.md").symlink_to("card.md")
    (folder / "card.md").write_text("mine")
    project.build(force=True)
    assert (folder / "README.md").is_symlink()
    assert (folder / "README.md").read_text() == "mine"
    assert "README.md" not in project.manifest("m").files


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_whatever_the_user_put_in_its_place_stays(project, kind):
    project.build()
    card = project.folder("m") / "README.md"
    card.unlink()
    {"folder": card.mkdir, "pipe": lambda: os.mkfifo(card), "link": lambda: card.symlink_to("nowhere")}[kind]()
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    project.build(force=True)
    assert {"folder": card.is_dir, "pipe": card.is_fifo, "link": card.is_symlink}[kind]()


def test_what_is_not_ours_is_told_by_one_changed_byte(project):
    project.build()
    data = (project.folder("m") / "README.md").read_bytes()
    assert is_own_card(data)
    for place in range(0, len(data), 7):
        assert not is_own_card(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    for other in (b"", data[:-1], data + b"\n", data.replace(b"\n", b"\r\n"), data + data):
        assert not is_own_card(other)


# --- when it is written anew ----------------------------------------------------------------------------------------


def test_another_card_of_a_source_is_taken_over_without_reading_a_weight(project):
    project.build()
    (project.root / "models/e1/README.md").write_text("---\nlicense: mit\n---\n")
    status = project.open().status().outputs["m"]
    assert (status.state, status.reasons) == ("stale", ("what its model card says of its sources changed",))
    report = project.build_one("m")
    read_bytes = (report.expert_bytes["read"], report.base_bytes_read, report.index_bytes_read, report.bytes_written)
    assert (report.state, read_bytes) == ("built", (0, 0, 0, 0))
    assert "license" not in front(read(project))
    assert project.build_one("m").state == "unchanged"


def test_text_below_the_front_matter_of_a_source_changes_nothing(project):
    project.build()
    (project.root / "models/e1/README.md").write_text(f"{STATED}\nsomething new\n")
    assert project.build_one("m").state == "unchanged"
