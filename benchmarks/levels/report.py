"""The tables of docs/levels-measured.md, put between its markers from the committed figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.budgets.report import percent
from benchmarks.levels.plot import draw
from benchmarks.levels.results import Json, load
from benchmarks.pages import put, table
from mergepipe.units import format_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "levels-measured.md", DOCS / "images" / "levels-family.svg"
DOMAINS = ("python", "c", "legal", "js", "docs", "mean")


def render() -> None:
    """Write the tables and the picture anew; sections that were never measured stay as they are."""
    found = load()
    text = PAGE.read_text(encoding="utf-8")
    for name, make in SECTIONS.items():
        if name.split()[0] in found:
            text = put(text, name, make(found[name.split()[0]]))
    PAGE.write_text(text, encoding="utf-8")
    if "family" in found:
        draw(found["family"], PICTURE)


def facts(found: Json) -> str:
    """Return where and when it was measured."""
    return f"Machine: {found['machine']}, {found['load']}. Date: {found['date']}."


# --- the real family ------------------------------------------------------------------------------------------------


def distances(found: Json) -> str:
    """Return the table of distances and bounds of all operators."""

    def rows() -> Iterator[Sequence[str]]:
        for operator, measured in found["operators"].items():
            budgets = sorted({int(name.split("-")[1]) for name in measured["rows"]})
            for budget in budgets:
                levels, blocks = (measured["rows"][f"{kind}-{budget}"] for kind in ("levels", "blocks"))
                yield (
                    operator,
                    f"{budget}%",
                    percent(levels["planned"] / levels["full"]),
                    f"{levels['deviation']:.4f}",
                    f"{levels['bound']:.3f}",
                    f"{levels['bound'] / levels['deviation']:.2f}",
                    f"{blocks['deviation']:.4f}",
                    f"{blocks['deviation'] / levels['deviation']:.1f}x",
                )

    head = ("operator", "budget", "read", "levels", "bound", "bound / true", "blocks", "blocks / levels")
    return table(head, rows())


def perplexities(found: Json) -> str:
    """Return the table of perplexities next to those of the full merge."""

    def rows() -> Iterator[Sequence[str]]:
        for operator, measured in found["operators"].items():
            full = measured["full"]
            yield (operator, "full", *(f"{full[domain]:.3f}" for domain in DOMAINS))
            scored = ((name, row) for name, row in measured["rows"].items() if row["perplexity"])
            for name, row in sorted(scored, key=_by_kind):
                cells = (_next_to(row["perplexity"][domain], full[domain]) for domain in DOMAINS)
                yield (operator, name.replace("-", ", ") + "%", *cells)

    return table(("operator", "read", *DOMAINS), rows())


def _by_kind(item: tuple[str, Json]) -> tuple[bool, int]:
    kind, budget = item[0].split("-")
    return kind != "levels", int(budget)


def _next_to(value: float, full: float) -> str:
    return f"{value:.3f} ({100 * (value / full - 1):+.2f}%)"


# --- real shapes ----------------------------------------------------------------------------------------------------


def shape_distances(found: Json) -> str:
    """Return the table of distances on the synthetic family."""

    def rows() -> Iterator[Sequence[str]]:
        for budget in sorted({int(name.split("-")[1]) for name in found["distances"]}):
            levels, blocks = (found["distances"][f"{kind}-{budget}"] for kind in ("levels", "blocks"))
            yield (
                f"{budget}%",
                format_bytes(levels["bytes"]),
                f"{levels['deviation']:.4f}",
                f"{levels['bound']:.3f}",
                f"{blocks['deviation']:.4f}",
            )

    return table(("budget", "expert bytes read", "levels", "bound", "blocks"), rows())


def builds(found: Json) -> str:
    """Return the table of builds in turn."""

    def rows() -> Iterator[Sequence[str]]:
        for name, one in found["builds"].items():
            yield (
                name,
                format_bytes(one["expert_bytes"]["read"]),
                format_bytes(one["read"]),
                f"{one['rss'] / 1e6:.0f} MB",
                f"{one['cpu']:.2f}",
                f"{one['wall']:.2f} ({one['least']:.2f} to {one['most']:.2f})",
                f"{one['to_full']:.2f}",
            )

    head = ("build", "expert bytes", "read", "peak RSS of a process", "CPU, s", "wall, s", "/ full read")
    return table(head, rows())


def break_even(found: Json) -> str:
    """Return what the pass costs, and after how many merges it has paid for itself."""
    levels, blocks = (found["indexes"][kind] for kind in ("levels", "blocks"))
    full, quick = (found["builds"][name]["wall"] for name in ("full read, cold", "10% in levels, cold"))
    experts = found["builds"]["full read, cold"]["expert_bytes"]["full"]
    merges = levels["wall"] / (full - quick) if full > quick else float("inf")
    return (
        f"The pass took {levels['wall']:.1f} s cold ({levels['cpu']:.1f} s of CPU, {levels['rss'] / 1e6:.0f} MB), and"
        f" {blocks['wall']:.1f} s ({blocks['cpu']:.1f} s) where no codes are made. The codes take"
        f" {format_bytes(found['code_bytes'])}, {percent(found['code_bytes'] / experts)} of the experts' bytes. A merge"
        f" with 10% in levels takes {quick:.1f} s where a full read takes {full:.1f} s: {merges:.1f} merges pay for the"
        " pass."
    )


# --- the code alone -------------------------------------------------------------------------------------------------


def rates(found: Json) -> str:
    """Return the table of the code."""

    def rows() -> Iterator[Sequence[str]]:
        for number, level in enumerate(found["levels"], 1):
            yield (
                str(number),
                str(level["bits"]),
                percent(level["bytes"] / 2),
                f"{level['residual']:.4f}",
                f"{level['decode'] / 1e6:,.0f}",
                f"{1e9 / level['decode']:.2f}",
            )

    head = ("level", "bits", "of the bf16 bytes", "residual", "decoded, million elements/s", "ns an element")
    text = (
        f"Encoding, residuals of all levels among it: {found['encode'] / 1e6:,.0f} million elements a second and core"
        f" ({1e9 / found['encode']:.1f} ns an element)."
    )
    return f"{text}\n\n{table(head, rows())}"


SECTIONS: dict[str, Callable[[Json], str]] = {
    "family facts": facts,
    "family distances": distances,
    "family perplexities": perplexities,
    "synthetic facts": facts,
    "synthetic distances": shape_distances,
    "synthetic builds": builds,
    "synthetic break-even": break_even,
    "code facts": facts,
    "code rates": rates,
}
