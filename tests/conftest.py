"""Settings for the whole suite."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

from hypothesis import settings
from support.cli import hear_signals

hear_signals()

# Deadlines measure the machine and not the code; CI also wants the same examples every time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# malloc.h of glibc. Else every array of more than 128 KiB is mapped anew and given back, page by page: a quarter of the
# time of small merges that count magnitudes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
if sys.platform == "linux":
    with contextlib.suppress(AttributeError):  # another C library
        _libc = ctypes.CDLL(None)
        _libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
        _libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)
