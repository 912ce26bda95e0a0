"""Budgets that were planned: what each came to, by the digest of all that it follows from.

A plan of a large model takes seconds, and who looks at one builds it next. Losing a row costs that time alone.
"""

from __future__ import annotations

import zlib

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.database import seal

# Budgets that are kept: those of the outputs of a project, as they were planned last.
_KEPT = 16


def keep_budget(catalog: Catalog, key: bytes, data: bytes) -> None:
    """Keep what a budget came to, in the place of the oldest one where there are many.

    Parameters
    ----------
    key
        The digest of all that ``data`` follows from.
    """
    packed = zlib.compress(data, 1)
    with catalog.transaction() as db:
        values = (key, packed, seal(key, packed))
        db.execute("INSERT OR REPLACE INTO budgets (key, data, seal) VALUES (?, ?, ?)", values)
        db.execute("DELETE FROM budgets WHERE id NOT IN (SELECT id FROM budgets ORDER BY id DESC LIMIT ?)", (_KEPT,))


def kept_budget(catalog: Catalog, key: bytes) -> bytes | None:
    """Return what was kept under this key; None where there is nothing, or it is damaged or of another form.

    Who decodes it checks it in the same way: what is not as it should be counts as absent.
    """
    for _, packed in catalog.sealed_rows("SELECT key, data, seal FROM budgets WHERE key = ?", (key,)):
        return unpacked(packed)
    return None


def unpacked(packed: object) -> bytes | None:
    """Return the data of a row; None where it is nothing that `keep_budget` wrote."""
    try:
        return zlib.decompress(packed) if isinstance(packed, bytes) else None
    except zlib.error:
        return None
