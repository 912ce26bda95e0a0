"""The page docs/parity.md, made from the figures in results.json and the words in explanations.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.parity.cases import METHODS
from benchmarks.parity.explanations import CAUSES, DIFFERENCES, HEAD, MASKS, PERPLEXITIES, SPACES

if TYPE_CHECKING:
    from benchmarks.parity.edges import Edge
    from benchmarks.parity.runner import Outcome

RESULTS = Path(__file__).resolve().parent / "results.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
_COUNTS = ("elements", "equal", "one", "undecided", "deliberate", "rounding", "nearer", "unexplained", "largest",
           "emulated", "reproduced", "counts", "other_counts", "ours_elsewhere",
           "theirs_elsewhere")  # fmt: skip
_COLUMNS = ("method", "settings that were varied", "cases", "elements", "bit-equal", "largest ulp distance",
            "largest distance, units of the inputs", "off the exact value: ours", "mergekit", "differs by choice",
            "by design", "unexplained")  # fmt: skip
_BUCKETS = ((1, 1, "1"), (2, 3, "2-3"), (4, 15, "4-15"), (16, 255, "16-255"), (256, 1 << 40, "256+"))


def _load() -> dict[str, Any]:
    empty: dict[str, Any] = {"methods": {}, "perplexity": {}, "edges": []}
    return empty | (json.loads(RESULTS.read_text()) if RESULTS.exists() else {})


def _save(results: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def record(method: str, outcome: Outcome) -> None:
    """Put the figures of a method into results.json."""
    total, results = outcome.total, _load()
    results["methods"][method] = {
        "cases": outcome.cases,
        "cases_equal": outcome.exact_cases,
        "refused": outcome.refused,
        **{name: getattr(total, name) for name in _COUNTS},
        **{name: float(f"{getattr(total, name):.3g}") for name in ("scaled", "ours_off", "theirs_off")},
        "ulps": {str(bucket): count for bucket, count in sorted(total.histogram.items())},
        "masks": {
            str(number): {"elements": g.elements, "kept": g.kept, "expected": round(g.expected, 1),
                          "deviation": round(g.deviation, 2), "mean": round(g.mean_deviation, 2)}
            for number, g in sorted(outcome.masks.groups.items())
            if g.elements
        },
        "worst": total.worst[:5],
    }  # fmt: skip
    _save(results)


def record_perplexity(method: str, recipe: Mapping[str, Any], found: Mapping[str, list[float]]) -> None:
    """Put the scores of a method into results.json."""
    results = _load()
    results["perplexity"][method] = {"recipe": recipe, **found}
    _save(results)


def record_edges(edges: list[Edge]) -> None:
    """Put what both sides do at the edges into results.json."""
    results = _load()
    results["edges"] = [{"what": e.what, "mergekit": e.mergekit, "ours": e.ours} for e in edges]
    _save(results)


def render() -> None:
    """Write the page."""
    results = _load()
    methods = results["methods"]
    tables = (_table(methods), _ulps(methods), _masks(methods), _differences(methods))
    parts = (HEAD, *tables, _edges(results["edges"]), _perplexities(results["perplexity"]))
    PAGE.write_text("\n\n".join(part.strip() for part in parts if part) + "\n")


def _known(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(method, found[method]) for method in METHODS if method in found]


def _share(part: int, whole: int) -> str:
    if part in (0, whole):
        return f"{100 * part // max(whole, 1)} %"
    digits = 2
    while round(100 * part / whole, digits) in (0, 100) and digits < 7:
        digits += 1
    return f"{100 * part / whole:.{digits}f} %"


def _table(methods: Mapping[str, Any]) -> str:
    rows = [
        "## Results",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "| --- |" + " --- |" * (len(_COLUMNS) - 1),
    ]
    for method, found in _known(methods):
        rows.append(
            f"| `{method}` | {SPACES[method]} | {found['cases'] - len(found['refused'])} | {found['elements']:,}"
            f" | {_share(found['equal'], found['elements'])} | {found['largest']:,} | {found['scaled']:g}"
            f" | {found['ours_off']:g} | {found['theirs_off']:g} | {found['undecided']:,} | {found['deliberate']:,}"
            f" | {found['unexplained']:,} |"
        )
    return "\n".join(rows)


def _ulps(methods: Mapping[str, Any]) -> str:
    rows = [
        "### Distances in units in the last place of the output",
        "",
        "| method | equal | " + " | ".join(label for *_, label in _BUCKETS) + " |",
        "| --- |" + " --- |" * (1 + len(_BUCKETS)),
    ]
    for method, found in _known(methods):
        whole = sum(found["ulps"].values())
        counts = [
            sum(count for bucket, count in found["ulps"].items() if low <= int(bucket) <= high)
            for low, high in ((0, 0), *((low, high) for low, high, _ in _BUCKETS))
        ]
        rows.append(f"| `{method}` | " + " | ".join(_share(count, whole) for count in counts) + " |")
    return "\n".join(rows)


def _masks(methods: Mapping[str, Any]) -> str:
    rows = [
        "### Random masks",
        "",
        MASKS,
        "",
        "| method | group | elements | kept | expected | deviation | of the sum of kept deltas |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method, found in _known(methods):
        rows += [
            f"| `{method}` | {int(number) + 1} | {g['elements']:,} | {g['kept']:,} | {g['expected']:,.1f}"
            f" | {g['deviation']:+.2f} | {g['mean']:+.2f} |"
            for number, g in found["masks"].items()
        ]
    return "\n".join(rows) if len(rows) > 6 else ""


def _differences(methods: Mapping[str, Any]) -> str:
    parts = ["## Differences, one by one", CAUSES.strip()]
    parts += [f"### `{method}`\n\n{DIFFERENCES[method].format(**found).strip()}" for method, found in _known(methods)]
    return "\n\n".join(parts)


def _edges(edges: list[Mapping[str, str]]) -> str:
    if not edges:
        return ""
    rows = ["## Edges", "", "What both sides do where a formula has no good answer.", "",
            "| case | mergekit 0.1.5 | mergepipe |", "| --- | --- | --- |"]  # fmt: skip
    return "\n".join([*rows, *(f"| {e['what']} | {e['mergekit']} | {e['ours']} |" for e in edges)])


def _perplexities(found: Mapping[str, Any]) -> str:
    if "linear" not in found:
        return ""
    mean = {m: {side: sum(f[side]) / len(f[side]) for side in ("mergepipe", "mergekit")} for m, f in found.items()}
    uniform, theirs = mean["linear"]["mergepipe"], mean["linear"]["mergekit"]
    rows = [
        "## Does the merged model work as well?",
        "",
        PERPLEXITIES,
        "",
        "| method | settings | mergepipe | mergekit | uniform average | ours minus mergekit's | not worse by more |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method, _ in _known(found):
        ours, other = mean[method]["mergepipe"], mean[method]["mergekit"]
        spread = max(max(f) - min(f) for f in (found[method]["mergepipe"], found[method]["mergekit"]))
        allowed = 1e-5 + spread
        seeds = f" (spread over seeds {spread:.1e})" if spread else ""
        good = (ours - uniform) - (other - theirs) <= allowed
        rows.append(
            f"| `{method}` | {_settings(found[method]['recipe'])} | {ours:.6f} | {other:.6f} | {uniform:.6f}"
            f" | {ours - other:+.1e}{seeds} | {'yes' if good else '**no**'} |"
        )
    return "\n".join(rows)


def _settings(recipe: Mapping[str, Any]) -> str:
    first = recipe["experts"][0]
    own = {} if isinstance(first, str) else {k: v for k, v in first.items() if k != "source"}
    both = own | {k: v for k, v in recipe.get("params", {}).items() if k != "seed"}
    return ", ".join(f"{name} {value}" for name, value in both.items()) or "-"
