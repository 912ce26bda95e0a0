"""Where things lie in the cache directory.

::

    .mergecache/
      CACHEDIR.TAG  .gitignore    so that backups and git leave it alone
      build.lock                  held by the one process that builds
      catalog.db                  digests and results (SQLite)
      packs/<hex>.safetensors     finished shards, named by digest, read-only
      progressive/<hex>.planes    codes of deltas, named by the content that they follow from
      staging/<name>.safetensors   shards being written, kept for the next run if this one is killed
      reserve                     a megabyte held while a build runs, for recording its work on a full disk
      quarantine/                 damaged packs, kept for a look
      projects/                   the places of the locks of projects that build with this cache
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mergepipe.errors import fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import write_file
from mergepipe.values import dataclass

_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# The cache of mergepipe; it can be deleted at any time.\n"

# The files that are ours in `packs/` and `quarantine/`, and in `staging/` (`mergepipe.engine.staging`). Somebody may
# have put a link to a folder with other files there.
PACK_FILE = re.compile(r"([0-9a-f]{64})\.safetensors")
STAGED_FILE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.safetensors")
# Those in `progressive/`: packs, and what killed processes leave of them (`mergepipe.progressive.writer`).
CODE_FILE = re.compile(r"([0-9a-f]{64})\.planes")
CODE_SCRAP = re.compile(r"\.[0-9]+-[0-9]+\.planes-tmp")


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The paths inside one cache directory."""

    root: Path

    @property
    def catalog(self) -> Path:
        """The SQLite index."""
        return self.root / "catalog.db"

    @property
    def packs(self) -> Path:
        """The folder of finished shards."""
        return self.root / "packs"

    @property
    def progressive(self) -> Path:
        """The folder of progressive packs."""
        return self.root / "progressive"

    @property
    def staging(self) -> Path:
        """The folder of shards in progress."""
        return self.root / "staging"

    @property
    def quarantine(self) -> Path:
        """The folder of damaged packs."""
        return self.root / "quarantine"

    @property
    def reserve(self) -> Path:
        """Room set aside while a build runs."""
        return self.root / "reserve"

    @property
    def lock(self) -> Path:
        """The lock file of the process that builds."""
        return self.root / "build.lock"

    @property
    def projects(self) -> Path:
        """The folder of notes on who builds with this cache."""
        return self.root / "projects"

    def is_cache(self) -> bool:
        """Return whether the directory is a cache, also one of which parts are gone, or is empty.

        Whoever removes things in it asks before: the name may be that of something else.

        Raises
        ------
        StorageError
            If the file system refuses.
        """
        try:
            found = set(os.listdir(self.root))
            if not found or found & {self.catalog.name, self.lock.name}:
                return True
            tag = self.root / "CACHEDIR.TAG"
            if tag.name in found and tag.read_bytes() == _TAG:
                return True
            folders = {self.packs.name, self.progressive.name, self.staging.name, self.quarantine.name}
            own = folders | {self.projects.name, ".gitignore"}
            return found <= own | {tag.name, self.reserve.name}
        except NotADirectoryError:
            return False
        except OSError as error:
            fail_storage(error, self.root, "look into")

    def create(self) -> None:
        """Make the directories that are missing.

        Raises
        ------
        StorageError
            If the file system refuses.
        """
        try:
            for folder in (self.packs, self.staging):
                folder.mkdir(parents=True, exist_ok=True)
            crash_point("cache.created")
            for name, content in (("CACHEDIR.TAG", _TAG), (".gitignore", b"*\n")):
                path = self.root / name
                if not path.exists():
                    write_file(path, content)
        except OSError as error:
            fail_storage(error, self.root, "create the cache directory")
