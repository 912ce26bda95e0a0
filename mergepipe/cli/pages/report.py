"""The page of a built output: one HTML file that needs nothing else, with figures, maps and tables.

All that it shows is in one value (`mergepipe.project.report_page`), which `report --json` prints as well; nothing is
computed here but words. The tables stand in the page as they are: without a script they only cannot be sorted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mergepipe.cli.pages.filling import filled, part, text
from mergepipe.cli.pages.maps import STEPS
from mergepipe.cli.pages.report_maps import map_section
from mergepipe.cli.pages.report_parts import (
    Column,
    digest,
    figures,
    name_text,
    number,
    share,
    short,
    table,
)
from mergepipe.signatures import COMMON_PARAMS
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.explain import ParameterGroup
    from mergepipe.project.report_page import OutputReported, ReportedTensor

GENERATOR = '<meta name="generator" content="mergepipe report">'
"""Stands near the beginning of every page: a file that has it may be overwritten."""


_DEFAULTS = {spec.name: spec.default for spec in COMMON_PARAMS}


def page(report: OutputReported) -> str:
    """Return the page of one output."""
    sections = [
        ("summary", "Summary", _summary(report)),
        ("sources", "Sources", _sources(report)),
        ("parameters", "Parameters", _parameters(report)),
        ("budget", "Budget and bound", _budget(report)),
        ("maps", "Layers and modules", map_section(report)),
        ("modules", "What each expert gave", _modules(report)),
        ("build", "The last build", _build(report)),
        ("tensors", "Tensors", _tensors(report)),
    ]
    parts = {
        "title": text(f"{report.output}: a merged model"),
        "name": text(report.output),
        "summary": text(_sentence(report)),
        "version": text(report.mergepipe),
        "contents": "\n".join(f'<li><a href="#{name}">{text(title)}</a></li>' for name, title, _ in sections),
        "sections": "\n".join(_section(name, title, body) for name, title, body in sections),
        "style": part("report.css") + _colours(),
        "script": part("report.js"),
    }
    return filled("report.html", parts)


def _section(name: str, title: str, body: Iterator[str]) -> str:
    head = f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{text(title)}</h2>'
    return "\n".join([head, *body, "</section>"])


def _colours() -> str:
    """Return the classes of the scale's colours."""
    rule = ".h{0} {{ fill: color-mix(in oklab, var(--heat1) {1:g}%, var(--heat0)); }}\n"
    return "".join(rule.format(step, 100 * step / STEPS) for step in range(STEPS + 1))


def _sentence(report: OutputReported) -> str:
    experts = format_count(len(report.experts), "expert")
    base = f" on {report.base}" if report.base is not None else ""
    where = f", in {report.path}" if report.path is not None else ", not published"
    return f"{report.operator} of {experts}{base}{where}."


def _summary(report: OutputReported) -> Iterator[str]:
    cost, budget, total = report.cost, report.budget, report.contribution
    update = None if total is None else total.update_relative
    yield figures(
        [
            ("operator", "Operator", report.operator, text(f"{report.operator} (version {report.operator_version})")),
            ("digest", "Digest", report.digest, digest(report.digest)),
            ("tensors", "Tensors", cost.tensors, number(cost.tensors)),
            ("output_bytes", "Size", cost.output_bytes, text(format_bytes(cost.output_bytes)), "in "
             + format_count(cost.shards, "file")),
            ("expert_bytes.planned", "Read of the experts", budget.expert_bytes["planned"],
             text(format_bytes(budget.expert_bytes["planned"])), f"of {format_bytes(budget.expert_bytes['full'])}"),
            ("bound.relative_to_update", "Error bound", budget.bound.relative_to_update, text(_bound(report))),
            ("update_relative", "Update", update, share(update), "its norm, of the base's"),
        ]
    )  # fmt: skip
    for decision in report.decisions:
        yield f"<p>{text(decision)}</p>"


def _bound(report: OutputReported) -> str:
    bound = report.budget.bound
    most = "about" if bound.kind == "estimated" else "at most"
    if bound.kind == "exact":
        return "none: nothing is left out"
    if bound.relative_to_update is not None:
        return f"{most} {short(100 * bound.relative_to_update)}% of the update ({bound.kind})"
    return "not known" if bound.absolute is None else f"{most} {short(bound.absolute)} ({bound.kind})"


def _sources(report: OutputReported) -> Iterator[str]:
    columns = [Column("Source", is_name=True), Column("Role"), Column("Where", is_name=True), Column("Digest"),
               Column("Tensors", is_number=True), Column("Size", is_number=True)]  # fmt: skip
    rows = [
        [
            text(source.source),
            text(", ".join(source.roles)),
            text(", ".join(value if key == "path" else f"{key} {value}" for key, value in source.location.items())),
            digest(source.digest),
            number(source.tensors),
            text(format_bytes(source.bytes)),
        ]
        for source in report.sources
    ]
    yield table("source-table", columns, rows)


def _parameters(report: OutputReported) -> Iterator[str]:
    for place, operator in enumerate(dict.fromkeys((group.operator, group.decision) for group in report.groups)):
        groups = [group for group in report.groups if (group.operator, group.decision) == operator]
        merged = operator[1] == "merge"
        count = format_count(sum(len(group.tensors) for group in groups), "tensor")
        yield f"<h3>{text(operator[0] if merged else 'Copied')} <small>{text(count)}</small></h3>"
        if not merged:
            yield "<p>No floating point: copied, and the same in every source.</p>"
            continue
        yield _group_table(place, groups)


def _group_table(place: int, groups: Sequence[ParameterGroup]) -> str:
    """Return the parameters of tensors that one operator merges, a row for those that are merged alike."""
    shown = list(dict.fromkeys(key for group in groups for key, value in group.params.items() if _is_told(key, value)))
    own = list(dict.fromkeys((source, key) for group in groups for source, keys in group.experts.items()
                             for key in keys))  # fmt: skip
    columns = [Column("Layers"), Column("Tensors", is_number=True), *(Column(key, is_number=True) for key in shown)]
    columns += [Column(f"{source}: {key}", is_number=True) for source, key in own]
    rows = [
        [
            text(_layers(group)),
            number(len(group.tensors)),
            *(text(_value(group.params.get(key, "–"))) for key in shown),
            *(text(_value(group.experts.get(source, {}).get(key, "–"))) for source, key in own),
        ]
        for group in groups
    ]
    return table(f"parameters-{place}", columns, rows, label="Parameters")


def _layers(group: ParameterGroup) -> str:
    """Return the layers of a group in words: ``0 to 3, 7, outside``."""
    runs: list[list[int]] = []
    for layer in group.layers:
        if layer is None:
            continue
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join([*words, *(["outside"] if None in group.layers else [])])


def _is_told(key: str, value: object) -> bool:
    """Return whether a parameter is shown: a common one only where it is not at its default."""
    return key not in _DEFAULTS or _DEFAULTS[key] != value


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _budget(report: OutputReported) -> Iterator[str]:
    budget = report.budget
    planned, full = budget.expert_bytes["planned"], budget.expert_bytes["full"]
    blocks = budget.expert_blocks
    entries: list[tuple[object, ...]] = [
        ("budget", "Budget", budget.budget, text(budget.budget)),
        ("expert_bytes.full", "A full read", full, text(format_bytes(full))),
        ("expert_bytes.share", "Planned", planned, text(format_bytes(planned)), share(planned / full if full else 1.0)),
        ("bound.kind", "Bound", budget.bound.kind, text(_bound(report))),
        ("bound.absolute", "Bound, as a norm", budget.bound.absolute, text(short(budget.bound.absolute))),
        ("expected_error", "Expected error", budget.expected_error, text(short(budget.expected_error)), "an estimate"),
        ("omitted_mass", "Of the deltas left out", budget.omitted_mass, share(budget.omitted_mass)),
    ]
    entries += [(f"expert_blocks.{key}", f"Expert blocks: {key}", n, number(n)) for key, n in blocks.items()]
    entries += [(f"levels.{key}", f"Expert blocks: {_level(key)}", n, number(n)) for key, n in
                (budget.levels or {}).items() if key != "omitted"]  # fmt: skip
    yield figures(entries)
    rows = [[text(source), number(count), text(format_bytes(count))] for source, count in budget.by_expert.items()]
    columns = [Column("Expert"), Column("Bytes read", is_number=True), Column("", is_number=True)]
    yield "<h3>Of each expert</h3>"
    yield table("by-expert", columns, rows, label="What a build from nothing reads of each expert")
    if budget.losses:
        yield "<h3>What loses most</h3>"
        columns = [Column("Tensor", is_name=True), *(Column(title, is_number=True) for title in
                   ("Left out", "Of its deltas", "Expected", "Bound"))]  # fmt: skip
        yield table("loss-table", columns, [
            [name_text(loss.tensor), text(format_bytes(loss.omitted_bytes)), share(loss.omitted_mass),
             text(short(loss.expected)), text(short(loss.bound))]
            for loss in budget.losses
        ])  # fmt: skip


def _level(key: str) -> str:
    """Return the name of a level in words."""
    return "read exactly" if key == "exact" else f"at level {key}"


def _modules(report: OutputReported) -> Iterator[str]:
    if report.contribution is None:
        yield f"<p>Not known: {text(report.not_measured or '')}.</p>"
        return
    yield ("<p>Of the update: the share of a module in the square of the update's length, so that shares add up to"
           " 100%. Of the base: the length of its update over that of its base. Of each expert: its share by norm (its"
           " delta times its weight), and the cosine of its delta with the update.</p>")  # fmt: skip
    names = [expert.source for expert in report.contribution.experts]
    columns = [Column("Module", is_name=True), *(Column(title, is_number=True) for title in ("Tensors", "Of the update",
               "Of the base", "Signs agree", *names))]  # fmt: skip
    rows = []
    for module in report.modules:
        own = {expert.source: expert for expert in module.contribution.experts}
        cells = []
        for name in names:
            expert = own.get(name)
            cells.append(text("–") if expert is None else _given(expert.norm_share, expert.cosine))
        found = module.contribution
        rows.append([name_text(module.module), number(module.tensors), share(module.update_share),
                     share(found.update_relative), share(found.sign_agreement), *cells])  # fmt: skip
    yield table("module-table", columns, rows)


def _given(norm_share: float | None, cosine: float | None) -> str:
    """Return an expert's share by norm and its cosine."""
    return f"{share(norm_share)} / {text('–' if cosine is None else f'{cosine:.2f}')}"


def _build(report: OutputReported) -> Iterator[str]:
    cost, last = report.cost, report.last
    yield "<h3>From nothing</h3>"
    yield figures([
        ("cost.expert_bytes", "Read of experts", cost.expert_bytes, text(format_bytes(cost.expert_bytes))),
        ("cost.base_bytes", "Read of the base", cost.base_bytes, text(format_bytes(cost.base_bytes))),
        ("cost.output_bytes", "Written", cost.output_bytes, text(format_bytes(cost.output_bytes))),
        ("cost.blocks", "Blocks", cost.blocks, number(cost.blocks)),
    ])  # fmt: skip
    yield "<h3>The build that made this output</h3>"
    if last is None:
        yield "<p>Nothing is recorded of it.</p>"
        return
    titles = {"expert_bytes_read": "Read of experts", "base_bytes_read": "Read of the base",
              "index_bytes_read": "Read to index", "bytes_written": "Written"}  # fmt: skip
    entries: list[tuple[object, ...]] = [
        (f"run.{key}", titles.get(key, key), count, text(format_bytes(count))) for key, count in last.run.items()
    ]
    entries += [(f"run.blocks.{key}", f"Blocks: {key}", count, number(count)) for key, count in last.blocks.items()]
    entries += [(f"run.tensors.{key}", f"Tensors: {key}", count, number(count)) for key, count in last.tensors.items()]
    yield figures(entries)
    if last.reasons:
        yield "<p>It was made because:</p>"
        yield f'<ul class="reasons">{"".join(f"<li>{text(reason)}</li>" for reason in last.reasons)}</ul>'


def _tensors(report: OutputReported) -> Iterator[str]:
    yield (
        '<div class="search needs-script" hidden><label for="search">Search</label>'
        '<input type="search" id="search" autocomplete="off" spellcheck="false">'
        '<output id="found" for="search" aria-live="polite"></output></div>'
    )
    experts = [] if report.contribution is None else [expert.source for expert in report.contribution.experts]
    mixed = len({_made_by(tensor) for tensor in report.tensors}) > 1
    columns = [
        Column("Tensor", is_name=True), Column("Type", is_narrow=True), *([Column("Operator")] if mixed else []),
        Column("Blocks read", is_number=True), Column("Update, of base", is_number=True),
        Column("Signs agree", is_number=True),
        *(Column(f"{name}: by norm / cosine", is_number=True) for name in experts),
        Column("Last build"), Column("Why", is_why=True), Column("Digest"),
    ]  # fmt: skip
    rows = [_tensor_row(tensor, experts, mixed=mixed) for tensor in report.tensors]
    values = [_tensor_values(tensor, experts) for tensor in report.tensors]
    yield table("tensor-table", columns, rows, values=values, sortable=True, heading=True, label="Tensors")


def _made_by(tensor: ReportedTensor) -> str:
    return tensor.operator if tensor.decision == "merge" else "copied"


def _tensor_row(tensor: ReportedTensor, experts: Sequence[str], *, mixed: bool) -> list[str]:
    return [
        name_text(tensor.name),
        text(f"{tensor.dtype} {' x '.join(map(str, tensor.shape)) or 'scalar'}"),
        *([text(_made_by(tensor))] if mixed else []),
        text(f"{tensor.read:,} of {tensor.total:,}{_levels(tensor)}"),
        share(tensor.update_relative),
        share(tensor.sign_agreement),
        *(_given(tensor.shares.get(name), tensor.cosines.get(name)) for name in experts),
        text(tensor.state or "–"),
        text(tensor.why or ""),
        digest(tensor.digest),
    ]


def _levels(tensor: ReportedTensor) -> str:
    """Return the levels at which blocks of a tensor are read, where any is approximate."""
    counts = [(key, count) for key, count in (tensor.levels or {}).items() if key not in ("omitted", "exact")]
    return f" ({', '.join(f'{count:,} {_level(key)}' for key, count in counts)})" if counts else ""


def _tensor_values(tensor: ReportedTensor, experts: Sequence[str]) -> list[float | None]:
    """Return what the columns of numbers are sorted by, in their order."""
    return [
        tensor.read / tensor.total if tensor.total else None,
        tensor.update_relative,
        tensor.sign_agreement,
        *(tensor.shares.get(name) for name in experts),
    ]
