"""Layers, found by the integer components of tensor names; no table of architectures.

In ``model.layers.3.mlp.experts.7.w1.weight`` the first integer component is the layer (3) and what precedes it is the
prefix of a *stack* (``model.layers``); integers further in (the expert 7) are not layers. A checkpoint may hold several
stacks. Its layers are

1. the largest stack: by size where sizes are known, else by number of tensors; a stack of a vision, image or audio
   tower (seen by its prefix) only where there is no other; equal ones in name order;
2. and the stack whose prefix differs from it by ``encoder`` / ``decoder`` alone. So both halves of a T5 count: the
   layer 3 of the encoder and that of the decoder are both layer 3, and the count is that of the longer half.

Tensors of other stacks have no layer. A name that begins with an integer (``0.auto_model.encoder.layer.3``: a list of
modules) has its layer at the next one, if there is one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

_DIGITS = re.compile(r"([0-9]+)")
_INDEX = re.compile(r"[0-9]{1,9}")
_TOWERS = ("vision", "visual", "image", "img", "video", "audio", "speech")
_TWINS = {"encoder": "decoder", "decoder": "encoder"}


@functools.lru_cache(maxsize=1 << 13)  # every checkpoint of a family has the same names
def natural_key(name: str) -> tuple[Any, ...]:
    """Return a key that sorts ``layers.2`` before ``layers.10``; different names have different keys."""
    parts = _DIGITS.split(name)
    key: list[Any] = [parts[0]]
    for i in range(1, len(parts), 2):
        digits = parts[i].lstrip("0")
        # Digits are compared by count, then as text: no conversion, whatever their number.
        key += (len(digits), digits, parts[i + 1])
    return tuple(key), name


def _locate(name: str) -> tuple[str, int] | None:
    """Return the prefix of the stack that a name belongs to and its index there, or None."""
    parts = name.split(".")
    leading: tuple[str, int] | None = None
    for i, part in enumerate(parts):
        if _INDEX.fullmatch(part):
            if i > 0:
                return ".".join(parts[:i]), int(part)
            leading = "", int(part)
    return leading


def layer_of(name: str) -> int | None:
    """Return the layer in a tensor's name, or None; a vision tower's layers count here as well.

    Examples
    --------
    >>> layer_of("model.layers.3.mlp.experts.7.w1.weight")
    3
    """
    found = _locate(name)
    return found[1] if found else None


def layer_count(names: Iterable[str]) -> int:
    """Return how many layers the checkpoint with these tensors has."""
    return LayerMap(names).count


class LayerMap:
    """The layers of one checkpoint.

    Parameters
    ----------
    names
        The names of its tensors.
    sizes
        Size of each tensor (any unit); None counts every tensor as one.

    Attributes
    ----------
    count
        Number of layers (the highest index plus one), 0 where there are none.
    stacks
        The prefixes whose integer is the layer, such as ``model.layers``: none, one, or an encoder's and a decoder's.
    """

    __slots__ = ("count", "stacks")

    count: int
    stacks: tuple[str, ...]

    def __init__(self, names: Iterable[str], *, sizes: Mapping[str, int] | None = None) -> None:
        totals: dict[str, int] = {}
        depths: dict[str, int] = {}
        for name in names:
            found = _locate(name)
            if found is not None:
                prefix, index = found
                totals[prefix] = totals.get(prefix, 0) + (1 if sizes is None else sizes[name])
                depths[prefix] = max(depths.get(prefix, 0), index + 1)
        self.stacks = _choose(totals)
        self.count = max((depths[prefix] for prefix in self.stacks), default=0)

    def index(self, name: str) -> int | None:
        """Return the layer of a tensor, or None if it lies outside the layers."""
        found = _locate(name)
        return found[1] if found is not None and found[0] in self.stacks else None

    def renumbered(self, name: str, layer: int) -> str:
        """Return the name that a tensor has in another layer; a tensor outside the layers keeps its name."""
        found = _locate(name)
        if found is None or found[0] not in self.stacks:
            return name
        start = len(found[0]) + 1 if found[0] else 0
        _, dot, rest = name[start:].partition(".")
        return f"{name[:start]}{layer}{dot}{rest}"

    def __repr__(self) -> str:
        return f"LayerMap(count={self.count}, stacks={self.stacks})"


def _choose(totals: Mapping[str, int]) -> tuple[str, ...]:
    """Return the prefixes of the layers, given the total size of each stack."""
    if not totals:
        return ()
    # A bare list of modules is a stack only where nothing else is; so is a tower.
    main = min(totals, key=lambda prefix: (prefix == "", is_tower(prefix), -totals[prefix], natural_key(prefix)))
    parts = main.split(".")
    twins = [".".join((*parts[:i], _TWINS[part], *parts[i + 1 :])) for i, part in enumerate(parts) if part in _TWINS]
    return tuple(sorted((main, *(twin for twin in twins if twin in totals)), key=natural_key))


def is_tower(name: str) -> bool:
    """Return whether a name, of a tensor or of a stack, is in the part of a model that sees or hears."""
    lowered = name.lower()
    return any(word in lowered for word in _TOWERS)
