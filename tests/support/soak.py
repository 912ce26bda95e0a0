"""A soak: processes killed at random moments while others work on the same project, again and again.

``PYTHONPATH=tests python -m support.soak --kills 200 --seconds 600`` runs it by hand, and says what survived.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.crash import CleanBuilds, Site, states
from support.forked import Forked, ForkServer

BUILD = ("build", "--json")
PRUNE = ("cache", "prune", "--max-size", "0")
# What runs beside the builds, and may be killed too.
BESIDE = (BUILD, BUILD, PRUNE, ("status",), ("plan",), ("verify",), ("cache", "info"))
_VERSIONS = range(1, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a soak did.

    Attributes
    ----------
    kills
        Processes that a SIGKILL ended, by the command that they ran.
    late
        Those that had ended before it came.
    rounds, seconds
        How often a build was completed and compared with a clean one, and how long all of it took.
    """

    kills: Counter[str]
    late: int
    rounds: int
    seconds: float

    def __str__(self) -> str:
        """Return the figures in words."""
        kinds = ", ".join(f"{name}: {count}" for name, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills survived ({kinds}) in {self.rounds} rounds, {self.seconds:.0f} s;"
            f" {self.late} came too late; every output, lock and digest as after a clean build"
        )


def soak(
    folder: Path,
    server: ForkServer,
    kills: int,
    seconds: float,
    *,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Soaked:
    """Kill processes until there were so many kills, or so many seconds went by; raise for the first loss.

    In each round the project moves on to another version, some processes start at random moments of one another, and
    some of them are killed at random moments. What is there then must be whole; and one more build must end with what a
    clean one makes.
    """
    generator = random.Random(seed)
    clean, site = CleanBuilds(folder / "clean", server), Site(folder / "site", server)
    started = time.monotonic()
    site.report()
    duration = min(site.run(*BUILD).seconds for _ in range(2)) + 0.15
    killed: Counter[str] = Counter()
    late = rounds = 0
    while killed.total() < kills and time.monotonic() - started < seconds:
        before = site.version
        site.turn_to(generator.choice([version for version in _VERSIONS if version != before]))
        running = _start_some(site, generator, duration)
        time.sleep(generator.random() * duration)
        victims = generator.sample(running, generator.randint(1, len(running)))
        for _, process in victims:
            process.kill()
        for command, process in running:
            result = process.wait()
            if result.code == -9:
                killed[command[0]] += 1
            late += (command, process) in victims and result.code != -9
            assert "Traceback" not in result.text, result.text
        site.check_between(clean[before], clean[site.version])
        site.report()
        site.check_done(clean[site.version])
        assert site.litter() == []
        assert states(site.report()) == ["unchanged", "unchanged"]
        rounds += 1
        if say is not None and rounds % 20 == 0:
            say(f"{killed.total()} kills in {rounds} rounds, {time.monotonic() - started:.0f} s")
    return Soaked(kills=killed, late=late, rounds=rounds, seconds=time.monotonic() - started)


def _start_some(site: Site, generator: random.Random, duration: float) -> list[tuple[tuple[str, ...], Forked]]:
    """Start a build and some other commands, at moments of one another."""
    commands = [BUILD, *(generator.choice(BESIDE) for _ in range(generator.randint(0, 2)))]
    running = []
    for command in commands:
        env = {"MERGEPIPE_NO_EXCHANGE": "1"} if generator.random() < 0.3 else {}
        running.append((command, site.start(*command, env=env)))
        time.sleep(generator.random() * duration / 4)
    return running


def main() -> int:
    """Run a soak from the command line."""
    parser = argparse.ArgumentParser(description="Kill mergepipe at random moments, and check that nothing is lost.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=900.0, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        done = soak(Path(folder), server, options.kills, options.seconds, seed=options.seed, say=print)
    print(done)
    return 0 if done.kills.total() >= options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
