"""The decorator of values does what the standard's does, of which it is a quick form."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from dataclasses import field
from typing import Any

import pytest

from mergepipe.values import dataclass

FORMS = [
    {"frozen": frozen, "slots": slots, "kw_only": kw_only, "eq": eq}
    for frozen, slots, kw_only, eq in itertools.product((True, False), repeat=4)
]


def made(decorate: Any, body: type, form: dict[str, bool]) -> Any:
    """Return a fresh class of this body, decorated."""
    own = {k: v for k, v in vars(body).items() if k not in ("__dict__", "__weakref__")}
    return decorate(**form)(type(body.__name__, (), {**own, "__annotations__": dict(own.get("__annotations__", {}))}))


class Plain:
    """A value with every kind of field."""

    name: str
    size: int
    place: int = 3
    line: int = field(default=0, compare=False)
    hidden: str = field(default="h", repr=False)
    parts: list = field(default_factory=list, hash=False)  # type: ignore[type-arg]
    later: int = field(init=False, default=7)
    counted: dict = field(init=False, default_factory=dict, hash=False)  # type: ignore[type-arg]

    @property
    def area(self) -> int:
        """Two fields together."""
        return self.size * self.place


class Own:
    """A value with methods of its own."""

    name: str
    twice: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.name * 2)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.name.lower() == other.name.lower()

    def __hash__(self) -> int:
        return hash(self.name.lower())


class Empty:
    """A value of no fields."""


def outcome(call: Any) -> Any:
    """Return what a call gives, or the error in words."""
    try:
        return call()
    except (TypeError, AttributeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(name for name, on in form.items() if on) or "plain")
@pytest.mark.parametrize("body", [Plain, Own, Empty])
def test_a_class_behaves_as_the_standard_one(body, form):
    kinds = [made(decorate, body, form) for decorate in (dataclasses.dataclass, dataclass)]
    given = {Plain: {"name": "a", "size": 2}, Own: {"name": "Aa"}, Empty: {}}[body]
    other = {Plain: {"name": "a", "size": 2, "line": 5}, Own: {"name": "aA"}, Empty: {}}[body]
    seen = []
    for kind in kinds:
        value, same, unlike = kind(**given), kind(**given), kind(**other)
        facts = [
            repr(value), value == same, value == unlike, value != same, value == 3, kind.__match_args__,
            [(f.name, f.init, f.repr, f.compare, f.kw_only) for f in dataclasses.fields(kind)],
            dataclasses.asdict(value), dataclasses.replace(unlike, **given) == value, kind.__doc__,
            outcome(lambda v=value, s=same: hash(v) == hash(s)), hasattr(value, "__dict__"), repr(outcome(kind)),
            outcome(lambda k=kind, g=given: k(*g.values())) == value, outcome(lambda k=kind, g=given: k(**g, more=1)),
            *(bool(outcome(lambda v=value, n=name: setattr(v, n, "b"))) for name in ("name", "unknown")),
            bool(outcome(lambda v=same: delattr(v, "name"))), repr(copy.copy(value)), repr(copy.deepcopy(value)),
        ]  # fmt: skip
        seen.append(facts)
    assert seen[1] == seen[0]


def test_a_frozen_value_says_what_cannot_be_changed():
    value = Base(name="a")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'name'"):
        value.name = "b"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'name'"):
        del value.name  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"Base\.__init__\(\) missing 1 required keyword-only argument: 'name'"):
        Base()  # type: ignore[call-arg]


def test_defaults_are_made_anew_for_each_object():
    kind = made(dataclass, Plain, {"frozen": True, "slots": True})
    first, second = kind("a", 1), kind("b", 2)
    first.parts.append(1)
    first.counted["x"] = 1
    assert (second.parts, second.counted) == ([], {})
    assert kind("a", 1, parts=[4]).parts == [4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What others extend."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(Base):
    """One more field."""

    size: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standard(Base):
    """One more field, by the standard's decorator: a user's operator extends what is ours."""

    size: int = 1


@pytest.mark.parametrize("kind", [Extended, Standard])
def test_a_class_can_be_extended(kind):
    value = kind(name="a")
    assert repr(value) == f"{kind.__name__}(name='a', size=1)"
    assert value == kind(name="a", size=1) != Base(name="a")
    assert hash(value) == hash(kind(name="a"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.name = "b"


def test_a_standard_class_that_is_not_frozen_cannot_extend_a_frozen_one():
    with pytest.raises(TypeError, match="non-frozen"):
        dataclasses.dataclass(type("Loose", (Base,), {"__annotations__": {"more": int}}))


def test_objects_are_pickled():
    for value in (Base(name="a"), Extended(name="b", size=2)):
        assert pickle.loads(pickle.dumps(value)) == value


def test_one_that_holds_itself_is_shown():
    kind = made(dataclass, Plain, {"slots": True})
    value = kind("a", 1)
    value.parts.append(value)
    assert "parts=[...]" in repr(value)
