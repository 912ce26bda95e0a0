"""The I/O floor: read every byte of some files, write as many bytes as an output has, flush them, and do nothing else.

Runs as a program of its own: `python -S floor.py THREADS TARGET BYTES FILE ...`. Every thread has one small
buffer of its own; the writes follow the reads, which was quicker than taking turns, and 1 MiB at a time quicker than
other sizes. Prints how long the flush took, as JSON.
"""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

SIZE = 1 << 20


def jobs(files: dict[int, int], written: int) -> list[tuple[int, int, int]]:
    """Return (file, offset, bytes) of all reads, then of all writes (file -1)."""
    reads = [(fd, at, min(SIZE, size - at)) for fd, size in files.items() for at in range(0, size, SIZE)]
    return reads + [(-1, at, min(SIZE, written - at)) for at in range(0, written, SIZE)]


def main(threads: int, target: str, written: int, paths: list[str]) -> None:
    """Read, write, flush, and remove what was written."""
    own = threading.local()
    block = os.urandom(SIZE)
    files = {(fd := os.open(path, os.O_RDONLY)): os.fstat(fd).st_size for path in paths}
    for fd in files:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def work(job: tuple[int, int, int]) -> int:
        fd, at, size = job
        if fd < 0:
            return os.pwrite(out, memoryview(block)[:size], at)
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(SIZE))
        return os.preadv(fd, [own.buffer[:size]], at)

    todo = jobs(files, written)
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, todo))
    if done != sum(size for _, _, size in todo):
        raise SystemExit(f"read and wrote {done} bytes only")
    begin = time.perf_counter()
    os.fsync(out)
    print(json.dumps({"flush": time.perf_counter() - begin}))
    os.close(out)
    os.unlink(target)  # noqa: PTH108 - without pathlib the program starts sooner


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
