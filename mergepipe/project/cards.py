"""What goes into the model cards of outputs: gathered from sources, also through the outputs that one is made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mergepipe.checkpoints.place import Place
from mergepipe.digest import format_digest, record_digest
from mergepipe.engine.results import FinishedOutput
from mergepipe.lockfile.records import LockedOutput
from mergepipe.mergefile.excerpt import excerpt
from mergepipe.mergefile.schema import Mergefile
from mergepipe.plan.values import OutputPlan
from mergepipe.project.stages import Plans, shown_root
from mergepipe.publish.card import model_card
from mergepipe.publish.carried import CardSource, Carried, carry
from mergepipe.publish.sidefiles import CONFIG
from mergepipe.publish.sourcecard import SourceCard, read_source_card
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card says beside what follows from the plan.

    Attributes
    ----------
    excerpt
        The part of the Mergefile that declares the output.
    locations
        Per source where it is; None for another output of the Mergefile.
    carried
        What is taken over from the sources' own cards and configs.
    """

    excerpt: str
    locations: Mapping[str, str | None]
    carried: Carried

    def digest(self) -> bytes:
        """Return a digest of all of it: when it changes, the card does."""
        return record_digest("card", self.excerpt, dict(self.locations), self.carried.digest())


def card_facts(plan: OutputPlan, plans: Plans) -> CardFacts:
    """Return what an output's card says beside its plan; reads the cards of its sources, as far as there are any."""
    sources = {source.declared.name: source for source in _card_sources(plan, plans)}
    return CardFacts(
        excerpt=excerpt(_without_defaults(plans.mergefile, plan), plan.output.name, plan.sources),
        locations={name: _location(name, plans) for name in plan.sources},
        carried=carry(tuple(sources.values())),
    )


def _without_defaults(mergefile: Mergefile, plan: OutputPlan) -> Mergefile:
    """Return the Mergefile without a tokenizer that is as it would be if nothing was said.

    A manifest does not tell the two apart, and a replay must write the same card.
    """
    output = mergefile.outputs[plan.output.name]
    if output.write.tokenizer != plan.definer:
        return mergefile
    output = replace(output, write=replace(output.write, tokenizer=None))
    return replace(mergefile, outputs={**mergefile.outputs, output.name: output})


def output_card(
    finished: FinishedOutput, locked: LockedOutput, facts: CardFacts, files: Mapping[str, bytes]
) -> bytes:
    """Return the card of a finished output; ``files`` are those that lie beside the weights, by name."""
    return model_card(
        finished.plan,
        facts.locations,
        {name: format_digest(digest) for name, digest in locked.sources.items()},
        excerpt=facts.excerpt,
        carried=facts.carried,
        digest=format_digest(locked.digest),
        has_config=CONFIG in files,
    )


def _card_sources(plan: OutputPlan, plans: Plans) -> Iterator[CardSource]:
    """Yield the sources of an output, those of the outputs that it is made from in their place."""
    for name in plan.sources:
        if name in plans.stages:
            yield from _card_sources(plans.stages[name].plan, plans)
            continue
        declared, checkpoint = plans.mergefile.sources[name], plans.checkpoints[name]
        card = SourceCard()
        if checkpoint.is_folder or checkpoint.adapter is not None:
            place = Place(label=name, root=checkpoint.root, shown=shown_root(plans.mergefile, checkpoint))
            card = read_source_card(place)
        own = checkpoint.config if checkpoint.adapter is None else {}  # an adapter's is that of what it applies to
        origin = own.get("_name_or_path")
        yield CardSource(declared=declared, origin=origin if isinstance(origin, str) else "", card=card)


def _location(name: str, plans: Plans) -> str | None:
    declared = plans.mergefile.sources.get(name)
    return None if declared is None else declared.place or declared.hub or name
