"""The decorator of frozen values: `dataclasses.dataclass`, but a class costs little to make.

The standard decorator compiles six methods for each class when its module is imported. A build imports two hundred
classes, and with nothing to do a quarter of its time went there. Here methods are closures, and nothing is compiled.

All else is the standard's: fields, slots, defaults, ``dataclasses.replace``, and what type checkers know.
"""

from __future__ import annotations

import copy
import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        *, frozen: bool = False, slots: bool = False, kw_only: bool = False, eq: bool = True, weakref_slot: bool = False
    ) -> Callable[[type], type]:
        """Return a decorator that makes a dataclass; a class that extends another one is left to the standard's."""

        def decorate(cls: type) -> type:
            if any(dataclasses.is_dataclass(base) for base in cls.__bases__):
                return dataclasses.dataclass(
                    cls, frozen=frozen, slots=slots, kw_only=kw_only, eq=eq, weakref_slot=weakref_slot
                )
            made = dataclasses.dataclass(
                cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only, weakref_slot=weakref_slot
            )
            _add_methods(made, frozen=frozen, slots=slots, eq=eq)
            if frozen and slots:
                _add_state(made)
            told = made.__dataclass_params__  # what a class that extends it, and is the standard's, is checked against
            told.init, told.repr, told.eq, told.frozen = True, True, eq, frozen
            return made

        return decorate


def _add_methods(cls: type, *, frozen: bool, slots: bool, eq: bool) -> None:
    """Add the methods that the class does not have of its own."""
    fields = dataclasses.fields(cls)
    own = vars(cls)
    has_hash = own.get("__hash__") is not None
    _add(cls, "__init__", _init(cls, frozen=frozen, slots=slots))
    _add(cls, "__repr__", _repr([field.name for field in fields if field.repr]))
    if eq:
        compared = _values([field.name for field in fields if field.compare])
        _add(cls, "__eq__", _equal(compared))
        if not has_hash:
            hashed = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
            cls.__hash__ = _hash(_values(hashed)) if frozen else None  # type: ignore[assignment,method-assign]
    if frozen:
        names = frozenset(field.name for field in fields)
        _add(cls, "__setattr__", _refusing(cls, names, "assign to", object.__setattr__))
        _add(cls, "__delattr__", _refusing(cls, names, "delete", object.__delattr__))


def _add(cls: type, name: str, method: Any) -> None:
    if name not in vars(cls):
        method.__name__ = name
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, method)


# --- making -------------------------------------------------------------------------------------------------------


def _init(cls: type, *, frozen: bool, slots: bool) -> Callable[..., None]:
    """Return an ``__init__`` that takes what the standard's takes, and leaves it to that to refuse what is wrong."""
    fields = dataclasses.fields(cls)
    if not all(field.init for field in fields) or (not frozen and "__setattr__" in vars(cls)):
        return _standard_init(cls, frozen=frozen, slots=slots)
    setters = [(field.name, _setter(cls, field.name, slots=slots)) for field in fields]
    count, then = len(fields), getattr(cls, "__post_init__", None)

    def init(self: object, /, *args: Any, **kwargs: Any) -> None:
        values = kwargs if len(kwargs) == count and not args else complete(self, args, kwargs)
        try:
            for name, put in setters:
                put(self, values[name])
        except KeyError:  # one is missing, and another is not known
            refuse(self, *args, **kwargs)
        if then is not None:
            then(self)

    def refuse(self: object, /, *args: Any, **kwargs: Any) -> None:
        """Raise the standard's error."""
        _standard_init(cls, frozen=frozen, slots=slots)(self, *args, **kwargs)

    complete = _completing(fields, refuse)
    return init


def _completing(
    fields: Sequence[dataclasses.Field[Any]], refuse: Callable[..., None]
) -> Callable[[object, tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return what puts values by name together from those that are given by place and by name, and the defaults."""
    positional = [field.name for field in fields if not field.kw_only]
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    makers = [(f.name, f.default_factory) for f in fields if f.default_factory is not dataclasses.MISSING]

    def complete(self: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        values = {**defaults, **kwargs}
        if args:
            given = dict(zip(positional, args, strict=False))
            if len(args) > len(positional) or not given.keys().isdisjoint(kwargs):
                refuse(self, *args, **kwargs)
            values |= given
        for name, make in makers:
            if name not in values:
                values[name] = make()
        if len(values) != len(fields):
            refuse(self, *args, **kwargs)
        return values

    return complete


def _setter(cls: type, name: str, *, slots: bool) -> Callable[[object, Any], None]:
    if slots:
        put: Callable[[object, Any], None] = vars(cls)[name].__set__
        return put

    def enter(self: object, value: Any) -> None:
        vars(self)[name] = value

    return enter


def _standard_init(cls: type, *, frozen: bool, slots: bool) -> Callable[..., None]:
    """Return the standard's ``__init__``, from a class of the same fields."""
    members = [(field.name, field.type, copy.copy(field)) for field in dataclasses.fields(cls)]
    namespace: dict[str, Any] = {"__doc__": "", "__qualname__": cls.__qualname__}
    if hasattr(cls, "__post_init__"):
        namespace["__post_init__"] = cls.__post_init__
    twin = dataclasses.make_dataclass(
        cls.__name__, members, namespace=namespace, repr=False, eq=False, frozen=frozen, slots=slots
    )
    method: Callable[..., None] = twin.__init__  # type: ignore[misc]
    return method


# --- using --------------------------------------------------------------------------------------------------------


def _values(names: list[str]) -> Callable[[object], Any]:
    """Return what gives all of these attributes together, as something that compares and hashes as their tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _equal(compared: Callable[[object], Any]) -> Callable[[object, object], Any]:
    def equal(self: object, other: object) -> Any:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    return equal


def _hash(hashed: Callable[[object], Any]) -> Callable[[object], int]:
    def hash_of(self: object) -> int:
        return hash(hashed(self))

    return hash_of


def _repr(names: list[str]) -> Callable[[object], str]:
    @reprlib.recursive_repr()
    def shown(self: object) -> str:
        inner = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.__class__.__qualname__}({inner})"

    return shown


def _refusing(cls: type, names: frozenset[str], what: str, otherwise: Callable[..., None]) -> Callable[..., None]:
    """Return what refuses to change a field, or anything of an object of the very class."""

    def refuse(self: object, name: str, *value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot {what} field {name!r}")
        otherwise(self, name, *value)

    return refuse


def _add_state(cls: type) -> None:
    """Let frozen objects with slots be copied and pickled: the usual way sets attributes."""
    names = [field.name for field in dataclasses.fields(cls)]

    def state(self: object) -> list[Any]:
        return [getattr(self, name) for name in names]

    def set_state(self: object, values: list[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)

    _add(cls, "__getstate__", state)
    _add(cls, "__setstate__", set_state)
