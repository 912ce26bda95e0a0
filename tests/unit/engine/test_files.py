"""Source files that a worker has open: few, looked at again in each job, and closed at the end."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mergepipe.engine.files import Files
from mergepipe.errors import SourceChangedError
from mergepipe.fsio.identity import FileIdentity, settle


def located(path):
    """Return a tensor at the beginning of a file as it is now."""
    identity = FileIdentity.at(path)
    settle(identity)  # as a run does before it reads
    file = SimpleNamespace(path=path, name=path.name, identity=identity)
    return SimpleNamespace(ref=SimpleNamespace(source="s", info=SimpleNamespace(offset=0)), file=file)


@pytest.fixture
def sources(tmp_path):
    found = []
    for number in range(5):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(bytes([number]) * 8)
        found.append(located(path))
    return found


def read(files, source):
    target = bytearray(8)
    files.read(source, memoryview(target), 0)
    return bytes(target)


def opened():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_few_files_stay_open_and_none_at_the_end(sources):
    before, files = opened(), Files()
    files.most = 2
    for _ in range(2):
        files.next_job()
        for number, source in enumerate(sources):
            assert read(files, source) == bytes([number]) * 8
            assert opened() <= before + 2
    files.close()
    assert opened() == before


def test_a_file_is_opened_once_for_all_jobs(sources, monkeypatch):
    calls, original = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: calls.append(path) or original(path, *rest))
    files = Files()
    for _ in range(3):
        files.next_job()
        read(files, sources[0])
    files.close()
    assert calls == [sources[0].file.path]


def written(path):
    path.write_bytes(b"changed!")
    os.utime(path, ns=(1, 1))


def replaced(path):
    other = path.with_name("other")
    other.write_bytes(b"changed!")
    other.replace(path)


@pytest.mark.parametrize("change", [written, replaced, os.unlink])
def test_a_file_that_is_another_one_is_found_by_the_next_job(sources, change):
    files = Files()
    read(files, sources[0])
    change(sources[0].file.path)
    files.next_job()
    with pytest.raises(SourceChangedError):
        read(files, sources[0])
    files.close()
