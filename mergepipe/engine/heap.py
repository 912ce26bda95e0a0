"""Having the C library keep memory that arrays let go of, instead of handing it back to the kernel at once.

numpy makes an array for every temporary. One of some 100 KiB and more is mapped by glibc's ``malloc`` on its own and
unmapped when it is freed, so that the kernel clears its pages again for the next one: more time than the arithmetic
takes. The limit is dynamic (``mallopt(3)``, `M_MMAP_THRESHOLD`): freeing a mapped piece raises it to the size of that
piece, at most 32 MiB, and what is kept free at the end of a heap to twice as much. So one piece of nearly that size is
taken and freed, untouched. Other allocators do as they do; where the user set the limits, they stay.
"""

from __future__ import annotations

import numpy as np

_KEPT_BYTES = 31 << 20


def keep_freed_memory() -> None:
    """Let temporaries of up to 31 MiB be taken from memory that was freed before; costs no memory by itself."""
    np.empty(_KEPT_BYTES, np.uint8)
