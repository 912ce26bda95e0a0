"""Nothing in a checkpoint is ever run: no pickle is loaded, no module of a model is imported, nothing is evaluated."""

import ast
import functools
import json
import os
import pickle
from pathlib import Path

import pytest
from fuzz.watch import outcome
from support.checkpoints import random_tensors, write_checkpoint
from support.projects import SmallProject

import mergepipe
from mergepipe.checkpoints.checkpoint import open_checkpoint
from mergepipe.errors import SourceError
from mergepipe.project.verify import VerifyOptions

PACKAGE = Path(mergepipe.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "code", "imp"}
# What may start a process or load a module by its path: git, the user's own `--eval`, and custom operators.
STARTS = {"project/git.py", "project/evaluate.py"}
IMPORTS_BY_PATH = {"project/plugins.py"}
SHAPES = {"model.layers.0.w.weight": (4, 4), "lm_head.weight": (4, 4)}


@functools.cache
def trees():
    return [(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in MODULES]


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def calls(tree):
    """Yield what is called as it is written, such as ``torch.load``, with the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


# Between a build and the processes that it has forked, through pipes that nobody else has an end of: no file, no name.
PRIVATE_PIPES = {("engine/pipes.py", "pickle")}


def test_no_module_imports_what_runs_data():
    found = {(name, one) for name, tree in trees() for one in imports(tree) if one.partition(".")[0] in LOADERS}
    assert found == PRIVATE_PIPES
    processes = {name for name, tree in trees() for one in imports(tree) if one.partition(".")[0] == "subprocess"}
    assert processes <= STARTS
    loads = ("spec_from_file_location", "exec_module", "load_module", "SourceFileLoader")
    by_path = {name for name, tree in trees() for called, _ in calls(tree) if called.endswith(loads)}
    assert by_path == IMPORTS_BY_PATH


def test_nothing_is_evaluated_or_loaded_with_torch():
    names = ("eval", "exec", "compile", "__import__", "os.system", "os.popen")
    ends = ("torch.load", "from_pretrained", ".import_module", ".run_path", ".unsafe_load", ".full_load")
    for module, tree in trees():
        for called, node in calls(tree):
            assert called not in names, f"{module}:{node.lineno}"
            assert not called.endswith(ends), f"{module}:{node.lineno}"
            assert not any(keyword.arg in ("trust_remote_code", "allow_pickle") for keyword in node.keywords), module
            if called.startswith("yaml."):
                assert ast.unparse(node) in ("yaml.load(text, yaml.BaseLoader)", "yaml.SafeLoader(text)")


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def write_traps(folder, marker):
    """Put into a checkpoint all that would run code somewhere: pickles, modules, a path file, a plug-in, git hooks."""
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.ckpt", "scaler.pkl"):
        (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    for name in ("modeling_x.py", "configuration_x.py", "sitecustomize.py", "torch.py", "yaml.py", "ops.py", "x.pth"):
        (folder / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    (folder / "Mergefile.toml").write_text('version = 1\n[operators.x]\npython = "ops.py:f"\n')


def test_what_would_run_code_elsewhere_is_left_alone(tmp_path):
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()  # the traps work
    marker.rmdir()
    project = SmallProject(tmp_path / "p")
    config = {"auto_map": {"AutoModel": "modeling_x.Model"}, "trust_remote_code": True, "model_type": "x"}
    for number, name in enumerate(("base", "a")):
        write_traps(project.add_source(name, random_tensors(number, SHAPES), config=config), marker)
    project.set_output("m", {"operator": "linear", "base": "base", "experts": ["a"]})
    for action in (
        project.build,
        lambda: project.open().explain("m"),
        lambda: project.open().verify((), VerifyOptions(full=True, sample=50)),
        lambda: project.open().status(()),
    ):
        assert outcome(action, tmp_path.resolve(), Path("/tmp").resolve()) == "read"
    assert not marker.exists()
    assert {path.name for path in project.folder("m").iterdir()} == {
        "README.md", "config.json", "mergepipe.json", "model.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path, name):
    marker = tmp_path / "ran"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).write_bytes(pickle.dumps(Payload(marker)))
    for path in (tmp_path / "m", tmp_path / "m" / name):
        with pytest.raises(SourceError) as caught:
            open_checkpoint(path, label="a")
        assert "safetensors" in caught.value.message
        assert "weights_only=True" in caught.value.hint
    assert not marker.exists()


def test_weights_in_both_forms_are_read_from_the_safe_one(tmp_path):
    folder = write_checkpoint(tmp_path / "m", random_tensors(0, SHAPES))
    write_traps(folder, tmp_path / "ran")
    assert list(open_checkpoint(folder, label="a").tensors) == sorted(SHAPES, key=lambda name: name != "lm_head.weight")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_under_a_safe_name_is_named_and_not_loaded(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_bytes(pickle.dumps(Payload(tmp_path / "ran")) + bytes(64))
    with pytest.raises(SourceError, match="a Python pickle"):
        open_checkpoint(tmp_path / "m", label="a")
    assert not (tmp_path / "ran").exists()


def test_an_index_of_pickled_shards_alone_is_an_incomplete_download(tmp_path):
    (tmp_path / "m").mkdir()
    index = {"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}
    (tmp_path / "m" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError) as caught:
        open_checkpoint(tmp_path / "m", label="a")
    assert "the files that `pytorch_model.bin.index.json` names are not there" in caught.value.message


def test_shards_are_converted_one_by_one(tmp_path):
    (tmp_path / "m").mkdir()
    for number in (1, 2):
        (tmp_path / "m" / f"pytorch_model-0000{number}-of-00002.bin").write_bytes(b"PK\3\4")
    with pytest.raises(SourceError) as caught:
        open_checkpoint(tmp_path / "m", label="a")
    assert "convert each of them" in caught.value.hint
    assert '"model-00001-of-00002.safetensors"' in caught.value.hint


def test_the_lines_to_paste_hold_a_files_name_as_a_literal(tmp_path):
    (tmp_path / "m").mkdir()
    name = 'x");__import__("os").system("id");("\\.bin'
    (tmp_path / "m" / name).write_bytes(b"PK\3\4")
    with pytest.raises(SourceError) as caught:
        open_checkpoint(tmp_path / "m", label="a")
    lines = [line.strip() for line in caught.value.hint.split("\n")[1:]]
    called = {called for called, _ in calls(ast.parse("\n".join(lines)))}
    assert called == {"torch.load", "save_file", "state.items", "v.clone().contiguous", "v.clone"}
    assert repr(name) in {ast.unparse(node) for node in ast.walk(ast.parse(lines[1])) if isinstance(node, ast.Constant)}
