"""Which checkpoints lie below a directory, what to call them, and which of them is the base: the guesses of `init`.

Only names and headers are read.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mergepipe.checkpoints.adapter import open_adapter
from mergepipe.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mergepipe.checkpoints.discovery import SUFFIX, is_adapter_file
from mergepipe.checkpoints.layers import natural_key
from mergepipe.errors import MergepipeError
from mergepipe.mergefile.names import clean_name
from mergepipe.values import dataclass

DEPTH = 3
ADAPTER_CONFIG = "adapter_config.json"
# Folders that hold results, copies or programs, not the models that somebody wants to merge.
_SKIPPED = ("build", "cache", "dist", "node_modules", "site-packages", "venv", "__pycache__")
_MARKED = ("CACHEDIR.TAG", "pyvenv.cfg", "mergepipe.json")
_FOREIGN = (".bin", ".pt", ".pth", ".gguf")
# Folders of the Hugging Face cache: models--ORG--NAME/snapshots/COMMIT.
_HUB_FOLDER = re.compile(r"models--(?:.*--)?(?P<name>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that can be a source, under the name that it gets; ``on`` is what an adapter applies to."""

    name: str
    path: Path
    checkpoint: Checkpoint
    on: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What lies below a directory.

    Attributes
    ----------
    checkpoints
        Paths, relative to the directory, of folders with safetensors weights, in natural order.
    adapters
        Folders with a LoRA adapter.
    foreign
        Folders of a model whose weights are in another format.
    """

    checkpoints: tuple[Path, ...]
    adapters: tuple[Path, ...]
    foreign: tuple[Path, ...]


def search(directory: Path, depth: int = DEPTH) -> Finding:
    """Return the checkpoints below a directory, down to ``depth`` folders; nothing inside of a checkpoint."""
    found: dict[str, list[Path]] = {"checkpoint": [], "adapter": [], "foreign": []}
    seen = {os.path.realpath(directory)}
    level = [directory]
    for _ in range(depth):
        level = [folder for parent in level for folder in _subfolders(parent, seen)]
        below = []
        for folder in level:
            kind = _kind(folder)
            if kind is None:
                below.append(folder)
            elif kind in found:
                found[kind].append(folder.relative_to(directory))
        level = below
    return Finding(
        checkpoints=_ordered(found["checkpoint"]),
        adapters=_ordered(found["adapter"]),
        foreign=_ordered(found["foreign"]),
    )


def _ordered(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(paths, key=lambda path: natural_key(str(path))))


def _subfolders(parent: Path, seen: set[str]) -> Iterator[Path]:
    """Yield the folders to look into, each place on the disk once: links may lead in circles."""
    try:
        entries = sorted(os.scandir(parent), key=lambda entry: natural_key(entry.name))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED or not _is_folder(entry):
            continue
        real = os.path.realpath(entry.path)
        if real not in seen:
            seen.add(real)
            yield Path(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _kind(folder: Path) -> str | None:
    """Return what a folder is by the names in it; None for one that is worth a look inside."""
    try:
        names = os.listdir(folder)
    except OSError:
        return "closed"
    if any(marker in names for marker in _MARKED):
        return "skipped"
    if any(name.endswith(SUFFIX) and not is_adapter_file(name) for name in names):
        return "checkpoint"
    if ADAPTER_CONFIG in names:
        return "adapter"
    if "config.json" in names and any(name.endswith(_FOREIGN) for name in names):
        return "foreign"
    # An index alone names weights that are missing: opening it says so.
    return "checkpoint" if "model.safetensors.index.json" in names else None


def is_adapter(path: Path) -> bool:
    """Return whether a path is that of a folder with a LoRA adapter, and no weights of its own."""
    return path.is_dir() and _kind(path) == "adapter"


def open_candidates(paths: Sequence[Path]) -> tuple[tuple[Candidate, ...], tuple[tuple[Path, MergepipeError], ...]]:
    """Return the checkpoints at these paths with names of their own, and each path that is none with the reason."""
    opened: list[tuple[Path, Checkpoint]] = []
    errors: list[tuple[Path, MergepipeError]] = []
    for path in paths:
        try:
            opened.append((path, open_checkpoint(path, label=folder_name(path))))
        except MergepipeError as error:
            errors.append((path, error))
    names = source_names([path for path, _ in opened])
    candidates = (
        Candidate(name=name, path=path, checkpoint=checkpoint)
        for name, (path, checkpoint) in zip(names, opened, strict=True)
    )
    return tuple(candidates), tuple(errors)


def open_adapters(
    folders: Sequence[Path], on: Candidate, taken: Sequence[str]
) -> tuple[tuple[Candidate, ...], tuple[tuple[Path, MergepipeError], ...]]:
    """Return the LoRA adapters in these folders that fit a checkpoint, and each other one with the reason.

    Parameters
    ----------
    taken
        Names that other sources have.
    """
    opened: list[Candidate] = []
    errors: list[tuple[Path, MergepipeError]] = []
    for folder in folders:
        name = _free_name(folder_name(folder), [*taken, *(candidate.name for candidate in opened)])
        try:
            checkpoint = open_adapter(folder, label=name, on=on.checkpoint)
        except MergepipeError as error:
            errors.append((folder, error))
        else:
            opened.append(Candidate(name=name, path=folder, checkpoint=checkpoint, on=on.name))
    return tuple(opened), tuple(errors)


def source_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: that of the folder, with the parent's where two are equal, numbered if need be."""
    names = [folder_name(path) for path in paths]
    count = Counter(names)
    names = [
        clean_name(f"{folder_name(path.absolute().parent)}-{name}") if count[name] > 1 else name
        for path, name in zip(paths, names, strict=True)
    ]
    taken: list[str] = []
    for name in names:
        taken.append(_free_name(name, taken))
    return taken


def _free_name(name: str, taken: Sequence[str]) -> str:
    """Return a name, numbered if it is taken."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def folder_name(path: Path) -> str:
    """Return the name that a checkpoint has by its place."""
    absolute = Path(os.path.normpath(path.absolute()))
    if absolute.parent.name == "snapshots" and (match := _HUB_FOLDER.fullmatch(absolute.parent.parent.name)):
        return clean_name(match["name"])
    return clean_name(absolute.name.removesuffix(SUFFIX))


def guess_base(candidates: Sequence[Candidate], adapters: Iterable[Path]) -> Candidate | None:
    """Return the base: the folder called ``base``, else the one that adapters say they were trained on.

    None if there is no such folder, or more than one.
    """
    called = [candidate for candidate in candidates if candidate.name.casefold() == "base"]
    if called:
        return called[0] if len(called) == 1 else None
    wanted = list(dict.fromkeys(_base_of_adapter(folder) for folder in adapters))
    named = [c for c in candidates if any(_is_called(c, name) for name in wanted if name)]
    return named[0] if len(named) == 1 else None


def _base_of_adapter(folder: Path) -> str | None:
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    name = config.get("base_model_name_or_path") if isinstance(config, Mapping) else None
    return name if isinstance(name, str) else None


def _is_called(candidate: Candidate, name: str) -> bool:
    """Return whether a name from an adapter's config, a path on some machine or ``org/model``, is this checkpoint."""
    last = Path(name.rstrip("/")).name
    return bool(last) and clean_name(last).casefold() == folder_name(candidate.path).casefold()
