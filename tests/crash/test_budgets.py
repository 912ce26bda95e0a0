"""Outputs with budgets: a kill while deltas are measured, or later, loses nothing and changes no access set."""

from __future__ import annotations

import pytest
from support.crash import CleanBuilds, Site, states
from support.forked import ForkServer
from support.quick import every

from mergepipe.fsio.crash import CRASH_POINTS

BUDGETS = """\

[outputs.one.budget]
expert_reads = "40%"
precision = "blocks"

[outputs.two.budget]
expert_reads = "60%"
precision = "levels"
"""
# A budget changes what is measured and merged, and not how it is published: the slow suite has those points.
MERGING = [point for point in CRASH_POINTS if point.startswith(("engine.", "packs.")) or point == "publish.swapped"]
RECORD_ALWAYS = "import mergepipe.engine.run as run; run._RECORD_EVERY = 0"


class BudgetedSite(Site):
    """A project whose two outputs read parts of their experts."""

    template = Site.template + BUDGETS


@pytest.fixture(scope="session")
def clean(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> CleanBuilds:
    """Return what clean builds make, by version."""
    return CleanBuilds(tmp_path_factory.mktemp("budgeted"), server, BudgetedSite)


@pytest.fixture
def site(tmp_path, server: ForkServer) -> BudgetedSite:
    """Return a project at version 1 that was not built yet."""
    return BudgetedSite(tmp_path / "site", server)


def finish(site, reference):
    """Build to the end, and once more: as clean, and then nothing to do."""
    report = site.report()
    site.check_done(reference)
    assert site.litter() == []
    assert site.staged() == []
    assert states(site.report()) == ["unchanged"] * 2
    return report


@pytest.mark.parametrize("point", every(CRASH_POINTS, MERGING))
def test_killed_at_any_point_the_next_build_ends_clean(site, clean, point):
    site.report()
    site.turn_to(2)
    site.kill_at(point)
    site.check_between(clean[1], clean[2])
    finish(site, clean[2])


@pytest.mark.parametrize("passes", [2, 5, 12])
def test_what_was_measured_before_a_kill_is_not_measured_again(site, clean, passes):
    env = {"MERGEPIPE_CRASH_POINT": f"engine.tensor-recorded:{passes}"}
    assert site.run("build", "-j", "1", env=env, prelude=RECORD_ALWAYS).code == -9
    site.check_between(None, clean[1])
    whole = sum(path.stat().st_size for path in (site.root / "models").rglob("*.safetensors"))
    report = finish(site, clean[1])
    index = sum(output["index_bytes_read"] for output in report["outputs"].values())
    assert index < whole * 0.95
    for output in report["outputs"].values():
        assert output["expert_bytes"]["read"] <= output["expert_bytes"]["planned"]
