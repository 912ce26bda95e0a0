"""The checksum at the end of a manifest: the digest of every byte before its line.

Digests of blocks, tensors and output vouch for one another; the checksum vouches for the rest too, such as decisions
and measured costs, which the lock cannot hold because they differ from build to build.
"""

from __future__ import annotations

from mergepipe.digest import content_digest, format_digest

CHECKSUM_KEY = "checksum"


def with_checksum(body: bytes) -> bytes:
    """Return a JSON object that lacks its end, up to and with the comma of its last line, closed by its checksum."""
    return body + f'  "{CHECKSUM_KEY}": "{format_digest(content_digest(body))}"\n}}\n'.encode()


_END_BYTES = len(with_checksum(b""))


def has_checksum(data: bytes) -> bool:
    """Return whether bytes are exactly what `with_checksum` returned: no byte was changed since."""
    return data == with_checksum(data[:-_END_BYTES])
