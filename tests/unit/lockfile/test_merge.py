"""Merging locks: from each side what it changed, and nothing that contradicts itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.diffs import digest, output, source, tensors
from unit.lockfile.samples import locks

from mergepipe.digest import sampled_pin
from mergepipe.lockfile.merge import inconsistencies, merge_locks
from mergepipe.lockfile.records import LockedSideFile, LockedSlice, Lockfile

SOURCES = {name: source(name).digest for name in ("base", "code", "math")}
LEFT, RIGHT = output("left", SOURCES, tensors("left")), output("right", SOURCES, tensors("right"))
STAGED = output("staged", {"left": LEFT.digest, "math": SOURCES["math"]}, tensors("staged"))


def lock(*outputs, **versions: int) -> Lockfile:
    sources = [source(name, versions.get(name, 1)) for name in SOURCES]
    return Lockfile(geometry=1, sources=tuple(sources), outputs=outputs)


def rebuilt(entry, label: str, **sources: bytes):
    """Return an output that came out otherwise."""
    return replace(output(entry.name, dict(entry.sources) | sources, tensors(label)), params={"lambda": 2.0})


def test_each_side_keeps_what_it_changed():
    base = lock(LEFT, RIGHT)
    ours, theirs = lock(rebuilt(LEFT, "a"), RIGHT), lock(LEFT, rebuilt(RIGHT, "b"))
    expected = lock(rebuilt(LEFT, "a"), rebuilt(RIGHT, "b"))
    assert merge_locks(base, ours, theirs).lock == expected
    assert merge_locks(base, theirs, ours).lock == expected


def test_outputs_that_are_added_and_taken_out():
    base = lock(LEFT, RIGHT)
    added = output("added", SOURCES, tensors("added"))
    assert merge_locks(base, lock(LEFT, RIGHT, added), lock(RIGHT)).lock == lock(RIGHT, added)


def test_one_output_that_both_changed_is_a_conflict():
    found = merge_locks(lock(LEFT), lock(rebuilt(LEFT, "a")), lock(rebuilt(LEFT, "b")))
    assert (found.lock, found.problems) == (None, ("both sides changed output `left`",))
    found = merge_locks(lock(LEFT, RIGHT), lock(RIGHT), lock(rebuilt(LEFT, "b"), RIGHT))
    assert found.problems == ("one side changed output `left`, the other took it out",)


def test_without_a_base_both_must_say_the_same():
    assert merge_locks(None, lock(LEFT), lock(LEFT)).lock == lock(LEFT)
    assert merge_locks(None, lock(LEFT), lock(rebuilt(LEFT, "b"))).lock is None
    assert merge_locks(None, lock(LEFT), lock(RIGHT)).lock == lock(LEFT, RIGHT)


def test_an_output_made_from_former_content_is_a_conflict():
    """Their output was made from the source that ours replaced: the lines would merge, the lock would be wrong."""
    base = lock(LEFT, RIGHT)
    new = {"math": digest("math 2")}
    ours = lock(rebuilt(LEFT, "a", **new), rebuilt(RIGHT, "a", **new), math=2)
    added = output("added", SOURCES, tensors("added"))
    found = merge_locks(base, ours, lock(LEFT, RIGHT, added))
    assert found.lock is None
    assert found.problems == ("output `added` was made from other content of source `math`",)


def test_an_output_made_from_a_former_stage_is_a_conflict():
    base = lock(LEFT, RIGHT, STAGED)
    restaged = rebuilt(STAGED, "a", left=rebuilt(LEFT, "a").digest)
    other = output("other", {"left": LEFT.digest, "math": SOURCES["math"]}, tensors("other"))
    found = merge_locks(base, lock(rebuilt(LEFT, "a"), RIGHT, restaged), lock(LEFT, RIGHT, STAGED, other))
    assert found.problems == ("output `other` was made from other content of output `left`",)


def test_an_output_of_a_source_that_is_gone_is_a_conflict():
    found = lock(LEFT)
    assert list(inconsistencies(found)) == []
    gone = replace(found, sources=found.sources[:2])
    assert list(inconsistencies(gone)) == ["output `left` was made from `math`, which the lock does not have"]
    idle = replace(found, sources=(*found.sources, source("idle")))
    assert list(inconsistencies(idle)) == ["no output was made from source `idle`"]


def test_other_blocks_cannot_be_merged():
    assert merge_locks(lock(LEFT), lock(LEFT), replace(lock(LEFT), geometry=2)).lock is None


@settings(deadline=None)
@given(locks, locks, locks)
def test_what_is_merged_comes_from_a_side_and_fits_together(base, ours, theirs):
    found = merge_locks(base, ours, theirs)
    assert (found.lock is None) == bool(found.problems)
    if found.lock is not None:
        sides = {entry.name: [] for side in (ours, theirs) for entry in (*side.sources, *side.outputs)}
        for side in (ours, theirs):
            for entry in (*side.sources, *side.outputs):
                sides[entry.name].append(entry)
        assert all(entry in sides[entry.name] for entry in (*found.lock.sources, *found.lock.outputs))
        assert found.lock == ours == theirs or list(inconsistencies(found.lock)) == []


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["left", "right", "third"]), st.integers(0, 2)), st.data())
def test_merging_is_the_same_from_both_sides(versions, data):
    def entry(name: str, version: int):
        return output(name, SOURCES, tensors(f"{name} {version}"))

    def drawn():
        changed = {name: data.draw(st.sampled_from([version, 7, 8, None])) for name, version in versions.items()}
        return lock(*(entry(name, version) for name, version in changed.items() if version is not None))

    base = lock(*(entry(name, version) for name, version in versions.items()))
    ours, theirs = drawn(), drawn()
    one, other = merge_locks(base, ours, theirs), merge_locks(base, theirs, ours)
    assert (one.lock, one.problems) == (other.lock, other.problems)
    assert merge_locks(base, ours, base).lock in (ours, None)


def test_a_fingerprint_and_a_digest_go_together_only_where_a_side_has_both():
    sampled = replace(LEFT, sources=LEFT.sources | {"math": sampled_pin(digest("math 1"))})
    base = lock(sampled, RIGHT)
    assert list(inconsistencies(base)) == []
    changed = replace(RIGHT, params={"lambda": 2.0})
    assert merge_locks(base, lock(sampled, changed), base).lock == lock(sampled, changed)
    new = rebuilt(RIGHT, "a", math=digest("math 2"))
    resampled = replace(sampled, params={"lambda": 2.0})
    found = merge_locks(lock(sampled, RIGHT), lock(sampled, new, math=2), lock(resampled, RIGHT))
    assert found.problems == ("output `left` may have been made from other content of source `math`",)


# --- what one build cannot have made together -------------------------------------------------------------------------

OURS, THEIRS = output("ours", SOURCES, tensors("ours")), output("theirs", SOURCES, tensors("theirs"))


def added(one, other):
    """Merge two sides that each add an output, in both directions; return the problems."""
    base = lock(RIGHT)
    found = merge_locks(base, lock(RIGHT, one), lock(RIGHT, other))
    assert merge_locks(base, lock(RIGHT, other), lock(RIGHT, one)) == found
    together = lock(RIGHT, one, other)
    assert found.problems == tuple(inconsistencies(together))
    assert (found.lock == together) == (found.problems == ())
    return found.problems


def sliced(name: str, *versions: int):
    """Return an output of slices, one of them in each version of an operator."""
    part = LockedSlice(
        layers="0..8", operator="ties", operator_version=1, base=None, base_layers=None, experts=(), params={}, rules=()
    )
    parts = tuple(replace(part, operator_version=version) for version in versions)
    return replace(output(name, SOURCES, tensors(name)), experts=(), slices=parts)


def test_two_codes_of_one_custom_operator_are_a_conflict():
    one, other = (replace(entry, operator="median", code={"median": digest("a")}) for entry in (OURS, THEIRS))
    assert added(one, other) == ()
    edited = replace(other, code={"median": digest("b")})
    assert added(one, edited) == ("outputs `ours` and `theirs` were made with different code of operator `median`",)
    assert added(one, replace(edited, operator="mean", code={"mean": digest("b")})) == ()


def test_two_versions_of_one_operator_are_a_conflict():
    newer = replace(THEIRS, operator_version=2)
    assert "outputs `ours` and `theirs` were made with different versions of operator `task_arithmetic`" in added(
        OURS, newer
    )
    assert added(replace(OURS, operator="ties", operator_version=1), sliced("theirs", 1, 1)) == ()
    expected = ("outputs `ours` and `theirs` were made with different versions of operator `ties`",)
    assert added(replace(OURS, operator="ties", operator_version=1), sliced("theirs", 2)) == expected
    (found,) = inconsistencies(lock(sliced("theirs", 1, 2)))
    assert found == "output `theirs` was made with different versions of operator `ties`"


def test_two_kinds_of_arithmetic_are_a_conflict_unless_they_were_asked_for():
    other = replace(THEIRS, numerics="float64")
    assert "outputs `ours` and `theirs` were made with different arithmetic (`numerics`)" in added(OURS, other)
    assert added(OURS, replace(other, params={"numerics": "float64"})) == ()


def with_files(entry, **files: str):
    names = {name.replace("_", "."): digest(label) for name, label in files.items()}
    return replace(entry, side_files=tuple(LockedSideFile(name=name, digest=own) for name, own in names.items()))


def test_two_contents_of_one_tokenizer_are_a_conflict():
    """A source's digest is of its tensors: that its tokenizer was changed in place shows in outputs alone."""
    one = with_files(OURS, config_json="a", tokenizer_json="t")
    base = lock(one)
    assert list(inconsistencies(base)) == []
    assert list(inconsistencies(lock(one, with_files(THEIRS, config_json="b", tokenizer_json="t")))) == []
    message = "outputs `ours` and `theirs` were made with different tokenizer files of `base`"
    for other in (with_files(THEIRS, tokenizer_json="u"), with_files(THEIRS, config_json="a")):
        assert list(inconsistencies(lock(one, other))) == [message]
        assert list(inconsistencies(lock(one, replace(other, path=None)))) == []
        assert list(inconsistencies(lock(one, replace(other, write=other.write | {"tokenizer": "code"})))) == []
    changed = with_files(OURS, config_json="a", tokenizer_json="u")
    found = merge_locks(base, lock(changed), lock(one, with_files(THEIRS, tokenizer_json="t")))
    assert found.problems == (message,)


def sampled(entry, label: str = "samples"):
    return replace(entry, sources=entry.sources | {"math": sampled_pin(digest(label))})


def test_a_source_that_no_output_is_left_to_read_whole_is_a_conflict():
    """Each side took one of two outputs out that read it whole: a build would pin it by its samples now."""
    keep = sampled(THEIRS)
    base = lock(LEFT, RIGHT, keep)
    found = merge_locks(base, lock(LEFT, keep), lock(RIGHT, keep))
    expected = ("the entry of source `math` is of all its content, and no output reads it whole",)
    assert (found.lock, found.problems) == (None, expected)
    assert merge_locks(base, lock(RIGHT, keep), lock(LEFT, keep)).problems == expected
    assert tuple(inconsistencies(lock(keep))) == expected


def by_samples(found: Lockfile, label: str = "samples") -> Lockfile:
    """Return a lock whose source `math` is pinned by samples."""
    pinned = [replace(s, digest=sampled_pin(digest(label))) if s.name == "math" else s for s in found.sources]
    return replace(found, sources=tuple(pinned))


def test_a_source_is_pinned_by_samples_only_where_no_output_reads_it_whole():
    assert list(inconsistencies(by_samples(lock(sampled(LEFT), sampled(RIGHT))))) == []
    assert list(inconsistencies(by_samples(lock(sampled(LEFT), RIGHT)))) == [
        "output `right` reads source `math` whole, whose entry is of samples alone"
    ]
    assert list(inconsistencies(by_samples(lock(sampled(LEFT, "other"), sampled(RIGHT))))) == [
        "output `left` was made from other content of source `math`"
    ]


def test_samples_of_two_outputs_are_those_of_one_content():
    assert list(inconsistencies(lock(LEFT, sampled(OURS), sampled(THEIRS)))) == []
    assert list(inconsistencies(lock(LEFT, sampled(OURS), sampled(THEIRS, "other")))) == [
        "outputs `ours` and `theirs` were made from other content of source `math`"
    ]


def test_two_versions_of_the_progressive_code_are_a_conflict():
    ours, theirs = (replace(output, levels_version=1) for output in (OURS, THEIRS))
    assert added(ours, theirs) == added(OURS, THEIRS)
    assert added(ours, THEIRS) == added(OURS, THEIRS), "a budget of whole blocks has none"
    found = added(ours, replace(theirs, levels_version=2))
    assert "outputs `ours` and `theirs` were made with different versions of the progressive code" in found
