"""What two pins of a source tell of each other: one of all content, and one that is a fingerprint, do not compare."""

from __future__ import annotations

from mergepipe.digest import SAMPLED_PREFIX


def repinned(old: str | None, new: str | None) -> str | None:
    """Return in words that a pin is of another kind than before; None where it is not, or the texts are no pins.

    Its content may be the same all the same: what changed is what an output reads of it.

    Parameters
    ----------
    old, new
        As a lock has them: ``b3:<hex>``, or ``sample:b3:<hex>`` for a fingerprint; None where there is none.
    """
    if old is None or new is None or old.startswith(SAMPLED_PREFIX) == new.startswith(SAMPLED_PREFIX):
        return None
    return "it is known by samples now" if new.startswith(SAMPLED_PREFIX) else "all of its content is known now"
