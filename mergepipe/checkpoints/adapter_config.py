"""``adapter_config.json`` as PEFT writes it: ranks and scalings, and a refusal for everything that changes the numbers.

A setting that only matters in training is ignored. One that is not known is refused if it is set at all: nobody can
tell here whether it changes the numbers.

Source: PEFT 0.21 (``LoraConfig``; ``get_pattern_key`` for the patterns; ``LoraLayer.update_layer`` for the scaling).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from mergepipe.checkpoints.discovery import ADAPTER_CONFIG
from mergepipe.checkpoints.patterns import ModulePattern, PatternError, Work
from mergepipe.checkpoints.place import Place, read_object
from mergepipe.checkpoints.wording import quote
from mergepipe.errors import SourceError, raise_collected
from mergepipe.values import dataclass

_MERGE_FIRST = "merge it into its base model first (PEFT: `merge_and_unload()`), and use the result"
_CONVERT = (
    "save it as a plain LoRA (PEFT: `save_pretrained` with `path_initial_model_for_weight_conversion`), or "
    + _MERGE_FIRST
)

_USED = frozenset(
    (
        "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out",
        "init_lora_weights",
    )
)  # fmt: skip
# What matters in training alone, or says again what the stored tensors say.
_IGNORED = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
        "lora_ga_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type", "velora_config",
    )
)  # fmt: skip
# What the product of two factors does not describe, and what people call it.
_REFUSED = {
    "use_dora": "DoRA: it has magnitudes beside the factors",
    "lora_bias": "a bias of the factor B",
    "layer_replication": "layers that are copies of others",
    "megatron_config": "layers of Megatron",
    "trainable_token_indices": "embeddings of single tokens",
    "alora_invocation_tokens": "activated LoRA, which applies to some tokens of a text only",
    "use_qalora": "QA-LoRA: its inputs are pooled",
    "use_bdlora": "BD-LoRA: its factors are block-diagonal",
    "kasa_config": "KaSA: it has singular values between the factors",
    "monteclora_config": "MonteCLoRA: it samples",
    "arrow_config": "Arrow: it routes between adapters",
    "target_parameters": "LoRA on parameters that are no module's weight",
}
_LARGEST = 1e30
_LONGEST_SHOWN = 200
# Ways to begin that change the base's weights: the factors then belong to another base.
_REWRITING = ("pissa", "olora", "corda", "loftq", "lora_ga")
_HARMLESS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """What an adapter's config says of the numbers.

    Attributes
    ----------
    rank, alpha
        Of modules that no pattern matches.
    rank_pattern, alpha_pattern
        In the config's order: the first pattern that matches a module's name counts.
    rslora
        Whether the scaling is ``alpha / sqrt(r)`` instead of ``alpha / r``.
    fan_in_fan_out
        Whether weights are stored ``(in, out)``, so that deltas are transposed.
    """

    rank: int
    alpha: float
    rank_pattern: tuple[tuple[ModulePattern, int], ...]
    alpha_pattern: tuple[tuple[ModulePattern, float], ...]
    rslora: bool
    fan_in_fan_out: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, such as ``model.layers.0.self_attn.q_proj``."""
        return next((rank for pattern, rank in self.rank_pattern if pattern.match(module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor of a module's product, in float64."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if pattern.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_settings(place: Place) -> LoraSettings:
    """Return the settings of the adapter in a folder.

    Raises
    ------
    SourceError
        If the config is not valid, not that of a LoRA, or has a setting that the factors alone do not follow; several
        are raised together.
    """
    config = read_object(place, ADAPTER_CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _not_lora(place, kind)
    raise_collected(_unsupported(place, config))
    reader = _Reader(place, config)
    return LoraSettings(
        rank=reader.rank("r", config.get("r", 8)),
        alpha=reader.alpha("lora_alpha", config.get("lora_alpha", 8)),
        rank_pattern=tuple((pattern, reader.rank(*item)) for pattern, *item in reader.pattern("rank_pattern")),
        alpha_pattern=tuple((pattern, reader.alpha(*item)) for pattern, *item in reader.pattern("alpha_pattern")),
        rslora=reader.flag("use_rslora"),
        fan_in_fan_out=reader.flag("fan_in_fan_out"),
    )


def _not_lora(place: Place, kind: Any) -> SourceError:
    if kind is None:
        return place.error(
            "is not an adapter of PEFT: it has no `peft_type`",
            name=ADAPTER_CONFIG,
            hint="convert it to the PEFT format, or merge it into its base model first, and use the result",
        )
    return place.error(
        f"is an adapter of the kind {quote(str(kind))}; only LoRA (`LORA`) is a product of factors",
        name=ADAPTER_CONFIG,
        hint=_MERGE_FIRST,
        peft_type=kind,
    )


def _unsupported(place: Place, config: Mapping[str, Any]) -> Iterator[SourceError]:
    """Yield an error for each setting that changes the numbers in a way that is not computed here."""
    for key, value in config.items():
        if key in _USED or key in _IGNORED or not value:
            continue
        if key in _REFUSED:
            what, hint = f"uses {quote(key)} ({_REFUSED[key]}), which is not supported", _MERGE_FIRST
        else:
            what = f"has the setting {quote(key)}, which is not known"
            hint = "if it mattered in training only, remove it from the file; if not, " + _MERGE_FIRST
        yield place.error(what, name=ADAPTER_CONFIG, hint=hint, setting=key)
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and not start.startswith(_HARMLESS):
        changes = start.startswith(_REWRITING)
        what = "which changes the base's own weights" if changes else "which is not known"
        hint = _CONVERT if changes else _MERGE_FIRST
        yield place.error(
            f"began with {quote(start)} (`init_lora_weights`), {what}",
            name=ADAPTER_CONFIG,
            hint=hint,
            setting="init_lora_weights",
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads single settings, with errors that name them."""

    place: Place
    config: Mapping[str, Any]
    work: Work = field(default_factory=Work)

    def _wrong(self, name: str, expected: str, value: Any) -> SourceError:
        shown = repr(value)
        shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."
        return self.place.error(f"has {quote(name)} {shown}: expected {expected}", name=ADAPTER_CONFIG, setting=name)

    def rank(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, "a whole number of at least 1", value)
        return value

    def alpha(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
            raise self._wrong(name, "a number", value)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value not in (None, True, False):
            raise self._wrong(name, "true or false", value)
        return bool(value)

    def pattern(self, name: str) -> Iterator[tuple[ModulePattern, str, Any]]:
        """Yield each pattern, compiled, with the name of its setting and its value."""
        patterns = self.config.get(name) or {}
        if not isinstance(patterns, dict):
            raise self._wrong(name, "an object", patterns)
        for text, value in patterns.items():
            try:
                yield ModulePattern(text, self.work), f"{name}.{text}", value
            except PatternError as error:
                raise self._wrong(name, f"regular expressions ({error})", text) from None
