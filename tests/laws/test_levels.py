"""Laws 1 to 6 and 8 of budgets that buy precision (`precision = "levels"`), through real builds.

Blocks have 16,384 elements here: enough that the first bits of a block cost much less than the block.
"""

import hashlib
import itertools
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budgets import levels, with_budget
from support.every_operator import RECIPES
from support.projects import Messages, Reads, SmallProject
from support.quick import every, examples

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.lockfile.reader import read_lock
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.levels import LEVELS

BLOCK = 16_384
GEOMETRY = Geometry(block_elements=BLOCK)
SHAPES = {
    "model.embed_tokens.weight": (600, 64),
    "model.layers.0.mlp.up_proj.weight": (512, 96),
    "model.layers.1.mlp.up_proj.weight": (300, 96),
    "model.layers.0.conv.weight": (40, 25, 17),
    "model.norm.weight": (64,),
    "model.long.bias": (20_000,),
}
EXPERTS = ("e1", "e2", "e3")
NAMES = sorted(name for name, recipe in RECIPES.items() if recipe["operator"] != "passthrough")
QUICK = ("task_arithmetic", "linear", "ties", "dare_linear", "karcher")
SHARES = (0, 4, 12, 30, 60, 95)


def family(seed=0, *, shapes=None, dtypes=("BF16",) * 4, spread=1.0):
    """Return a base and three experts; the lengths of deltas differ by rows, tensors and experts, and some are zero."""
    rng = np.random.default_rng(seed)
    kinds = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
    base = {name: rng.normal(0, 0.02, shape) for name, shape in (shapes or SHAPES).items()}
    found = {"base": {name: array.astype(np.float32).astype(kinds[dtypes[0]]) for name, array in base.items()}}
    for number, expert in enumerate(EXPERTS):
        found[expert] = {}
        for name in base:
            start = np.asarray(found["base"][name], np.float64)
            rows = np.exp(rng.normal(0, spread, start.shape[:1] + (1,) * (start.ndim - 1)))
            delta = rng.normal(0, 0.004, start.shape) * rows * np.exp(rng.normal(0, spread))
            delta[: len(delta) // 5] *= number != 1  # equal rows: blocks and parts of blocks without a delta
            values = np.clip(start + delta, -6e4, 6e4)  # what F16 can hold
            found[expert][name] = values.astype(np.float32).astype(kinds[dtypes[number + 1]])
    return found


def budget(share):
    return {"expert_reads": f"{share}%", "precision": "levels"}


def make(root, name="task_arithmetic", share=None, *, sources=None, shards=1, **more):
    project = SmallProject(root, GEOMETRY)
    project.add_sources(sources or family(), shards=shards)
    recipe = RECIPES[name] | {"base": "base", "write": {"dtype": "float32"}} | more
    project.set_output("m", recipe | ({} if share is None else {"budget": budget(share)}))
    return project


def files(project, output="m"):
    """Return the digests of an output's files but its manifest, which has what a run read, and its lock."""
    folder = project.folder(output)
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "mergepipe.json"}
    return {name: hashlib.blake2b(data).hexdigest() for name, data in found.items()}, project.lock.read_text()


def distance(first, second):
    return float(np.sqrt(sum(np.sum((np.float64(first[n]) - np.float64(second[n])) ** 2) for n in first)))


def packs(project):
    return sorted((project.cache / "progressive").iterdir())


def matrix(rows):
    """Return levels as an array, ``(experts, blocks)``."""
    return np.array([list(row) for row in rows])


def codes_of(project):
    """Return all levels of an output's access set that are neither nothing nor exact."""
    return {level for rows in levels(project).values() for row in rows for level in row if 0 < level <= LEVELS}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a function from a recipe to its full read, and what comes out of it under every share, in one cache."""
    made = {}

    def build(name):
        if name not in made:
            project = make(tmp_path_factory.mktemp("levels") / "project", name)
            project.build()
            full, found = project.tensors("m"), {}
            for share in SHARES:
                report = with_budget(project, budget(share)).build_one("m")
                found[share] = (report, project.tensors("m"), levels(project))
            made[name] = (full, found)
        return made[name]

    return build


# --- laws 1, 3 and 4 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every(NAMES, QUICK))
def test_a_full_budget_in_levels_gives_the_full_read_bit_for_bit(tmp_path, name):
    project = make(tmp_path / "full", name)
    total = project.build_one("m").expert_bytes["full"]
    want = project.raw("m")
    for number, limit in enumerate(({"expert_reads": "100%"}, {"expert_reads": total})):
        other = with_budget(project.clone(tmp_path / str(number)), limit | {"precision": "levels"})
        report = other.build_one("m")
        assert (other.raw("m"), report.bound.kind) == (want, "exact")


@pytest.mark.parametrize("name", every(NAMES, QUICK))
def test_levels_never_fall_and_bytes_stay_within_the_budget(built, name):
    _, found = built(name)
    for less, more in itertools.pairwise(SHARES):
        for name_of, rows in found[less][2].items():
            assert (matrix(rows) <= matrix(found[more][2][name_of])).all()
    for share in SHARES:
        report = found[share][0]
        assert report.expert_bytes["planned"] <= report.expert_bytes["full"] * share / 100
    assert any(0 < level <= LEVELS for rows in found[30][2].values() for row in rows for level in row)


@pytest.mark.parametrize("name", every(NAMES, QUICK))
def test_the_true_error_is_within_the_bound_and_bounds_never_grow(built, name):
    full, found = built(name)
    bounds = [found[share][0].bound.absolute for share in SHARES]
    assert None in bounds or bounds == sorted(bounds, reverse=True)
    for share in SHARES:
        report, tensors, _ = found[share]
        if report.bound.kind != "none":
            assert distance(full, tensors) <= report.bound.absolute * (1 + 1e-5) + 1e-4


@pytest.mark.parametrize("name", every(["dare_linear", "linear", "task_arithmetic", "karcher"], ["task_arithmetic"]))
def test_levels_come_nearer_than_whole_blocks(built, tmp_path, name):
    full, found = built(name)
    for share in (12, 30):
        project = make(tmp_path / str(share), name, budget={"expert_reads": f"{share}%", "precision": "blocks"})
        project.build()
        assert distance(full, found[share][1]) < 0.7 * distance(full, project.tensors("m"))


def test_the_reader_reads_what_was_planned_of_packs_and_blocks_and_nothing_else(tmp_path, monkeypatch):
    project = make(tmp_path, share=30)
    project.open().plan()  # measures and codes, and merges nothing
    reads = Reads(monkeypatch)
    report = project.build_one("m")
    experts = [stop - start for e in EXPERTS for start, stop in reads.data_ranges(project.source_file(e))]
    folder = project.cache / "progressive"
    coded = [(path, start, stop) for path, start, stop in reads.ranges if path.parent == folder]
    assert coded
    # Headers are read from their packs' first byte on; chunks lie behind them.
    chunks = sum(stop - start for _, start, stop in coded if start > 0)
    assert sum(experts) + chunks >= report.expert_bytes["read"] == report.expert_bytes["planned"]
    assert sum(experts) + chunks <= report.expert_bytes["full"] * 0.3 + header_tails(coded)
    assert report.index_bytes_read == 0


def header_tails(coded):
    """Return what is read of headers behind their first part."""
    first = {path: stop for path, start, stop in coded if start == 0}
    return sum(stop - start for path, start, stop in coded if start and start == first.get(path))


# --- what a level is ------------------------------------------------------------------------------------------------


def approximated(sources, access):
    """Return the deltas of all experts as a budget reads them, decoded here block by block."""
    found = []
    for number, expert in enumerate(EXPERTS):
        deltas = {}
        for name, base in sources["base"].items():
            start = base.astype(np.float32).ravel()
            delta = sources[expert][name].astype(np.float32).ravel() - start
            row = base.shape[-1] if base.ndim > 1 else 1
            size = max(1, BLOCK // row) * row
            for block, level in enumerate(access[name][number]):
                part = slice(block * size, (block + 1) * size)
                if level == 0:
                    delta[part] = 0
                elif level <= LEVELS:
                    exact = delta[part].copy()
                    BlockDecoder(encode_block(exact, row).chunks[:level], exact.size, row).fill(0, delta[part])
            deltas[name] = delta.reshape(base.shape)
        found.append(deltas)
    return found


@pytest.mark.parametrize("operator", ["task_arithmetic", "linear"])
def test_the_output_is_made_from_decoded_deltas(tmp_path, operator):
    weights = [0.5, 0.25, 0.125]
    experts = [{"source": name, "weight": weight} for name, weight in zip(EXPERTS, weights, strict=True)]
    more = {"operator": operator, "experts": experts, "params": {"normalize": False}}
    project = make(tmp_path, share=25, **more)
    project.build()
    assert codes_of(project)
    sources = family()
    deltas = approximated(sources, levels(project))
    for name, array in project.tensors("m").items():
        base = sources["base"][name].astype(np.float64)
        sum_of = base * (1.0 if operator == "task_arithmetic" else sum(weights))
        for weight, delta in zip(weights, deltas, strict=True):
            sum_of = sum_of + weight * delta[name].astype(np.float64)
        np.testing.assert_allclose(array.astype(np.float64), sum_of, rtol=2e-6, atol=2e-8)


def test_small_tensors_and_equal_ones_cost_nothing_or_are_exact(tmp_path):
    project = make(tmp_path, share=30)
    project.build()
    access = levels(project)
    assert all(level in (0, 255) for row in access["model.norm.weight"] for level in row)
    assert any(level not in (0, 255) for row in access["model.long.bias"] for level in row)


# --- law 2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["task_arithmetic", "linear", "ties"])
def test_nothing_depends_on_cache_threads_memory_or_shards(tmp_path, name):
    first = make(tmp_path / "first", name, 20)
    first.build(workers=1)
    want = files(first)
    for number, (shards, options) in enumerate(
        [(3, {"workers": 2}), (1, {"workers": 8}), (1, {"workers": 1, "memory": 1 << 20})]
    ):
        other = make(tmp_path / str(number), name, 20, shards=shards)
        other.build(**options)
        assert files(other) == want
    shutil.rmtree(first.folder("m"))
    first.build()  # all is known
    assert files(first) == want
    with_budget(first, budget(60)).build()
    with_budget(first, budget(20)).build()
    assert files(first) == want


def test_plans_need_no_packs_and_what_is_built_is_not_read_again(tmp_path):
    project = make(tmp_path, share=20)
    project.build()
    want = files(project)
    shutil.rmtree(project.cache / "progressive")
    report = project.build_one("m")
    assert (report.state, report.index_bytes_read, report.expert_bytes["read"]) == ("unchanged", 0, 0)
    with_budget(project, budget(21)).build()
    assert packs(project)
    with_budget(project, budget(20)).build()
    assert files(project) == want


# --- laws 5 and 6 ---------------------------------------------------------------------------------------------------


def test_one_block_of_one_expert_that_changed_is_the_only_one_that_is_made_anew(tmp_path):
    project = make(tmp_path, share=40)
    project.build()
    before = levels(project)
    sources = family()
    changed = sources["e2"]["model.layers.0.mlp.up_proj.weight"]
    changed[200:210] = (changed[200:210].astype(np.float32) * np.float32(1.004)).astype(ml_dtypes.bfloat16)
    project.add_source("e2", sources["e2"])
    report = project.build_one("m")
    after = levels(project)
    moved = {(n, int(b)) for n in before for b in np.flatnonzero((matrix(before[n]) != matrix(after[n])).any(axis=0))}
    touched = ("model.layers.0.mlp.up_proj.weight", 200 // (BLOCK // 96))
    assert report.blocks["computed"] + report.blocks["copied"] <= len(moved | {touched})
    clean = project.clone(tmp_path / "clean")
    clean.build()
    assert files(clean) == files(project)


def test_another_weight_takes_no_pass_over_the_experts(tmp_path):
    project = make(tmp_path, share=40)
    project.build()
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    report = project.build_one("m")
    assert report.index_bytes_read == 0
    assert report.expert_bytes["read"] == report.expert_bytes["planned"] > 0


# --- law 8 ----------------------------------------------------------------------------------------------------------


def spoil(path, at):
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_in_a_pack_never_reaches_an_output(tmp_path, seed):
    rng = np.random.default_rng(seed)
    project = make(tmp_path, share=20)
    project.build()
    with_budget(project, budget(30)).build()
    want = files(project)
    with_budget(project, budget(20)).build()
    for path in packs(project):
        spoil(path, int(rng.integers(path.stat().st_size)))
    shutil.rmtree(project.cache / "packs")
    messages = Messages()
    with_budget(project, budget(30)).build(reporter=messages)
    assert files(project) == want
    assert any("was damaged" in text for text in messages.warnings)


@pytest.mark.parametrize("how", ["cut", "empty", "gone", "another", "folder"])
def test_a_pack_that_is_not_what_it_was_is_made_again(tmp_path, how):
    project = make(tmp_path, share=30)
    project.open().plan()
    first, *others = packs(project)
    intact = first.read_bytes()
    first.chmod(0o644)
    match how:
        case "cut":
            first.write_bytes(intact[: len(intact) // 2])
        case "empty":
            first.write_bytes(b"")
        case "another":
            first.write_bytes(others[0].read_bytes())
        case "folder":
            first.unlink()
            first.mkdir()
        case "gone":
            first.unlink()
    project.build()
    clean = project.clone(tmp_path / "clean")
    clean.build()
    assert files(project) == files(clean)


# --- inputs of every kind -------------------------------------------------------------------------------------------


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bounds_hold_for_shapes_dtypes_and_scales_of_all_kinds(tmp_path_factory, data):
    shape = data.draw(st.sampled_from([(130, 130), (1, 40_000), (40_000,), (9_000, 3), (64, 16, 17), (2, 20_000)]))
    dtypes = tuple(data.draw(st.sampled_from(["BF16", "F16", "F32", "F64"])) for _ in range(4))
    spread = data.draw(st.sampled_from([0.0, 1.0, 4.0]))
    share = data.draw(st.sampled_from([3, 10, 40, 70]))
    sources = family(data.draw(st.integers(0, 9)), shapes={"w": shape, "norm": (8,)}, dtypes=dtypes, spread=spread)
    project = make(tmp_path_factory.mktemp("kinds"), sources=sources)
    project.build()
    full = project.tensors("m")
    report = with_budget(project, budget(share)).build_one("m")
    scale = max(float(np.abs(np.float64(full["w"])).max()), 1.0)
    rounding = 1e-5 * scale * full["w"].size ** 0.5
    assert distance(full, project.tensors("m")) <= report.bound.absolute * (1 + 1e-5) + rounding
    assert report.expert_bytes["read"] <= report.expert_bytes["full"] * share / 100
    assert report.expert_bytes["read"] <= report.expert_bytes["planned"]  # blocks of the full read are there already


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_blocks_that_are_not_finite_are_read_exactly_or_not_at_all(tmp_path, value):
    sources = family()
    sources["e1"]["model.embed_tokens.weight"][5, 7] = value
    project = make(tmp_path, share=30, sources=sources, params={"non_finite": "allow"})
    project.build()
    assert levels(project)["model.embed_tokens.weight"][0][0] in (0, 255)
    assert codes_of(project)


def test_two_outputs_read_shared_stages_once(tmp_path):
    project = make(tmp_path, share=20)
    project.set_output("n", project.outputs["m"] | {"path": "build/n", "budget": budget(40)})
    project.open().plan()
    report = project.build()
    alone = make(tmp_path / "alone", share=40)
    assert alone.build_one("m").expert_bytes["planned"] == report.outputs["n"].expert_bytes["planned"]
    total = sum(one.expert_bytes["read"] for one in report.outputs.values())
    assert total < sum(one.expert_bytes["planned"] for one in report.outputs.values())
    assert alone.raw("m") == project.raw("n")


def test_the_lock_says_that_a_budget_is_in_levels(tmp_path):
    project = make(tmp_path, share=20)
    project.build()
    assert read_lock(project.lock).outputs[0].budget == "20% in levels"


HARD = """\
import numpy as np
from mergepipe.operators.additive import TaskArithmetic
from mergepipe.operators.influence import additive


class Hard(TaskArithmetic):
    def apply(self, inputs, prepared, reduction=None):
        out = inputs.base.copy()
        for index, weight in enumerate(prepared.coefficients):
            if inputs.has(index):
                delta = inputs.delta(index, 0)
                out += np.where(np.abs(delta) > 0.004, np.float32(weight) * delta, 0)
        return out
"""


def test_a_custom_class_that_inherits_what_is_said_of_another_apply_is_not_taken_as_linear(tmp_path):
    project = make(tmp_path)
    (tmp_path / "ops.py").write_text(HARD, encoding="utf-8")
    text = project.mergefile.read_text(encoding="utf-8").replace('operator = "task_arithmetic"', 'operator = "hard"')
    text += '[operators.hard]\npython = "ops.py:Hard"\n'

    def build(more=""):
        project.mergefile.write_text(text.replace('base = "base"', f'base = "base"{more}'), encoding="utf-8")
        return project.build_one("m", allow_custom=True)

    build()
    full = project.tensors("m")
    for share in (40, 60, 80):
        report = build(f'\nbudget = {{ expert_reads = "{share}%", precision = "levels" }}')
        assert codes_of(project)
        assert distance(full, project.tensors("m")) <= report.bound.absolute


@pytest.mark.parametrize("order", [("e1", "longer"), ("longer", "e1")])
def test_an_expert_with_more_rows_and_the_same_ones_as_another_shares_its_blocks(tmp_path, order):
    sources = family()
    longer = {name: array.copy() for name, array in sources["e1"].items()}
    table = longer["model.embed_tokens.weight"]
    longer["model.embed_tokens.weight"] = np.concatenate([table, table[:7]])
    experts = [{"source": name, "weight": 0.5} for name in order]
    recipe = {"experts": experts, "params": {"rows": "common"}}
    project = make(tmp_path, sources=sources | {"longer": longer}, **recipe)
    project.build()
    full = project.tensors("m")
    report = with_budget(project, budget(30)).build_one("m")
    assert codes_of(project)
    assert report.expert_bytes["read"] <= report.expert_bytes["planned"] <= 0.3 * report.expert_bytes["full"]
    assert distance(full, project.tensors("m")) <= report.bound.absolute * (1 + 1e-5) + 1e-4
