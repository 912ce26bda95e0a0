"""Whether a checkpoint is quantised: by its config, or by tensors that only make sense beside others.

The codes of a quantised weight mean nothing without their scales. Arithmetic on them gives noise, so that such
checkpoints have to be recognised before anything is merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.checkpoints.wording import quote
from mergepipe.values import dataclass

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
_CODES = ("F8_", "I8", "U8", "I32", "U32")

_Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class _Sign:
    """A kind of tensor that gives a scheme away.

    Attributes
    ----------
    scheme
        Who writes it.
    ending
        How its name ends.
    beside
        Endings of which one must be there in its place; none: the name says enough.
    dtypes
        How the dtype of that tensor begins.
    """

    scheme: str
    ending: str
    beside: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = _CODES

    def fits(self, tensors: _Tensors, name: str) -> bool:
        """Return whether a tensor is such a sign."""
        if not name.endswith(self.ending):
            return False
        stem = name.removesuffix(self.ending)
        found = [tensors[stem + ending].dtype for ending in self.beside if stem + ending in tensors]
        return not self.beside or any(dtype.startswith(self.dtypes) for dtype in found)


_SIGNS = (
    _Sign("GPTQ or AWQ", ".qweight"),
    _Sign("GPTQ or AWQ", ".qzeros"),
    _Sign("GPTQ", ".g_idx"),
    _Sign("bitsandbytes 4-bit", ".absmax"),
    _Sign("bitsandbytes 4-bit", ".quant_map"),
    _Sign("bitsandbytes 8-bit", ".SCB"),
    _Sign("compressed-tensors", ".weight_packed"),
    _Sign("float8 with scales", "_scale_inv"),
    _Sign("weights with scales", ".weight_scale", (".weight", ".weight_packed")),
    _Sign("MXFP4", "_blocks", ("_scales",)),
    _Sign("MLX", ".scales", (".weight",)),
)
_ENDINGS = tuple(sign.ending for sign in _SIGNS)


def quantisation(checkpoint: Checkpoint) -> str | None:
    """Return how a checkpoint is quantised, in words for a message, or None if it is not.

    The words name the sign: the entry of ``config.json`` with its method, or the scheme and one of the tensors.
    """
    for key, settings in _settings(checkpoint.config):
        method = _method(settings)
        return f"`{key}`{f' ({method})' if method else ''} in config.json"
    for name in checkpoint.tensors:
        scheme = _scheme(checkpoint.tensors, name)
        if scheme is not None:
            return f"{scheme}: tensors such as {quote(name)}"
    return None


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the entries of a config that describe a quantisation, those of a language model within it as well."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            for key in _CONFIG_KEYS:
                settings = part.get(key)
                # MLX writes `quantization`; the word alone could mean anything.
                if isinstance(settings, Mapping) and settings and (key != "quantization" or "bits" in settings):
                    yield key, settings


def _method(settings: Mapping[str, Any]) -> str | None:
    """Return the name of the method in a quantisation's settings."""
    method = settings.get("quant_method")
    if isinstance(method, str) and method:
        return method
    return "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else None


def _scheme(tensors: _Tensors, name: str) -> str | None:
    """Return the scheme that a tensor's name gives away."""
    if ".quant_state." in name:
        return "bitsandbytes 4-bit"
    if not name.endswith(_ENDINGS):  # nearly all names
        return None
    return next((sign.scheme for sign in _SIGNS if sign.fits(tensors, name)), None)
