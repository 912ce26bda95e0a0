"""Killed at points that only special situations and other commands pass: the next run ends as if nothing had been."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from support.crash import OUTPUTS, Site, files_in, states

from mergepipe.fsio.crash import CRASH_POINTS, RARE_CRASH_POINTS

NO_EXCHANGE = {"MERGEPIPE_NO_EXCHANGE": "1"}
# A user saves a file at the last moment: the next directory is complete, and the old one still in its place.
SAVE_LATE = """
import mergepipe.fsio.swap as swap

def point(name):
    if name == "publish.swap-begun":
        with open("build/one/late.txt", "w") as file:
            file.write("saved late")
    original(name)

original, swap.crash_point = swap.crash_point, point
"""


@dataclass(frozen=True)
class Case:
    """How a project that was built at version 1 gets to a point.

    ``command`` passes the point, after ``prepare``. The project is at ``version`` then.
    """

    prepare: Callable[[Site], None]
    version: int = 2
    command: tuple[str, ...] = ("build", "--json")
    env: tuple[str, ...] = ()
    prelude: str = ""


# --- situations ---------------------------------------------------------------------------------------------------


def without_cache(site):
    shutil.rmtree(site.cache)
    site.turn_to(2)


def with_damaged_catalog(site):
    (site.cache / "catalog.db").write_bytes(b"no database" * 1000)
    site.turn_to(2)


def with_damaged_packs(site):
    for pack in (site.cache / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[-1] ^= 1
        pack.unlink()
        pack.write_bytes(data)
    for name in OUTPUTS:
        shutil.rmtree(site.out(name))


def with_unknown_pack(site):
    (site.cache / "packs" / f"{0:064x}.safetensors").write_bytes(b"?")
    site.turn_to(2)


def with_work_of_another_layout(site):
    site.turn_to(2)
    site.mergefile.write_text(site.mergefile.read_text().replace('"1.5 MB"', '"500 KB"'))
    site.kill_at("engine.tensor-recorded")
    site.turn_to(2)


def without_manifest(site):
    (site.out("one") / "mergepipe.json").unlink()
    site.turn_to(2)


def with_notes(site):
    (site.out("one") / "notes.txt").write_text("mine")
    site.turn_to(2)


def cut_after_the_swap(site):
    site.turn_to(2)
    site.kill_at("publish.swapped")


def cut_between_two_renames(site):
    site.turn_to(2)
    site.kill_at("swap.retired", NO_EXCHANGE)


def next_version(site):
    site.turn_to(2)


CASES = {
    "cache.created": Case(without_cache),
    "catalog.created": Case(without_cache),
    "catalog.set-aside": Case(with_damaged_catalog),
    "packs.forgotten": Case(with_damaged_packs, version=1),
    "packs.quarantined": Case(with_damaged_packs, version=1),
    "prune.forgotten": Case(with_unknown_pack, command=("cache", "prune", "--max-size", "0")),
    "prune.removed": Case(with_unknown_pack, command=("cache", "prune", "--max-size", "0")),
    "engine.abandoned": Case(with_work_of_another_layout),
    "publish.claimed": Case(without_manifest),
    "publish.kept": Case(with_notes),
    "publish.rescued": Case(next_version, prelude=SAVE_LATE),
    "publish.recovered": Case(cut_after_the_swap),
    "swap.journalled": Case(next_version, env=("MERGEPIPE_NO_EXCHANGE",)),
    "swap.retired": Case(next_version, env=("MERGEPIPE_NO_EXCHANGE",)),
    "swap.replaced": Case(next_version, env=("MERGEPIPE_NO_EXCHANGE",)),
    "swap.completed": Case(cut_between_two_renames, env=("MERGEPIPE_NO_EXCHANGE",)),
}
# Commands beside `build`, each with a test of its own below.
OTHERS = {
    *("signature.written", "signature.renamed", "scratch.made", "replay.swapped", "sweep.scratch"),
    *("git.configured", "git.removed", "git.unlinked", "file.written", "file.renamed"),
    *("planes.written", "planes.renamed", "codes.quarantined"),
    *("pack.begun", "pack.exact", "pack.assembled", "pack.cleaned", "pack.recovered"),
}


def test_every_rare_point_has_a_case():
    assert CASES.keys() | OTHERS == set(RARE_CRASH_POINTS)


def run_case(site, case, point):
    env = {"MERGEPIPE_CRASH_POINT": point, **dict.fromkeys(case.env, "1")}
    return site.run(*case.command, env=env, prelude=case.prelude).code


def check_user_files(site):
    """Check that files of the user are there if they were ever there, and take them away."""
    for name, text in (("notes.txt", "mine"), ("late.txt", "saved late")):
        for place in (site.out("one"), site.out("two")):
            path = place / name
            if path.exists():
                assert path.read_text() == text
                path.unlink()


def check_whole(site, clean, case):
    """Check what is there after a kill: every output that is in its place is whole."""
    known = [clean[version] for version in range(1, case.version + 1)]
    for name in OUTPUTS:
        found = {k: v for k, v in (files_in(site.out(name)) if site.out(name).is_dir() else {}).items()
                 if k not in ("notes.txt", "late.txt")}  # fmt: skip
        if found.get("mergepipe.json") is not None:
            wholes = [reference.outputs[name] for reference in known]
            short = [{k: v for k, v in whole.items() if k != "mergepipe.json"} for whole in wholes]
            assert found in wholes or {k: v for k, v in found.items() if k != "mergepipe.json"} in short, name
    assert site.lock_bytes() in [reference.lock for reference in known]


@pytest.mark.parametrize("point", CASES)
def test_killed_at_a_rare_point_once_and_again_the_next_build_ends_clean(built, clean, point):
    case = CASES[point]
    case.prepare(built)
    assert run_case(built, case, point) == -9, f"the command did not reach {point}"
    check_whole(built, clean, case)
    assert run_case(built, case, point) in (0, -9)
    check_whole(built, clean, case)
    assert built.run(*case.command, env=dict.fromkeys(case.env, "1")).code == 0
    built.report()
    kept = (built.out("one") / "notes.txt").exists() or (built.out("one") / "late.txt").exists()
    assert kept == (point in ("publish.kept", "publish.rescued")), "a file of the user"
    check_user_files(built)
    built.check_done(clean[case.version])
    assert built.litter() == []
    assert states(built.report()) == ["unchanged", "unchanged"]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["swap.journalled", "swap.retired", "swap.replaced"])
@pytest.mark.parametrize("then", CRASH_POINTS)
def test_killed_between_the_renames_and_then_anywhere_the_next_build_ends_clean(built, clean, point, then):
    built.turn_to(2)
    built.kill_at(point, NO_EXCHANGE)
    assert built.run(env={"MERGEPIPE_CRASH_POINT": then}).code in (0, -9)
    built.report()
    built.check_done(clean[2])
    assert built.litter() == []


# --- other commands -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return the paths of a private key and of its public half."""
    if importlib.util.find_spec("model_signing") is None:
        pytest.skip("model-signing is not installed")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, key = tmp_path_factory.mktemp("keys"), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key").write_bytes(private)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pub").write_bytes(public)
    return folder / "key", folder / "key.pub"


@pytest.mark.parametrize("point", ["signature.written", "signature.renamed"])
def test_killed_while_it_is_signed_an_output_has_a_valid_signature_or_none(built, clean, keys, point):
    private, public = map(str, keys)
    built.turn_to(2)
    for _ in range(2):
        result = built.run("build", "--sign", private, env={"MERGEPIPE_CRASH_POINT": point})
        assert result.code == -9, result.text
        for name in OUTPUTS:
            if (built.out(name) / "model.sig").exists():
                assert built.run("verify", name, "--signature", "--public-key", public).code == 0
    result = built.run("build", "--sign", private)
    assert result.code == 0, result.text
    assert built.run("verify", "--signature", "--public-key", public).code == 0
    for name in OUTPUTS:
        (built.out(name) / "model.sig").unlink()
    built.check_done(clean[2])
    assert built.litter() == []


REPLAY_POINTS = ("scratch.made", "replay.swapped", "engine.tensor-recorded", "packs.renamed", "publish.assembled")


@pytest.mark.parametrize("point", [*REPLAY_POINTS, "publish.swap-begun", "publish.swapped"])
def test_a_killed_replay_leaves_nothing_that_the_next_one_does_not_remove(built, clean, point):
    replay = ("replay", "build/one", "--out", "again")
    for _ in range(2):
        assert built.run(*replay, env={"MERGEPIPE_CRASH_POINT": point}).code == -9
        built.check_done(clean[1])
        if (built.root / "again").is_dir():
            assert files_in(built.root / "again").keys() == clean[1].outputs["one"].keys()
    result = built.run(*replay)
    assert result.code == 0, result.text
    weights = {name: digest for name, digest in clean[1].outputs["one"].items() if name.endswith(".safetensors")}
    assert weights.items() <= files_in(built.root / "again").items()
    assert built.litter() == ["again"]
    built.check_done(clean[1])


def test_a_killed_sweep_leaves_nothing_that_the_next_one_does_not_remove(built, clean):
    sweep = ("sweep", "two", "--budgets", "50%", "--eval", "sh -c 'echo 1'")
    assert built.run(*sweep, env={"MERGEPIPE_CRASH_POINT": "sweep.scratch"}).code == -9
    assert built.litter() != []
    result = built.run(*sweep)
    assert result.code == 0, result.text
    assert built.litter() == []
    built.report()
    built.check_done(clean[1])


@pytest.fixture
def repository(built):
    """Return the project in a repository of git."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    subprocess.run(["git", "init", "-q"], cwd=built.root, check=True, capture_output=True)
    (built.root / ".gitattributes").write_text("*.png binary\n")
    return built


@pytest.mark.parametrize("point", ["git.configured", "git.configured:2", "file.written", "file.renamed"])
def test_a_killed_set_up_of_git_is_completed_by_the_next_one(repository, point):
    for _ in range(2):
        assert repository.run("git", "setup", env={"MERGEPIPE_CRASH_POINT": point}).code in (0, -9)
        assert (repository.root / ".gitattributes").read_text().startswith("*.png binary\n")
    assert repository.run("git", "setup").code == 0
    assert repository.run("git", "setup", "--check").code == 0
    assert (repository.root / ".gitattributes").read_text().count("Mergefile.lock") == 1
    assert not (repository.root / "..gitattributes.tmp").exists()


@pytest.mark.parametrize("point", ["git.removed", "git.unlinked", "file.written", "file.renamed"])
def test_a_killed_removal_from_git_is_completed_by_the_next_one(repository, point):
    attributes = repository.root / ".gitattributes"
    if point == "git.unlinked":
        attributes.unlink()
    assert repository.run("git", "setup").code == 0
    assert repository.run("git", "setup", "--remove", env={"MERGEPIPE_CRASH_POINT": point}).code == -9
    assert repository.run("git", "setup", "--remove").code == 0
    assert (attributes.read_text() if attributes.exists() else None) == (
        None if point == "git.unlinked" else "*.png binary\n"
    )
    config = (repository.root / ".git" / "config").read_text()
    assert "mergepipe" not in config


@pytest.mark.parametrize("point", ["file.written", "file.renamed"])
def test_a_killed_init_leaves_a_whole_mergefile_or_none(built, server, tmp_path, point):
    home = tmp_path / "new"
    shutil.copytree(built.root / "models", home / "models")
    assert server.run(("init",), home, {"MERGEPIPE_CRASH_POINT": point}).code == -9
    whole = (home / "Mergefile.toml").read_text() if (home / "Mergefile.toml").exists() else None
    (home / "Mergefile.toml").unlink(missing_ok=True)
    assert server.run(("init",), home).code == 0
    assert whole in (None, (home / "Mergefile.toml").read_text())
    assert sorted(os.listdir(home)) == ["Mergefile.toml", "models"]


