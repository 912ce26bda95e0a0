"""A lock and a manifest that show every part of both formats, and random ones."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from hypothesis import strategies as st

from mergepipe.digest import content_digest, source_digest, tensor_digest
from mergepipe.lockfile.manifest import (
    LEVEL_EXACT,
    LEVEL_OMITTED,
    Manifest,
    ManifestInput,
    ManifestPlace,
    ManifestStage,
    ManifestTensor,
    ParameterSet,
    RunFacts,
    truncate_digests,
)
from mergepipe.lockfile.records import (
    LockedExpert,
    LockedFile,
    LockedLevels,
    LockedOutput,
    LockedRule,
    LockedShard,
    LockedSideFile,
    LockedSlice,
    LockedSource,
    LockedTensor,
    Lockfile,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "lockfile"


def check_golden(name, data):
    """Compare with the golden file, or write it where MERGEPIPE_UPDATE_GOLDEN=1."""
    path = GOLDEN / name
    if os.environ.get("MERGEPIPE_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert data.decode() == path.read_bytes().decode()


def digest(label):
    return content_digest(label.encode())


def blocks(label, count):
    return b"".join(digest(f"{label}#{index}") for index in range(count))


BASE = LockedSource(
    name="base",
    location={"hub": "org/base-1b", "revision": "0123456789abcdef0123456789abcdef01234567"},
    digest=digest("base"),
    tensors=4,
    bytes=3_408_896,
    files=(
        LockedFile(name="model-00001-of-00002.safetensors", bytes=2_097_424),
        LockedFile(name="model-00002-of-00002.safetensors", bytes=1_311_944),
    ),
)
CODE = LockedSource(
    name="code",
    location={"path": "modèles/code expert"},
    digest=digest("code"),
    tensors=4,
    bytes=3_408_896,
    files=(LockedFile(name="model.safetensors", bytes=3_409_280),),
)
MATH = LockedSource(
    name="math",
    location={"path": "models/math"},
    digest=digest("math"),
    tensors=4,
    bytes=3_408_896,
    files=(LockedFile(name="model.safetensors", bytes=3_409_280),),
)

TENSOR_FACTS = (
    # name, dtype, shape, output blocks, read, total
    ("lm_head.weight", "BF16", (1024, 512), 2, 4, 4),
    ("model.layers.0.mlp.up_proj.weight", "BF16", (1024, 1024), 4, 7, 8),
    ("model.layers.10.self_attn.q_proj.weight", "BF16", (512, 256), 1, 1, 2),
    ("model.norm.weight", "F32", (512,), 1, 2, 2),
)


def locked_tensor(facts):
    name, dtype, shape, count, read, total = facts
    return LockedTensor(
        name=name, digest=tensor_digest(dtype, shape, blocks(f"merged {name}", count)), read=read, total=total
    )


TENSORS = tuple(map(locked_tensor, TENSOR_FACTS))
SHARD_TENSORS = (
    ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"),
    ("model.norm.weight", "model.layers.10.self_attn.q_proj.weight"),
)

ASSISTANT = LockedOutput(
    name="assistant",
    path="build/assistant",
    operator="ties",
    operator_version=2,
    numerics="float32",
    base="base",
    experts=(
        LockedExpert(source="math", params={"weight": 1.0}),
        LockedExpert(source="code", params={"weight": (0.2, 0.6), "density": 0.4}),
    ),
    params={"lambda": 1.0, "normalize": True, "seed": 7},
    rules=(
        LockedRule(match=("*.self_attn.*",), layers=None, params={"density": 0.8}, experts={"math": {"weight": 0.9}}),
        LockedRule(match=("lm_head.*", "*.embed_tokens.*"), layers=None, params={"rows": "common"}, experts={}),
        LockedRule(match=(), layers="8..16", params={"density": (0.5, 0.25, 1e-05)}, experts={"code": {}}),
    ),
    budget="full",
    write={"dtype": "BF16", "shard_size": 2_100_000, "tokenizer": "base"},
    sources={"base": BASE.digest, "code": CODE.digest, "math": MATH.digest},
    expert_bytes_full=6_817_792,
    expert_bytes_planned=6_162_432,
    bound={"kind": "exact", "absolute": 0.0, "relative_to_update": 0.0},
    digest=source_digest((tensor.name, tensor.digest) for tensor in TENSORS),
    shards=(
        LockedShard(name="model-00001-of-00002.safetensors", digest=digest("shard 1"), bytes=3_146_000),
        LockedShard(name="model-00002-of-00002.safetensors", digest=digest("shard 2"), bytes=264_488),
    ),
    side_files=(
        LockedSideFile(name="config.json", digest=digest("config")),
        LockedSideFile(name="model.safetensors.index.json", digest=digest("index")),
    ),
    tensors=TENSORS,
)
BLEND = LockedOutput(
    name="blend",
    path="build/blend",
    operator="linear",
    operator_version=1,
    numerics="float32",
    base=None,
    experts=(LockedExpert(source="assistant", params={"weight": 0.5}), LockedExpert(source="math", params={})),
    params={},
    rules=(),
    budget="full",
    write={"dtype": "F32", "shard_size": 5_000_000_000},
    sources={"assistant": ASSISTANT.digest, "math": MATH.digest},
    expert_bytes_full=6_817_792,
    expert_bytes_planned=6_817_792,
    bound={"kind": "none"},
    digest=source_digest([(TENSORS[3].name, TENSORS[3].digest)]),
    shards=(LockedShard(name="model.safetensors", digest=digest("blend shard"), bytes=2128),),
    side_files=(),
    tensors=TENSORS[3:],
)
STACK = LockedOutput(
    name="stack",
    path="build/stack",
    operator="passthrough",
    operator_version=1,
    numerics="float32",
    base=None,
    experts=(),
    params={},
    slices=(
        LockedSlice(
            layers="0..8",
            operator=None,
            operator_version=None,
            base=None,
            base_layers=None,
            experts=(LockedExpert(source="base", params={}),),
            params={},
            rules=(),
        ),
        LockedSlice(
            layers="8..16",
            operator="task_arithmetic",
            operator_version=1,
            base="base",
            base_layers="4..12",
            experts=(
                LockedExpert(source="math", params={}),
                LockedExpert(source="code", params={"weight": 0.3}, layers="0..8"),
            ),
            params={"lambda": (0.0, 0.5)},
            rules=(
                LockedRule(match=("*.mlp.*",), layers=None, params={"lambda": 1.0}, experts={"code": {"weight": 0.1}}),
            ),
        ),
    ),
    rules=(),
    budget="full",
    write={"shard_size": 5_000_000_000},
    sources={"base": BASE.digest, "code": CODE.digest, "math": MATH.digest},
    expert_bytes_full=4_194_304,
    expert_bytes_planned=4_194_304,
    bound={"kind": "exact", "absolute": 0.0, "relative_to_update": 0.0},
    digest=source_digest([(TENSORS[3].name, TENSORS[3].digest)]),
    shards=(LockedShard(name="model.safetensors", digest=digest("stack shard"), bytes=2128),),
    side_files=(),
    tensors=TENSORS[3:],
)
LOCK = Lockfile(geometry=1, sources=(MATH, BASE, CODE), outputs=(BLEND, ASSISTANT))
SLICED = Lockfile(geometry=1, sources=(MATH, BASE, CODE), outputs=(STACK,))

_COMMON = {"lambda": 1.0, "normalize": True}
_PLAIN = ParameterSet(params=_COMMON, experts=({"density": 1.0, "weight": 1.0}, {"density": 0.4, "weight": 0.2}))
_ATTENTION = ParameterSet(params=_COMMON, experts=({"density": 0.8, "weight": 0.9}, {"density": 0.8, "weight": 0.6}))
_LEVELS = {
    "model.layers.10.self_attn.q_proj.weight": bytes([LEVEL_EXACT, LEVEL_OMITTED]),
}


def manifest_tensor(facts):
    name, dtype, shape, count, *_ = facts
    copied = name == "model.norm.weight"
    return ManifestTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        decision="copy" if copied else "merge",
        parameters=None if copied else _ATTENTION if "self_attn" in name else _PLAIN,
        inputs=tuple(
            ManifestInput(
                source=source,
                digest=tensor_digest(dtype, shape, blocks(f"{source} {name}", count)),
                blocks=truncate_digests(blocks(f"{source} {name}", count)),
            )
            for source in (("base",) if copied else ("base", "math", "code"))
        ),
        blocks=blocks(f"merged {name}", count),
        levels=_LEVELS.get(name),
    )


MANIFEST = Manifest(
    mergepipe="0.1.0",
    geometry=1,
    output=ASSISTANT,
    sources=(BASE, CODE, MATH),
    tensors=tuple(map(manifest_tensor, TENSOR_FACTS)),
    shard_tensors=SHARD_TENSORS,
    generated=(LockedSideFile(name="README.md", digest=digest("card")),),
    files=(
        "README.md",
        "config.json",
        "mergepipe.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ),
    decisions=("`math`: 1 extra tensor dropped: `value_head.weight`",),
    run=RunFacts(
        expert_bytes_read=6_162_432,
        base_bytes_read=3_408_896,
        index_bytes_read=0,
        bytes_written=3_410_488,
        blocks={"total": 8, "computed": 7, "cached": 0, "copied": 1},
        expert_blocks={"total": 16, "read": 14, "omitted": 1, "zero": 1, "shared": 0},
    ),
)

# `blend` is made from `assistant`, which is not published here; its input `math` is the stage's, too.
STAGED = Manifest(
    mergepipe="0.1.0",
    geometry=1,
    output=dataclasses.replace(BLEND, write=BLEND.write | {"tokenizer": "chat"}),
    sources=(
        LockedSource(
            name="assistant",
            location={"output": "assistant"},
            digest=ASSISTANT.digest,
            tensors=4,
            bytes=3_408_896,
            files=(LockedFile(name="model.safetensors", bytes=3_409_280),),
        ),
        MATH,
    ),
    places=(ManifestPlace(name="chat", location={"path": "../chat"}),),
    operators={"mine": "ops/mine.py:merge"},
    stages=(
        ManifestStage(
            output=dataclasses.replace(ASSISTANT, path=None, shards=(), side_files=()),
            sources=(BASE, CODE, MATH),
            tensors=tuple(dataclasses.replace(tensor, blocks=b"") for tensor in MANIFEST.tensors),
        ),
    ),
    tensors=(
        dataclasses.replace(
            MANIFEST.tensors[3],
            decision="merge",
            parameters=ParameterSet(params=_COMMON, experts=({"weight": 0.5}, {"weight": 1.0})),
            inputs=tuple(
                ManifestInput(
                    source=source,
                    digest=tensor_digest("F32", (512,), blocks(f"{name} model.norm.weight", 1)),
                    blocks=truncate_digests(blocks(f"{name} model.norm.weight", 1)),
                )
                for source, name in (("assistant", "merged"), ("math", "base"))
            ),
        ),
    ),
    shard_tensors=(("model.norm.weight",),),
    generated=(),
    files=("mergepipe.json", "model.safetensors"),
    decisions=(),
    run=MANIFEST.run,
)

# Random records. Texts are everything but lone surrogates, which no text file can hold.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
digests = st.binary(min_size=32, max_size=32)
counts = st.integers(0, 2**63 - 1)
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.booleans() | numbers | texts
values = scalars | st.lists(numbers, max_size=3).map(tuple)


def mappings(elements, keys=texts):
    return st.dictionaries(keys, elements, max_size=3)


def in_name_order(records):
    return tuple(sorted(records, key=lambda record: record.name))


def tuples(elements, max_size=3):
    return st.lists(elements, max_size=max_size).map(tuple)


expert_params = mappings(values, texts.filter(lambda key: key not in ("source", "layers")))
experts = st.builds(LockedExpert, source=texts, params=expert_params)
ranged_experts = st.builds(LockedExpert, source=texts, params=expert_params, layers=st.none() | texts)
rules = st.builds(
    LockedRule,
    match=tuples(texts),
    layers=st.none() | texts,
    params=mappings(values),
    experts=mappings(mappings(values)),
)
slices = st.builds(
    LockedSlice,
    layers=texts,
    operator=st.none() | texts,
    operator_version=st.none() | counts,
    base=st.none() | texts,
    base_layers=st.none() | texts,
    experts=tuples(ranged_experts),
    params=mappings(values),
    rules=tuples(rules, max_size=2),
)
sources = st.builds(
    LockedSource,
    name=texts,
    location=mappings(texts, st.sampled_from(["path", "hub", "revision", "on"])),
    digest=digests,
    tensors=counts,
    bytes=counts,
    files=tuples(st.builds(LockedFile, name=texts, bytes=counts)),
)
bounds = st.fixed_dictionaries(
    {}, optional={"kind": texts, "absolute": st.floats(0, 1e300), "relative_to_update": st.floats(0, 1e300)}
)
shards = st.builds(LockedShard, name=texts, digest=digests, bytes=counts)
side_files = st.builds(LockedSideFile, name=texts, digest=digests)
locked_tensors = st.builds(LockedTensor, name=texts, digest=digests, read=counts, total=counts)
read_levels = st.builds(
    LockedLevels,
    bytes=counts,
    blocks=st.dictionaries(st.integers(0, 255), st.integers(1, 2**40)).map(lambda found: dict(sorted(found.items()))),
)
whole_outputs = st.builds(
    LockedOutput,
    name=texts,
    path=texts,
    operator=texts,
    operator_version=counts,
    numerics=texts,
    base=st.none() | texts,
    experts=tuples(experts),
    params=mappings(values),
    slices=tuples(slices, max_size=2),
    rules=tuples(rules),
    budget=texts,
    write=mappings(texts | counts),
    sources=mappings(digests),
    expert_bytes_full=counts,
    expert_bytes_planned=counts,
    bound=bounds,
    digest=digests,
    shards=tuples(shards),
    side_files=tuples(side_files),
    tensors=st.lists(locked_tensors, max_size=3, unique_by=lambda tensor: tensor.name).map(in_name_order),
)


def with_levels(output, version, levels):
    if version is None:
        return output
    tensors = tuple(dataclasses.replace(t, levels=found) for t, found in zip(output.tensors, levels, strict=False))
    return dataclasses.replace(output, levels_version=version, tensors=tensors)


outputs = st.builds(
    with_levels, whole_outputs, st.none() | counts, st.lists(st.none() | read_levels, min_size=3, max_size=3)
)


def named(elements):
    return st.lists(elements, max_size=3, unique_by=lambda element: element.name).map(tuple)


locks = st.builds(Lockfile, geometry=counts, sources=named(sources), outputs=named(outputs))


places = st.builds(
    ManifestPlace, name=texts, location=mappings(texts, st.sampled_from(["path", "hub", "revision", "on"]))
)


@st.composite
def random_stages(draw, output, used, taken):
    """At most one stage, made from the sources that the output is made from."""
    name = draw(texts)
    if draw(st.booleans()) or name == output.name or name in taken:
        return ()
    parameters = st.none() | st.builds(ParameterSet, params=mappings(scalars), experts=tuples(mappings(scalars)))
    made = [
        ManifestTensor(
            name=tensor,
            dtype="BF16",
            shape=draw(tuples(st.integers(0, 2**40))),
            decision=draw(texts),
            parameters=draw(parameters),
            inputs=tuple(
                ManifestInput(
                    source=draw(texts), digest=digest(number), blocks=b"known one, said." if number == "1" else b""
                )
                for number in draw(st.lists(st.sampled_from(["1", "2"]), max_size=1))
            ),
            blocks=b"",
            levels=draw(st.none() | st.binary(max_size=4)),
        )
        for tensor in draw(st.lists(texts, max_size=1))
    ]
    results = tuple(LockedTensor(name=one.name, digest=draw(digests), read=1, total=2) for one in made)
    stage = dataclasses.replace(
        draw(outputs),
        name=name,
        path=draw(st.none() | texts),
        sources={source.name: source.digest for source in used},
        digest=source_digest((result.name, result.digest) for result in results),
        tensors=results,
        shards=(),
        side_files=(),
    )
    return (ManifestStage(output=stage, sources=used, tensors=tuple(made)),)


@st.composite
def manifests(draw):
    """Manifests that do not contradict themselves."""
    output = draw(outputs)
    inputs = st.builds(
        ManifestInput,
        source=texts,
        digest=digests,
        blocks=st.binary(min_size=16, max_size=16) | st.just(b""),
        tensor=st.none() | texts,
    )
    parameters = st.builds(ParameterSet, params=mappings(scalars), experts=tuples(mappings(scalars)))
    tensors, results = [], []
    for name in draw(st.lists(texts, max_size=3, unique=True)):
        count = draw(st.integers(0, 2))
        made_with = draw(st.none() | parameters)
        of_slice = made_with if output.slices else None
        level_count = count * len(output.experts if of_slice is None else of_slice.experts)
        tensor = ManifestTensor(
            name=name,
            dtype=draw(st.sampled_from(["BF16", "F32", "I64"])),
            shape=draw(tuples(st.integers(0, 2**40))),
            decision=draw(texts),
            parameters=made_with,
            inputs=draw(tuples(inputs)),
            blocks=draw(st.binary(min_size=32 * count, max_size=32 * count)),
            levels=draw(st.none() | st.binary(min_size=level_count, max_size=level_count)),
        )
        read, total = sorted(draw(st.tuples(counts, counts)))
        content = tensor_digest(tensor.dtype, tensor.shape, tensor.blocks)
        tensors.append(tensor)
        results.append(LockedTensor(name=name, digest=content, read=read, total=total))
    names = draw(st.permutations([tensor.name for tensor in tensors]))
    return build_manifest(draw, output, tensors, results, names)


def build_manifest(draw, output, tensors, results, names):
    used = draw(named(sources))
    beside = draw(named(places.filter(lambda place: place.name not in {source.name for source in used})))
    shard = dataclasses.replace(draw(shards), name="model.safetensors")
    side_file = dataclasses.replace(draw(side_files), name="sub/config.json")
    output = dataclasses.replace(
        output,
        sources={source.name: source.digest for source in used},
        tensors=tuple(results),
        digest=source_digest((result.name, result.digest) for result in results),
        shards=(shard,),
        side_files=(side_file,),
    )
    run = st.builds(
        RunFacts,
        expert_bytes_read=counts,
        base_bytes_read=counts,
        index_bytes_read=counts,
        bytes_written=counts,
        blocks=mappings(counts),
        expert_blocks=mappings(counts),
    )
    return Manifest(
        mergepipe=draw(texts),
        geometry=draw(counts),
        output=output,
        sources=used,
        places=beside,
        operators=draw(mappings(texts)),
        stages=draw(random_stages(output, used, {one.name for one in (*used, *beside)})),
        tensors=tuple(tensors),
        shard_tensors=(tuple(names),),
        files=("model.safetensors", "sub/config.json", "mergepipe.json"),
        decisions=draw(tuples(texts)),
        run=draw(run),
    )
