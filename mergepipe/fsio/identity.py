"""File identity: when a file may be taken to be the one that was read before, without reading it again.

The rule is git's: size, mtime, ctime and inode must all match, and the file must not have been modified within the
timestamp granularity of the moment at which it was read ("racily clean"), because a later write could then carry the
same timestamps.
"""

from __future__ import annotations

import os
import time

from mergepipe.errors import fail_storage
from mergepipe.values import dataclass

# The kernel stamps files with the time of its last tick: 10 ms at the slowest tick rate, with room to spare.
FINE_GRANULARITY_NS = 20_000_000
# FAT keeps two seconds, some network file systems one.
COARSE_GRANULARITY_NS = 2_000_000_000
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What `os.stat` says of a file's content: bytes, nanoseconds, inode number."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        """Return the identity in a stat result."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> FileIdentity | None:
        """Return the identity of the file at ``path`` (symlinks followed), or None if none can be looked at."""
        try:
            return cls.of(os.stat(path))
        except OSError:
            return None

    @classmethod
    def found(cls, path: str | os.PathLike[str]) -> FileIdentity | None:
        """Return the identity of the file at ``path`` (symlinks followed), or None if there is none.

        Raises
        ------
        StorageError
            If the file system does not say.
        """
        try:
            return cls.of(os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            fail_storage(error, path, "look at")

    def same_content(self, other: FileIdentity) -> bool:
        """Return whether all but ctime agree: a link was made or removed, or the mode changed, but no byte was written.

        Only for files that were ours all the time; whoever can set an mtime can deceive it.
        """
        return (self.size, self.mtime_ns, self.inode) == (other.size, other.mtime_ns, other.inode)

    def granularity_ns(self) -> int:
        """Return the granularity to assume of this file's timestamps, in nanoseconds."""
        coarse = self.mtime_ns % _SECOND_NS == 0 and self.ctime_ns % _SECOND_NS == 0
        return COARSE_GRANULARITY_NS if coarse else FINE_GRANULARITY_NS

    def is_racy(self, read_at_ns: int) -> bool:
        """Return whether a read that began at ``read_at_ns`` could have missed a later write.

        Only ctime counts: every write sets it, and nobody can set it back. An mtime may lie in the future (unpacked
        archives) and says nothing then.
        """
        return self.ctime_ns + self.granularity_ns() > read_at_ns


def settle(identity: FileIdentity) -> int:
    """Wait until a read of this file cannot be racy any more; return the time to record as its read time.

    It waits 20 ms at most, and only for a file that was modified just now. Files with coarse timestamps are not
    waited for: they are re-hashed next time.
    """
    now = time.time_ns()
    remaining = identity.ctime_ns + FINE_GRANULARITY_NS + 1 - now
    if 0 < remaining <= FINE_GRANULARITY_NS + 1:
        time.sleep(remaining / _SECOND_NS)
        now = time.time_ns()
    return now
