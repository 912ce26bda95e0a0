"""What `verify` may find, made up: everything right, and one of each thing that can be wrong."""

from __future__ import annotations

from dataclasses import replace

from mergepipe.project.verify_report import (
    PackCounts,
    Problem,
    SampleReport,
    VerifiedLock,
    VerifiedOutput,
    VerifiedSource,
    VerifyReport,
)

GB = 10**9
DIGEST = "b3:" + "0123456789abcdef" * 4
ASSISTANT = VerifiedOutput(
    name="assistant",
    path="build/assistant",
    digest=DIGEST,
    problems=(),
    shards=3,
    tensors=290,
    blocks=9204,
    files=6,
    bytes=12 * GB,
    packs=PackCounts(checked=1, linked=1, absent=1),
    sample=SampleReport(percent=5.0, seed=7, blocks=461, total=9204, bytes=600_000_000),
    signature="valid",
)
HIDDEN = VerifiedOutput(name="hidden", path=None, digest=None, problems=(), bytes=GB, packs=PackCounts(checked=1))
VERIFIED = VerifyReport(
    outputs=(ASSISTANT, HIDDEN),
    lock=VerifiedLock(path="Mergefile.lock", problems=()),
    sources=(VerifiedSource(name="math", digest=DIGEST, bytes=3 * GB, problems=()),),
    seconds=8.0,
)
BLOCK = Problem(
    kind="block",
    where="build/assistant/model-00001-of-00003.safetensors",
    what="tensor `model.norm.weight`: block 3 of 12 differs (rows 96 to 127)",
    hint="remove `build/assistant` and run `mergepipe build assistant`",
    facts={"file": "model-00001-of-00003.safetensors", "tensor": "model.norm.weight", "blocks": [3, 4]},
)
LINE = Problem(
    kind="lock",
    where="Mergefile.lock:14",
    what="is `bytes = 34` and should be `bytes = 35`",
    hint="restore it from version control",
    facts={"line": 14, "got": "bytes = 34", "expected": "bytes = 35"},
)
HOSTILE = replace(BLOCK, where="build/\x1b[31mx\n/model.safetensors", hint=None)
DAMAGED = VerifyReport(
    outputs=(
        replace(ASSISTANT, problems=(BLOCK, HOSTILE), others=2, signature="unchecked", sample=None),
        replace(ASSISTANT, name=None, path="elsewhere", digest=None, problems=(BLOCK,), packs=None, signature="absent"),
    ),
    lock=VerifiedLock(path="Mergefile.lock", problems=(LINE,)),
    sources=(),
    seconds=8.0,
)
