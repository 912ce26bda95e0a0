"""Law 9: a manifest and the sources are enough to make every tensor of an output again and to check its digest."""

import json

import numpy as np
import pytest
from blake3 import blake3
from support.checkpoints import as_dtype, random_tensors, read_checkpoint
from support.projects import TINY, SmallProject
from support.reference import linear, round_to, task_arithmetic

from mergepipe.digest import content_digest, source_digest, tensor_digest
from mergepipe.lockfile.reader import read_lock
from mergepipe.plan.layout import shard_digest

SHAPES = {f"model.layers.{n}.w": (10, 16) for n in range(3)} | {
    "model.embed_tokens.weight": (14, 8),
    "model.norm": (70,),
    "model.scale": (),
    "model.empty": (0, 3),
}
OPERATORS = ("linear", "task_arithmetic", "passthrough")


@pytest.fixture(params=OPERATORS)
def project(tmp_path, request):
    """Return a built project whose output has rules, gradients, a missing tensor, common rows and a buffer."""
    project = SmallProject(tmp_path)
    for seed, (name, dtype) in enumerate([("base", "bfloat16"), ("e1", "float32"), ("e2", "float16")]):
        tensors = {n: a.astype(as_dtype(dtype)) for n, a in random_tensors(seed, SHAPES).items()}
        tensors["ids"] = np.arange(100)
        project.add_source(name, tensors, shards=seed + 1, config={"torch_dtype": "bfloat16"})
    lacking = read_checkpoint(tmp_path / "models/e2")
    lacking["model.embed_tokens.weight"] = lacking["model.embed_tokens.weight"][:9]
    del lacking["model.norm"]
    project.add_source("e2", lacking)
    experts = [{"source": "e1", "weight": [0.2, 0.8]}, {"source": "e2", "weight": 0.4}]
    recipe = {
        "operator": request.param,
        "base": "base",
        "experts": experts,
        "params": {"missing": "base", "rows": "common", "normalize": True},
        "rules": [{"match": "*.1.*", "experts": {"e2": {"weight": -0.1}}}],
        "write": {"shard_size": 500, "dtype": "float16"},
    }
    if request.param == "passthrough":
        recipe = {
            "operator": "passthrough",
            "experts": [{"source": "e1", "scale": [0.5, 2.0]}],
            "write": {"shard_size": 500},
        }
    project.set_output("m", recipe)
    project.build()
    return project


def block_digests(data, shape):
    """Return the packed digests of a tensor's blocks of 64 elements, in whole rows; cut by hand."""
    size = len(data) // max(1, int(np.prod(shape))) if data else 1
    row = size * (shape[-1] if len(shape) > 1 else 1)
    step = row * max(1, TINY.block_elements // max(1, row // size))
    return b"".join(blake3(data[at : at + step]).digest() for at in range(0, len(data), step))


def again(manifest, tensor, sources):
    """Make one tensor again from what its manifest says and the sources' arrays."""
    output, parameters = manifest.output, tensor.parameters
    definer = output.base if output.base and output.operator != "passthrough" else output.experts[0].source
    own = sources[definer][tensor.name]
    if tensor.decision == "equal":
        return own
    found = [sources[expert.source].get(tensor.name) for expert in output.experts]
    rows = min([len(own), *(len(array) for array in found if array is not None)]) if own.ndim else None
    cut = [array if array is None or rows is None else array[:rows] for array in found]
    mine = own if rows is None else own[:rows]
    if output.operator == "task_arithmetic":
        weights = [expert["weight"] for expert in parameters.experts]
        merged = task_arithmetic(
            mine, cut, weights, normalize=parameters.params["normalize"], scale=parameters.params["lambda"]
        )
    elif output.operator == "linear":
        weights = [expert["weight"] for expert in parameters.experts]
        filled = [mine if array is None else array for array in cut]
        merged = linear(filled, weights, normalize=parameters.params["normalize"])
    else:
        merged = linear([mine], [parameters.experts[0]["scale"]], normalize=False)
    result = round_to(merged, tensor.dtype)
    return result if rows is None else np.concatenate([result, round_to(own[rows:], tensor.dtype)])


def test_every_tensor_is_made_again_with_the_digest_that_the_manifest_states(project):
    manifest = project.manifest("m")
    sources = {s.name: read_checkpoint(project.root / s.location["path"]) for s in manifest.sources}
    pairs = []
    for tensor, locked in zip(manifest.tensors, manifest.output.tensors, strict=True):
        array = again(manifest, tensor, sources)
        assert array.shape == tensor.shape
        blocks = block_digests(array.tobytes(), tensor.shape)
        assert blocks == tensor.blocks, tensor.name
        assert tensor_digest(tensor.dtype, tensor.shape, blocks) == locked.digest
        pairs.append((tensor.name, locked.digest))
    assert source_digest(pairs) == manifest.output.digest


def test_the_manifest_identifies_every_input(project):
    manifest = project.manifest("m")
    for source in manifest.sources:
        arrays = read_checkpoint(project.root / source.location["path"])
        digests = {}
        for name, array in arrays.items():
            blocks = block_digests(array.tobytes(), array.shape)
            dtype = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}[str(array.dtype)]
            digests[name] = (tensor_digest(dtype, array.shape, blocks), blocks)
        assert source.digest == source_digest((name, digest) for name, (digest, _) in digests.items())
        assert (source.tensors, source.bytes) == (len(arrays), sum(array.nbytes for array in arrays.values()))
        for tensor in manifest.tensors:
            for given in tensor.inputs:
                if given.source == source.name:
                    digest, blocks = digests[tensor.name]
                    assert given.digest == digest
                    assert given.blocks == b"".join(blocks[at : at + 16] for at in range(0, len(blocks), 32))


def test_the_manifest_describes_every_file_beside_it(project):
    manifest, folder = project.manifest("m"), project.folder("m")
    assert sorted(manifest.files) == sorted(path.name for path in folder.iterdir())
    digests = {tensor.name: tensor.digest for tensor in manifest.output.tensors}
    for shard, names in zip(manifest.output.shards, manifest.shard_tensors, strict=True):
        data = (folder / shard.name).read_bytes()
        assert len(data) == shard.bytes
        stop = 8 + int.from_bytes(data[:8], "little")
        assert [name for name in json.loads(data[8:stop]) if name != "__metadata__"] == list(names)
        assert shard_digest(data[:stop], [digests[name] for name in names]) == shard.digest
    for side in manifest.output.side_files:
        assert content_digest((folder / side.name).read_bytes()) == side.digest


def test_the_manifest_and_the_lock_say_the_same_of_an_output(project):
    lock = read_lock(project.lock)
    assert lock.output("m") == project.manifest("m").output


def test_the_manifest_counts_what_the_run_read(project):
    report = project.open().plan().outputs["m"]
    run = project.manifest("m").run
    assert run.expert_bytes_read == report.expert_bytes["full"]
    assert run.blocks["total"] == run.blocks["computed"] + run.blocks["copied"] == report.blocks["total"]
    assert run.bytes_written == sum(a.nbytes for a in project.tensors("m").values())


def test_manifests_of_one_result_differ_in_measured_costs_alone(project, tmp_path):
    other = project.clone(tmp_path / "other")
    other.build(workers=1)
    assert other.manifest("m") == project.manifest("m")
    experts = project.outputs["m"]["experts"]
    key = "scale" if project.outputs["m"]["operator"] == "passthrough" else "weight"
    project.set_output("m", project.outputs["m"] | {"experts": [experts[0] | {key: 0.9}, *experts[1:]]})
    project.build()
    project.set_output("m", other.outputs["m"])
    project.build()
    again = project.manifest("m")
    assert again.run != other.manifest("m").run
    assert (again.output, again.tensors, again.sources) == (
        other.manifest("m").output,
        other.manifest("m").tensors,
        other.manifest("m").sources,
    )
