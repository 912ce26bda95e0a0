"""What a model card takes over from the sources: which models they are, and what their cards agree on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from mergepipe.digest import record_digest
from mergepipe.mergefile.schema import Source
from mergepipe.publish.sourcecard import SourceCard, is_hub_id, is_hub_name
from mergepipe.values import dataclass

# A hub's cache keeps a repository in a folder of this name, wherever the cache is.
_CACHED = re.compile(r"(?:^|/)models--(?P<owner>[^/]+?)--(?P<name>[^/]+)(?:/|$)")
# What training writes to is called like a repository; these are folders on somebody's disk.
_FOLDERS = frozenset((
    "build", "checkpoint", "checkpoints", "ckpt", "ckpts", "data", "hf_models", "local", "model", "models", "out",
    "output", "outputs", "results", "runs", "tmp", "weights",
))  # fmt: skip
_TRAINING = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSource:
    """A checkpoint that an output is made from, directly or through other outputs.

    Attributes
    ----------
    declared
        Its entry in the Mergefile.
    origin
        What its config says of the model that it was loaded from (``_name_or_path``), any text.
    card
        What its own card states.
    """

    declared: Source
    origin: str
    card: SourceCard

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it stands for, as a hub knows them; else what its folder is called, if that is a name."""
        return _repository(self.declared) or _origin(self.origin) or self.card.base_models or _folder(self.declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a card takes over; an empty value is left out.

    ``licenses`` has by source what its own card says.
    """

    base_models: tuple[str, ...] = ()
    license: str = ""
    license_name: str = ""
    license_link: str = ""
    languages: tuple[str, ...] = ()
    pipeline_tag: str = ""
    licenses: Mapping[str, str] = field(default_factory=dict)

    def digest(self) -> bytes:
        """Return a digest of all of it."""
        own = (self.license, self.license_name, self.license_link, self.pipeline_tag)
        return record_digest("carried", list(self.base_models), own, list(self.languages), dict(self.licenses))


def carry(sources: Sequence[CardSource]) -> Carried:
    """Return what the card of an output takes over from its sources, in their order.

    A license is taken over only if every source states that same one: what one of them does not say is not known.
    Languages and the task are taken over where those that state them agree.
    """
    cards = [source.card for source in sources]
    licenses = {(card.license, card.license_name if card.license == "other" else "") for card in cards}
    license_, license_name = licenses.pop() if len(licenses) == 1 else ("", "")
    if license_ == "other" and not license_name:
        license_ = ""  # two others need not be one
    links = {card.license_link for card in cards}
    return Carried(
        base_models=tuple(dict.fromkeys(model for source in sources for model in source.models)),
        license=license_,
        license_name=license_name,
        license_link=links.pop() if license_name and len(links) == 1 else "",
        languages=_languages(cards),
        pipeline_tag=_agreed(card.pipeline_tag for card in cards),
        licenses={source.declared.name: _stated(source.card) for source in sources if source.card.license},
    )


def _stated(card: SourceCard) -> str:
    return f"{card.license} ({card.license_name})" if card.license_name else card.license


def _languages(cards: Iterable[SourceCard]) -> tuple[str, ...]:
    """Return the languages of the first card that states any, if all that do state the same ones."""
    stated = [card.languages for card in cards if card.languages]
    return stated[0] if len({frozenset(languages) for languages in stated}) == 1 else ()


def _agreed(values: Iterable[str]) -> str:
    stated = {value for value in values if value}
    return stated.pop() if len(stated) == 1 else ""


def _repository(source: Source) -> tuple[str, ...]:
    """Return the repository that a location names: one of a hub, or a folder in a hub's cache."""
    found = [source.hub] if source.hub is not None else []
    found += [f"{match['owner']}/{match['name']}" for match in _CACHED.finditer(source.place or "")]
    return tuple(name for name in found[:1] if is_hub_id(name))


def _origin(text: str) -> tuple[str, ...]:
    owner, _, name = text.partition("/")
    is_folder = owner.lower() in _FOLDERS or _TRAINING.fullmatch(name) is not None
    return (text,) if is_hub_id(text) and not is_folder else ()


def _folder(source: Source) -> tuple[str, ...]:
    return tuple(name for name in list(_names(source.place or ""))[-1:] if is_hub_name(name))


def _names(path: str) -> Iterator[str]:
    """Yield the names of a path's folders; a file is known by the folder that it is in."""
    for name in path.split("/"):
        if name not in ("", ".", "..", "~") and not name.endswith(".safetensors"):
            yield name
