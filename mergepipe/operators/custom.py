"""Operators of the user's own: a plain function over arrays, or a class of the whole contract.

A function takes the base's and the experts' values and returns the merged ones::

    def midpoint(base, experts, *, weight=1.0):
        return base + weight * (sum(experts) / len(experts) - base)

It is called piece by piece, with 1-D arrays of float32 (float64 where an input is), and every element of its result may
depend on the same element of the inputs alone; `merge_function` declares what is different from that. Its keyword-only
arguments are the parameters that a Mergefile may set.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

from mergepipe.errors import MergefileError, OperatorError
from mergepipe.operators.contract import (
    Array,
    BlockInputs,
    Operator,
    Prepared,
    Reduction,
    TensorFacts,
    TensorParams,
)
from mergepipe.signatures import (
    BasePolicy,
    OperatorReference,
    OperatorSignature,
    ParamKind,
    ParamSpec,
    Scalar,
    Scope,
)
from mergepipe.values import dataclass

_SETTINGS = "__mergepipe_settings__"
_PROBE_ELEMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSettings:
    """What `merge_function` declares about a function; see there."""

    base: Literal["required", "optional", "none"] = "optional"
    per_expert: Mapping[str, float] = field(default_factory=dict)
    rows: bool = False
    min_experts: int = 1
    max_experts: int | None = None


def merge_function(
    *,
    base: Literal["required", "optional", "none"] = "optional",
    per_expert: Mapping[str, float] | None = None,
    rows: bool = False,
    min_experts: int = 1,
    max_experts: int | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how a function merges; a function without this decorator has the defaults.

    Parameters
    ----------
    base
        Whether an output must name a base; ``none``: a base given all the same only defines the tensors, and the
        function is called with None for it.
    per_expert
        Parameters that every expert has its own value of, with their defaults. The function gets a list of numbers for
        each, in expert order; it takes them as keyword-only arguments like any other.
    rows
        False: an element depends on the same element of the inputs. True: it may depend on its whole row; arrays come
        2-D then, ``(rows, row length)``, and the result has that shape. (A 1-D tensor is one row.)
    min_experts, max_experts
        How many experts it takes.
    """
    settings = FunctionSettings(
        base=base,
        per_expert=dict(per_expert or {}),
        rows=rows,
        min_experts=min_experts,
        max_experts=max_experts,
    )

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _SETTINGS, settings)
        return function

    return declare


def make_operator(name: str, found: Any, code: bytes, where: str) -> Operator:
    """Return an operator from what a file or a package offers under a name.

    Parameters
    ----------
    found
        A function, an `Operator`, or a class of one.
    code
        The digest of its source code: part of every action key.
    where
        The file and the name in it, for messages.

    Raises
    ------
    MergefileError
        If it is none of these, or its arguments cannot be parameters.
    """
    if isinstance(found, type) and issubclass(found, Operator):
        try:
            found = found()
        except Exception as error:
            raise MergefileError(f"{where} cannot be made: {_words(error)}") from error
    if isinstance(found, Operator):
        return _named(name, found, code)
    if not callable(found):
        raise MergefileError(
            f"{where} is a {type(found).__name__}, not a function that merges",
            hint="write `def my_merge(base, experts, *, weight=1.0): ...`",
        )
    return FunctionOperator(name, found, code, where)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _named(name: str, inner: Operator, code: bytes) -> Operator:
    """Return a copy of an operator under the name that the Mergefile gives it, with its code as part of its keys."""
    operator = copy.copy(inner)
    apply = operator.apply

    def guarded(inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Turn whatever goes wrong inside into an error in words."""
        try:
            return apply(inputs, prepared, reduction)
        except OperatorError:
            raise
        except Exception as error:
            raise _failed(name, error) from error

    vars(operator).update(
        signature=replace(inner.signature, name=name),
        reference=getattr(inner, "reference", _reference(inner)),
        code=code,
        apply=guarded,
    )
    return operator


def _failed(name: str, error: Exception) -> OperatorError:
    return OperatorError(
        f"the custom operator `{name}` raised {_words(error)}",
        hint="run with `--debug` for the traceback",
        operator=name,
    )


def _reference(source: object) -> OperatorReference:
    text = inspect.getdoc(source) or "A custom operator."
    return OperatorReference(formula=(text.splitlines()[0],), source="the Mergefile", locality="as its code says")


@dataclass(frozen=True, kw_only=True)
class _Call(Prepared):
    """The keyword arguments of every call."""

    arguments: Mapping[str, Any]


class FunctionOperator(Operator):
    """An operator that calls a function."""

    def __init__(self, name: str, function: Callable[..., Any], code: bytes, where: str) -> None:
        self._function = function
        self._where = where
        self._settings: FunctionSettings = getattr(function, _SETTINGS, FunctionSettings())
        text = inspect.getdoc(function) or ""
        self.signature = OperatorSignature(  # type: ignore[misc]
            name=name,
            summary=text.splitlines()[0] if text else f"the function {where}",
            base=BasePolicy.REQUIRED if self._settings.base == "required" else BasePolicy.OPTIONAL,
            params=tuple(_specs(function, self._settings, where)),
            min_experts=self._settings.min_experts,
            max_experts=self._settings.max_experts,
        )
        self.reference = _reference(function)  # type: ignore[misc]
        self.version = 1  # type: ignore[misc]
        self.uses_base = self._settings.base != "none"  # type: ignore[misc]
        self.code = code  # type: ignore[misc]

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the arguments, after one call with a few ones: most mistakes show there, before weights are read."""
        own = {spec.name: spec for spec in self.signature.params}
        arguments: dict[str, Any] = {
            name: list(params.column(name)) if spec.scope is Scope.EXPERT else params.values[name]
            for name, spec in own.items()
        }
        count = len(params.experts)
        self._probe(arguments, count, work)
        return _Call(coefficients=(1.0,) * count, arguments=arguments)

    def _probe(self, arguments: Mapping[str, Any], count: int, work: str) -> None:
        import numpy as np

        ones = np.ones((1, _PROBE_ELEMENTS) if self._settings.rows else _PROBE_ELEMENTS, work)
        with np.errstate(all="ignore"):
            self._checked(ones if self.uses_base else None, [ones.copy() for _ in range(count)], arguments, ones.shape)

    def check(self, prepared: Prepared, facts: TensorFacts) -> None:
        """Refuse a row that lies in several blocks, where rows must be whole."""
        if self._settings.rows and facts.splits_row:
            raise OperatorError(
                f"`{self.signature.name}` works on whole rows, and the only row of this 1-D tensor has"
                f" {facts.elements:,} elements, more than a block",
                hint="take the tensor from the base, or let the function work element by element",
            )

    def rowwise(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return what the function declares."""
        return self._settings.rows

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return what the function makes of the values."""
        assert isinstance(prepared, _Call)
        shape = (-1, inputs.row_elements) if self._settings.rows else inputs.shape
        base = None if inputs.base is None else inputs.base.reshape(shape)
        experts = [inputs.value(index, 100 + index).reshape(shape) for index in range(len(inputs.experts))]
        wanted = experts[0].shape
        result = self._checked(base, experts, prepared.arguments, wanted)
        return result.reshape(inputs.shape)

    def _checked(
        self, base: Array | None, experts: Sequence[Array], arguments: Mapping[str, Any], shape: tuple[int, ...]
    ) -> Array:
        import numpy as np

        for array in (base, *experts):
            if array is not None:
                array.flags.writeable = False  # arrays are shared with other outputs of the build
        try:
            result = np.asarray(self._function(base, list(experts), **arguments))
        except OperatorError:
            raise
        except Exception as error:
            raise _failed(self.signature.name, error) from error
        if result.shape != shape or not np.issubdtype(result.dtype, np.floating):
            raise OperatorError(
                f"the custom operator `{self.signature.name}` returned {result.dtype} {list(result.shape)}"
                f" where floats of shape {list(shape)} were expected",
                hint="return one value for each element of the inputs",
                operator=self.signature.name,
            )
        return result.astype(experts[0].dtype, copy=False)


# --- parameters from a function's arguments -----------------------------------------------------------------------


def _specs(function: Callable[..., Any], settings: FunctionSettings, where: str) -> list[ParamSpec]:
    try:
        arguments = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise MergefileError(f"{where}: its arguments cannot be looked at: {error}") from None
    positional = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 2 or any(a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments):
        raise MergefileError(
            f"{where} must take the base and the experts, and parameters by name",
            hint="write `def my_merge(base, experts, *, weight=1.0): ...`",
        )
    hints = _hints(function)
    specs = [_spec(a, hints.get(a.name), settings, where) for a in arguments if a.kind is a.KEYWORD_ONLY]
    unknown = [name for name in settings.per_expert if name not in {spec.name for spec in specs}]
    if unknown:
        raise MergefileError(f"{where}: `per_expert` names `{unknown[0]}`, which is no keyword-only argument of it")
    return specs


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - annotations may be anything, and the defaults say enough
        return {}


def _spec(argument: inspect.Parameter, hint: Any, settings: FunctionSettings, where: str) -> ParamSpec:
    name = argument.name
    default = None if argument.default is argument.empty else argument.default
    if name in settings.per_expert:
        return ParamSpec(
            name=name,
            kind=ParamKind.REAL,
            scope=Scope.EXPERT,
            default=float(settings.per_expert[name]),
            gradient=True,
        )
    if typing.get_origin(hint) is Literal:
        choices: tuple[Scalar, ...] = typing.get_args(hint)
        return ParamSpec(name=name, kind=ParamKind.CHOICE, choices=choices, default=default)
    if isinstance(default, bool) or hint is bool:
        return ParamSpec(name=name, kind=ParamKind.FLAG, default=default)
    if hint is int or (isinstance(default, int) and hint is None):
        return ParamSpec(name=name, kind=ParamKind.INTEGER, default=default)
    if default is None or isinstance(default, int | float):
        value = None if default is None else float(default)
        return ParamSpec(name=name, kind=ParamKind.REAL, default=value, gradient=True)
    raise MergefileError(
        f"{where}: the argument `{name}` has the default {default!r}, which no parameter can have",
        hint="parameters are numbers, true or false, or one of a few words: `mode: Literal['a', 'b'] = 'a'`",
    )
