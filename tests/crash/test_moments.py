"""A build killed at any moment, and readers that look at an output all the time."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from blake3 import blake3
from support.cli import start_mergepipe
from support.crash import MANIFEST, OUTPUTS, Site, files_in, spread

FEW, MANY = 5, 60


def measured(site, version):
    """Return the seconds of an undisturbed build of a version, from the start of its process."""
    site.turn_to(version)
    result = site.run()
    assert result.code == 0, result.text
    return result.seconds


def kill_at_moments(site, clean, count, seed):
    """Kill a build of each next version at a moment; what is there must be whole, and the next build as clean."""
    duration = min(measured(site, 2), measured(site, 3))
    generator = random.Random(seed)
    killed = 0
    for version, moment in enumerate(spread(count, duration, [generator.random() for _ in range(count)]), 4):
        site.turn_to(version)
        process = site.start()
        time.sleep(moment)
        process.kill()
        killed += process.wait().code == -9
        site.check_between(clean[version - 1], clean[version])
        site.report()
        site.check_done(clean[version])
        assert site.litter() == []
        assert site.staged() == []
    assert killed > 0, "every build had ended before it was killed"


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_moments_spread_over_a_build_the_next_one_ends_clean(built, clean, seed):
    kill_at_moments(built, clean, FEW, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 6))
def test_killed_at_many_moments_spread_over_a_build_the_next_one_ends_clean(built, clean, seed):
    kill_at_moments(built, clean, MANY, seed)


def test_interrupted_at_moments_spread_over_a_build_it_says_so_and_the_next_one_ends_clean(built, clean):
    duration = min(measured(built, 2), measured(built, 3))
    generator = random.Random(7)
    for version, moment in enumerate(spread(6, duration, [generator.random() for _ in range(6)]), 4):
        built.turn_to(version)
        process = built.start("build")
        time.sleep(moment)
        process.kill(signal.SIGINT)
        result = process.wait()
        assert result.code in (0, 130), result.text
        assert "Traceback" not in result.text
        built.check_between(clean[version - 1], clean[version])
        assert built.litter() == []
        built.report()
        built.check_done(clean[version])


@pytest.mark.slow
def test_killed_at_moments_of_a_process_that_a_user_starts(tmp_path, server, clean):
    site = Site(tmp_path / "site", server)
    site.report()
    generator = random.Random(9)
    for version, moment in enumerate(spread(30, 1.0, [generator.random() for _ in range(30)]), 2):
        site.turn_to(version)
        process = start_mergepipe(["build"], site.root)
        time.sleep(moment)
        process.kill()
        process.communicate(timeout=60)
        site.check_between(clean[version - 1], clean[version])
        site.report()
        site.check_done(clean[version])


# --- readers ------------------------------------------------------------------------------------------------------


class Watcher(threading.Thread):
    """Reads an output directory again and again, the way a loader does: opens it, lists it, reads every file.

    Attributes
    ----------
    seen
        The digests of all states that were read whole.
    gone
        How often the directory was not there.
    broken
        What was wrong: a file listed in a directory that is still in its place could not be read.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.seen: set[str] = set()
        self.gone = 0
        self.broken: list[str] = []
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.is_set():
            try:
                fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                self.gone += 1
                continue
            try:
                self._look(fd)
            finally:
                os.close(fd)

    def _look(self, fd: int) -> None:
        files = {}
        try:
            for name in sorted(os.listdir(fd)):
                with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
                    files[name] = file.read()
        except FileNotFoundError as error:
            # The directory that we hold is being removed after it was replaced: a reader opens the new one then.
            if self._still_there(fd):
                self.broken.append(f"{error.filename} vanished from a directory that is in its place")
            return
        if self._still_there(fd):
            self.seen.add(state_of(files))

    def _still_there(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.directory), os.fstat(fd))
        except FileNotFoundError:
            return False

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(60)


def state_of(files: dict[str, bytes]) -> str:
    """Return a digest of all files; a manifest counts without what the run cost."""
    record = json.loads(files[MANIFEST]) if MANIFEST in files else {}
    record.pop("run", None)
    record.pop("checksum", None)  # that of all bytes, what the run cost among them
    whole = {**files, MANIFEST: json.dumps(record).encode()}
    return blake3(b"".join(name.encode() + data for name, data in sorted(whole.items()))).hexdigest()


def state_at(directory: Path) -> str:
    return state_of({name: (directory / name).read_bytes() for name in files_in(directory)})


def test_a_reader_sees_the_old_output_or_the_new_one_at_every_moment(built):
    watchers = [Watcher(built.out(name)) for name in OUTPUTS]
    allowed = {name: {state_at(built.out(name))} for name in OUTPUTS}
    for watcher in watchers:
        watcher.start()
    try:
        for version in range(2, 7):
            built.turn_to(version)
            if version % 3 == 0:
                built.run(env={"MERGEPIPE_CRASH_POINT": "publish.swapped"})
            built.report()
            for name in OUTPUTS:
                allowed[name].add(state_at(built.out(name)))
    finally:
        for watcher in watchers:
            watcher.stop()
    for name, watcher in zip(OUTPUTS, watchers, strict=True):
        assert watcher.broken == []
        assert watcher.gone == 0, "the output directory was away for a moment"
        assert watcher.seen <= allowed[name]
        assert len(watcher.seen) > 1, "the reader saw no change"


def test_without_the_exchange_the_output_may_be_away_but_is_never_broken(built):
    watcher = Watcher(built.out("one"))
    allowed = {state_at(built.out("one"))}
    watcher.start()
    try:
        for version in range(2, 5):
            built.turn_to(version)
            assert built.run(env={"MERGEPIPE_NO_EXCHANGE": "1"}).code == 0
            allowed.add(state_at(built.out("one")))
    finally:
        watcher.stop()
    assert watcher.broken == []
    assert watcher.seen <= allowed
