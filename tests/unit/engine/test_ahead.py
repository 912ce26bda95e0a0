"""Advice to the kernel: a few files open, closed at the end; whatever cannot be asked for is left to the reader."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mergepipe.checkpoints.geometry import GEOMETRY_1, grid
from mergepipe.engine import ahead
from mergepipe.engine.ahead import ReadAhead
from mergepipe.engine.work import Group, Input, Job
from mergepipe.fsio.durable import start_writeback


def job_of(*paths, known=None, start=0, stop=1):
    inputs = {}
    for path in paths:
        ref = SimpleNamespace(source="s", info=SimpleNamespace(offset=16))
        source = Input(
            key=(str(path), "t"), ref=ref, file=None, grid=grid("BF16", (4, 8), GEOMETRY_1), known=known
        )
        inputs[source.key] = source
    return Job(group=Group(works=(), inputs=inputs), start=start, stop=stop)


@pytest.fixture
def asked(monkeypatch):
    calls = []
    monkeypatch.setattr(ahead, "advise", lambda fd, offset, count: calls.append((offset, count)))
    return calls


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{number}.safetensors" for number in range(5)]
    for path in paths:
        path.write_bytes(bytes(100))
    return paths


def test_what_a_job_is_sure_to_read_is_asked_for(asked, files):
    one = ReadAhead()
    one.ask(job_of(*files[:2]))
    one.close()
    assert asked == [(16, 64), (16, 64)]


def test_what_is_known_or_beyond_the_end_is_not_asked_for(asked, files):
    one = ReadAhead()
    one.ask(job_of(files[0], known=bytes(32)))
    one.ask(job_of(files[0], start=1, stop=2))
    one.close()
    assert asked == []


def test_a_file_that_is_gone_is_left_to_the_reader(asked, tmp_path):
    one = ReadAhead()
    one.ask(job_of(tmp_path / "gone"))
    one.ask(job_of(tmp_path / "gone"))
    one.close()
    assert asked == []


def coded_job(*headers, start=0):
    codes = {number: SimpleNamespace(header=header) for number, header in enumerate(headers)}
    return Job(group=Group(works=(), inputs={}, codes=codes), start=start, stop=start + 1)


def test_with_the_first_job_the_headers_of_codes_are_asked_for(asked, files, tmp_path):
    one = ReadAhead()
    before = open_files()
    one.ask(coded_job((files[0], 40), None, (tmp_path / "gone", 40), (files[1], 50)))
    one.ask(coded_job((files[2], 60), start=4))
    assert asked == [(0, 40), (0, 50)]
    assert open_files() == before
    one.close()


def test_where_a_header_is_in_the_page_cache_the_others_of_its_group_are_taken_to_be(files, monkeypatch):
    asked = []
    monkeypatch.setattr(ahead, "advise", lambda fd, offset, count: asked.append(count) or count == 50)
    one = ReadAhead()
    one.ask(coded_job((files[0], 40), (files[1], 50), (files[2], 60)))
    one.ask(coded_job((files[2], 70)))
    one.close()
    assert asked == [40, 50, 70]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_few_files_stay_open_and_none_at_the_end(asked, files, monkeypatch):
    monkeypatch.setattr(ahead, "_FILES", 2)
    before = open_files()
    one = ReadAhead()
    for _ in range(2):
        for path in files:
            one.ask(job_of(path))
    assert open_files() == before + 2
    one.close()
    assert open_files() == before
    assert len(asked) == 10


def test_writing_back_early_changes_no_byte(tmp_path):
    data = os.urandom(100_000)
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, data, 3)
        start_writeback(fd, 3, len(data))
        assert os.pread(fd, len(data), 3) == data
    finally:
        os.close(fd)
    start_writeback(fd, 0, 1)  # advice about what is closed is no error


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be asked for")
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_in_the_page_cache_is_not_asked_for(tmp_path, monkeypatch, kept):
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 << 20))
    calls, reads = [], []

    def preadv(fd, buffers, offset, flags):
        reads.append((offset, len(buffers[0])))
        if kept:
            return len(buffers[0])
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, count, advice: calls.append((offset, count)))
    with path.open("rb") as file:
        ahead.advise(file.fileno(), 10, (2 << 20) + 5)
    assert calls == ([] if kept else [(10, 1 << 20), (10 + (1 << 20), 1 << 20), (10 + (2 << 20), 5)])
    assert all(size == 1 and 10 <= offset < 10 + (2 << 20) + 5 for offset, size in reads)
