"""Embeddings and output heads: the tensors whose rows are the vocabulary, and whether one is tied to the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Modules that are nothing else, wherever they stand in a name.
_EMBEDDINGS = frozenset(
    (
        "embed_tokens",
        "embed_tokens_per_layer",
        "tok_embeddings",
        "token_embedding",
        "word_embeddings",
        "wte",
        "embed_in",
    )
)
_HEADS = frozenset(("lm_head", "lm_heads", "embed_out", "output_projection"))
# Modules that mean the vocabulary at the top of a model, and something else inside a layer.
_TOP_EMBEDDINGS = frozenset(("shared", "embeddings", "embedding", "embed", "emb"))
_TOP_HEADS = frozenset(("output", "head"))
_BERT_HEAD = ("predictions", "decoder")


def _module(name: str) -> tuple[tuple[str, ...], bool] | None:
    """Return the module path of a weight or bias without its integers, and whether it had any."""
    parts = name.split(".")
    if parts[-1] not in ("weight", "bias"):
        return None
    path = tuple(part for part in parts[:-1] if not part.isdecimal())
    return (path, len(path) < len(parts) - 1) if path else None


def is_head(name: str) -> bool:
    """Return whether a tensor is the output head (or its bias)."""
    module = _module(name)
    if module is None:
        return False
    path, in_layer = module
    return path[-1] in _HEADS or path[-2:] == _BERT_HEAD or (not in_layer and path[-1] in _TOP_HEADS and len(path) == 1)


def is_vocabulary(name: str) -> bool:
    """Return whether a tensor is an embedding of tokens or an output head: one row per token.

    Position embeddings are neither.
    """
    module = _module(name)
    if module is None:
        return False
    path, in_layer = module
    return path[-1] in _EMBEDDINGS or (not in_layer and path[-1] in _TOP_EMBEDDINGS) or is_head(name)


def head_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of output heads among ``names``, in their order."""
    return tuple(name for name in names if is_head(name))


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` says that the head is the embedding.

    The language model's own part (``text_config``) decides where it says anything; a config that is silent says no.
    """
    for part in (config.get("text_config"), config):
        if isinstance(part, Mapping) and isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return False
