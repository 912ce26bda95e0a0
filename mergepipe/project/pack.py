"""``mergepipe pack``: an expert as a progressive checkpoint, from a base and the expert alone."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.discovery import ADAPTER_CONFIG
from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry
from mergepipe.checkpoints.place import Place
from mergepipe.checkpoints.standalone import RECORD, Standalone, StandaloneTensor, dump_record
from mergepipe.digest import content_digest, format_digest
from mergepipe.engine.packing import Coded, code_expert, worker_bytes
from mergepipe.engine.pool import WorkerPool
from mergepipe.errors import MergepipeError, PlanError, SourceError, raise_collected
from mergepipe.mergefile.parse import load_mergefile
from mergepipe.mergefile.schema import Mergefile, Source
from mergepipe.operators.registry import signatures
from mergepipe.progressive.levels import CODE_VERSION, LEVEL_BITS
from mergepipe.project.exact_files import write_exact
from mergepipe.project.gather import check_overlap, open_settled
from mergepipe.project.reports import Json
from mergepipe.project.session import CACHE_DIRECTORY, processors
from mergepipe.publish.sidefiles import carried_files
from mergepipe.publish.sourcecard import read_source_card
from mergepipe.publish.standalone import StandaloneDirectory, check_target
from mergepipe.publish.standalone_card import CardLevel, standalone_card
from mergepipe.reporting import Reporter
from mergepipe.units import format_bytes
from mergepipe.values import dataclass

CARD = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLevel:
    """What one level of all codes comes to.

    Attributes
    ----------
    bits
        For each element, scales and tables left out.
    bytes
        Those of the codes up to this level.
    error
        The norm of what is missing of the coded deltas, relative to theirs; None where they are 0.
    """

    level: int
    bits: int
    bytes: int
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was packed.

    Attributes
    ----------
    path
        The folder of the progressive checkpoint.
    base, expert
        Content digests.
    expert_bytes
        Of all tensors of the expert.
    coded, exact
        How many of its tensors are there as codes, and how many exactly.
    code_bytes, exact_bytes
        What these take; the former with headers.
    """

    path: str
    base: str
    expert: str
    expert_bytes: int
    coded: int
    exact: int
    code_bytes: int
    exact_bytes: int
    levels: tuple[PackedLevel, ...]
    seconds: float

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the folder."""
        return self.code_bytes + self.exact_bytes

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "path": self.path,
            "base": self.base,
            "expert": self.expert,
            "bytes": {
                "expert": self.expert_bytes,
                "codes": self.code_bytes,
                "exact": self.exact_bytes,
                "total": self.total_bytes,
            },
            "tensors": {"coded": self.coded, "exact": self.exact},
            "levels": [
                {"level": one.level, "bits": one.bits, "bytes": one.bytes, "error": one.error} for one in self.levels
            ],
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How to pack.

    Attributes
    ----------
    force
        Replace the weights in a folder that is no progressive checkpoint.
    workers
        Threads; one per processor by default. Never changes a result.
    memory
        Bytes that they may take.
    """

    force: bool = False
    workers: int | None = None
    memory: int | None = None
    geometry: Geometry = GEOMETRY_1


def pack(
    source: str, base: str, out: Path, options: PackOptions, reporter: Reporter, mergefile: Path | None = None
) -> PackReport:
    """Write an expert as a progressive checkpoint.

    Parameters
    ----------
    source, base
        Names of sources in the Mergefile, or paths of checkpoints.
    out
        The folder to be written, absolute.
    mergefile
        Where names are looked up; None for paths alone.

    Raises
    ------
    MergepipeError
        If anything stops it; what was in the folder stays then.
    """
    started = time.monotonic()
    names = load_mergefile(mergefile, signatures()) if mergefile is not None else None
    checkpoints = _open({"source": source, "base": base}, names)
    for text in dict.fromkeys((source, base)):
        _tell_if_ambiguous(text, names, reporter)
    expert, against = checkpoints["source"], checkpoints["base"]
    root = Path.cwd() if names is None else names.root
    given = {source: expert, base: against}
    check_overlap(out, out.name, root, given, root / CACHE_DIRECTORY, another="choose another `--out`")
    check_target(out, force=options.force)
    side_files = {file.name: file.data for file in carried_files(_place(expert))} if expert.is_folder else {}
    workers = _fitting(options.workers or processors(), options.memory, (against, expert), options.geometry)
    with StandaloneDirectory(out, force=options.force) as directory:
        pool = WorkerPool(workers)
        try:
            coded = code_expert(against, expert, options.geometry, directory.tensors, pool, reporter)
        finally:
            pool.close()
        kept = [expert.stored[tensor.name] for tensor in coded.tensors if tensor.pack is None]
        digests = {tensor.name: tensor for tensor in coded.tensors}
        exact = write_exact(expert, kept, digests, options.geometry, directory.tensors)
        report = _report(out, expert, coded, sum(info.nbytes for info in kept), started)
        card = standalone_card(
            read_source_card(_place(expert)) if expert.is_folder else None,
            base=report.base,
            expert=report.expert,
            expert_bytes=report.expert_bytes,
            levels=[CardLevel(bits=one.bits, nbytes=one.bytes, error=one.error) for one in report.levels],
        )
        files = {**side_files, CARD: card}
        record = dump_record(_standalone(coded, exact, files, options.geometry))
        packs = [tensor.pack for tensor in coded.tensors if tensor.pack is not None]
        directory.finish({**files, RECORD: record}, [*exact, *packs])
    return report


# --- what is packed ---------------------------------------------------------------------------------------------------


def _open(given: Mapping[str, str], mergefile: Mergefile | None) -> dict[str, Checkpoint]:
    """Open the two checkpoints; what is wrong with them is reported together."""
    found: dict[str, Checkpoint] = {}
    errors: list[MergepipeError] = []
    for role, text in given.items():
        try:
            found[role] = _opened(text, mergefile)
        except MergepipeError as error:
            errors.append(error)
    raise_collected(errors)
    return found


def _opened(text: str, mergefile: Mergefile | None) -> Checkpoint:
    source = mergefile.sources.get(text) if mergefile is not None else None
    if source is not None and mergefile is not None and source.path is not None and source.on is None:
        return open_settled(mergefile.absolute(source.path), source, {})
    if source is not None and source.on is not None:
        raise _is_adapter(f"source `{text}`", text)
    if source is not None and source.path is None:
        raise SourceError(
            f"source `{text}` is a progressive checkpoint already: a whole one is needed here",
            hint="give the checkpoint that it was made from",
            source=text,
        )
    path = Path(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111 - links stay
    if os.path.lexists(path / ADAPTER_CONFIG):
        raise _is_adapter(f"`{text}`", text)
    if not os.path.lexists(path) and mergefile is not None and os.sep not in text:
        names = ", ".join(f"`{name}`" for name in mergefile.sources)
        what = f"`{text}` is neither a source of `{mergefile.path.name}` nor a path"
        raise SourceError(what, hint=f"its sources are: {names}", path=text)
    return open_settled(path, Source(name=path.name, path=text), {})


def _tell_if_ambiguous(text: str, mergefile: Mergefile | None, reporter: Reporter) -> None:
    """Warn of a name that is a source of a Mergefile, which may lie far above, and another checkpoint here as well."""
    path = mergefile.source_path(text) if mergefile is not None and text in mergefile.sources else None
    if path is None or not os.path.lexists(text) or os.path.realpath(path) == os.path.realpath(text):
        return
    reporter.warn(
        f"`{text}` is taken for the source of that name at `{path}`, and is a path here as well:"
        f" write `{os.path.join(os.curdir, text)}` for what is here"
    )


def _is_adapter(what: str, text: str) -> SourceError:
    return SourceError(
        f"{what} is a LoRA adapter, which is small already: there is nothing to pack",
        hint="publish the adapter itself, or merge it into its base first (`passthrough`) and pack the result",
        path=text,
    )


def _place(checkpoint: Checkpoint) -> Place:
    return Place(label=checkpoint.label, root=checkpoint.root, shown=str(checkpoint.root))


def _fitting(workers: int, memory: int | None, checkpoints: Sequence[Checkpoint], geometry: Geometry) -> int:
    """Return how many workers the memory allows.

    Raises
    ------
    PlanError
        If it is too small for one.
    """
    if memory is None:
        return workers
    needed = worker_bytes(checkpoints, geometry)
    if memory < needed:
        raise PlanError(
            f"`--memory` {format_bytes(memory)} is too small: one worker needs {format_bytes(needed)}",
            hint=f"give at least {format_bytes(math.ceil(needed / 1e6) * 1e6)}",
            expected=needed,
            got=memory,
        )
    return min(workers, memory // needed)


# --- what is told of it -----------------------------------------------------------------------------------------------


def _standalone(
    coded: Coded, exact: Iterable[str], files: Mapping[str, bytes], geometry: Geometry
) -> Standalone:
    tensors: dict[str, StandaloneTensor] = {tensor.name: tensor for tensor in coded.tensors}
    return Standalone(
        code=CODE_VERSION,
        block_elements=geometry.block_elements,
        base=coded.base,
        expert=coded.expert,
        tensors=tensors,
        exact=tuple(exact),
        files={name: content_digest(data) for name, data in files.items()},
    )


def _report(out: Path, expert: Checkpoint, coded: Coded, exact_bytes: int, started: float) -> PackReport:
    packs = sum(tensor.pack is not None for tensor in coded.tensors)
    levels = []
    for number, (bits, size, left) in enumerate(zip(LEVEL_BITS, coded.sizes, coded.residuals, strict=True)):
        error = math.sqrt(left / coded.square) if coded.square else None
        levels.append(PackedLevel(level=number + 1, bits=bits, bytes=size, error=error))
    return PackReport(
        path=str(out),
        base=format_digest(coded.base),
        expert=format_digest(coded.expert),
        expert_bytes=expert.nbytes,
        coded=packs,
        exact=len(coded.tensors) - packs,
        code_bytes=coded.code_bytes,
        exact_bytes=exact_bytes,
        levels=tuple(levels),
        seconds=time.monotonic() - started,
    )
