"""``config.json`` of an output with slices: how many layers there are, and what it says of each of them.

There is no table of architectures: counts go by their key, lists over the layers by their length. What a config says
of a layer moves with the layer, from the config of the source that the layer came from. What cannot be carried over is
left as it is, and noted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergepipe.checkpoints.layers import is_tower
from mergepipe.plan.values import LayerOrigin
from mergepipe.values import dataclass

Config = Mapping[str, Any]

COUNT_KEYS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    *("num_encoder_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
)
"""Keys whose value is the number of layers, of the whole model or of one of its halves (sliced alike)."""
_INDEX_LISTS = (
    *("mlp_only_layers", "moe_layers", "cross_attention_layers", "hybrid_layer_ids", "global_attn_idx"),
    *("attn_layer_indices", "full_attn_idxs"),
)
"""Lists of the layers that have something."""
_THRESHOLDS = {"max_window_layers": "layer_types", "first_k_dense_replace": None}
"""The first so many layers are different; a list over the layers of that name, where there is one, decides instead."""
_PERIODS = {
    "sliding_window_pattern": "layer_types",
    "full_attention_interval": "layer_types",
    "global_attn_every_n_layers": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "interleave_moe_layer_step": "moe_layers",
    "attn_layer_period": None,
    "expert_layer_period": None,
    "decoder_sparse_step": None,
    "moe_layer_freq": None,
}
"""Every so many layers one is different; a list as above decides instead."""
_NOT_LAYERS = ("architectures", "keys_to_ignore_at_inference", "mrope_section", "suppress_tokens")
_PATTERNS = ("hybrid_override_pattern",)
"""Strings with a character for each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restacked:
    """A config for other layers, and what it could not say."""

    config: dict[str, Any]
    notes: tuple[str, ...]


def restacked(config: Config, stack: Sequence[LayerOrigin], configs: Mapping[str, Config]) -> Restacked:
    """Return a config for a model whose layers come from elsewhere.

    Parameters
    ----------
    config
        The content of ``config.json`` that the model takes.
    stack
        Where each of its layers comes from.
    configs
        By source the config that says what its layers are.
    """
    new = copy.deepcopy(dict(config))
    notes: list[str] = []
    found = False
    for path in _sections(config, ()):
        section = _Section(config, path, stack, configs)
        found |= bool(section.counts)
        _at(new, path).update(section.changes())
        notes += section.notes
    if config and not found:
        notes.append(f"config.json: none of {', '.join(f'`{key}`' for key in COUNT_KEYS[:4])} is there to be set")
    return Restacked(config=new, notes=tuple(dict.fromkeys(notes)))


def _sections(config: Config, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the config and of nested ones; those of vision and audio towers have layers of their own."""
    yield path
    for key, value in config.items():
        if isinstance(value, Mapping) and not is_tower(key):
            yield from _sections(value, (*path, key))


def _at(config: Any, path: Sequence[str]) -> Any:
    """Return the nested config at a path; an empty one where there is none."""
    for key in path:
        config = config.get(key)
        if not isinstance(config, Mapping):
            return {}
    return config


class _Section:
    """One level of a config that is to be carried over to other layers."""

    def __init__(
        self, config: Config, path: tuple[str, ...], stack: Sequence[LayerOrigin], configs: Mapping[str, Config]
    ) -> None:
        self._section: Config = _at(config, path)
        self._stack = stack
        self._others = {source: _at(other, path) for source, other in configs.items()}
        self.counts = [self._section[key] for key in COUNT_KEYS if _is_count(self._section.get(key))]
        self.notes: list[str] = []

    def changes(self) -> dict[str, Any]:
        """Return the values that are others now; none where the section states no number of layers."""
        changes: dict[str, Any] = {}
        for key, value in self._section.items() if self.counts else ():
            if key in COUNT_KEYS and _is_count(value):
                changes[key] = len(self._stack)
            elif key in _INDEX_LISTS and isinstance(value, list):
                changes[key] = self._indices(key, value)
            elif key == "attention_types" and isinstance(value, list):
                changes |= self._expanded(key, value)
            elif isinstance(value, list) or (key in _PATTERNS and isinstance(value, str)):
                changes |= self._per_layer(key, value)
            elif key in _THRESHOLDS and _is_count(value):
                changes |= self._threshold(key, value)
            elif key in _PERIODS and _is_count(value):
                self._check_period(key, value)
        return changes

    def _own(self, origin: LayerOrigin, key: str, value: Any) -> Any:
        """Return what the source of a layer says under a key; what this config says where it is silent."""
        found = self._others.get(origin.source, {}).get(key)
        return found if isinstance(found, type(value)) else value

    def _per_layer(self, key: str, value: Any) -> dict[str, Any]:
        if len(value) not in self.counts or key in _NOT_LAYERS or key.endswith(("_token_id", "_token_ids")):
            return {}
        taken = []
        for origin in self._stack:
            own = self._own(origin, key, value)
            if origin.layer >= len(own):
                self._note(key, f"has no entry for layer {origin.layer} of `{origin.source}`")
                return {}
            taken.append(own[origin.layer])
        return {key: "".join(taken) if isinstance(value, str) else taken}

    def _expanded(self, key: str, value: list[Any]) -> dict[str, Any]:
        """Carry over GPT-Neo's ``[[["global", "local"], 12]]``: what each layer has, with repetitions."""
        try:
            layers = [kind for kinds, times in value for _ in range(times) for kind in kinds]
        except (TypeError, ValueError):
            return {}
        if len(layers) not in self.counts or any(origin.layer >= len(layers) for origin in self._stack):
            return {}
        return {key: [[[layers[origin.layer] for origin in self._stack], 1]]}

    def _indices(self, key: str, value: list[Any]) -> list[int]:
        return [i for i, origin in enumerate(self._stack) if origin.layer in self._own(origin, key, value)]

    def _threshold(self, key: str, value: int) -> dict[str, int]:
        below = [origin.layer < self._own(origin, key, value) for origin in self._stack]
        first = below.index(False) if False in below else len(below)
        if not any(below[first:]):
            return {key: first}
        if self._decides(key, _THRESHOLDS) and self._section.get("use_sliding_window") is not False:
            self._note(key, f"is {value}, and the layers below it are no longer the first ones")
        return {}

    def _check_period(self, key: str, value: int) -> None:
        moved = any((index - origin.layer) % value for index, origin in enumerate(self._stack)) if value else False
        if moved and self._decides(key, _PERIODS):
            self._note(key, f"is {value}, and the layers no longer stand in that order")

    def _decides(self, key: str, table: Mapping[str, str | None]) -> bool:
        """Return whether a key has a say: not where a list over the layers says the same."""
        instead = table[key]
        return instead is None or not isinstance(self._section.get(instead), list)

    def _note(self, key: str, problem: str) -> None:
        self.notes.append(f"config.json: `{key}` {problem}; it was left as it is")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
