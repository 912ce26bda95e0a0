"""The model card of a progressive checkpoint: what it is, and how it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe._version import __version__
from mergepipe.publish.escaping import fenced, yaml_scalar
from mergepipe.publish.sourcecard import SourceCard
from mergepipe.units import format_bytes
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLevel:
    """A level of the codes: bits for each element, bytes up to it, and the relative norm of what it lacks."""

    bits: int
    nbytes: int
    error: float | None


def standalone_card(
    card: SourceCard | None, *, base: str, expert: str, expert_bytes: int, levels: Sequence[CardLevel]
) -> bytes:
    """Return the `README.md` of a progressive checkpoint.

    Parameters
    ----------
    card
        What the expert's own card states: license, languages and the model that it was made from are taken over.
    base, expert
        Content digests, as they are written.
    levels
        What the codes come to, level by level.
    """
    lines = ["---", "library_name: mergepipe", "tags:", "- mergepipe", "- progressive"]
    lines += _taken_over(card) if card is not None else ()
    lines += ["---", "", "# A progressive checkpoint", ""]
    lines += [
        "This folder holds a fine-tuned model as codes of its differences from its base, most significant bits first.",
        "No library loads it as a model: mergepipe merges from it, and reads as much of it as a budget allows.",
        "",
    ]
    mergefile = [
        "[sources.expert]",
        'progressive = "PATH/OF/THIS/FOLDER"',
        "",
        "[outputs.merged]",
        'operator = "task_arithmetic"',
        'base = "base"',
        'experts = ["expert"]',
        "",
        "[outputs.merged.budget]",
        'expert_reads = "10%"',
        'precision = "levels"',
    ]
    lines += [*fenced("\n".join(mergefile), "toml"), ""]
    lines += [f"- base: `{base}`", f"- expert: `{expert}` ({format_bytes(expert_bytes)})", ""]
    lines += ["| bits an element | bytes | of the expert | lacks of the difference |", "| --- | --- | --- | --- |"]
    for level in levels:
        share = level.nbytes / expert_bytes if expert_bytes else 0.0
        error = "none" if level.error is None else f"{level.error:.3%}"
        lines.append(f"| {level.bits} | {format_bytes(level.nbytes)} | {share:.1%} | {error} |")
    lines += ["", f"Packed by mergepipe {__version__}.", ""]
    return "\n".join(lines).encode()


def _taken_over(card: SourceCard) -> Iterator[str]:
    if card.license:
        yield f"license: {yaml_scalar(card.license)}"
    if card.license_name:
        yield f"license_name: {yaml_scalar(card.license_name)}"
    if card.license_link:
        yield f"license_link: {yaml_scalar(card.license_link)}"
    for key, values in (("language", card.languages), ("base_model", card.base_models)):
        if values:
            yield f"{key}:"
            yield from (f"- {yaml_scalar(value)}" for value in values)
