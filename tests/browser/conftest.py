"""A browser for the tests in this folder. They are left out where there is none, but not in CI, which installs one."""

import os

import pytest
from support.chromium import chromium, find_chromium


@pytest.fixture(scope="session")
def browser():
    if find_chromium() is None and not os.environ.get("CI"):
        pytest.skip("there is no Chromium here")
    with chromium() as running:
        yield running


@pytest.fixture
def screen(browser):
    """Return a blank page of the browser."""
    page = browser.new_page()
    yield page
    browser.close(page)
