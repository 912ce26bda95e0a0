"""Killed while a progressive pack is written: it is there whole or not at all, and writing it again ends well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mergepipe.progressive.pack import check_pack
from mergepipe.progressive.writer import TEMPORARY_SUFFIX

WRITE = """
import sys
from pathlib import Path
import numpy as np
from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.writer import TEMPORARY_SUFFIX, PackWriter

folder = Path(sys.argv[1])
writer = PackWriter(folder, shape=(64, 64), block_elements=1024)
for block in range(4):
    writer.put(block, encode_block(np.arange(-512, 512, dtype=np.float32) * (block + 1), 64))
writer.finish(bytes(32), bytes(32), folder / "a.planes", durable=True)
"""


def write(folder, point=None):
    env = os.environ | ({} if point is None else {"MERGEPIPE_CRASH_POINT": point})
    return subprocess.run([sys.executable, "-c", WRITE, folder], env=env, timeout=60).returncode


@pytest.mark.parametrize(("point", "is_there"), [("planes.written", False), ("planes.renamed", True)])
def test_a_pack_is_whole_or_not_there(tmp_path, point, is_there):
    path = tmp_path / "a.planes"
    assert write(tmp_path, point) == -signal.SIGKILL
    assert path.exists() == is_there
    if is_there:
        check_pack(path)
    left = {other.name for other in tmp_path.iterdir()} - {path.name}
    assert all(name.startswith(".") and name.endswith(TEMPORARY_SUFFIX) for name in left)
    assert write(tmp_path) == 0
    check_pack(path)
