"""Settings for the tests in this folder."""

from collections.abc import Iterator

import pytest
from support.projects import skip_flushing


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        skip_flushing(monkeypatch)
        yield
