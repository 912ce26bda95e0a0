"""Which files of an output directory are ours: its record says so."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from mergepipe.errors import fail_storage
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.reading import read_regular
from mergepipe.publish.card import own_files

MANIFEST = "mergepipe.json"


def owned_files(target: Path) -> tuple[str, ...] | None:
    """Return the names of the files that mergepipe put into a directory, or None if it is not one of its own.

    Raises
    ------
    StorageError
        If the record that says so is there and cannot be read: it decides whose files are whose.
    """
    try:
        return own_files(target, _claimed(target / MANIFEST))
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
    except OSError as error:
        fail_storage(error, target / MANIFEST, "read")


def _claimed(record: Path) -> tuple[str, ...]:
    """Return the files that a record claims; one that is the file that was read before is not read again.

    A build asks three times, and records grow with the model.
    """
    began, identity = time.time_ns(), FileIdentity.at(record)
    known = _CLAIMED.get(record)
    if known is not None and known[0] == identity:
        return known[1]
    files = msgspec.json.decode(read_regular(record), type=_Owned).files
    _CLAIMED.clear()
    if identity is not None and not identity.is_racy(began):
        _CLAIMED[record] = (identity, files)
    return files


_CLAIMED: dict[Path, tuple[FileIdentity, tuple[str, ...]]] = {}


class _Owned(msgspec.Struct):
    files: tuple[str, ...]
    version: int
