"""Opening a LoRA adapter (PEFT) as a virtual checkpoint: the tensors of the one that it applies to, some changed.

Only headers and the config are read. The names in the adapter's file are those of the model as PEFT wraps it:

==============================================  ====================================================
name, after ``base_model.model.``               meaning
==============================================  ====================================================
``M.lora_A.weight``, ``M.lora_B.weight``        ``M.weight`` gets ``scaling * (B @ A)`` added
``M.lora_embedding_A``, ``M.lora_embedding_B``  the same, transposed
``M.modules_to_save.T``, ``M.T``                stands in the place of ``M.T``
``M.base_layer.T``                              stands in the place of ``M.T``; a product goes on top
``M.original_module.T``                         what was there before: ignored
==============================================  ====================================================

The adapter's own name (``M.lora_A.default.weight``) may stand in each of them. Everything else is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from mergepipe.checkpoints.absent import no_adapter, no_adapter_weights, visible_names
from mergepipe.checkpoints.adapter_config import LoraSettings, read_settings
from mergepipe.checkpoints.checkpoint import Adapter, Checkpoint, LowRank, is_folder, open_file
from mergepipe.checkpoints.discovery import ADAPTER_CONFIG, ADAPTER_FILE
from mergepipe.checkpoints.heads import is_head, ties_embeddings
from mergepipe.checkpoints.layers import natural_key
from mergepipe.checkpoints.patterns import PatternError
from mergepipe.checkpoints.place import Place
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.checkpoints.wording import quote
from mergepipe.dtypes import DTYPES, is_mergeable
from mergepipe.errors import MergepipeError, SourceError, raise_collected
from mergepipe.values import dataclass

_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(\.(?P<adapter>(?!(weight|bias)$)[^.]+))?(\.weight)?"
)
# Parts of names that mean another method than a product of two factors.
_FOREIGN = (
    ("lora_magnitude_vector", "DoRA (`lora_magnitude_vector`)"),
    ("trainable_tokens", "trained embeddings of single tokens (`trainable_token_indices`)"),
    ("lora_E", "AdaLoRA"),
    ("lora_", "a variant of LoRA that is not known"),
)
_MERGE_FIRST = "merge it into its base model first (PEFT: `merge_and_unload()`), and use the result"


def open_adapter(path: Path, *, label: str, on: Checkpoint, shown: str | None = None) -> Checkpoint:
    """Open an adapter.

    Parameters
    ----------
    path
        Its folder, with ``adapter_config.json`` and ``adapter_model.safetensors``.
    label
        Name of the source, for messages.
    on
        The checkpoint that it applies to.
    shown
        What messages call the path; None for ``path`` itself.

    Raises
    ------
    SourceError
        If it is no adapter, or does not fit the checkpoint, or does more than add products of factors.
    FormatError
        If its file breaks a rule of the format.
    CollectedErrors
        If more than one of these is the case.
    """
    place = Place(label=label, root=Path(path).absolute(), shown=str(path) if shown is None else shown)
    names = visible_names(place.root) if is_folder(place) else ()
    if ADAPTER_CONFIG not in names:
        raise no_adapter(place, names)
    if on.adapter is not None:
        raise place.error(
            f"applies to {quote(on.label)}, which is an adapter itself",
            hint="make an output of that one (`passthrough`), and apply this one to the result",
        )
    settings = read_settings(place)
    if ADAPTER_FILE not in names:
        raise no_adapter_weights(place, names)
    opened = open_file(place, ADAPTER_FILE)
    stored = {info.name: info for info in sorted(opened.header.tensors, key=lambda info: natural_key(info.name))}
    found = _Found(place, on, settings)
    for info in stored.values():
        found.add(info)
    try:
        pairs = found.pairs()
    except PatternError as error:
        raise place.error(f"selects modules by patterns: {error}", name=ADAPTER_CONFIG, hint=_MERGE_FIRST) from None
    adapter = Adapter(on=on, stored=stored, low_rank=pairs, replaced=found.replaced)
    raise_collected(found.errors())
    return Checkpoint(
        label=label,
        root=place.root,
        files=(opened.file,),
        tensors={name: _virtual(adapter, info) for name, info in on.tensors.items()},
        config=on.config,
        notes=tuple(found.notes),
        adapter=adapter,
    )


def _virtual(adapter: Adapter, info: TensorInfo) -> TensorInfo:
    """Return what a tensor is under the adapter: its dtype stays what it is in the checkpoint below."""
    whole = adapter.replaced.get(info.name)
    if whole is None and info.name not in adapter.low_rank:
        return info
    dtype, shape = info.dtype, info.shape
    if whole is not None:
        shape = whole.shape
        dtype = dtype if is_mergeable(dtype) and is_mergeable(whole.dtype) else whole.dtype
    nbytes = DTYPES[dtype].nbytes(math.prod(shape))
    return TensorInfo(name=info.name, dtype=dtype, shape=shape, file=0, offset=0, nbytes=nbytes)


@dataclass(slots=True)
class _Found:
    """Sorts the stored tensors by what they do to the checkpoint below, and keeps what does not fit."""

    place: Place
    on: Checkpoint
    settings: LoraSettings
    factors: dict[tuple[str, bool], dict[str, TensorInfo]] = field(default_factory=dict)
    replaced: dict[str, TensorInfo] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    def add(self, info: TensorInfo) -> None:
        """Take a stored tensor."""
        name = info.name.removeprefix(_PREFIX)
        match = _FACTOR.fullmatch(name)
        if match is not None:
            pair = self.factors.setdefault((match["module"], bool(match["embedding"])), {})
            if match["factor"] in pair:
                self._twice(info, pair[match["factor"]])
            pair[match["factor"]] = info
            return
        foreign = _foreign(name)
        if foreign is not None:
            self._problem("foreign", info, f"belongs to {foreign}, which is not supported", hint=_MERGE_FIRST)
        elif ".original_module." in name:
            self.notes.append(f"{quote(self.place.shown)}: ignored {quote(info.name)}, which is no trained tensor")
        else:
            self._replace(info, name)

    def _replace(self, info: TensorInfo, name: str) -> None:
        candidates = list(_replaced_names(name))
        target = next((candidate for candidate in candidates if candidate in self.on.tensors), None)
        if target is None:
            self.unmatched[candidates[0]] = info.name
        elif target in self.replaced:
            self._twice(info, self.replaced[target])
        else:
            self.replaced[target] = info

    def pairs(self) -> dict[str, LowRank]:
        """Return the pairs of factors by the tensor that they apply to, as far as they are right."""
        found: dict[str, LowRank] = {}
        for (module, embedding), pair in self.factors.items():
            target = f"{module}.weight"
            for here, there in (("A", "B"), ("B", "A")):
                if there not in pair:
                    self._problem("half", pair[here], f"has no counterpart `lora_{there}` in the file")
            if target in found:
                self._twice(pair.popitem()[1], found[target].b)
            elif target not in self.on.tensors:
                self.unmatched[target] = next(iter(pair.values())).name
            elif len(pair) == 2 and self._fits(module, pair["A"], pair["B"], embedding=embedding):
                found[target] = LowRank(
                    a=pair["A"],
                    b=pair["B"],
                    scaling=self.settings.scaling_of(module),
                    transposed=embedding or self.settings.fan_in_fan_out,
                )
        return found

    def _fits(self, module: str, a: TensorInfo, b: TensorInfo, *, embedding: bool) -> bool:
        """Return whether two factors make a delta of the tensor's shape; keep what is wrong with them."""
        for info in (a, b):
            if not is_mergeable(info.dtype):
                hint = "only F64, F32, F16 and BF16 factors are multiplied"
                return self._problem("dtype", info, f"is {info.dtype}: no factor can be", hint=hint)
            if len(info.shape) != 2:
                what = f"has shape {list(info.shape)}: only factors of linear layers and embeddings (2-D) are supported"
                return self._problem("dimensions", info, what, hint=_MERGE_FIRST)
        rank = self.settings.rank_of(module)
        for info, got in ((a, a.shape[0]), (b, b.shape[1])):
            if got != rank:
                what = f"has rank {got}, but `{ADAPTER_CONFIG}` says {rank}"
                hint = "the config and the file do not belong together: the scaling would be wrong"
                return self._problem("rank", info, what, hint=hint, expected=rank, got=got)
        return self._has_shape(f"{module}.weight", a, b, embedding=embedding)

    def _has_shape(self, name: str, a: TensorInfo, b: TensorInfo, *, embedding: bool) -> bool:
        target, owner = self.on.tensors[name], quote(self.on.label)
        if name in self.replaced:  # the delta goes on top of that
            target, owner = self.replaced[name], "the adapter"
        shape = (b.shape[0], a.shape[1])
        delta = shape[::-1] if embedding or self.settings.fan_in_fan_out else shape
        if not is_mergeable(target.dtype):
            what = f"would be added to {quote(name)}, which is {target.dtype} in {owner}"
            hint = f"apply it to the checkpoint that {owner} was quantised from"
            return self._problem("target", b, what, hint=hint)
        if delta == target.shape:
            return True
        hint = "an adapter applies to the model that it was trained on"
        if delta[::-1] == target.shape and not embedding:
            hint = f"`fan_in_fan_out` in `{ADAPTER_CONFIG}` may be wrong: transposed, the shapes agree"
        what = f"makes a delta of shape {list(delta)} for {quote(name)}, which has shape {list(target.shape)}"
        what += f" in {owner}"
        return self._problem("shape", b, what, hint=hint, expected=list(target.shape), got=list(delta))

    def _twice(self, info: TensorInfo, other: TensorInfo) -> None:
        hint = "the file holds several adapters: save one of them alone"
        self._problem("twice", info, f"means the same as {quote(other.name)}", hint=hint)

    def _problem(self, kind: str, info: TensorInfo, what: str, *, hint: str | None = None, **facts: Any) -> bool:
        """Keep a problem of a stored tensor; return False."""
        problem = {"what": f"tensor {quote(info.name)} {what}", "hint": hint, "tensor": info.name, **facts}
        self.problems.setdefault(kind, []).append(problem)
        return False

    def errors(self) -> Iterator[MergepipeError]:
        """Yield every problem; those of one kind as one, the first with the count of the others."""
        for first, *others in self.problems.values():
            more = f" ({len(others):,} more like it)" if others else ""
            yield self.place.error(**{**first, "what": first["what"] + more})
        if self.unmatched:
            yield self._nothing_matches()
        elif not self.factors and not self.replaced:
            yield self.place.error("holds no tensor of an adapter", name=ADAPTER_FILE)

    def _nothing_matches(self) -> SourceError:
        changed = {f"{module}.weight" for module, _ in self.factors} | self.replaced.keys()
        total = len(changed | self.unmatched.keys())
        target, key = next(iter(self.unmatched.items()))
        return self.place.error(
            f"fits {quote(self.on.label)} in {total - len(self.unmatched):,} of {total:,} tensors: {quote(key)} is for"
            f" {quote(target)}, which is not there",
            hint=_unmatched_hint(target, self.on),
            name=ADAPTER_FILE,
            tensor=key,
            count=len(self.unmatched),
        )


def _foreign(name: str) -> str | None:
    """Return what a stored tensor belongs to that is no plain LoRA, None if it may be a whole tensor."""
    if re.search(r"\.lora_B(\.[^.]+)?\.bias$", name):
        return "a factor with a bias (`lora_bias`)"
    return next((what for part, what in _FOREIGN if f".{part}" in name), None)


def _replaced_names(name: str) -> Iterator[str]:
    """Yield the names of the tensor that a stored one may stand for, the most likely first."""
    module, saved, rest = name.partition(".modules_to_save.")
    if not saved:
        yield name.replace(".base_layer.", ".")
        return
    _, dot, inner = rest.partition(".")
    if dot:  # the adapter's own name is left out in files that PEFT writes itself
        yield f"{module}.{inner}"
    yield f"{module}.{rest}"


def _unmatched_hint(target: str, on: Checkpoint) -> str:
    if is_head(target) and ties_embeddings(on.config):
        return (
            f"{quote(on.label)} ties its head to its embeddings: apply the adapter to one with its own head (a copy"
            " of the embeddings, `tie_word_embeddings` false)"
        )
    similar = _most_similar(target, on.tensors)
    if similar is None:
        return f"{quote(on.label)} must be the model that the adapter was trained on"
    return (
        f"{quote(on.label)} has {quote(similar)}: it must be the model that the adapter was trained on, under the same"
        " names"
    )


def _most_similar(target: str, names: Mapping[str, TensorInfo] | Sequence[str]) -> str | None:
    """Return the name that shares the longest dotted end with another, two components at least."""
    best, longest = None, 1
    wanted = target.split(".")[::-1]
    for name in names:
        parts = name.split(".")[::-1]
        shared = next((i for i, (one, other) in enumerate(zip(wanted, parts, strict=False)) if one != other), None)
        length = min(len(wanted), len(parts)) if shared is None else shared
        if length > longest:
            best, longest = name, length
    return best
