"""The files of progressive packs in a cache: what lies there, when it was used last, and whether it is what it says."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cache.layout import CODE_FILE, CODE_SCRAP, CacheLayout
from mergepipe.errors import PackError, StorageError, fail_storage
from mergepipe.fsio.durable import remove_tree
from mergepipe.progressive.levels import pack_key
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.progressive.header import PackHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCode:
    """A file with the name of a progressive pack.

    Attributes
    ----------
    key
        What its name says, in hexadecimal.
    nbytes
        Its size.
    used_at_ns
        When it was last read from, or made: the file's mtime.
    """

    key: str
    path: Path
    nbytes: int
    used_at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFolder:
    """What lies in the folder of progressive packs: packs by name, and how many files are none of ours."""

    codes: tuple[StoredCode, ...]
    foreign: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCheck:
    """A progressive pack that was read whole.

    Attributes
    ----------
    fault
        What is wrong with it, in words; None if it is what its name says.
    seal
        The digest of its header, if there is no fault.
    """

    code: StoredCode
    fault: str | None
    seal: bytes = b""


def code_folder(layout: CacheLayout) -> CodeFolder:
    """Return what lies in the folder of progressive packs; nothing where there is none.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    names = sorted(_names(layout))
    found = []
    for key in [match[1] for match in map(CODE_FILE.fullmatch, names) if match]:
        path = layout.progressive / f"{key}.planes"
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            fail_storage(error, path, "look at")
        found.append(StoredCode(key=key, path=path, nbytes=status.st_size, used_at_ns=status.st_mtime_ns))
    foreign = sum(not (CODE_FILE.fullmatch(name) or CODE_SCRAP.fullmatch(name)) for name in names)
    return CodeFolder(codes=tuple(found), foreign=foreign)


def has_codes(layout: CacheLayout) -> bool:
    """Return whether there is any progressive pack, whatever is in it.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    return any(map(CODE_FILE.fullmatch, _names(layout)))


def drop_scraps(layout: CacheLayout) -> None:
    """Remove what killed processes left of packs in the making; the caller holds the cache.

    What cannot be removed stays: it takes room, and nobody reads it.
    """
    with contextlib.suppress(StorageError):
        for name in filter(CODE_SCRAP.fullmatch, _names(layout)):
            remove_tree(layout.progressive / name)


def _names(layout: CacheLayout) -> list[str]:
    try:
        return os.listdir(layout.progressive)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        fail_storage(error, layout.progressive, "look into")


def is_needed(code: StoredCode, digests: Collection[bytes]) -> bool:
    """Return whether a pack codes the difference of two tensors whose digests are both among these."""
    from mergepipe.progressive.pack import read_header

    try:
        header = read_header(code.path) if _is_file(code.path) else None
    except (PackError, StorageError):
        return False  # nobody can read it
    return header is not None and header.base_digest in digests and header.expert_digest in digests


def check_code(code: StoredCode) -> CodeCheck:
    """Read a whole pack; check every chunk against the header, and that against the name."""
    from mergepipe.progressive.pack import check_pack

    if not _is_file(code.path):
        is_symlink = code.path.is_symlink()
        return CodeCheck(code=code, fault="it is a symbolic link" if is_symlink else "it is not a file")
    try:
        header = check_pack(code.path)
    except PackError as error:
        return CodeCheck(code=code, fault="it " + error.message.removeprefix(f"`{code.path}` "))
    except StorageError as error:
        return CodeCheck(code=code, fault=f"it cannot be read: {error.message.rpartition(': ')[2]}")
    if _key(header) != code.key:
        return CodeCheck(code=code, fault="its content is not what its name says")
    return CodeCheck(code=code, fault=None, seal=header.seal)


def sealed_keys(checks: Collection[CodeCheck]) -> Mapping[bytes, bytes]:
    """Return by key the digest of the header of every pack that is right."""
    return {bytes.fromhex(check.code.key): check.seal for check in checks if check.fault is None}


def _key(header: PackHeader) -> str:
    return pack_key(header.base_digest, header.expert_digest, header.block_elements).hex()


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
