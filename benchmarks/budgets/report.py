"""The tables of docs/budgets-measured.md, put between its markers from the committed figures."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.budgets.plot import draw
from benchmarks.budgets.results import Json, load
from benchmarks.pages import put, table
from mergepipe.units import format_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "budgets-measured.md", DOCS / "images" / "budgets-family.svg"
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


def percent(value: float | None) -> str:
    """Return a share in percent with three digits."""
    if value is None:
        return "none"
    return "0%" if value == 0 else f"{100 * value:.3g}%"


# --- the real family ----------------------------------------------------------------------------------------------


def distances(found: Json, operator: str) -> str:
    """Return the distances of one operator: ours, and the same bytes chosen otherwise."""
    measured = found["operators"][operator]
    head = ["budget", "read", "blocks", "deviation", "expected", "bound", "at random: mean (min to max)", "hash order"]
    head += ["random / ours", "hash / ours", "nearest other / ours"]

    def rows() -> Iterator[Sequence[str]]:
        for budget, row in _by_budget(measured):
            ours = row["gain"]
            share = percent(ours["bytes"] / measured["expert_bytes"])
            cells = [f"{budget}%", f"{format_bytes(ours['bytes'])} ({share})", str(ours["blocks"])]
            cells += [f"**{percent(ours['deviation'])}**"]
            cells += [percent(ours[name]) for name in ("expected", "bound")]
            yield [*cells, *(_others(row) if "random" in row else ["the same"] * 2 + ["-"] * 3)]

    return table(head, rows())


def _others(row: Json) -> list[str]:
    ours, hashed = row["gain"]["deviation"], row["hash"]["deviation"]
    random = [point["deviation"] for point in row["random"]]
    mean = statistics.fmean(random)
    spread = f"{percent(mean)} ({percent(min(random))} to {percent(max(random))})"
    ratios = [mean / ours, hashed / ours, min(*random, hashed) / ours]
    return [spread, percent(hashed), *(f"{ratio:.2f}" for ratio in ratios)]


def perplexities(found: Json, operator: str) -> str:
    """Return the perplexities of one operator, by domain, and the means of the other choices."""
    measured = found["operators"][operator]
    head = ["budget", *DOMAINS, "mean, at random", "mean, hash order"]

    def rows() -> Iterator[Sequence[str]]:
        yield ["base", *(f"{found['base'][name]:.2f}" for name in DOMAINS), "", ""]
        for budget, row in _by_budget(measured):
            cells = [f"{budget}%", *(f"{row['gain']['perplexity'][name]:.2f}" for name in DOMAINS)]
            if "random" not in row:
                yield [*cells, "the same", "the same"]
                continue
            random = [point["perplexity"]["mean"] for point in row["random"] if "perplexity" in point]
            yield [*cells, ", ".join(f"{mean:.2f}" for mean in random), f"{row['hash']['perplexity']['mean']:.2f}"]

    return table(head, rows())


def _by_budget(measured: Json) -> list[tuple[int, Json]]:
    return sorted((int(budget), row) for budget, row in measured["budgets"].items())


def _where(found: Json) -> str:
    """Return where and when times were taken."""
    return f"Machine: {found['machine']}; {found['load']}. Date: {found['date']}."


def family_facts(found: Json) -> str:
    """Return what was merged, and on what."""
    first = next(iter(found["operators"].values()))
    size = f"{len(found['experts'])} experts, {format_bytes(first['expert_bytes'])} of them in {first['expert_blocks']}"
    updates = ", ".join(f"{percent(m['update_to_output'])} for `{op}`" for op, m in sorted(found["operators"].items()))
    return (
        f"{size} blocks, {found['seeds']} random seeds. The update is as long as {updates} of the merged weights."
        f" Machine: {found['machine']}. Date: {found['date']}."
    )


# --- the synthetic family -----------------------------------------------------------------------------------------


def builds(found: Json) -> str:
    """Return the builds in turn."""
    head = ["build", "expert bytes merged", "read to measure", "base", "wall, s (min to max)", "full read / this"]
    head += ["CPU, s", "peak RSS"]

    def rows() -> Iterator[Sequence[str]]:
        for name, one in found["builds"].items():
            low, high = one["wall_range"]
            yield [
                name,
                format_bytes(one["expert_bytes"]["read"]),
                format_bytes(one["index_bytes"]),
                format_bytes(one["base_bytes"]),
                f"{one['wall']:.2f} ({low:.2f} to {high:.2f})",
                f"{one['speedup']:.2f}",
                f"{one['cpu']:.1f}",
                format_bytes(one["rss"]),
            ]

    emptied = "" if found["page_cache_emptied"] else " The page cache could not be emptied: cold runs were warm."
    facts = (
        f"Shape {found['shape']}, {found['experts']} experts and the base, bfloat16, `task_arithmetic` with weights of"
        f" {found['weight']}; {found['rounds']} rounds, in each of which every row ran once, in this order: medians,"
        f" and of the peaks the largest.{emptied} {_where(found)}"
    )
    return f"{facts}\n\n{table(head, rows())}"


def synthetic_distances(found: Json) -> str:
    """Return how far the builds with a budget are from the full read."""
    head = ["what is read", "expert bytes", "of the update", "of the weights", "bound, of the update"]
    head += ["stored in bfloat16: of the update", "of the weights"]
    exact, stored = (found["distances"][dtype] for dtype in ("float32", "bfloat16"))

    def rows() -> Iterator[Sequence[str]]:
        whole = [percent(one["update_to_output"]) for one in (exact, stored)]
        yield ["nothing", "0 B", "100%", whole[0], "", "100%", whole[1]]
        for name, one in exact["choices"].items():
            also = stored["choices"][name]
            yield [
                {"gain": "**10%, as mergepipe plans it**", "hash": "10% in hash order"}.get(name, f"10%, {name}"),
                format_bytes(one["bytes"]),
                percent(one["to_update"]),
                percent(one["to_output"]),
                percent(one["bound_to_update"]),
                percent(also["to_update"]),
                percent(also["to_output"]),
            ]

    return table(head, rows())


# --- the planner --------------------------------------------------------------------------------------------------


def planner(found: Json) -> str:
    """Return what planning took."""
    return (
        f"{found['blocks']:,} expert blocks in {found['tensors']} tensors ({found['experts']} experts of a 70B model,"
        f" {format_bytes(found['expert_bytes'])}) are put in order, cut for 21 budgets and a `max_error`, and made into"
        f" an access set in **{found['seconds']:.2f} s** (median of {found['rounds']}; the slowest took"
        f" {found['slowest']:.2f} s), {found['order_seconds']:.2f} s of it for the order; {found['cpu']:.2f} s of CPU"
        " time. Peak RSS of the process:"
        f" **{format_bytes(found['rss'])}**, of which {format_bytes(found['rss_before'])} were there before planning"
        f" began. {_where(found)}"
    )


OPERATORS = ("task_arithmetic", "ties")
SECTIONS: Mapping[str, Callable[[Json], str]] = {
    "family facts": family_facts,
    **{f"family distances {name}": functools.partial(distances, operator=name) for name in OPERATORS},
    **{f"family perplexity {name}": functools.partial(perplexities, operator=name) for name in OPERATORS},
    "synthetic builds": builds,
    "synthetic distances": synthetic_distances,
    "planning facts": planner,
}
