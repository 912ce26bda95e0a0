import json
import os

import pytest
from support.adapters import factors, write_adapter
from support.checkpoints import random_tensors, write_checkpoint, write_safetensors
from unit.cli.fakes import assert_golden

from mergepipe.mergefile.parse import load_mergefile
from mergepipe.operators.registry import signatures

SHAPES = {"model.layers.0.weight": (4, 8), "model.norm.weight": (8,)}


@pytest.fixture
def here(cli, tmp_path):
    """The current directory, without a Mergefile."""
    (tmp_path / "Mergefile.toml").unlink()
    return tmp_path


def checkpoint(folder, seed=1, **options):
    return write_checkpoint(folder, random_tensors(seed, SHAPES), **options)


def adapter(folder, base):
    write_safetensors(folder / "adapter_model.safetensors", random_tensors(1, {"lora_A.weight": (2, 8)}))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}), encoding="utf-8")


def written(folder, name="Mergefile.toml"):
    """Return the Mergefile, which every build could read."""
    return load_mergefile(folder / name, signatures())


def sources(folder):
    return {name: source.path for name, source in written(folder).sources.items()}


def test_finds_the_checkpoints_below_and_says_what_comes_next(cli, here):
    for name in ("math", "base", "code"):
        checkpoint(here / "models" / name)
    result = cli("init")
    assert (result.code, result.stderr) == (0, "")
    assert_golden("init.txt", result.stdout)
    assert sources(here) == {"base": "models/base", "code": "models/code", "math": "models/math"}
    (output,) = written(here).outputs.values()
    assert (output.operator, output.base) == ("task_arithmetic", "base")
    assert [expert.source for expert in output.experts] == ["code", "math"]


def test_looks_three_folders_deep_and_not_deeper(cli, here):
    checkpoint(here / "a" / "b" / "c")
    checkpoint(here / "a" / "b" / "d" / "e")
    assert cli("init").code == 0
    assert sources(here) == {"c": "a/b/c"}


@pytest.mark.parametrize("folder", [".hidden", "build", "cache", "__pycache__", "node_modules", ".mergecache/packs"])
def test_leaves_out_hidden_build_and_cache_folders(cli, here, folder):
    checkpoint(here / folder / "model")
    checkpoint(here / folder)
    checkpoint(here / "good")
    assert cli("init").code == 0
    assert sources(here) == {"good": "good"}


@pytest.mark.parametrize("marker", ["CACHEDIR.TAG", "pyvenv.cfg", "mergepipe.json"])
def test_leaves_out_folders_that_say_what_they_are(cli, here, marker):
    checkpoint(here / "other" / "model")
    (here / "other" / marker).touch()
    checkpoint(here / "good")
    assert cli("init").code == 0
    assert sources(here) == {"good": "good"}


def test_does_not_look_inside_of_a_checkpoint(cli, here):
    checkpoint(here / "run")
    checkpoint(here / "run" / "checkpoint-500")
    assert cli("init").code == 0
    assert sources(here) == {"run": "run"}


def test_links_in_a_circle_are_no_trouble_and_name_a_place_once(cli, here):
    checkpoint(here / "models" / "one")
    (here / "models" / "again").symlink_to(here / "models")
    (here / "models" / "zone").symlink_to(here / "models" / "one")
    assert cli("init").code == 0
    assert sources(here) == {"one": "models/one"}


def test_nothing_found_is_an_error_and_writes_nothing(cli, here):
    (here / "models").mkdir()
    result = cli("init")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: no checkpoints in `{here}`, 3 folders deep\nhint: name them: `mergepipe init DIR...`\n"
    )
    assert os.listdir(here) == ["models"]


def test_nothing_usable_found_says_what_is_wrong_with_what_there_is(cli, here):
    adapter(here / "lora", "base")
    folder = here / "old"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    result = cli("init")
    assert result.code == 2
    assert "`old` holds no safetensors weights, only `pytorch_model.bin`" in result.stderr
    assert "`lora` is a LoRA adapter" in result.stderr
    assert not (here / "Mergefile.toml").exists()


def test_what_is_left_out_is_said(cli, here):
    checkpoint(here / "base")
    checkpoint(here / "good")
    adapter(here / "lora", "base")
    (here / "broken").mkdir()
    (here / "broken" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (here / "old").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (here / "old" / name).write_bytes(b"{}")
    result = cli("init")
    assert result.code == 0
    assert "warning: left out: source `broken`" in result.stderr
    assert "warning: left out: source `lora`: `lora/adapter_config.json` is not an adapter of PEFT" in result.stderr
    assert "note: left out: `old` has no safetensors weights\n" in result.stderr
    assert list(sources(here)) == ["base", "good"]


def test_an_index_without_its_shards_is_reported(cli, here):
    checkpoint(here / "good")
    checkpoint(here / "partial", shards=2)
    for shard in (here / "partial").glob("*.safetensors"):
        shard.unlink()
    result = cli("init")
    assert result.code == 0
    assert "warning: left out: source `partial`" in result.stderr


@pytest.mark.parametrize("name", ["qwen", "org/qwen", "/data/models/qwen/", "Org/Qwen"])
def test_the_base_is_what_an_adapter_was_trained_on(cli, here, name):
    checkpoint(here / "models" / "math")
    checkpoint(here / "models" / "qwen")
    adapter(here / "lora", name)
    assert cli("init").code == 0
    assert written(here).outputs["merged"].base == "qwen"


@pytest.mark.parametrize("config", ["not json", "[]", '{"base_model_name_or_path": 5}', "{}"])
def test_an_adapter_that_names_no_base_is_no_help(cli, here, config):
    checkpoint(here / "math")
    adapter(here / "lora", "x")
    (here / "lora" / "adapter_config.json").write_text(config, encoding="utf-8")
    assert cli("init").code == 0
    assert written(here).outputs["merged"].base is None


def test_without_a_base_the_user_is_asked_to_name_it(cli, here):
    checkpoint(here / "code")
    checkpoint(here / "math")
    result = cli("init")
    assert result.code == 0
    assert_golden("init-no-base.txt", result.stderr)
    (output,) = written(here).outputs.values()
    assert (output.operator, output.base) == ("linear", None)
    assert cli("init", "--force", "--base", "math").code == 0
    assert written(here).outputs["merged"].base == "math"


def test_two_bases_are_none(cli, here):
    checkpoint(here / "a" / "base")
    checkpoint(here / "b" / "base")
    assert cli("init").code == 0
    assert list(sources(here)) == ["a-base", "b-base"]
    assert written(here).outputs["merged"].base is None


def test_named_checkpoints_are_used_in_their_order(cli, here):
    for name in ("math", "code", "other"):
        checkpoint(here / name)
    assert cli("init", "math", "./code", "code/").code == 0
    assert sources(here) == {"math": "math", "code": "code"}


def test_a_single_file_is_a_checkpoint(cli, here):
    write_safetensors(here / "math.safetensors", random_tensors(1, SHAPES))
    assert cli("init", "math.safetensors").code == 0
    assert sources(here) == {"math": "math.safetensors"}


def test_named_checkpoints_that_are_none_are_all_reported(cli, here):
    checkpoint(here / "good")
    result = cli("init", "good", "gone", "missing")
    assert result.code == 2
    assert "`gone`" in result.stderr
    assert "`missing`" in result.stderr
    assert result.stderr.endswith("2 problems found\n")
    assert not (here / "Mergefile.toml").exists()


@pytest.mark.parametrize("base", ["math", "models/math", "./models/math/"])
def test_the_base_is_named_by_name_or_by_path(cli, here, base):
    for name in ("math", "base", "code"):
        checkpoint(here / "models" / name)
    assert cli("init", "--base", base).code == 0
    assert written(here).outputs["merged"].base == "math"
    assert list(sources(here)) == ["math", "base", "code"]


def test_a_base_elsewhere_becomes_a_source(cli, here):
    checkpoint(here / "project" / "math")
    checkpoint(here / "qwen")
    assert cli("-C", "project", "init", "--base", "../qwen").code == 0
    assert sources(here / "project") == {"qwen": "../qwen", "math": "math"}
    assert written(here / "project").outputs["merged"].base == "qwen"


def test_a_base_that_is_not_there(cli, here):
    checkpoint(here / "math")
    result = cli("init", "--base", "maht")
    assert result.code == 2
    assert result.stderr == (
        "error: `maht` is neither one of the checkpoints nor the path of another\nhint: did you mean `math`?\n"
    )
    assert not (here / "Mergefile.toml").exists()


def test_a_base_that_is_no_checkpoint(cli, here):
    checkpoint(here / "math")
    (here / "empty").mkdir()
    result = cli("init", "--base", "empty")
    assert result.code == 2
    assert "`empty` is an empty folder" in result.stderr


def test_a_base_alone_is_nothing_to_merge(cli, here):
    checkpoint(here / "qwen")
    (here / "project").mkdir()
    result = cli("-C", "project", "init", "--base", "../qwen")
    assert result.code == 2
    assert "no checkpoints" in result.stderr


def test_a_mergefile_that_is_there_stays(cli, here):
    checkpoint(here / "math")
    (here / "Mergefile.toml").write_text("mine", encoding="utf-8")
    result = cli("init")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == "error: `Mergefile.toml` exists already\nhint: `--force` replaces it\n"
    assert (here / "Mergefile.toml").read_text(encoding="utf-8") == "mine"


def test_force_replaces_a_mergefile(cli, here):
    checkpoint(here / "math")
    (here / "Mergefile.toml").write_text("mine", encoding="utf-8")
    assert cli("init", "--force").code == 0
    assert sources(here) == {"math": "math"}
    assert sorted(os.listdir(here)) == ["Mergefile.toml", "math"]


def test_a_directory_in_the_place_of_the_mergefile_stays(cli, here):
    checkpoint(here / "math")
    (here / "Mergefile.toml").mkdir()
    assert cli("init", "--force").code == 2


def test_a_mergefile_above_is_no_obstacle(cli, here):
    (here / "Mergefile.toml").write_text("mine", encoding="utf-8")
    checkpoint(here / "project" / "math")
    assert cli("init", "-C", "project").code == 0
    assert sources(here / "project") == {"math": "math"}


def test_another_mergefile_gets_paths_relative_to_itself(cli, here):
    checkpoint(here / "models" / "math")
    (here / "recipes").mkdir()
    assert cli("init", "-f", "recipes/average.toml").code == 0
    assert {n: s.path for n, s in written(here / "recipes", "average.toml").sources.items()} == {
        "math": "../models/math"
    }


def test_an_absolute_path_elsewhere_stays_absolute(cli, here, tmp_path_factory):
    elsewhere = checkpoint(tmp_path_factory.mktemp("elsewhere") / "math")
    inside = checkpoint(here / "code")
    assert cli("init", str(elsewhere), str(inside)).code == 0
    assert sources(here) == {"math": str(elsewhere), "code": "code"}


@pytest.mark.parametrize("name", ["two words", "模型", 'quo"te', "~home", "a'b"])
def test_odd_folder_names_are_written_so_that_they_are_found_again(cli, here, name):
    checkpoint(here / name)
    assert cli("init").code == 0
    mergefile = written(here)
    (source,) = mergefile.sources
    assert mergefile.source_path(source).resolve() == (here / name).resolve()


def test_snapshots_of_the_hub_cache_are_named_after_their_repository(cli, here):
    checkpoint(here / "models--org--Qwen2-0.5B" / "snapshots" / "0123abcd")
    assert cli("init").code == 0
    assert sources(here) == {"Qwen2-0.5B": "models--org--Qwen2-0.5B/snapshots/0123abcd"}


def test_equal_names_are_told_apart(cli, here):
    for folder in ("a/final", "b/final", "x/a-final"):
        checkpoint(here / folder)
    assert cli("init").code == 0
    assert sources(here) == {"a-final": "a/final", "b-final": "b/final", "a-final-2": "x/a-final"}


def test_json_says_what_was_written(cli, here):
    checkpoint(here / "base")
    checkpoint(here / "math")
    result = cli("init", "--json")
    assert json.loads(result.stdout) == {
        "mergefile": "Mergefile.toml",
        "base": "base",
        "sources": {"base": "base", "math": "math"},
        "adapters": [],
    }
    assert result.stderr == ""


MODULE = "model.layers.0"


def test_adapters_of_the_base_are_experts(cli, here):
    checkpoint(here / "base")
    checkpoint(here / "math")
    for folder in ("code", "more/math"):
        write_adapter(here / folder, factors(3, MODULE, 4, 8))
    result = cli("init")
    assert (result.code, result.stderr) == (0, "")
    assert "  adapter  code    code       96 B, 2 tensors\n" in result.stdout
    found = written(here)
    assert sources(here) == {"base": "base", "math": "math", "code": "code", "math-2": "more/math"}
    assert [found.sources[name].on for name in ("math", "code", "math-2")] == [None, "base", "base"]
    assert [expert.source for expert in found.outputs["merged"].experts] == ["math", "code", "math-2"]
    assert json.loads(cli("init", "--force", "--json").stdout)["adapters"] == ["code", "math-2"]
    assert cli("build").code == 0


def test_a_checkpoint_alone_with_adapters_is_their_base(cli, here):
    checkpoint(here / "qwen")
    write_adapter(here / "lora", factors(3, MODULE, 4, 8), base_model_name_or_path="somewhere/else")
    result = cli("init")
    assert (result.code, result.stderr) == (0, "")
    (output,) = written(here).outputs.values()
    assert (output.base, [expert.source for expert in output.experts]) == ("qwen", ["lora"])


def test_an_adapter_that_does_not_fit_is_left_out_and_said(cli, here):
    checkpoint(here / "base")
    write_adapter(here / "lora", factors(3, MODULE, 4, 6))
    result = cli("init")
    assert result.code == 0
    assert result.stderr.startswith("warning: left out: source `lora`: ")
    assert list(sources(here)) == ["base"]


def test_an_adapter_among_those_that_are_named_says_which_is_the_base(cli, here):
    checkpoint(here / "first")
    checkpoint(here / "second")
    write_adapter(here / "lora", factors(3, MODULE, 4, 8), base_model_name_or_path="first")
    assert cli("init", "first", "lora", "second").stderr == ""
    assert list(sources(here)) == ["first", "second", "lora"]
    assert next(iter(written(here).outputs.values())).base == "first", "it was trained on that"
    assert cli("init", "--force", "lora").code == 2


def test_an_adapter_of_which_the_base_is_not_known_is_left_out_and_said(cli, here):
    checkpoint(here / "first")
    checkpoint(here / "second")
    write_adapter(here / "lora", factors(3, MODULE, 4, 8), base_model_name_or_path="third")
    result = cli("init")
    note = 'note: left out: `lora` is a LoRA adapter; a source of its own with `on = "NAME"` adds it\n'
    assert result.stderr.startswith(note)
    assert list(sources(here)) == ["first", "second"]


def test_a_checkpoint_alone_is_told(cli, here):
    checkpoint(here / "base")
    assert cli("init", "base").stderr.startswith("note: `base` is the only checkpoint, ")


@pytest.mark.parametrize("name", ["other.toml", "../two words.toml"])
def test_what_comes_next_names_the_file(cli, here, name):
    checkpoint(here / "base")
    shown = "'../two words.toml'" if " " in name else name
    assert f"\n  mergepipe -f {shown} build   to build it\n" in cli("init", "-f", name, "base").stdout
