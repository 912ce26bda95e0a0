"""Settings for the tests of counters."""

from collections.abc import Iterator

import pytest
from support.projects import quicken


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        quicken(monkeypatch)
        yield
