"""Two locks of one project that differ in every way in which locks differ, for the golden files of `diff`."""

from __future__ import annotations

from dataclasses import replace

from mergepipe.digest import content_digest, source_digest
from mergepipe.lockfile.records import (
    LockedExpert,
    LockedOutput,
    LockedRule,
    LockedShard,
    LockedSideFile,
    LockedSource,
    LockedTensor,
    Lockfile,
)

MODULES = ("mlp.down_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.v_proj")
NAMES = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{module}.weight" for layer in range(12) for module in MODULES),
    "model.norm.weight",
)


def digest(label: str) -> bytes:
    """Return a digest that stands for a content."""
    return content_digest(label.encode())


def source(name: str, version: int = 1, **changes: object) -> LockedSource:
    """Return a source; another version of it has other content."""
    found = LockedSource(
        name=name,
        location={"path": f"models/{name}"},
        digest=digest(f"{name} {version}"),
        tensors=len(NAMES),
        bytes=3_408_896,
    )
    return replace(found, **changes)


def tensors(label: str, changed: dict[str, str] | None = None, read: int = 2) -> tuple[LockedTensor, ...]:
    """Return the tensors of an output; those in ``changed`` have another content, or are not there (empty)."""
    return tuple(
        LockedTensor(name=name, digest=digest(f"{label} {name} {version}"), read=read, total=2)
        for name in NAMES
        if (version := (changed or {}).get(name, "1"))
    )


def output(name: str, sources: dict[str, bytes], found: tuple[LockedTensor, ...], **changes: object) -> LockedOutput:
    """Return an output of two experts, whose digest is that of its tensors."""
    own = source_digest((tensor.name, tensor.digest) for tensor in found)
    made = LockedOutput(
        name=name,
        path=f"build/{name}",
        operator="task_arithmetic",
        operator_version=1,
        numerics="float32",
        base="base",
        experts=(LockedExpert(source="math", params={"weight": 0.5}), LockedExpert(source="code", params={})),
        params={},
        rules=(),
        budget="full",
        write={"shard_size": 5_000_000_000, "tokenizer": "base"},
        sources=sources,
        expert_bytes_full=6_817_792,
        expert_bytes_planned=6_817_792,
        bound={"kind": "exact", "absolute": 0.0, "relative_to_update": 0.0},
        digest=own,
        shards=(LockedShard(name="model.safetensors", digest=own, bytes=3_410_000),),
        side_files=(LockedSideFile(name="config.json", digest=digest("config")),),
        tensors=found,
    )
    return replace(made, **changes)


def of_layers(layers: range, *modules: str) -> dict[str, str]:
    """Return the tensors of some modules in some layers as changed ones."""
    return {f"model.layers.{layer}.{module}.weight": "2" for layer in layers for module in modules}


_ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
_RULE = LockedRule(match=("*.self_attn.*",), layers="8..12", params={}, experts={"math": {"weight": 0.7}})
_SOURCES = {name: source(name).digest for name in ("base", "code", "math")}
_NEW_SOURCES = _SOURCES | {"math": digest("math 2")}

_STAGE = output("assistant", _SOURCES, tensors("assistant"), rules=(_RULE,))
_NEW_STAGE = output(
    "assistant",
    _NEW_SOURCES,
    tensors("assistant", of_layers(range(8), "mlp.down_proj") | of_layers(range(8, 12), *_ATTENTION)),
    rules=(replace(_RULE, experts={"math": {"weight": 0.9}}),),
)
_FINAL = output(
    "final",
    {"assistant": _STAGE.digest, "chat": source("chat").digest},
    tensors("final"),
    operator="ties",
    base=None,
    experts=(LockedExpert(source="assistant", params={}), LockedExpert(source="chat", params={"weight": (0.2, 0.75)})),
    params={"density": 0.5},
)
_NEW_FINAL = replace(
    output(
        "final",
        _FINAL.sources | {"assistant": _NEW_STAGE.digest},
        tensors("final", of_layers(range(8), "mlp.down_proj") | {"lm_head.weight": ""}, read=1),
    ),
    operator="ties",
    base=None,
    experts=_FINAL.experts,
    params=_FINAL.params,
    budget="25%",
    expert_bytes_planned=1_704_448,
    bound={"kind": "certified", "absolute": 0.25, "relative_to_update": 0.125},
    side_files=(LockedSideFile(name="config.json", digest=digest("another config")),),
)
_SAME = output("average", _SOURCES, tensors("average"), operator="linear")
_REWRITTEN = replace(_SAME, name="plain", path="build/plain", params={"weight": 1.0})
_GONE = output("former", _SOURCES, tensors("former"))
_NEW = output("fresh", _SOURCES, tensors("fresh"))

OLD = Lockfile(
    geometry=1,
    sources=tuple(map(source, ("base", "chat", "code", "math"))),
    outputs=(_STAGE, _FINAL, _SAME, replace(_REWRITTEN, params={}), _GONE),
)
NEW = Lockfile(
    geometry=1,
    sources=(
        *map(source, ("base", "chat")),
        source("code", location={"path": "models/code-moved"}),
        source("math", 2, location={"hub": "org/math", "revision": "0123456789abcdef0123456789abcdef01234567"}),
        source("extra"),
    ),
    outputs=(_NEW_STAGE, _NEW_FINAL, _SAME, _REWRITTEN, _NEW),
)
