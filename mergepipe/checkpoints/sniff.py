"""What a file that is not safetensors really is, in words.

Broken downloads leave all kinds of files under a checkpoint's name. People recognise the cause at once when the
message names it, and never from "header too large".
"""

from __future__ import annotations

import codecs
import re

from mergepipe.checkpoints.wording import quote
from mergepipe.units import format_bytes
from mergepipe.values import dataclass

SNIFF_BYTES = 4096
"""How much of a file's beginning `sniff` wants."""

_AGAIN = "download the file again"
_LOGIN = "download the file again; if the model is gated, log in first"
_ORIGINAL = "use the safetensors checkpoint that it was made from"
_UNPACK = "unpack it, and point the source at the folder with the `.safetensors` files"
_CONVERT = "convert the checkpoint to safetensors, or fetch its safetensors version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a file is.

    Attributes
    ----------
    kind
        A stable word for scripts, such as ``git-lfs-pointer``.
    what
        The words that follow "is" in a message.
    hint
        What to do about it.
    """

    kind: str
    what: str
    hint: str


_MAGIC = (
    (b"PK\x03\x04", Finding(kind="zip", what="a zip archive, such as PyTorch writes (`.bin`, `.pt`)", hint=_CONVERT)),
    (b"GGUF", Finding(kind="gguf", what="a GGUF file", hint=_ORIGINAL)),
    (b"\x1f\x8b", Finding(kind="gzip", what="a gzip archive", hint=_UNPACK)),
    (b"\x28\xb5\x2f\xfd", Finding(kind="zstd", what="a zstd archive", hint=_UNPACK)),
    (b"\xfd7zXZ\x00", Finding(kind="xz", what="an xz archive", hint=_UNPACK)),
    (b"\x89HDF\r\n\x1a\n", Finding(kind="hdf5", what="an HDF5 file, such as Keras writes", hint=_CONVERT)),
    (b"\x93NUMPY", Finding(kind="numpy", what="a NumPy array file", hint=_CONVERT)),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
_LFS_SIZE = re.compile(rb"^size ([0-9]{1,18})$", re.MULTILINE)
_HTML = re.compile(r"<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_COMMENT, _COMMENT_END = "<!--", "-->"
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")


def sniff(head: bytes) -> Finding | None:
    """Return what a file is, from its first `SNIFF_BYTES` bytes, or None where they tell nothing."""
    if head.startswith(_LFS_MAGIC):
        return _lfs_pointer(head)
    for magic, finding in _MAGIC:
        if head.startswith(magic):
            return finding
    if _PICKLE.match(head):
        return Finding(kind="pickle", what="a Python pickle, such as old PyTorch versions write", hint=_CONVERT)
    if head[257:262] == b"ustar":
        return Finding(kind="tar", what="a tar archive", hint=_UNPACK)
    if len(head) >= 8 and not head.strip(b"\0"):
        return Finding(
            kind="zeros",
            what=f"all zeros (at least its first {len(head):,} bytes), as an interrupted download leaves",
            hint=_AGAIN,
        )
    return _text(head)


def _lfs_pointer(head: bytes) -> Finding:
    """Describe a Git LFS pointer, with the size of the file that it stands for where it says so."""
    size = _LFS_SIZE.search(head)
    real = f" (the real file has {format_bytes(int(size[1]))})" if size else ""
    return Finding(
        kind="git-lfs-pointer",
        what=f"a Git LFS pointer, not the file that it stands for{real}",
        hint="run `git lfs pull` in the model's repository, or download the model again",
    )


def _text(head: bytes) -> Finding | None:
    """Describe a text: a web page, JSON, or any other; None if the bytes are not text."""
    text = _decode(head)
    if text is None:
        return None
    if _HTML.match(_without_comments(text)):
        return Finding(kind="html", what="an HTML page, such as a login or error page", hint=_LOGIN)
    start = text.lstrip()
    if start.startswith("<?xml"):
        return Finding(kind="xml", what="an XML document, such as a storage service's error", hint=_LOGIN)
    first_line = quote(start[:60].split("\n", 1)[0].strip())
    if start.startswith(("{", "[")):
        return Finding(kind="json", what=f"a JSON document, such as an error body: {first_line}", hint=_LOGIN)
    return Finding(kind="text", what=f"a text file that begins {first_line}", hint=_LOGIN)


def _without_comments(text: str) -> str:
    """Return what follows the comments that a page begins with. By hand: a pattern would try all ways to split them."""
    text = text.lstrip()
    while text.startswith(_COMMENT):
        text = text[len(_COMMENT) :].partition(_COMMENT_END)[2].lstrip()
    return text


def _decode(head: bytes) -> str | None:
    """Return UTF-8 text that holds no control characters and is not blank; the last character may be cut off."""
    head = head.removeprefix(codecs.BOM_UTF8)
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return None
        text = head[: error.start].decode()
    return None if _CONTROLS.search(text) or not text.strip() else text
