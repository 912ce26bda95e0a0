"""What is wrong with the tensors of a part, in words: each problem once, with tensors, sources and shapes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.heads import is_head
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.errors import MergepipeError, OperatorError, PlanError
from mergepipe.plan.parts import Part

# At most this many tensors are named in one message; the rest is counted.
_NAMED = 5


def unmergeable(definer: str, info: TensorInfo, source: str, other: TensorInfo) -> PlanError:
    """Return the error for a tensor that is not floating point and not the same everywhere."""
    return PlanError(
        f"tensor `{info.name}` cannot be merged: it is {info.dtype} {_shape(info.shape)} in `{definer}`"
        f" and {other.dtype} {_shape(other.shape)} in `{source}`",
        hint="only F64, F32, F16 and BF16 tensors are merged; any other must be the same in every source",
        tensor=info.name,
        source=source,
        expected={"dtype": info.dtype, "shape": list(info.shape)},
        got={"dtype": other.dtype, "shape": list(other.shape)},
    )


def shape_mismatch(definer: str, info: TensorInfo, source: str, shape: tuple[int, ...], *, fits: bool) -> PlanError:
    """Return the error for a tensor of another shape; ``fits`` says that ``rows = "common"`` would do."""
    hint = (
        'set `rows = "common"` in the output\'s params to merge the rows that all sources have and keep the rest'
        if fits
        else "the sources must be fine-tunes of one base; shapes are never cut or broadcast"
    )
    return PlanError(
        f"tensor `{info.name}` has shape {_shape(shape)} in expert `{source}` and {_shape(info.shape)} in `{definer}`",
        hint=hint,
        tensor=info.name,
        source=source,
        expected=list(info.shape),
        got=list(shape),
    )


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def listing(names: Sequence[str]) -> str:
    """Return a count of tensors with the first names."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{len(names):,} tensor{'s' if len(names) != 1 else ''} ({shown}{more})"


class Problems:
    """Collects problems and puts those that repeat for many tensors into one message each."""

    def __init__(self) -> None:
        self.missing: dict[str, list[str]] = {}
        """By expert the names, as it would have them, of the tensors that it lacks."""
        self._found: list[MergepipeError] = []
        self._parameters: dict[str, tuple[OperatorError, list[str]]] = {}

    def add(self, error: MergepipeError) -> None:
        """Keep a problem of its own."""
        self._found.append(error)

    def add_parameter_error(self, tensor: str, error: OperatorError) -> None:
        """Keep a problem of parameters; equal ones of other tensors are counted."""
        self._parameters.setdefault(error.message, (error, []))[1].append(tensor)

    def errors(self, part: Part, count: int) -> list[MergepipeError]:
        """Return everything collected for a part that makes ``count`` tensors, missing ones summarised per expert."""
        errors: list[MergepipeError] = [
            _missing_error(part, source, names, count) for source, names in self.missing.items()
        ]
        errors += _condensed(self._found)
        for error, names in self._parameters.values():
            errors.append(
                PlanError(
                    f"{_subject(part)}: {error.message}; for {listing(names)}",
                    hint=error.hint,
                    output=part.output.name,
                    tensors=names[:_NAMED],
                    **error.facts,
                )
            )
        return errors


def _condensed(errors: Sequence[MergepipeError]) -> Iterable[MergepipeError]:
    """Put errors of one kind about many tensors of one source into the first of them."""
    groups: dict[tuple[object, object], list[MergepipeError]] = {}
    for error in errors:
        groups.setdefault((error.hint, error.facts.get("source")), []).append(error)
    for (_, source), group in groups.items():
        first, *others = group
        names = [str(error.facts["tensor"]) for error in others if "tensor" in error.facts]
        if len(others) < _NAMED or len(names) < len(others):
            yield from group
        else:
            more = f"{first.message}\nand likewise {listing(names)} of `{source}`"
            yield PlanError(more, hint=first.hint, **{**first.facts, "others": len(others)})


def _subject(part: Part) -> str:
    return f"output `{part.output.name}`" if part.slice is None else f"`{part.where}`"


def _missing_error(part: Part, source: str, names: list[str], count: int) -> PlanError:
    """Say what an expert lacks; if it shares next to nothing, say how the names differ."""
    definer = part.definer.source
    checkpoint, reference = part.checkpoints[source], part.checkpoints[definer]
    shared = count - len(names)
    others = [name for name in checkpoint.tensors if name not in reference.tensors]
    if shared < count / 2 and others:
        theirs, ours = _typical_name(others), _typical_name(names)
        return PlanError(
            f"expert `{source}` shares {shared} of {count} tensor names with `{definer}`:"
            f" it has names such as `{theirs}`, expected were names such as `{ours}`",
            hint=_prefix_hint(checkpoint, reference),
            source=source,
            shared=shared,
            expected=ours,
            got=theirs,
        )
    head = _head_hint(names)
    return PlanError(
        f"expert `{source}` lacks {listing(names)} of `{definer}`",
        hint=head or 'the upload may be incomplete; `missing = "base"` in the params takes the base\'s values instead',
        source=source,
        tensors=names[:_NAMED],
        count=len(names),
    )


def _head_hint(names: Sequence[str]) -> str | None:
    if len(names) == 1 and is_head(names[0]):
        return (
            f"the expert ties `{names[0]}` to its embeddings and the base does not: save it with its own head,"
            ' or set `missing = "base"` in the params to keep the base\'s'
        )
    return None


def _typical_name(names: Iterable[str]) -> str:
    """Return a name from deep inside the model: it shows the naming scheme best."""
    return max(names, key=lambda name: name.count("."))


def _prefix_hint(checkpoint: Checkpoint, reference: Checkpoint) -> str:
    """Return a hint that names the prefix by which the names differ, if one does."""
    prefix = _extra_prefix(checkpoint.tensors, reference.tensors)
    if prefix is not None:
        return f"its names carry the prefix `{prefix}`: save it without that prefix"
    prefix = _extra_prefix(reference.tensors, checkpoint.tensors)
    if prefix is not None:
        return f"its names lack the prefix `{prefix}`: save it with that prefix"
    return "check that it is a fine-tune of this base, saved under the same names"


def _extra_prefix(names: Iterable[str], others: Container[str]) -> str | None:
    """Return the dotted prefix without which some name is among the others."""
    for name in names:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in others:
                return ".".join(parts[:cut]) + "."
    return None
