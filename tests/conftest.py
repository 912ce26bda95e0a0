"""Settings for the whole suite."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

import pytest
from hypothesis import settings
from support.cli import hear_signals

hear_signals()

# Deadlines measure the machine and not the code; CI also wants the same examples every time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
_EVERYWHERE = settings.get_profile("ci" if os.environ.get("CI") else "dev")
settings.register_profile("thorough", _EVERYWHERE, max_examples=100)
settings.register_profile("quick", _EVERYWHERE, max_examples=40)
settings.load_profile("quick")

# What pytest makes of the tests' assertions is kept between runs, whatever the environment says of bytecode: to make it
# anew takes each worker longer than to import everything.
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples where the slow suite is left out; `test_properties.py`, in it, tries the others."""
    settings.load_profile("quick" if "not slow" in config.getoption("markexpr") else "thorough")


# malloc.h of glibc. Else every array of more than 128 KiB is mapped anew and given back, page by page: a quarter of the
# time of small merges that count magnitudes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
if sys.platform == "linux":
    with contextlib.suppress(AttributeError):  # another C library
        _libc = ctypes.CDLL(None)
        _libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
        _libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)
