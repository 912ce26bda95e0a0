"""What an exact evaluation of a method takes, and what it returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
NEAR = 1e-6  # relative: what float32 sums may be off
BLUR = 2.0**-22  # of a cosine


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One tensor of a case: float32 arrays, the settings at this tensor, and the kept elements of random masks.

    ``selected``, where given, is what sce selects instead of what it would select.
    """

    method: str
    base: Array | None
    experts: tuple[Array, ...]
    settings: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Any]
    masks: tuple[Array, ...] | None
    selected: Array | None = None

    def deltas(self) -> list[Array]:
        """Return what float32 makes of the differences, in float64."""
        assert self.base is not None
        return [(expert - self.base).astype(np.float64) for expert in self.experts]

    def number(self, name: str, default: float) -> float:
        """Return a setting of the whole merge, rounded to float32."""
        return float(np.float32(self.params.get(name, default)))

    def column(self, name: str, default: float) -> list[float]:
        """Return a setting of each expert, as given."""
        return [float(own.get(name, self.params.get(name, default))) for own in self.settings]

    def weights(self) -> list[float]:
        """Return the weights, rounded to float32."""
        return [float(np.float32(weight)) for weight in self.column("weight", 1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The exact values of a tensor, element by element.

    Attributes
    ----------
    undecided
        Where there is a choice.
    size
        The magnitude of the largest numbers that are added up, where they may be larger than inputs and result.
    blur
        What the values change by where a cosine is off by 2^-22: as much as a float32 sum may be.
    """

    value: Array
    undecided: Array
    size: Array | None = None
    blur: Array | None = None


def at_layer(settings: Mapping[str, Any], tensor: str, layers: int) -> dict[str, Any]:
    """Return settings at a tensor: gradients are linear in the layer, and have their first value outside."""
    found = re.search(r"\.layers\.(\d+)\.", tensor)
    where = int(found[1]) / (layers - 1) if found else 0.0

    def value(setting: Any) -> Any:
        if not isinstance(setting, list):
            return setting
        place = where * (len(setting) - 1)
        low = int(place)
        high = min(len(setting) - 1, low + 1)
        return (1 - (place - low)) * setting[low] + (place - low) * setting[high]

    return {name: value(setting) for name, setting in settings.items()}


def decided(values: Array) -> Exact:
    """Return values where there is no choice."""
    return Exact(value=values, undecided=np.zeros(values.shape, bool))
