"""Settings for the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# Deadlines measure the machine and not the code; CI also wants the same examples every time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
