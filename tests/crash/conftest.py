"""What the crash tests share: a fork server and clean builds for each worker, and a fresh project for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cases.launch import can_mount
from support.crash import CleanBuilds, Site
from support.faults import compile_faults
from support.forked import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Return the server of every build that needs no environment of its own."""
    with ForkServer() as started:
        yield started


@pytest.fixture(scope="session")
def clean(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> CleanBuilds:
    """Return what clean builds make, by version."""
    return CleanBuilds(tmp_path_factory.mktemp("clean"), server)


@pytest.fixture
def site(tmp_path, server: ForkServer) -> Site:
    """Return a project at version 1 that was not built yet."""
    return Site(tmp_path / "site", server)


@pytest.fixture
def built(site: Site) -> Site:
    """Return a project that was built at version 1."""
    site.report()
    return site


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Return a server whose processes run with the library of faults (`support.faults`)."""
    library = compile_faults(tmp_path_factory.mktemp("faults"))
    if library is None:
        pytest.skip("there is no C compiler for the library of faults")
    with ForkServer(env={"LD_PRELOAD": str(library)}, flush=True) as started:
        yield started


@pytest.fixture(scope="session")
def mounting() -> Iterator[ForkServer]:
    """Return a server with mounts of its own, that may mount small disks."""
    if not can_mount():
        pytest.skip("this machine does not let us mount a small disk (`unshare -rm`)")
    with ForkServer(("unshare", "-rm")) as started:
        yield started
