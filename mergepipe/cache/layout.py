"""Where things lie in the cache directory.

::

    .mergecache/
      CACHEDIR.TAG  .gitignore    so that backups and git leave it alone
      build.lock                  held by the one process that builds
      catalog.db                  digests and results (SQLite)
      packs/<hex>.safetensors     finished shards, named by digest, read-only
      staging/<name>.safetensors   shards being written, kept for the next run if this one is killed
      reserve                     a megabyte held while a build runs, for recording its work on a full disk
      quarantine/                 damaged packs, kept for a look
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergepipe.errors import fail_storage
from mergepipe.fsio.durable import write_file

_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# The cache of mergepipe; it can be deleted at any time.\n"


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
            for name, content in (("CACHEDIR.TAG", _TAG), (".gitignore", b"*\n")):
                path = self.root / name
                if not path.exists():
                    write_file(path, content)
        except OSError as error:
            fail_storage(error, self.root, "create the cache directory")
