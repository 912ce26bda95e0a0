"""Progressive codes in the cache: packs by content, and what the planner needs of them in the catalog.

A pack says all that its row says; the row remains when the pack is pruned, so that plans stay what they are. Losing
either costs time: both are made again from the sources, with the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.database import seal
from mergepipe.errors import CacheError, PackError, StorageError, fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import remove_tree
from mergepipe.progressive.levels import LEVELS, SUFFIX, pack_key
from mergepipe.values import dataclass

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.progressive.header import PackHeader

    Array = np.ndarray[Any, Any]

_PRICES = "SELECT key, sizes, residuals, header, seal FROM codes WHERE key IN"
_HEADERS = "SELECT key, header FROM codes WHERE key IN"
_KEPT_BYTES = 1 << 24  # of prices in memory; those of more deltas are looked up each time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodePrices:
    """What the levels of one delta come to.

    Attributes
    ----------
    sizes
        The bytes of each stage of each block, int64 ``(levels, blocks)``.
    residuals
        Upper limits of the norms of what is missing at each level, float64 ``(levels, blocks)``.
    header
        The digest of the header of the pack.
    """

    sizes: Array
    residuals: Array
    header: bytes


class CodeStore:
    """The progressive packs of a cache, by the digests of the two tensors that they follow from."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.layout = catalog.layout
        self.folder = catalog.layout.progressive
        self._pending: dict[bytes, CodePrices] = {}
        self._known: dict[bytes, CodePrices] = {}  # as the catalog has them
        self._known_bytes = 0
        self._headers: dict[bytes, bytes] = {}  # as the catalog has them, of some
        self._keys: dict[tuple[bytes, bytes], bytes] = {}
        self._paths: dict[bytes, Path] = {}
        self._place = f"{self.folder}{os.sep}"

    def key(self, base: bytes, expert: bytes) -> bytes:
        """Return the key of the code of a delta, from the digests of both tensors."""
        pair = (base, expert)
        found = self._keys.get(pair)
        if found is None:
            found = self._keys[pair] = pack_key(base, expert, self._catalog.block_elements)
        return found

    def path(self, key: bytes) -> Path:
        """Return where a pack lies, if it is there."""
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self.folder / f"{key.hex()}{SUFFIX}"
        return found

    def prices(self, key: bytes) -> CodePrices | None:
        """Return what the levels of a delta come to; None if that is not known."""
        return self._pending.get(key) or self._known.get(key) or self.all_prices([key]).get(key)

    def all_prices(self, keys: Sequence[bytes]) -> dict[bytes, CodePrices]:
        """Return by key what the levels of deltas come to, as far as it is known."""
        import numpy as np

        known = {key: self._pending.get(key) or self._known.get(key) for key in keys}
        found = {key: prices for key, prices in known.items() if prices is not None}
        asked = [key for key in known if key not in found]
        for key, sizes, residuals, header in self._catalog.rows_of_keys(_PRICES, asked):
            prices = CodePrices(
                sizes=np.frombuffer(sizes, "<u4").astype(np.int64).reshape(LEVELS, -1),
                residuals=np.frombuffer(residuals, "<f8").reshape(LEVELS, -1),
                header=header,
            )
            found[key] = prices
            if self._known_bytes < _KEPT_BYTES:  # the next one who asks is not long in coming
                prices.sizes.setflags(write=False)
                self._known[key] = prices
                self._known_bytes += prices.sizes.nbytes + prices.residuals.nbytes
        return found

    def has_pack(self, key: bytes) -> bool:
        """Return whether a pack is there; what it holds is checked when it is read."""
        try:  # without a `Path`: it is asked thousands of times
            return stat.S_ISREG(os.stat(f"{self._place}{key.hex()}{SUFFIX}").st_mode)
        except FileNotFoundError:
            return False
        except OSError:
            return self.path(key).is_file()

    def has_lost_packs(self) -> bool:
        """Return whether of any delta it is known what its levels come to, and its pack is not there."""
        rows = self._catalog.rows("SELECT key FROM codes", ())
        return not all(isinstance(key, bytes) and self.has_pack(key) for (key,) in rows)

    def record(self, key: bytes, header: PackHeader) -> CodePrices:
        """Take down what a finished pack comes to; it is kept for good by the next `flush`.

        What is lost before that is read again from the pack (`adopt`).
        """
        import numpy as np

        prices = CodePrices(
            sizes=header.sizes.astype(np.int64), residuals=header.residuals.astype(np.float64), header=header.seal
        )
        self._pending[key] = prices
        self._known.pop(key, None)
        self._headers.pop(key, None)
        return prices

    def flush(self) -> None:
        """Record what was taken down, all of it together: a commit costs more than making a small pack."""
        if not self._pending:
            return
        with self._catalog.transaction() as db:
            for key, prices in self._pending.items():
                columns = (key, *_packed(prices), prices.header)
                db.execute(
                    "INSERT OR REPLACE INTO codes (key, sizes, residuals, header, seal) VALUES (?, ?, ?, ?, ?)",
                    (*columns, seal(*columns)),
                )
        self._pending = {}

    def forget(self, key: bytes) -> None:
        """Drop what is known of a pack."""
        self._known.pop(key, None)
        self._headers.pop(key, None)
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM codes WHERE key = ?", (key,))

    def note_use(self, key: bytes) -> None:
        """Note that a pack was read from: pruning removes those first that were not for longest.

        Where it cannot be noted, such as in a cache that may only be read, nothing is.
        """
        with contextlib.suppress(OSError):
            os.utime(self.path(key), follow_symlinks=False)

    def adopt(self, key: bytes) -> CodePrices | None:
        """Return the prices of a pack that lies there without a row, and take them down; None if there is none."""
        from mergepipe.progressive.pack import read_header  # numpy comes with it

        try:
            header = read_header(self.path(key)) if self.has_pack(key) else None
        except (PackError, StorageError):
            self.quarantine(key)
            return None
        if header is None or self.key(header.base_digest, header.expert_digest) != key:
            return None
        return self.record(key, header)

    def header(self, key: bytes) -> bytes | None:
        """Return the digest of the header of the pack whose prices are known; None if none are."""
        found = self._pending.get(key) or self._known.get(key)
        return self.headers([key]).get(key) if found is None else found.header

    def headers(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return by key the digest of the header of each pack whose prices are known."""
        asked = [key for key in keys if key not in self._headers]
        self._headers |= dict(self._catalog.rows_of_keys(_HEADERS, asked, sealed=False))
        told = {key: self._pending.get(key) or self._known.get(key) for key in keys}
        found = {key: self._headers.get(key) if prices is None else prices.header for key, prices in told.items()}
        return {key: header for key, header in found.items() if header is not None}

    def quarantine(self, key: bytes) -> None:
        """Take a damaged pack out of use.

        Raises
        ------
        CacheError
            If it cannot be moved.
        """
        path = self.path(key)
        target = self._catalog.layout.quarantine / path.name
        if not os.path.lexists(path):
            return
        try:
            target.parent.mkdir(exist_ok=True)
            remove_tree(target)
            path.replace(target)
            crash_point("codes.quarantined")
        except OSError as error:
            raise CacheError(
                f"a damaged pack `{path}` cannot be moved away: {error}", hint="remove it", path=str(path)
            ) from error

    def make_folder(self) -> None:
        """Make the folder of packs.

        Raises
        ------
        StorageError
            If the file system refuses.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail_storage(error, self.folder, "create")


def _packed(prices: CodePrices) -> tuple[bytes, bytes]:
    """Return sizes and residuals as the catalog has them."""
    import numpy as np

    return prices.sizes.astype("<u4").tobytes(), np.ascontiguousarray(prices.residuals, "<f8").tobytes()
