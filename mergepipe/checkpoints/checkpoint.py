"""A checkpoint: ordered tensors in one or more safetensors files, and its ``config.json``.

Opening one reads headers only; the bytes of the tensors stay where they are. Everything that is wrong with a checkpoint
is reported together.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergepipe.checkpoints.absent import adapter, missing_path, no_weights, not_a_weight_file, visible_names
from mergepipe.checkpoints.discovery import ADAPTER_CONFIG, SUFFIX, WeightFiles, find_weights, is_adapter_file
from mergepipe.checkpoints.layers import LayerMap, natural_key
from mergepipe.checkpoints.place import Place, opened, read_object
from mergepipe.checkpoints.safetensors import Header, TensorInfo, read_header
from mergepipe.checkpoints.standalone import RECORD, Standalone
from mergepipe.checkpoints.wording import enumerate_names, quote
from mergepipe.digest import record_digest
from mergepipe.errors import MergepipeError, SourceChangedError, SourceError, raise_collected
from mergepipe.fsio.identity import FileIdentity
from mergepipe.values import dataclass

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file with weights.

    Attributes
    ----------
    path
        Absolute.
    name
        Relative to the checkpoint's folder.
    identity
        Of the file from which the header was read.
    header_size
        Bytes before the data.
    header_digest
        Content digest of those bytes.
    is_sealed
        Whether it belongs to a progressive checkpoint, whose record says what it holds: other bytes are damage.
    """

    path: Path
    name: str
    identity: FileIdentity
    header_size: int
    header_digest: bytes
    is_sealed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The stored factors of one tensor's delta.

    Attributes
    ----------
    a, b
        ``(r, n)`` and ``(m, r)``: the delta is ``scaling * (b @ a)``, ``(m, n)``.
    transposed
        Whether the delta is the transpose of that.
    """

    a: TensorInfo
    b: TensorInfo
    scaling: float
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What an adapter changes of the checkpoint that it applies to, by that checkpoint's tensor names.

    Attributes
    ----------
    on
        The checkpoint that it applies to, no adapter itself.
    stored
        The tensors of its own file, by their names there, in natural order.
    low_rank
        The tensors to which a product of factors is added.
    replaced
        The tensors that it holds whole (trained modules, biases): the stored one stands in the other's place. A tensor
        that is also in ``low_rank`` gets the delta on top.
    """

    on: Checkpoint
    stored: Mapping[str, TensorInfo]
    low_rank: Mapping[str, LowRank]
    replaced: Mapping[str, TensorInfo]

    @property
    def digest(self) -> bytes:
        """The digest of what makes values of the stored tensors: the scalings, and which deltas are transposed."""
        return record_digest(
            "adapter", [(name, pair.scaling, pair.transposed) for name, pair in sorted(self.low_rank.items())]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint.

    An adapter is a virtual one: its tensors are those of the checkpoint that it applies to, changed. Which of them are
    stored, and how, is in ``adapter``; ``files`` holds its own file alone.

    Attributes
    ----------
    label
        Name of the source.
    root
        Its folder, absolute.
    files
        The files with weights, in natural order of their names.
    tensors
        By name, in natural order: layer 2 before layer 10.
    config
        The content of ``config.json``; empty if there is none. An adapter's is that of the one that it applies to.
    notes
        What was ignored, in words. It depends on files that do not count: it belongs in no digest and no record.
    is_folder
        False for a single file, which has no config and no side files.
    adapter
        What makes it an adapter, None for a checkpoint that is stored whole.
    is_planned
        Whether it is one that the project makes: an output that others are made from.
    standalone
        What makes it a progressive one: its content is known, and some of its tensors are there as codes alone. The
        file of such a tensor is that of its code, and its bytes are in none.
    """

    label: str
    root: Path
    files: tuple[CheckpointFile, ...]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    notes: tuple[str, ...]
    is_folder: bool = True
    adapter: Adapter | None = None
    is_planned: bool = False
    standalone: Standalone | None = None

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        """The tensors that its files hold, by their names there."""
        return self.tensors if self.adapter is None else self.adapter.stored

    @property
    def facts(self) -> tuple[tuple[str, bytes], ...]:
        """What its values depend on beside the stored tensors, as (name, digest): for an adapter, the scalings."""
        return () if self.adapter is None else (("adapter_config.json", self.adapter.digest),)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(info.nbytes for info in self.stored.values())

    def layers(self) -> LayerMap:
        """Return the layers of the checkpoint."""
        return LayerMap(self.tensors, sizes={name: info.nbytes for name, info in self.tensors.items()})


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A weight file with its checked header."""

    file: CheckpointFile
    header: Header


def open_checkpoint(path: Path, *, label: str, shown: str | None = None) -> Checkpoint:
    """Open a checkpoint: find its files, check their headers, and read its config.

    Parameters
    ----------
    path
        A folder, or a single ``.safetensors`` file.
    label
        Name of the source, for messages.
    shown
        What messages call the path, such as the path as it is written in the Mergefile; None for ``path`` itself.

    Raises
    ------
    SourceError
        If there is no checkpoint, or it is incomplete, or is not one that can be read.
    FormatError
        If a file breaks a rule of its format.
    SourceChangedError
        If a file changes meanwhile.
    CollectedErrors
        If more than one of these is the case.
    """
    place = Place(label=label, root=Path(path).absolute(), shown=str(path) if shown is None else shown)
    if is_folder(place):
        return _open_folder(place)
    if is_adapter_file(place.root.name):
        raise adapter(place)
    if not place.root.name.endswith(SUFFIX):
        raise not_a_weight_file(place)
    folder = Place(label=label, root=place.root.parent, shown=os.path.dirname(place.shown), is_named=True)
    weights = WeightFiles(files=(place.root.name,))
    return _assemble(folder, weights, config={}, is_folder=False)


def is_folder(place: Place) -> bool:
    """Return whether the path is a folder; raise if there is nothing, or nothing that can be looked at."""
    try:
        mode = os.stat(place.root).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise missing_path(place) from None
    except (OSError, ValueError) as error:
        raise place.error(f"cannot be used as a path: {getattr(error, 'strerror', None) or error}") from error
    return stat.S_ISDIR(mode)


def _open_folder(place: Place) -> Checkpoint:
    """Open a checkpoint in a folder; errors of its config and of its weights are reported together."""
    try:
        names = visible_names(place.root)
    except OSError as error:
        raise place.error(f"cannot be listed: {error.strerror or error}") from error
    if ADAPTER_CONFIG in names:
        raise adapter(place)
    if RECORD in names:
        hint = "declare it with `progressive` in the place of `path`"
        raise place.error("is a progressive checkpoint: most of its tensors are there as codes alone", hint=hint)
    errors: list[MergepipeError] = []
    config: Mapping[str, Any] = {}
    with collected(errors):
        config = read_object(place, CONFIG) if CONFIG in names else {}
    with collected(errors):
        weights = find_weights(place, names)
        if weights is None:
            raise no_weights(place, names)
        checkpoint = _assemble(place, weights, config=config, is_folder=True)
    raise_collected(errors)
    return checkpoint


@contextlib.contextmanager
def collected(errors: list[MergepipeError]) -> Iterator[None]:
    """Keep an error for later."""
    try:
        yield
    except MergepipeError as error:
        errors.append(error)


def _assemble(place: Place, weights: WeightFiles, *, config: Mapping[str, Any], is_folder: bool) -> Checkpoint:
    """Read the headers of the weight files and put the checkpoint together."""
    errors: list[MergepipeError] = []
    opened_files: dict[str, OpenedFile] = {}
    for name in weights.files:
        with collected(errors):
            opened_files[name] = open_file(place, name)
    notes = list(weights.notes)
    where: Mapping[str, str]
    if weights.weight_map is None:
        where, problems = _unindexed(place, opened_files)
    else:
        where, problems = _indexed(place, weights, opened_files, notes)
    errors += problems
    if not where and not errors:
        errors.append(place.error("holds no tensors", name=weights.files[0] if len(weights.files) == 1 else None))
    raise_collected(errors)
    return Checkpoint(
        label=place.label,
        root=place.root,
        files=tuple(opened_files[name].file for name in weights.files),
        tensors=_tensors(weights.files, opened_files, where),
        config=config,
        notes=tuple(notes),
        is_folder=is_folder,
    )


def open_file(place: Place, name: str) -> OpenedFile:
    """Read the header of one file, and make sure that it was one and the same file all the time."""
    with opened(place, name) as (fd, status):
        identity = FileIdentity.of(status)
        header = read_header(fd, place.show(name), identity.size, label=place.label)
        if FileIdentity.of(os.fstat(fd)) != identity:
            raise SourceChangedError(
                f"source {quote(place.label)}: {quote(place.show(name))} changed while its header was being read",
                hint="wait until the file is complete, and run the command again",
                source=place.label,
                path=place.show(name),
            )
    file = CheckpointFile(
        path=place.root / name,
        name=name,
        identity=identity,
        header_size=header.size,
        header_digest=header.digest,
    )
    return OpenedFile(file, header)


def _unindexed(place: Place, files: Mapping[str, OpenedFile]) -> tuple[dict[str, str], list[SourceError]]:
    """Return the file of each tensor where no index decides; no tensor may be in two files."""
    where: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for file, content in files.items():
        for tensor in content.header.tensors:
            first = where.setdefault(tensor.name, file)
            if first != file:
                twice.setdefault((first, file), []).append(tensor.name)
    if not twice:
        return where, []
    (first, second), names = next(iter(twice.items()))
    lines = [f"{quote(a)} and {quote(b)}: {enumerate_names(same, limit=3)}" for (a, b), same in twice.items()]
    error = place.error(
        f"has the tensor {quote(names[0])} in both {quote(first)} and {quote(second)}",
        *lines[:8],
        hint="keep one set of weights in the folder, or add a `model.safetensors.index.json` that names the right one",
        tensor=names[0],
        files=[first, second],
    )
    return where, [error]


def _indexed(
    place: Place, weights: WeightFiles, files: Mapping[str, OpenedFile], notes: list[str]
) -> tuple[Mapping[str, str], list[SourceError]]:
    """Return the file of each tensor by the index, and an error for each shard that lacks some of its own."""
    where = weights.weight_map or {}
    wanted: dict[str, list[str]] = {}
    for tensor, file in where.items():
        wanted.setdefault(file, []).append(tensor)
    errors: list[SourceError] = []
    for file, content in files.items():
        there = [tensor.name for tensor in content.header.tensors]
        present = frozenset(there)
        lacking = [tensor for tensor in wanted[file] if tensor not in present]
        if lacking:
            errors.append(
                place.error(
                    f"lacks {len(lacking):,} of the tensors that the index places there: {enumerate_names(lacking)}",
                    f"named by {quote(place.show(weights.index or ''))}",
                    name=file,
                    hint="the index and the file do not belong together: download both again",
                    tensors=lacking,
                )
            )
        surplus = [tensor for tensor in there if where.get(tensor) != file]
        if surplus:
            notes.append(
                f"{quote(place.show(file))}: ignored {enumerate_names(surplus)}, which the index does not place there"
            )
    return where, errors


def _tensors(names: Sequence[str], files: Mapping[str, OpenedFile], where: Mapping[str, str]) -> dict[str, TensorInfo]:
    """Return the tensors by name in natural order, each with the number of its file."""
    found = [
        info if number == 0 else renumbered(info, number)
        for number, name in enumerate(names)
        for info in files[name].header.tensors
        if where.get(info.name) == name
    ]
    return {info.name: info for info in sorted(found, key=lambda info: natural_key(info.name))}


def renumbered(info: TensorInfo, file: int) -> TensorInfo:
    """Return a tensor of another file of the checkpoint."""
    return TensorInfo(
        name=info.name, dtype=info.dtype, shape=info.shape, file=file, offset=info.offset, nbytes=info.nbytes
    )
