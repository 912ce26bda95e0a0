"""What is fuzzed: each target damages one kind of file, reads it as the commands do, and says what must hold."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import sqlite3
import struct
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from fuzz.mutate import VALUES, mutated, mutated_header, mutated_json, mutated_lines
from fuzz.watch import BrokenPromiseError, outcome
from support.adapters import PREFIX, factors, write_adapter
from support.checkpoints import random_tensors, safetensors_bytes, write_checkpoint
from support.projects import SmallProject

from mergepipe.cache.given import GivenCodes
from mergepipe.checkpoints.adapter import open_adapter
from mergepipe.checkpoints.checkpoint import open_checkpoint
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.place import Place
from mergepipe.checkpoints.progressive import open_standalone
from mergepipe.checkpoints.sniff import sniff
from mergepipe.checkpoints.standalone import RECORD
from mergepipe.digest import content_digest, format_digest
from mergepipe.errors import MergepipeError
from mergepipe.lockfile.checksum import has_checksum
from mergepipe.lockfile.diff import diff_sides, manifest_side
from mergepipe.lockfile.diff_values import Side
from mergepipe.lockfile.manifest import parse_manifest
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.writer import render_lock
from mergepipe.mergefile.mergekit.imported import import_mergekit
from mergepipe.mergefile.mergekit.sources import Found
from mergepipe.mergefile.parse import load_mergefile
from mergepipe.operators.registry import signatures
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.pack import check_pack
from mergepipe.progressive.writer import PackWriter
from mergepipe.project.caches import open_cache
from mergepipe.project.caches_report import CacheCheck
from mergepipe.project.pack import PackOptions, pack
from mergepipe.project.replay_source import declared_mergefile
from mergepipe.project.verify import VerifyOptions
from mergepipe.publish.owned import owned_files
from mergepipe.publish.sidefiles import without_private
from mergepipe.publish.sourcecard import parse_source_card, read_source_card
from mergepipe.reporting import SilentReporter

GOLDEN = Path(__file__).parents[1] / "golden"
CORPUS = Path(__file__).parent / "corpus"
SHAPES = {"embed.weight": (6, 4), "layers.0.q.weight": (4, 4), "layers.1.q.weight": (4, 4), "lm_head.weight": (6, 4)}
Mutator = Callable[[random.Random, Sequence[bytes]], bytes]


class Target:
    """One kind of file.

    Attributes
    ----------
    mutate
        How it is damaged.
    """

    name: str
    mutate: Mutator = staticmethod(mutated)

    def __init__(self, box: Path) -> None:
        """Prepare in an empty folder of the target's own."""
        self.box = box
        self.seeds = [*self.prepare(), *(p.read_bytes() for p in sorted((CORPUS / self.name).glob("*")))]

    @abstractmethod
    def prepare(self) -> list[bytes]:
        """Return valid files to begin with."""

    @abstractmethod
    def read(self, data: bytes) -> object:
        """Read a damaged one as a command would."""

    def put(self, data: bytes) -> None:
        """Lay a damaged file where `read` looks for it."""

    def execute(self, draw: random.Random) -> tuple[bytes, str]:
        """Damage, read and judge once; return the file and how it ended."""
        data = self.mutate(draw, self.seeds)
        return data, self.judge(data)

    def judge(self, data: bytes) -> str:
        """Read a file and return how it ended."""
        self.put(data)
        return outcome(lambda: self.read(data), self.box)


class HeaderTarget(Target):
    """A safetensors file."""

    name = "header"
    mutate = staticmethod(mutated_header)

    def prepare(self) -> list[bytes]:
        mixed = random_tensors(1, SHAPES, "F32") | random_tensors(2, {"half": (3,), "empty": (0, 4), "one": ()}, "BF16")
        return [
            safetensors_bytes(random_tensors(0, SHAPES, "BF16"), {"format": "pt"}),
            safetensors_bytes(mixed | {"ids": ("I64", (2,), bytes(16)), "f4": ("F4", (4,), bytes(2))}),
            safetensors_bytes({}),
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
            b"<!-- a --><!-- b --> <!doctype html><html>",
            b"PK\x03\x04" + bytes(60), b"\x80\x02}q\x00.", b"GGUF" + bytes(40),
        ]  # fmt: skip

    def put(self, data: bytes) -> None:
        (self.box / "model.safetensors").write_bytes(data)

    def read(self, data: bytes) -> object:
        sniff(data[:4096])
        return open_checkpoint(self.box, label="source").layers()


class IndexTarget(Target):
    """The index of a sharded checkpoint."""

    name = "index"
    mutate = staticmethod(mutated_json)

    def prepare(self) -> list[bytes]:
        write_checkpoint(self.box / "m", random_tensors(0, SHAPES), shards=2)
        return [(self.box / "m" / "model.safetensors.index.json").read_bytes()]

    def put(self, data: bytes) -> None:
        (self.box / "m" / "model.safetensors.index.json").write_bytes(data)

    def read(self, data: bytes) -> object:
        return open_checkpoint(self.box / "m", label="source")


class SideFilesTarget(Target):
    """A config, a source's card, and what else lies beside weights."""

    name = "sidefiles"
    mutate = staticmethod(mutated_json)

    def prepare(self) -> list[bytes]:
        write_checkpoint(self.box / "m", random_tensors(0, SHAPES))
        config = {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "torch_dtype": "bfloat16",
            "_name_or_path": "/home/me/model", "tie_word_embeddings": False, "rope": {"a": [1]},
            "quantization_config": {"bits": 4},
        }  # fmt: skip
        return [json.dumps(config).encode()]

    def put(self, data: bytes) -> None:
        (self.box / "m" / "config.json").write_bytes(data)
        (self.box / "m" / "README.md").write_bytes(b"---\nlicense: mit\n" + data + b"\n---\n")

    def read(self, data: bytes) -> object:
        read_source_card(Place(label="m", root=self.box / "m", shown="m"))
        parse_source_card(b"---\nbase_model:\n- " + data + b"\n---")
        without_private(data)
        return open_checkpoint(self.box / "m", label="source")


class MergefileTarget(Target):
    """A Mergefile."""

    name = "mergefile"
    mutate = staticmethod(mutated_lines)

    def prepare(self) -> list[bytes]:
        root = Path(__file__).parents[2] / "Mergefile.toml"
        return [root.read_bytes(), *(path.read_bytes() for path in sorted(GOLDEN.glob("merge*/*.toml")))]

    def put(self, data: bytes) -> None:
        (self.box / "Mergefile.toml").write_bytes(data)

    def read(self, data: bytes) -> object:
        return load_mergefile(self.box / "Mergefile.toml", signatures())


class MergekitTarget(Target):
    """A configuration of mergekit."""

    name = "mergekit"
    mutate = staticmethod(mutated_lines)

    def prepare(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((GOLDEN / "mergekit").glob("*.yml"))]

    def read(self, data: bytes) -> object:
        found = Found(path="models/m")
        return import_mergekit(data, Path("merge.yml"), self.box / "Mergefile.toml", signatures(), lambda _: found)


class LockTarget(Target):
    """A lock: read, written and read again, and compared with the one that it was made from."""

    name = "lock"
    mutate = staticmethod(mutated_lines)

    def prepare(self) -> list[bytes]:
        self.path = self.box / "Mergefile.lock"
        seeds = [path.read_bytes() for path in sorted((GOLDEN / "lockfile").glob("*.lock"))]
        self.first = parse_lock(seeds[0], self.path)
        return seeds

    def read(self, data: bytes) -> object:
        lock = parse_lock(data, self.path)
        again = parse_lock(render_lock(lock), self.path)
        if render_lock(again) != render_lock(lock):
            raise BrokenPromiseError("a lock that was read is written as another one")
        return diff_sides(
            Side(name="old", kind="lock", lock=self.first), Side(name="new", kind="lock", lock=lock), signatures()
        ).as_json()


class ManifestTarget(Target):
    """A manifest: read as `verify`, `diff`, `replay` and publishing do."""

    name = "manifest"
    mutate = staticmethod(mutated_json)

    def prepare(self) -> list[bytes]:
        project = SmallProject(self.box / "project")
        project.add_sources({name: random_tensors(i, SHAPES) for i, name in enumerate(("base", "a", "b"))})
        project.set_output(
            "m", {"operator": "ties", "base": "base", "experts": ["a"], "budget": {"expert_reads": "50%"}}
        )
        project.set_output("n", {"operator": "linear", "experts": [{"source": "m", "weight": 0.5}, "b"]})
        project.build()
        made = [(project.folder(name) / "mergepipe.json").read_bytes() for name in project.outputs]
        return made + [path.read_bytes() for path in sorted((GOLDEN / "lockfile").glob("*.json"))]

    def put(self, data: bytes) -> None:
        (self.box / "mergepipe.json").write_bytes(data)

    def read(self, data: bytes) -> object:
        owned_files(self.box)
        path = self.box / "mergepipe.json"
        manifest = parse_manifest(data, path, unchanged=False)
        has_checksum(data)
        for name in manifest.files:
            if not (self.box / name).resolve().is_relative_to(self.box.resolve()):
                raise BrokenPromiseError(f"the file {name!r} is outside")
        side = manifest_side("new", manifest)
        diff_sides(side, side, signatures()).as_json()
        return declared_mergefile(manifest, path, self.box, code=None, allow_custom=False)


class AdapterConfigTarget(Target):
    """The config of an adapter."""

    name = "adapter-config"
    mutate = staticmethod(mutated_json)

    def prepare(self) -> list[bytes]:
        base = write_checkpoint(self.box / "base", random_tensors(0, SHAPES))
        self.on = open_checkpoint(base, label="base")
        weights = factors(1, "layers.0.q", 4, 4) | factors(2, "layers.1.q", 4, 4)
        weights |= random_tensors(3, {f"{PREFIX}lm_head.weight": (6, 4)})
        write_adapter(self.box / "a", weights)
        plain = (self.box / "a" / "adapter_config.json").read_bytes()
        config = json.loads(plain)
        patterns = {"rank_pattern": {"layers.0.q": 2, r".*\.1\.q": 2}, "alpha_pattern": {"^layers\\.[0-9]+\\.(q|k)": 7}}
        return [plain, json.dumps(config | patterns | {"use_rslora": True}).encode()]

    def put(self, data: bytes) -> None:
        (self.box / "a" / "adapter_config.json").write_bytes(data)

    def read(self, data: bytes) -> object:
        adapter = open_adapter(self.box / "a", label="adapter", on=self.on).adapter
        return adapter and adapter.digest


class AdapterTarget(AdapterConfigTarget):
    """The weights of an adapter."""

    name = "adapter"
    mutate = staticmethod(mutated_header)

    def prepare(self) -> list[bytes]:
        super().prepare()
        return [(self.box / "a" / "adapter_model.safetensors").read_bytes()]

    def put(self, data: bytes) -> None:
        (self.box / "a" / "adapter_model.safetensors").write_bytes(data)


class ProjectTarget(Target):
    """A file of a project that was built: whoever looks after the cache finds what is damaged and takes it out of use.

    That is quick, and done for every case. For some of them, the first among them, the next builds are run as well:
    they end well, and with the right bytes. One may fail for a file of its own that is damaged; the one after it puts
    that right.
    """

    damaged: str
    """What is damaged: the first file that the pattern finds."""
    thorough = 20
    """One case of so many is built."""
    executions = 0

    def prepare(self) -> list[bytes]:
        self.clean = self.box / "clean"
        project = SmallProject(self.clean)
        project.add_sources({name: random_tensors(i, SHAPES) for i, name in enumerate(("base", "a", "b"))})
        project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["a", "b"]})
        project.set_output("n", {"operator": "ties", "base": "base", "experts": ["a", "b"], "params": {"density": 0.5}})
        project.build()
        self.files = {name: project.folder(name) / "model.safetensors" for name in project.outputs}
        self.want = {name: content_digest(path.read_bytes()) for name, path in self.files.items()}
        self.outputs = project.outputs
        self.looked_at = self._copy("looked-at")
        self.cached = {path: path.read_bytes() for path in self.looked_at.cache.rglob("*") if path.is_file()}
        return [path.read_bytes() for path in sorted(self.clean.glob(self.damaged))]

    def _copy(self, name: str) -> SmallProject:
        """Return a copy of the project in a folder of its own, built there; one that is there is left as it is."""
        root = self.box / name
        project = SmallProject(root, sources={n: f"models/{n}" for n in ("base", "a", "b")}, outputs=self.outputs)
        if not root.exists():
            shutil.copytree(self.clean, root)
            project.build()
        return project

    def judge(self, data: bytes) -> str:
        number, self.executions = self.executions, self.executions + 1
        return self.built(data, number // self.thorough) if number % self.thorough == 0 else self.looked_after(data)

    def _damage(self, project: SmallProject, data: bytes) -> None:
        path = min(project.root.glob(self.damaged))
        path.chmod(0o644)
        self.damage(path, data)

    def damage(self, path: Path, data: bytes) -> None:
        """Put the damage in place."""
        path.write_bytes(data)

    # --- quick ----------------------------------------------------------------------------------------------------

    def looked_after(self, data: bytes) -> str:
        """Look at the cache and check it, twice; return what was found the first time."""
        project = self.looked_at
        self._restore()
        self._damage(project, data)
        cache = open_cache(project.cache, lock_path=project.lock, geometry=project.geometry, workers=1)
        is_damaged = any(path.read_bytes() != content for path, content in self.cached.items())
        told: list[CacheCheck] = []
        checks: list[CacheCheck] = []
        if zlib.crc32(data) % 3 == 0:
            outcome(lambda: project.open().status(()), self.box)
            outcome(lambda: told.append(cache.verify(dry_run=True)), self.box)
        ends = [outcome(action, self.box) for action in (
            cache.info, lambda: cache.prune(0, dry_run=True),
            lambda: checks.append(cache.verify()), lambda: checks.append(cache.verify()),
        )]  # fmt: skip
        if len(checks) < 2:  # such as for a catalog of a newer mergepipe
            return ends[-1]
        first, second = checks
        if not second.ok or [check.ok for check in told] not in ([], [first.ok]):
            raise BrokenPromiseError(f"checked, and checked again: {told}, {first.ok}, {second.ok}")
        if is_damaged and self.damaged.endswith(".safetensors") and first.ok:
            raise BrokenPromiseError("a pack was damaged, and nobody noticed")
        return "sound" if first.ok else "repaired"

    def _restore(self) -> None:
        """Make the cache what it was before it was damaged."""
        for path in self.looked_at.cache.rglob("*"):
            if path.is_file() and path not in self.cached:
                path.unlink()
        for path, content in self.cached.items():
            path.unlink(missing_ok=True)  # a pack is read-only, and an output may share its bytes
            path.write_bytes(content)

    # --- thorough -------------------------------------------------------------------------------------------------

    def built(self, data: bytes, number: int) -> str:
        """Look at the project and build it, twice; return how the first build ended."""
        project = self._copy("built")
        self._damage(project, data)
        if number % 2:  # so that there is something to make from what lies in the cache
            shutil.rmtree(project.root / "build")
        try:
            return self.rebuilt(project)
        except BrokenPromiseError:
            shutil.rmtree(project.root)  # else it goes on from what the last build left
            raise

    def rebuilt(self, project: SmallProject) -> str:
        """Build twice, and return how the first build ended."""
        looked = outcome(lambda: self.look(project), self.box)
        first, second = outcome(project.build, self.box), outcome(project.build, self.box)
        if second != "read":
            raise BrokenPromiseError(f"the second build ends with an error, too: {looked}, {first}, {second}")
        for name, want in self.want.items():
            if content_digest((project.folder(name) / "model.safetensors").read_bytes()) != want:
                raise BrokenPromiseError(f"output {name} has other bytes after {looked}, {first}, {second}")
        return f"built after {first}"

    def look(self, project: SmallProject) -> None:
        """Do what writes nothing."""
        with contextlib.suppress(MergepipeError):
            project.open().status(())
        with contextlib.suppress(MergepipeError):
            project.open().plan(())
        project.open().verify((), VerifyOptions())


DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "C64": 8}
NAMES = (
    *SHAPES, "layers.2.q.weight", "layers.999999999.w", "\x1b[31m\n", "../x", "", "\u202e", "a" * 3000,
    "layers.0.q.bias", "model.embed_tokens.weight", "layers.0.q.weight_scale_inv", "layers.01.q.weight", "0",
    "x.qweight",
)  # fmt: skip
DIMS = (0, 1, 2, 4, 4, 6, 64, 65, 2**40)


def odd_tensors(draw: random.Random, _: Sequence[bytes]) -> bytes:
    """Return a valid file of odd tensors: any names, dtypes, shapes and values."""
    shapes: dict[str, tuple[int, ...]] = dict(SHAPES) if draw.random() < 0.7 else {}
    for _number in range(draw.randint(1, 3)):
        name = draw.choice(NAMES)
        if draw.random() < 0.2:
            shapes.pop(name, None)
            continue
        shapes[name] = tuple(draw.choice(DIMS) for _dim in range(draw.choice([0, 1, 2, 2, 2, 3])))
    tensors = {}
    for name, shape in shapes.items():
        dtype = draw.choice(["F32", "F32", "F32", "F32", *DTYPES])
        size = DTYPES[dtype] * math.prod(shape)
        if size > 1 << 16:
            shape, size = (*shape, 0), 0
        tensors[name] = dtype, shape, draw.choice([bytes(size), draw.randbytes(size), b"\xff" * size])
    return safetensors_bytes(tensors)


class BuildTarget(Target):
    """An expert of odd tensors, planned and merged by one operator after the other."""

    name = "build"
    mutate = staticmethod(odd_tensors)
    operators = ("linear", "ties", "slerp", "model_stock", "sce", "dare_ties", "karcher", "breadcrumbs", "passthrough")

    def prepare(self) -> list[bytes]:
        self.project = SmallProject(self.box / "p")
        self.project.add_sources(
            {name: random_tensors(i, SHAPES) for i, name in enumerate(("base", "a", "b"))}, config={}
        )
        return []

    def put(self, data: bytes) -> None:
        operator = self.operators[zlib.crc32(data) % len(self.operators)]
        base = {} if operator in ("linear", "passthrough", "karcher") else {"base": "base"}
        more = {"ties": {"budget": {"expert_reads": "50%"}}, "slerp": {"params": {"t": 0.5}}}.get(operator, {})
        if len(data) % 2:
            more = {**more, "params": {**more.get("params", {}), "non_finite": "allow"}}
        experts = ["a", "b"] if operator in ("model_stock", "karcher", "sce") else ["a"]
        self.project.set_output("m", {"operator": operator, "experts": experts, **base, **more})
        self.project.source_file("a").write_bytes(data)
        for name in ("build", ".mergecache"):
            shutil.rmtree(self.project.root / name, ignore_errors=True)

    def read(self, data: bytes) -> object:
        project = self.project.open()
        project.plan(())
        project.build(())
        project.explain("m").as_json()
        report = project.verify((), VerifyOptions(full=True))
        if not report.ok:
            raise BrokenPromiseError("what was just built is not right")
        return project.report(()).as_json()


class PackTarget(ProjectTarget):
    """A finished shard in the cache; half of the time the output that shares it is gone."""

    name = "pack"
    mutate = staticmethod(mutated_header)
    damaged = ".mergecache/packs/*.safetensors"


class CatalogTarget(ProjectTarget):
    """The catalog as a file."""

    name = "catalog"
    damaged = ".mergecache/catalog.db"


class RowsTarget(ProjectTarget):
    """Rows of the catalog: any value in any column. The file is drawn from as a source of chance alone."""

    name = "rows"
    damaged = ".mergecache/catalog.db"

    def damage(self, path: Path, data: bytes) -> None:
        draw = random.Random(data)
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
            for _ in range(draw.randint(1, 4)):
                table = draw.choice(sorted(tables))
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                value = draw.choice([*VALUES, b"", b"\0" * 32, draw.randbytes(40)])
                if not isinstance(value, int | float | str | bytes | None) or value in ("\ud800", 2**64, 10**30, 2**63):
                    value = b"\xff\xfe"
                with contextlib.suppress(sqlite3.Error):
                    connection.execute(f"UPDATE {table} SET {draw.choice(columns)} = ?", (value,))


def mutated_planes(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return a damaged progressive pack, sometimes with digests that are right for what it says."""
    data = mutated(draw, seeds)
    return resealed(data) if draw.random() < 0.6 else data


def resealed(data: bytes) -> bytes:
    """Return a progressive pack with the digests of its chunks and of its header put right, if it has room for them."""
    if len(data) < 104:
        return data
    blocks, rank = struct.unpack_from("<QI", data, 24)
    stop = 136 + 8 * rank + 308 * blocks
    if stop > len(data):
        return data
    out, at = bytearray(data), stop
    for number in range(7 * blocks):
        (size,) = struct.unpack_from("<I", data, stop - 32 - 252 * blocks + 4 * number)
        place = stop - 32 - 224 * blocks + 32 * number
        out[place : place + 32] = content_digest(data[at : at + size])
        at += size
    out[stop - 32 : stop] = content_digest(bytes(out[: stop - 32]))
    return bytes(out)


class PlanesTarget(Target):
    """A progressive pack: checked, and decoded whole at every level."""

    name = "planes"
    mutate = staticmethod(mutated_planes)

    def prepare(self) -> list[bytes]:
        draw = np.random.default_rng(0)
        seeds = []
        for number, shape in enumerate([(40, 30), (700,), (3, 300), (2, 8200)]):
            delta = draw.standard_normal(shape).astype(np.float64 if number == 2 else np.float32)
            delta[: len(delta) // 2] *= draw.random() < 0.5
            delta.reshape(-1)[-1] = [1, np.inf, 1e-40, 1e30][number]
            writer = PackWriter(self.box, shape=shape, block_elements=512)
            row = shape[-1] if len(shape) > 1 else 1
            step = max(1, 512 // row) * row
            for block, start in enumerate(range(0, delta.size, step)):
                writer.put(block, encode_block(delta.reshape(-1)[start : start + step], row))
            writer.finish(bytes(32), bytes([number]) * 32, self.box / "a.planes")
            seeds.append((self.box / "a.planes").read_bytes())
        return seeds

    def put(self, data: bytes) -> None:
        (self.box / "a.planes").unlink(missing_ok=True)
        (self.box / "a.planes").write_bytes(data)

    def read(self, data: bytes) -> object:
        header = check_pack(self.box / "a.planes")
        if resealed(data) != data:
            raise BrokenPromiseError("a pack whose digests are wrong was taken")
        grid = header.grid
        for block in range(header.blocks):
            chunks = [data[slice(*header.chunk_range(stage, block))] for stage in range(7)]
            elements = grid.elements_of(block)
            for level in range(1, 8):
                out = np.full(min(elements, 10_000), np.nan, np.float32)
                BlockDecoder(chunks[:level], elements, grid.row_elements).fill(elements - len(out), out)
                if not np.isfinite(out).all():
                    raise BrokenPromiseError("a block was decoded to numbers that are not finite")
        return header.dump()


class ProgressiveTarget(Target):
    """The record of a progressive checkpoint, sealed again half of the time: what somebody hostile would send."""

    name = "progressive"
    mutate = staticmethod(mutated_json)

    def prepare(self) -> list[bytes]:
        geometry = Geometry(block_elements=64)
        base, expert = (random_tensors(seed, {"a": (16, 16), "b": (4,)}, "BF16") for seed in (0, 1))
        write_checkpoint(self.box / "base", base)
        write_checkpoint(self.box / "expert", expert)
        options = PackOptions(geometry=geometry, workers=1)
        pack(str(self.box / "expert"), str(self.box / "base"), self.box / "m", options, SilentReporter())
        return [(self.box / "m" / RECORD).read_bytes()]

    def put(self, data: bytes) -> None:
        body, found, _ = data.rpartition(b'"seal"')
        if found and zlib.crc32(data) % 2:
            body = body.rstrip(b", \n") + b","
            data = body + b'\n"seal":"' + format_digest(content_digest(body)).encode() + b'"}\n'
        (self.box / "m" / RECORD).write_bytes(data)

    def read(self, data: bytes) -> object:
        checkpoint = open_standalone(self.box / "m", label="expert")
        value = checkpoint.standalone
        if value is None or any(not path.is_relative_to(self.box / "m") for path in (f.path for f in checkpoint.files)):
            raise BrokenPromiseError("it leads out of its folder")
        codes = GivenCodes({"expert": checkpoint}, Geometry(block_elements=value.block_elements))
        return [codes.code("expert", info) for info in checkpoint.tensors.values()]


TARGETS: tuple[type[Target], ...] = (
    HeaderTarget, IndexTarget, SideFilesTarget, MergefileTarget, MergekitTarget, LockTarget, ManifestTarget,
    AdapterConfigTarget, AdapterTarget, BuildTarget, PlanesTarget, PackTarget, CatalogTarget, RowsTarget,
    AdapterConfigTarget, AdapterTarget, ProgressiveTarget, BuildTarget, PackTarget, CatalogTarget, RowsTarget,
)  # fmt: skip
