"""Which files of a folder hold the weights.

1. ``model.safetensors.index.json`` decides alone: what it does not name is ignored. So does an index of another name
   where it is the only one and there is no ``model.safetensors``.
2. Else ``model.safetensors``.
3. Else all ``*.safetensors`` of the folder itself, without adapters, and without ``consolidated*`` (another copy under
   other names) where there is anything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mergepipe.checkpoints.index import read_index
from mergepipe.checkpoints.layers import natural_key
from mergepipe.checkpoints.place import Place
from mergepipe.checkpoints.wording import enumerate_names, quote
from mergepipe.errors import SourceError
from mergepipe.values import dataclass

SUFFIX = ".safetensors"
MAIN_FILE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAIN_INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files that hold a checkpoint's weights.

    Attributes
    ----------
    files
        Names relative to the folder, in natural order.
    weight_map
        The file of each tensor as the index has it; None without an index.
    index
        Name of the index, if any.
    notes
        What was ignored, in words.
    """

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None
    notes: tuple[str, ...] = ()


def is_adapter_file(name: str) -> bool:
    """Return whether a file is named like a LoRA adapter's."""
    return name.startswith(("adapter_model", "adapter_config"))


def find_weights(place: Place, names: Sequence[str]) -> WeightFiles | None:
    """Return the weight files of a folder that holds ``names``, or None if there are none.

    Raises
    ------
    SourceError
        If files of the set are missing, or the index is not valid, or it is not clear which index counts.
    """
    weights = [name for name in names if name.endswith(SUFFIX) and not is_adapter_file(name)]
    index = _choose_index(place, names, weights)
    if index is not None:
        return _indexed(place, index, weights)
    if MAIN_FILE in weights:
        return WeightFiles(files=(MAIN_FILE,), notes=_ignored(place, weights, (MAIN_FILE,), f"`{MAIN_FILE}` is used"))
    main = [name for name in weights if not name.startswith("consolidated")]
    files = tuple(main or weights)
    if not files:
        return None
    missing = _missing_siblings(files)
    if missing:
        raise _missing_shards(place, missing, "the numbers in the names of the files that are there")
    return WeightFiles(files=files, notes=_ignored(place, weights, files, "another copy of the weights"))


def _choose_index(place: Place, names: Sequence[str], weights: Sequence[str]) -> str | None:
    """Return the name of the index that counts, if there is one."""
    if MAIN_INDEX in names:
        return MAIN_INDEX
    if MAIN_FILE in weights:
        return None
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX) and not is_adapter_file(name)]
    main = [name for name in indexes if not name.startswith("consolidated")]
    if len(main) > 1:
        raise place.error(
            f"holds several indexes: {enumerate_names(main)}",
            hint=f"keep one of them, or name the one that counts `{MAIN_INDEX}`",
        )
    if main or all(name.startswith("consolidated") for name in weights):
        return next(iter(main or indexes), None)
    return None


def _indexed(place: Place, index: str, weights: Sequence[str]) -> WeightFiles:
    """Return the files that an index names, all of them there."""
    weight_map = read_index(place, index)
    files = tuple(sorted(set(weight_map.values()), key=natural_key))
    missing = [name for name in files if not _is_there(place.root / name)]
    if missing:
        raise _missing_shards(place, missing, f"`{index}`")
    notes = _ignored(place, weights, files, f"not named by `{index}`")
    return WeightFiles(files=files, weight_map=weight_map, index=index, notes=notes)


def _is_there(path: Path) -> bool:
    """Return whether anything has this name; where the system does not tell, whoever opens it says why."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True


def _ignored(place: Place, weights: Sequence[str], used: Sequence[str], why: str) -> tuple[str, ...]:
    chosen = frozenset(used)
    ignored = [name for name in weights if name not in chosen]
    return (f"{quote(place.shown)}: ignored {enumerate_names(ignored)} ({why})",) if ignored else ()


def _missing_siblings(files: Sequence[str]) -> list[str]:
    """Return the shards that are not there although their siblings' names (``-00001-of-00003``) call for them."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in files:
        match = _SHARD.fullmatch(name)
        if match:
            sets.setdefault((match["stem"], match["total"]), set()).add(int(match["number"]))
    missing: list[str] = []
    for (stem, total), present in sets.items():
        # Some writers count from 0.
        first = 0 if 0 in present else 1
        wanted = range(first, first + int(total))
        missing += [f"{stem}-{number:05d}-of-{total}{SUFFIX}" for number in wanted if number not in present]
    return missing


def _missing_shards(place: Place, missing: Sequence[str], source: str) -> SourceError:
    return place.error(
        f"is an incomplete download: it lacks {enumerate_names(missing, limit=10)}",
        f"named by {source}",
        hint="fetch the missing files, or download the checkpoint again",
        missing=list(missing),
    )
