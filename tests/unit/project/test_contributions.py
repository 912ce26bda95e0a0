"""What experts contributed: the numbers are those of numpy over the whole tensors, and they are measured once."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters import factors, write_adapter
from support.budgets import levels, percent
from support.checkpoints import random_tensors, read_checkpoint
from support.projects import Reads, SmallProject, edit_tensor
from support.quick import examples

from mergepipe.engine.contributions import InputsAndOutput, TensorContributions, folded
from mergepipe.errors import MergepipeError
from mergepipe.plan.access import TensorAccess
from mergepipe.project.contributions import ContributionSums

SHAPES = {"model.embed_tokens.weight": (20, 16), "model.norm.weight": (16,)} | {
    f"model.layers.{n}.mlp.up_proj.weight": (24, 16) for n in range(3)
}
WEIGHTS = {"a": 0.5, "b": -0.2, "c": 0.7}
CLOSE = 1e-5  # deltas are float32


def project_of(root, **options):
    project = SmallProject(root, **options)
    base = random_tensors(0, SHAPES)
    project.add_source("base", base)
    for seed, name in enumerate(WEIGHTS):
        deltas = random_tensors(seed + 1, SHAPES, scale=0.1)
        tensors = {tensor: base[tensor] + deltas[tensor] for tensor in base}
        if name == "b":  # an expert that leaves a tensor as it is
            tensors["model.layers.1.mlp.up_proj.weight"] = base["model.layers.1.mlp.up_proj.weight"]
        project.add_source(name, tensors)
    experts = [{"source": name, "weight": weight} for name, weight in WEIGHTS.items()]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    return project


def vectors(project, output="m", names=tuple(WEIGHTS), base="base"):
    """Return the update and the experts' deltas by name, all tensors in one row, float64, and the base."""
    tensors = {name: read_checkpoint(project.root / project.sources[name]) for name in {*names, base}}
    merged = project.tensors(output)

    def row(found):
        return np.concatenate([found[tensor].astype(np.float64).ravel() for tensor in sorted(SHAPES)])

    start = row(tensors[base])
    return row(merged) - start, {name: row(tensors[name]) - start for name in names}, start


def agreement(one, other):
    signs = np.sign(one) * np.sign(other)
    return (signs > 0).sum(), (signs != 0).sum()


def test_the_numbers_are_those_of_whole_tensors(tmp_path):
    project = project_of(tmp_path)
    project.build()
    found = project.open().explain("m").contribution
    update, deltas, base = vectors(project)
    assert found.update_norm == pytest.approx(np.linalg.norm(update), rel=CLOSE)
    assert found.base_norm == pytest.approx(np.linalg.norm(base), rel=CLOSE)
    assert found.update_relative == pytest.approx(np.linalg.norm(update) / np.linalg.norm(base), rel=CLOSE)
    lengths = {name: abs(WEIGHTS[name]) * np.linalg.norm(delta) for name, delta in deltas.items()}
    for share in found.experts:
        delta = deltas[share.source]
        length = np.linalg.norm(delta)
        assert share.norm == pytest.approx(length, rel=CLOSE)
        assert share.norm_share == pytest.approx(lengths[share.source] / sum(lengths.values()), rel=CLOSE)
        assert share.cosine == pytest.approx(delta @ update / length / np.linalg.norm(update), rel=CLOSE)
        same, both = agreement(delta, update)
        assert share.sign_agreement == pytest.approx(same / both, rel=1e-3)
    pairs = [agreement(deltas[one], deltas[other]) for one, other in ("ab", "ac", "bc")]
    assert found.sign_agreement == sum(same for same, _ in pairs) / sum(both for _, both in pairs)


def test_modules_add_up_to_the_output(tmp_path):
    project = project_of(tmp_path)
    project.build()
    found = project.open().explain("m")
    assert math.fsum(module.update_share for module in found.modules) == pytest.approx(1.0)
    squares = math.fsum(module.contribution.update_norm**2 for module in found.modules)
    assert math.sqrt(squares) == pytest.approx(found.contribution.update_norm)
    assert found.modules[0].module == "mlp.up_proj"
    shares = [module.update_share for module in found.modules]
    assert shares == sorted(shares, reverse=True)


def test_what_a_budget_leaves_out_contributed_nothing(tmp_path):
    project = project_of(tmp_path)
    project.set_output("m", project.outputs["m"] | {"budget": percent(40)})
    project.build()
    update, deltas, _ = vectors(project)
    masks = {name: [] for name in WEIGHTS}
    for tensor in sorted(SHAPES):
        size, row = math.prod(SHAPES[tensor]), 16 if len(SHAPES[tensor]) > 1 else 1
        block = max(1, 64 // row) * row
        for name, level in zip(WEIGHTS, levels(project)[tensor], strict=True):
            masks[name].append(np.repeat([entry != 0 for entry in level], block)[:size])
    for share in project.open().explain("m").contribution.experts:
        delta = deltas[share.source] * np.concatenate(masks[share.source])
        assert share.norm == pytest.approx(np.linalg.norm(delta), rel=CLOSE, abs=1e-12)
        if share.cosine is not None:
            product = np.linalg.norm(delta) * np.linalg.norm(update)
            assert share.cosine == pytest.approx(delta @ update / product, rel=CLOSE)
    assert any(0 in mask for name in WEIGHTS for mask in masks[name])


def test_a_second_look_reads_no_weight(tmp_path, monkeypatch):
    project = project_of(tmp_path)
    project.build()
    first = project.open().report(["m"]).outputs["m"]
    assert first.measured_bytes_read == 5 * sum(
        4 * math.prod(shape) for name, shape in SHAPES.items() if "layers.1" not in name
    ) + 4 * 4 * math.prod(SHAPES["model.layers.1.mlp.up_proj.weight"])
    reads = Reads(monkeypatch)
    again = project.open().report(["m"]).outputs["m"]
    assert all(not reads.data_ranges(project.source_file(name)) for name in project.sources)
    assert not reads.data_ranges(project.folder("m") / "model.safetensors")
    assert (again.contribution, again.measured_bytes_read) == (first.contribution, 0)


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 3}, {"memory": 1 << 20}])
def test_threads_and_memory_change_no_number(tmp_path, options):
    project = project_of(tmp_path)
    project.build()
    expected = project_of(tmp_path / "other")
    expected.build()
    assert project.open(**options).explain("m").contribution == expected.open().explain("m").contribution


def test_one_tensor_reads_its_inputs_alone(tmp_path, monkeypatch):
    project = project_of(tmp_path)
    project.build()
    reads = Reads(monkeypatch)
    found = project.open().explain("m", "model.norm.weight")
    assert found.contribution is not None
    assert sum(stop - start for start, stop in reads.data_ranges(project.source_file("a"))) == 4 * 16


def test_without_leave_no_weight_is_read(tmp_path, monkeypatch):
    project = project_of(tmp_path)
    project.build()
    reads = Reads(monkeypatch)
    found = project.open().explain("m", measure=False)
    assert (found.contribution, found.not_measured) == (None, "it was not measured")
    assert all(not reads.data_ranges(project.source_file(name)) for name in project.sources)


def test_an_output_without_a_base_is_its_own_update(tmp_path):
    project = project_of(tmp_path)
    project.set_output("m", {"operator": "linear", "experts": ["a", "b"]})
    project.build()
    found = project.open().explain("m").contribution
    merged = np.concatenate([tensor.ravel() for tensor in project.tensors("m").values()]).astype(np.float64)
    assert (found.base_norm, found.update_relative) == (None, None)
    assert found.update_norm == pytest.approx(np.linalg.norm(merged), rel=CLOSE)


def test_a_base_that_the_operator_does_not_use_is_what_the_update_is_counted_from(tmp_path):
    project = project_of(tmp_path)
    project.set_output("m", {"operator": "linear", "base": "base", "experts": ["a", "b"]})
    project.build()
    update, _, _ = vectors(project)
    assert project.open().explain("m").contribution.update_norm == pytest.approx(np.linalg.norm(update), rel=CLOSE)


def test_an_adapter_contributes_its_delta(tmp_path):
    shapes = {f"model.layers.{n}.q.weight": (12, 8) for n in range(2)}
    project = SmallProject(tmp_path)
    project.add_source("base", random_tensors(0, shapes))
    parts = factors(1, "model.layers.0.q", 12, 8)
    write_adapter(tmp_path / "models/lora", parts)
    project.sources["lora"], project.adapters["lora"] = "models/lora", "base"
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["lora"]})
    project.build()
    found = project.open().explain("m").contribution
    a, b = parts.values()
    delta = 3 / 2 * b.astype(np.float64) @ a.astype(np.float64)
    (share,) = found.experts
    assert share.norm == pytest.approx(np.linalg.norm(delta), rel=1e-4)
    assert share.cosine == pytest.approx(1.0, abs=1e-4)
    explained = project.open().explain("m", "model.layers.0.q.weight")
    assert explained.experts[0].reads.bytes_read == sum(part.nbytes for part in parts.values())
    assert "as factors of rank 2" in explained.experts[0].used


def test_stages_are_looked_at_whether_they_are_published_or_not(tmp_path):
    project = project_of(tmp_path)
    project.set_output("hidden", {"operator": "linear", "experts": ["a", "c"], "publish": False})
    project.set_output("final", {"operator": "task_arithmetic", "base": "base", "experts": ["hidden", "m"]})
    project.build()
    for output in ("hidden", "final"):
        assert project.open().explain(output).contribution.update_norm > 0
    assert [e.source for e in project.open().explain("final").contribution.experts] == ["hidden", "m"]


def test_an_unpublished_output_whose_packs_are_gone_says_so(tmp_path):
    project = project_of(tmp_path)
    project.set_output("hidden", {"operator": "linear", "experts": ["a", "c"], "publish": False})
    project.build()
    project.open().cache_prune(max_bytes=0)
    assert project.open().explain("hidden").not_measured == "its files are gone"


def test_slices_and_copied_tensors(tmp_path):
    project = project_of(tmp_path)
    for name in ("base", "a"):
        project.add_source(name, read_checkpoint(tmp_path / project.sources[name]) | {"ids": np.arange(5)})
    slices = [{"experts": ["a"], "layers": layers, "base": "base"} for layers in ("0..2", "1..3")]
    project.set_output("m", {"operator": "task_arithmetic", "slices": slices, "params": {"weight": 0.5}})
    project.build()
    found = project.open().explain("m")
    (share,) = found.contribution.experts
    assert share.cosine == pytest.approx(1.0, abs=1e-6)
    copied = project.open().explain("m", "ids")
    assert (copied.contribution, copied.not_measured) == (None, "it is copied, not merged")
    cells = project.open().report(["m"]).outputs["m"].cells
    assert {cell.layer for cell in cells} == {None, 0, 1, 2, 3}


def test_slices_with_and_without_a_base_are_not_added_up(tmp_path):
    """The norms of updates and those of whole weights are no sum."""
    project = project_of(tmp_path)
    merged = {"operator": "task_arithmetic", "layers": "0..1", "base": "base", "experts": ["a", "b"]}
    copied = {"layers": "0..2", "experts": ["c"]}
    project.set_output("m", {"operator": "passthrough", "slices": [merged, copied]})
    project.build()
    found = project.open().explain("m")
    total = found.contribution
    assert (total.update_norm, total.update_relative, total.sign_agreement) == (None, None, None)
    assert {expert.norm_share for expert in total.experts} == {None}
    assert {module.update_share for module in found.modules} == {None}
    alone = project.open().explain("m", "model.layers.0.mlp.up_proj.weight").contribution
    assert 0 < alone.update_relative < 1


def test_an_output_that_was_written_to_is_named(tmp_path):
    project = project_of(tmp_path)
    project.build()
    path = project.folder("m") / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    edit_tensor(path, "model.norm.weight", 3, 7.5)
    with pytest.raises(MergepipeError, match=r"build/m/model\.safetensors` of output `m` is not what was built"):
        project.open().explain("m")
    with pytest.raises(MergepipeError, match=r"output `m` is not what a build would make now[^`]*\n.*were touched"):
        project.open().report(["m"])


def test_an_output_that_was_only_touched_is_reported(tmp_path):
    project = project_of(tmp_path)
    project.build()
    os.utime(project.folder("m") / "README.md")
    assert project.open().status().outputs["m"].state == "stale"
    assert project.open().report(["m"]).outputs["m"].contribution is not None
    assert project.open().status().outputs["m"].state == "up-to-date"


def test_values_that_are_not_finite_are_not_known(tmp_path):
    project = project_of(tmp_path)
    tensors = read_checkpoint(tmp_path / project.sources["a"])
    tensors["model.norm.weight"][0] = np.inf
    project.add_source("a", tensors)
    params = {"non_finite": "allow"}
    project.set_output("m", {**project.outputs["m"], "params": params})
    project.build()
    found = project.open().explain("m", "model.norm.weight")
    assert (found.contribution.update_norm, found.experts[0].contribution.cosine) == (None, None)
    assert found.as_json()["contribution"]["update_norm"] is None


def test_what_a_sampled_budget_left_unread_is_not_read_for_this(tmp_path, monkeypatch):
    project = project_of(tmp_path)
    project.set_output("m", project.outputs["m"] | {"budget": percent(40) | {"stats": "sample"}})
    project.build()
    reads = Reads(monkeypatch)
    found = project.open().explain("m")
    assert found.not_measured == "its budget goes by samples, and its experts were not read whole"
    report = project.open().report(["m"]).outputs["m"]
    assert report.contribution is None
    assert [source.digest.partition("b3:")[0] for source in report.sources] == ["", "sample:", "sample:", "sample:"]
    assert all(not reads.data_ranges(project.source_file(name)) for name in project.sources)
    assert project.open().status().outputs["m"].state == "up-to-date"
    project.set_output("full", {"operator": "linear", "experts": list(WEIGHTS)})
    project.build()  # which reads them whole
    assert project.open().explain("m").contribution is not None
    assert project.open().status().outputs["m"].state == "up-to-date"


# --- laws of the sums -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=12, max_size=12), min_size=1, max_size=4), st.data())
def test_omitted_blocks_are_those_that_are_not_there(rows, data):
    """Folding blocks with an access set is folding omitted deltas as zero, but for how experts' signs agree."""
    blocks = 3
    left_out = data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))
    slots = tuple(range(1, len(rows) + 1))
    statistic = InputsAndOutput(slots=slots)
    access = TensorAccess(levels=(bytes(0 if out else 255 for out in left_out), *(None,) * (len(rows) - 1)))
    values = np.asarray(rows, np.float64).reshape(len(rows), blocks, 4)
    masked = values.copy()
    if len(rows) > 1:  # the last row is the update, of which nothing is left out
        masked[0, left_out] = 0.0
    else:
        access = None
    packed = [packed_block(values[:, block]) for block in range(blocks)]
    whole = folded(statistic, packed)
    expected = folded(statistic, [packed_block(masked[:, block]) for block in range(blocks)])
    assert folded(statistic, packed, access) == replace(expected, same=whole.same, both=whole.both)


def packed_block(rows):
    count = len(rows)
    products = [float((rows[i] * rows[j]).sum()) for i in range(count) for j in range(i, count)]
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    same = [int((np.sign(rows[i]) * np.sign(rows[j]) > 0).sum()) for i, j in pairs]
    both = [int((np.sign(rows[i]) * np.sign(rows[j]) != 0).sum()) for i, j in pairs]
    return np.asarray([*products, *same, *both], "<f8").tobytes()


def test_shares_of_nothing_are_not_known():
    sums = ContributionSums()
    assert sums.total().experts == ()
    nothing = TensorContributions(
        experts=(), base=None, update=0.0, deltas=(), along=(), same=0, both=0, update_same=(), update_both=()
    )
    assert nothing.deltas == ()
    assert sums.total().update_relative is None
