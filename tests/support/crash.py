"""A project that goes from version to version, what a clean build makes of each, and what must hold after a failure."""

from __future__ import annotations

import functools
import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from support.checkpoints import random_tensors, read_safetensors, write_checkpoint
from support.forked import Forked, ForkServer, Result

OUTPUTS = ("one", "two")
MANIFEST = "mergepipe.json"
INDEX = "model.safetensors.index.json"

_SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (320, 1024),  # two blocks
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in {"attn.weight": (256, 512), "mlp.weight": (700, 512), "norm.weight": (512,)}.items()
    },
}
_TOUCHED = "model.layers.1.mlp.weight"
_CONFIG = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "num_hidden_layers": 2}
_MERGEFILE = """\
version = 1

[sources.base]
path = "models/base"

[sources.a]
path = "models/a"

[sources.b]
path = "models/b"

[outputs.one]
operator = "linear"
base = "base"
experts = ["a", "b"]
write = {{ shard_size = "{shard_size}" }}

[outputs.two]
operator = "task_arithmetic"
base = "base"
experts = [{{ source = "a", weight = {weight:.2f} }}, {{ source = "b", weight = 0.3 }}]
write = {{ shard_size = "1.5 MB" }}
"""

_STAGED = """\
version = 1

[sources.base]
path = "models/base"

[sources.a]
path = "models/a"

[sources.b]
path = "models/b"

[outputs.two]
operator = "linear"
experts = [{{ source = "one", weight = {weight:.2f} }}, "hidden"]
write = {{ shard_size = "1.5 MB" }}

[outputs.one]
operator = "task_arithmetic"
base = "base"
experts = ["hidden", {{ source = "a", weight = 0.3 }}]
write = {{ shard_size = "{shard_size}" }}

[outputs.hidden]
operator = "linear"
base = "base"
experts = ["a", "b"]
publish = false
write = {{ shard_size = "1 MB", tokenizer = "b" }}
"""

Files = Mapping[str, str]
"""The files of a directory by relative name, each with a digest of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a clean build of one version made: the lock, the files of every output, and the digests reported."""

    lock: bytes
    outputs: Mapping[str, Files]
    digests: Mapping[str, str]
    blocks: int


class Site:
    """A project of two sharded outputs over a base and two experts, with several blocks in a tensor.

    Version by version one tensor of one expert changes, the shard layout of one output, and a weight of the other.

    Parameters
    ----------
    home
        The project's folder, as the server sees it; made if it is missing.
    """

    template = _MERGEFILE

    def __init__(self, home: Path, server: ForkServer, version: int = 1) -> None:
        self.home = home
        self.root = server.view(home)
        self.server = server
        self.version = version
        for source, shards in (("base", 1), ("a", 2), ("b", 1)):
            write_checkpoint(
                self.source(source), _tensors(source), shards=shards, config=_CONFIG,
                side_files={"tokenizer.json": f'{{"of": "{source}"}}', "generation_config.json": "{}"},
            )  # fmt: skip
        self.turn_to(version)

    # --- places ---------------------------------------------------------------------------------------------------

    @property
    def mergefile(self) -> Path:
        """The Mergefile."""
        return self.root / "Mergefile.toml"

    @property
    def lock(self) -> Path:
        """The lock."""
        return self.root / "Mergefile.lock"

    @property
    def cache(self) -> Path:
        """The cache directory."""
        return self.root / ".mergecache"

    @property
    def build(self) -> Path:
        """The folder above the outputs."""
        return self.root / "build"

    def out(self, name: str) -> Path:
        """An output directory."""
        return self.build / name

    def source(self, name: str) -> Path:
        """A source's folder."""
        return self.root / "models" / name

    def weights(self, name: str) -> Path:
        """The file with a source's weights; ``a`` has two, and this is the first."""
        return self.source(name) / ("model-00001-of-00002.safetensors" if name == "a" else "model.safetensors")

    # --- versions -------------------------------------------------------------------------------------------------

    def turn_to(self, version: int) -> None:
        """Make the project what it is at a version."""
        self.version = version
        size = "1 MB" if version % 2 else "1.6 MB"
        text = self.template.format(weight=0.2 + version / 100, shard_size=size)
        written = self.mergefile.with_suffix(".new")
        written.write_text(text, encoding="utf-8")
        written.replace(self.mergefile)  # in one step: others may be reading it
        self.edit_source(version)

    def edit_source(self, number: int) -> None:
        """Change a value of one tensor of one expert, in place; nothing else of the version."""
        with self.weights("b").open("r+b") as file:
            file.seek(_data_offset(self.weights("b"), _TOUCHED) + 1000)
            file.write(struct.pack("<H", 0x3F80 + number))

    # --- running --------------------------------------------------------------------------------------------------

    def start(self, *args: str, env: Mapping[str, str] | None = None, prelude: str = "") -> Forked:
        """Start ``mergepipe ARGS``; ``build --json`` by default."""
        return self.server.start(args or ("build", "--json"), self.home, env, prelude=prelude)

    def run(self, *args: str, env: Mapping[str, str] | None = None, prelude: str = "") -> Result:
        """Run ``mergepipe ARGS`` to its end; ``build --json`` by default."""
        return self.start(*args, env=env, prelude=prelude).wait()

    def kill_at(self, point: str, env: Mapping[str, str] | None = None) -> None:
        """Build with the process killed at a crash point; it must get there."""
        result = self.run(env={"MERGEPIPE_CRASH_POINT": point, **(env or {})})
        assert result.code == -9, f"the build did not reach {point}: code {result.code}\n{result.text}"

    def report(self) -> dict[str, Any]:
        """Build, which must succeed; return what it reports."""
        result = self.run()
        assert result.code == 0, result.text
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    # --- what is there --------------------------------------------------------------------------------------------

    def lock_bytes(self) -> bytes | None:
        """Return the lock's bytes, None if there is no lock."""
        return self.lock.read_bytes() if self.lock.exists() else None

    def sources(self) -> Files:
        """Return all files of all sources."""
        return files_in(self.root / "models")

    def litter(self) -> list[str]:
        """Return what lies in the project that is neither its own nor what a finished build leaves."""
        known = {"Mergefile.toml", "Mergefile.lock", "models", "build", ".mergecache"}
        found = [name for name in os.listdir(self.root) if name not in known]
        if self.build.is_dir():
            found += [f"build/{name}" for name in os.listdir(self.build) if name not in OUTPUTS]
        return sorted(found)

    def staged(self) -> list[str]:
        """Return the names of the shards that are being made, or were when a build was killed."""
        folder = self.cache / "staging"
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def check_done(self, reference: Reference) -> None:
        """Check that everything is as a clean build makes it."""
        for name in OUTPUTS:
            different = _differences(files_in(self.out(name)), reference.outputs[name])
            assert not different, f"output {name} is not what a clean build makes: {different}"
        assert self.lock_bytes() == reference.lock, "the lock is not what a clean build makes"

    def check_between(self, *allowed: Reference | None) -> None:
        """Check that every output, and the lock, is whole and of one of these versions; None: not there yet."""
        for name in OUTPUTS:
            found = files_in(self.out(name)) if os.path.lexists(self.out(name)) else None
            if found is None:
                assert None in allowed, f"output {name} is gone"
                continue
            different = [_differences(found, state.outputs[name]) for state in allowed if state is not None]
            assert not all(different), f"output {name} is of no version; it differs in {different}"
            assert problems(self.out(name)) == [], f"output {name} is broken: {problems(self.out(name))}"
        locks = [state and state.lock for state in allowed]
        assert self.lock_bytes() in locks, "the lock is of no version"


class StagedSite(Site):
    """A project whose outputs are made from one another: `hidden`, which is not published, then `one`, then `two`."""

    template = _STAGED


@functools.cache
def _tensors(source: str) -> dict[str, Any]:
    tensors = random_tensors({"base": 1, "a": 2, "b": 3}[source], _SHAPES, "bfloat16")
    if source == "b":  # an expert that trained few layers: most of its blocks are the base's
        tensors |= {name: array for name, array in _tensors("base").items() if "attn" in name}
    return tensors


class CleanBuilds:
    """What clean builds make of each version, in folders of their own below ``folder``; each is made once."""

    def __init__(self, folder: Path, server: ForkServer, kind: type[Site] = Site) -> None:
        self._folder = folder
        self._server = server
        self._kind = kind
        self._made: dict[int, Reference] = {}

    def __getitem__(self, version: int) -> Reference:
        """Return what a clean build of a version makes."""
        if version not in self._made:
            self._made[version] = self._make(self._kind(self._folder / f"version-{version}", self._server, version))
        return self._made[version]

    def _make(self, site: Site) -> Reference:
        report = site.report()
        assert [problems(site.out(name)) for name in OUTPUTS] == [[], []]
        reference = Reference(
            lock=site.lock.read_bytes(),
            outputs={name: files_in(site.out(name)) for name in OUTPUTS},
            digests={name: output["digest"] for name, output in report["outputs"].items()},
            blocks=blocks(report, "total"),
        )
        shutil.rmtree(site.root)
        return reference


def _data_offset(path: Path, tensor: str) -> int:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return int(8 + size + json.loads(file.read(size))[tensor]["data_offsets"][0])


def files_in(directory: Path) -> Files:
    """Return every file below a directory with a digest of its bytes; of a manifest without what the run cost."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): _digest(path.name, path.read_bytes()) for path in paths}


def _digest(name: str, data: bytes) -> str:
    if name == MANIFEST:
        record = json.loads(data)
        record.pop("run", None)
        record.pop("checksum", None)  # that of all bytes, what the run cost among them
        data = json.dumps(record).encode()
    return blake3(data).hexdigest()


def _differences(first: Files, second: Files) -> list[str]:
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def problems(directory: Path) -> list[str]:
    """Return what is wrong with an output directory, judged without mergepipe."""
    names = set(os.listdir(directory))
    found = [f"{name} is missing" for name in (MANIFEST, INDEX, "config.json") if name not in names]
    if found:
        return found
    index = json.loads((directory / INDEX).read_bytes())
    held: dict[str, str] = {}
    for name in sorted(name for name in names if name.endswith(".safetensors")):
        try:
            held |= dict.fromkeys(read_safetensors(directory / name), name)
        except (ValueError, KeyError, struct.error) as error:
            found.append(f"{name} cannot be read: {error!r}")
    if held != index["weight_map"]:
        found.append("the index does not say what the shards hold")
    shards = json.loads((directory / MANIFEST).read_bytes())["shards"]
    if {shard["name"] for shard in shards} != set(index["weight_map"].values()):
        found.append("the manifest names other shards")
    return found


def blocks(report: Mapping[str, Any], kind: str) -> int:
    """Return how many blocks of all outputs a report counts as ``computed``, ``cached`` or ``total``."""
    return sum(output["blocks"][kind] for output in report["outputs"].values())


def states(report: Mapping[str, Any]) -> list[str]:
    """Return the states of all outputs in a report."""
    return [output["state"] for output in report["outputs"].values()]


def check_refused(result: Result, *words: str, code: int = 1) -> None:
    """Check that a command failed with an error in words, that holds ``words``, and not with one of ours."""
    assert result.code == code, result.text
    assert "Traceback" not in result.text, result.text
    assert "internal error" not in result.text, result.text
    missing = [word for word in words if word not in result.stderr]
    assert not missing, f"the error does not say {missing}:\n{result.stderr}"


def spread(count: int, duration: float, numbers: Sequence[float]) -> list[float]:
    """Return ``count`` moments in a duration: one in each of as many equal parts, at the place that a number says."""
    return [(part + number) * duration / count for part, number in zip(range(count), numbers, strict=True)]
