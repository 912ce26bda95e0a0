"""Many tensor names in few words: by layer and module, with layers in ranges."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mergepipe.checkpoints.layers import LayerMap, natural_key
from mergepipe.lockfile.diff_values import Places

_INDEX = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
_WEIGHT = ".weight"


def places_of(names: Iterable[str], layers: LayerMap, whole: Iterable[str] = ()) -> tuple[Places, ...]:
    """Return where tensors are: modules that are concerned in the same layers stand together.

    The layers come first, in order; what lies outside of them last.

    Parameters
    ----------
    whole
        All tensors of the output, to see which places are complete.
    """
    sizes = Counter(map(layers.index, whole))
    counts: Counter[str] = Counter()
    found: defaultdict[str, set[int]] = defaultdict(set)
    for name in names:
        layer = layers.index(name)
        module = module_of(name, layers)
        counts[module] += 1
        if layer is not None:
            found[module].add(layer)
    together: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for module in counts:
        together[tuple(sorted(found[module]))].append(module)
    places = []
    for numbers in sorted(together, key=lambda numbers: (not numbers, numbers)):
        modules = sorted(together[numbers], key=natural_key)
        place = Places(
            layers=ranges(numbers) if numbers else None, modules=tuple((module, counts[module]) for module in modules)
        )
        places.append(replace(place, complete=place.count == sum(sizes[number] for number in numbers or (None,))))
    return tuple(places)


def module_of(name: str, layers: LayerMap) -> str:
    """Return what a tensor is in its layer: ``mlp.down_proj`` of ``model.layers.3.mlp.down_proj.weight``.

    Further integers (those of experts in a layer) are written ``*``. Where there are two stacks of layers, an encoder's
    and a decoder's, the stack stays in the name.
    """
    layer = layers.index(name)
    rest = name
    if layer is not None:
        stack = next(stack for stack in layers.stacks if not stack or name.startswith(f"{stack}."))
        rest = name[len(stack) + 1 if stack else 0 :].partition(".")[2] or name
        rest = f"{stack}.{rest}" if len(layers.stacks) > 1 else rest
    rest = _INDEX.sub("*", rest)
    return rest.removesuffix(_WEIGHT) or name


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending integers as ``0-7, 9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
