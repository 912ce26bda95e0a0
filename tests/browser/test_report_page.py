"""The page of a report in a real browser: figures, sizes, light and dark, keyboard, hostile names, no network."""

import json

import pytest
from support.budgets import percent
from support.checkpoints import random_tensors
from support.cli import run_mergepipe
from support.levels import levels_project
from support.projects import SmallProject
from unit.cli.reported import fake_report

from mergepipe.cli.pages.report import page

pytestmark = pytest.mark.browser

SIZES = [(400, False), (400, True), (1400, False), (1400, True)]
EVIL = "<script>alert(1)</script>"
TURNED = "abc\u202etxt.exe\u200f.weight"
NAMES = (EVIL, TURNED, '"><img src=x onerror=alert(2)>', "日本語.weight")
VISIBLE = "[...document.querySelectorAll('body *')].filter((one) => one.checkVisibility())"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a project that was built and reported as a user does, with names that mean harm."""
    project = SmallProject(tmp_path_factory.mktemp("project"))
    shapes = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,), **dict.fromkeys(NAMES, (8, 8))}
    shapes |= {f"model.layers.{n}.{m}.weight": (16, 8) for n in range(3) for m in ("mlp.up_proj", "self_attn.q_proj")}
    for seed, name in enumerate(("base", "math", "code")):
        project.add_source(name, random_tensors(seed, shapes))
    experts = [{"source": "math", "weight": 0.5}, {"source": "code", "weight": [0.2, 0.8]}]
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": experts, "budget": percent(60)}
    project.set_output("m", recipe)
    for command in (["build"], ["report"]):
        result = run_mergepipe(command, project.root)
        assert result.code == 0, result.stderr
    return project


@pytest.fixture
def shown(screen, project):
    screen.open(project.root / "m.report.html")
    yield screen
    assert screen.complaints == []
    assert screen.requests == [(project.root / "m.report.html").as_uri()]


def test_the_figures_are_those_of_the_manifest(shown, project):
    figures = shown.run(
        "Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
        ".map((one) => [one.dataset.figure, one.dataset.value]))"
    )
    manifest = project.manifest("m")
    output, run = manifest.output, manifest.run
    assert figures["digest"] == "b3:" + output.digest.hex()
    assert int(figures["expert_bytes.planned"]) == output.expert_bytes_planned
    assert int(figures["expert_bytes.full"]) == output.expert_bytes_full
    assert figures["budget"] == output.budget
    assert (figures["bound.kind"], float(figures["bound.absolute"])) == (
        output.bound["kind"], output.bound["absolute"],
    )  # fmt: skip
    assert float(figures["bound.relative_to_update"]) == output.bound["relative_to_update"]
    for name in ("expert_bytes_read", "base_bytes_read", "index_bytes_read", "bytes_written"):
        assert int(figures[f"run.{name}"]) == getattr(run, name)
    assert {name: int(figures[f"run.blocks.{name}"]) for name in run.blocks} == dict(run.blocks)
    for name in ("total", "omitted", "zero", "shared"):
        assert int(figures[f"expert_blocks.{name}"]) == run.expert_blocks[name]


def test_the_tables_are_those_of_the_manifest(shown, project):
    manifest = project.manifest("m")
    rows = shown.run(
        "[...document.querySelectorAll('#tensor-table tbody tr')].map((row) => [row.cells[0].textContent,"
        " [...row.cells].map((cell) => cell.textContent), row.querySelector('[data-digest]').dataset.digest])"
    )
    assert len(rows) == len(manifest.output.tensors)
    for (name, cells, digest), tensor in zip(rows, manifest.output.tensors, strict=True):
        assert name == tensor.name.replace("\u202e", "\\u202e").replace("\u200f", "\\u200f")
        assert digest == "b3:" + tensor.digest.hex()
        assert f"{tensor.read:,} of {tensor.total:,}" in cells
    sources = shown.run("[...document.querySelectorAll('#source-table [data-digest]')].map((o) => o.dataset.digest)")
    assert sources == ["b3:" + source.digest.hex() for source in manifest.sources]


def test_the_figures_are_those_of_the_json(shown, project):
    printed = json.loads(run_mergepipe(["report", "m", "--json"], project.root).stdout)["outputs"]["m"]
    titles = shown.run("[...document.querySelectorAll('#maps svg.map title')].map((one) => one.textContent)")
    cell = next(cell for cell in printed["cells"] if cell["layer"] == 2 and cell["module"] == "mlp.up_proj")
    assert f"layer 2, mlp.up_proj: {float(format(100 * cell['update_relative'], '.3g')):.6g}%" in titles
    assert len(titles) == len(printed["cells"]) * 5  # update, read, signs, and two experts


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_nothing_is_wider_than_the_screen(shown, tmp_path, width, dark):
    shown.resize(width, dark=dark)
    assert shown.overflow() <= 0
    assert len(shown.screenshot(tmp_path / f"{width}-{dark}.png")) > 10_000
    check_layout(shown, width)


def test_nothing_is_wider_than_the_screen_with_many_layers_and_long_names(screen, tmp_path):
    path = tmp_path / "large.html"
    experts = ("math", "a-rather-long-name-of-an-expert-that-goes-on-and-on", "code_with_underscores_in_it")
    modules = (*(f"block_sparse_moe.experts.w{n}.down_projection" for n in range(18)), EVIL)
    path.write_text(page(fake_report(name="x" * 60, experts=experts, layers=26, modules=modules)), encoding="utf-8")
    screen.open(path)
    for width in (400, 1400):
        screen.resize(width)
        assert screen.overflow() <= 0
        check_layout(screen, width)
    assert screen.complaints == []


def check_layout(shown, width):
    """Check that text is inside the screen or in a part that scrolls by itself, and lies over no other text."""
    outside = shown.run(
        f"{VISIBLE}.filter((one) => !one.closest('.wide, .skip') && one.getBoundingClientRect().right > {width} + 0.5)"
        ".map((one) => one.outerHTML.slice(0, 200))"
    )
    assert outside == []
    cut = shown.run(
        f"{VISIBLE}.filter((one) => !(one instanceof SVGElement) && getComputedStyle(one).overflowX === 'visible'"
        " && getComputedStyle(one).display !== 'inline'"
        " && one.clientWidth > 0 && one.scrollWidth > one.clientWidth + 1)"
        ".map((one) => one.outerHTML.slice(0, 200))"
    )
    assert cut == []
    overlapping = shown.run("""(() => {
      const boxes = [...document.querySelectorAll('svg.map')].flatMap((map) =>
        [...map.querySelectorAll('text.l')].map((one) => [one.textContent, one.getBoundingClientRect(), map]));
      const found = [];
      boxes.forEach(([a, one, map], i) => boxes.slice(i + 1).forEach(([b, other, its]) => {
        const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
        const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
        if (map === its && wide > 2 && high > 3) found.push(`${a} / ${b}`);
      }));
      for (const [a, one, map] of boxes) {
        const all = map.getBoundingClientRect();
        if (one.left < all.left - 2 || one.right > all.right + 2 || one.top < all.top - 2) found.push(`${a} is cut`);
      }
      return found;
    })()""")
    assert overlapping == []


def test_hostile_names_are_shown_and_do_nothing(shown):
    assert shown.run("document.querySelectorAll('img').length") == 0
    text = shown.run("document.body.innerText")
    assert EVIL in text
    assert "abc\\u202etxt.exe\\u200f.weight" in text
    assert "\u202e" not in text


def test_the_theme_follows_the_system_until_it_is_chosen(shown):
    colour = "getComputedStyle(document.body).backgroundColor"
    shown.resize(1400, dark=False)
    light = shown.run(colour)
    shown.resize(1400, dark=True)
    dark = shown.run(colour)
    assert dark != light
    shown.run("document.getElementById('theme').click()")
    assert (shown.run(colour), shown.run("document.getElementById('theme').ariaPressed")) == (light, "false")
    shown.run("document.getElementById('theme').click()")
    assert (shown.run(colour), shown.run("document.getElementById('theme').ariaPressed")) == (dark, "true")


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_told_from_its_ground(shown, dark):
    """Contrast of at least 4.5, also of the numbers on the cells of the maps (WCAG 2.2, criterion 1.4.3)."""
    shown.resize(1400, dark=dark)
    low = shown.run("""(() => {
      const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
      const rgb = (colour) => {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return canvas.getImageData(0, 0, 1, 1).data;
      };
      const light = (colour) => [...rgb(colour)].slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const contrast = (a, b) => {
        const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
        return (x + 0.05) / (y + 0.05);
      };
      const paper = getComputedStyle(document.body).backgroundColor;
      const found = ['p', 'dt', 'th', 'td', 'a', 'small', 'summary']
        .map((name) => document.querySelector(`main ${name}, nav ${name}`)).filter(Boolean)
        .map((one) => [one.tagName, contrast(getComputedStyle(one).color, paper)]);
      const map = document.querySelector('svg.map');
      for (let step = 0; step <= 20; step += 1) {
        const box = document.createElementNS('http://www.w3.org/2000/svg', 'path');
        const ink = document.createElementNS('http://www.w3.org/2000/svg', 'text');
        box.setAttribute('class', `h${step}`);
        ink.setAttribute('class', step <= 11 ? 'n' : 'n d');
        map.append(box, ink);
        found.push([`h${step}`, contrast(getComputedStyle(ink).fill, getComputedStyle(box).fill)]);
        box.remove();
        ink.remove();
      }
      return found.filter(([, value]) => value < 4.5);
    })()""")
    assert low == []


# --- by keyboard ------------------------------------------------------------------------------------------------------


def focused(shown):
    return shown.run("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")


def test_the_first_stop_skips_to_the_report(shown):
    shown.press("Tab")
    assert shown.run("document.activeElement.textContent") == "Skip to the report"
    assert shown.run("document.activeElement.getBoundingClientRect().left") >= 0
    shown.press("Enter")
    assert focused(shown) == "main"


def test_every_stop_can_be_seen_and_has_a_name(shown):
    seen = []
    for _ in range(200):
        shown.press("Tab")
        if shown.run("document.activeElement === document.body"):
            break
        seen.append(
            shown.run("""(() => {
              const one = document.activeElement;
              const style = getComputedStyle(one);
              const name = one.ariaLabel || one.textContent.trim() || one.labels?.[0]?.textContent
                || document.getElementById(one.getAttribute('aria-labelledby') ?? '')?.textContent;
              return [one.tagName, style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2, Boolean(name)];
            })()""")
        )
    kinds = {tag.lower() for tag, _, _ in seen}
    assert kinds >= {"a", "button", "svg", "summary", "input", "div"}
    assert [stop for stop in seen if not (stop[1] and stop[2])] == []


def test_the_arrow_keys_go_through_a_map(shown):
    shown.run("document.querySelector('svg.map').focus()")
    status = "document.getElementById('map-update-status').textContent"
    before = shown.run(status)
    shown.press("ArrowRight")
    first = shown.run(status)
    shown.press("ArrowRight")
    second = shown.run(status)
    shown.press("ArrowDown")
    third = shown.run(status)
    assert first.startswith("layer 0, mlp.up_proj: ")
    assert second.startswith("layer 0, self_attn.q_proj: ")
    assert third.startswith("layer 1, self_attn.q_proj: ")
    shown.run("document.activeElement.blur()")
    assert shown.run(status) == before


def test_tensors_are_searched(shown):
    shown.run("document.getElementById('search').focus()")
    shown.type("layers.1 mlp")
    names = (
        "[...document.querySelectorAll('#tensor-table tbody tr')].filter((row) => row.checkVisibility())"
        ".map((row) => row.cells[0].textContent)"
    )
    assert shown.run(names) == ["model.layers.1.mlp.up_proj.weight"]
    assert shown.run("document.getElementById('found').textContent") == "1 of 12 tensors"


def test_tensors_are_sorted_by_a_column_either_way(shown):
    head = "[...document.querySelectorAll('#tensor-table thead th')].find((o) => o.textContent.startsWith('Update'))"
    place = shown.run(f"{head}.cellIndex")
    values = (
        "[...document.querySelectorAll('#tensor-table tbody tr')]"
        f".map((row) => Number(row.cells[{place}].dataset.value))"
    )
    shown.run(f"{head}.querySelector('button').focus()")
    shown.press("Enter")
    up = shown.run(values)
    assert up == sorted(up)
    assert shown.run(f"{head}.ariaSort") == "ascending"
    shown.press("Enter")
    down = shown.run(values)
    assert down == sorted(up, reverse=True)
    assert shown.run(f"{head}.ariaSort") == "descending"


def test_roles_and_names_reach_a_screen_reader(shown):
    tree = shown.call("Accessibility.getFullAXTree")["nodes"]
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if "role" in node]
    roles = {role for role, _ in found}
    assert roles >= {"main", "navigation", "table", "columnheader", "rowheader", "searchbox", "button", "heading"}
    for role in ("button", "searchbox", "region", "link", "table"):
        if role != "table":  # a table has the name of the region around it
            assert all(name for kind, name in found if kind == role), role
    assert ("heading", "Budget and bound") in found


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_the_map_of_levels_fits_and_says_its_scale(screen, tmp_path, width, dark):
    project = levels_project(tmp_path / "project", "15%")
    project.build()
    path = tmp_path / "levels.html"
    path.write_text(page(project.open().report().outputs["m"]), encoding="utf-8")
    screen.open(path)
    screen.resize(width, dark=dark)
    assert screen.overflow() <= 0
    figure = "document.getElementById('map-levels-title').closest('figure')"
    scale = screen.run(f"[...{figure}.querySelectorAll('.scale li')].map((one) => one.textContent)")
    assert scale == ["nothing", *map(str, range(1, 8)), "exact"]
    assert screen.run(f"{figure}.querySelector('.scale').scrollWidth <= {figure}.querySelector('.scale').clientWidth")
    titles = screen.run(f"[...{figure}.querySelectorAll('.cell title')].map((one) => one.textContent)")
    assert any(": level " in title for title in titles)
    assert any(title.endswith(": exact") for title in titles)
    assert screen.complaints == []
