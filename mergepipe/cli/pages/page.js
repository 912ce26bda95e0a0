"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const SHAPES = { bound: "circle", expected: "square", deviation: "diamond" };
  const TITLES = { bound: "bound", expected: "expected", deviation: "measured" };
  const DECADES = 5; // the logarithmic axis goes no deeper below the largest value

  // --- making elements: text goes in as text, never as markup ---------------------------------------------------
  const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const draw = (name, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  function fill(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return element;
  }

  // --- numbers --------------------------------------------------------------------------------------------------
  function bytes(count) {
    if (count < 1000) return `${Math.round(count)} B`;
    let value = count;
    for (const unit of ["KB", "MB", "GB", "TB"]) {
      value /= 1000;
      if (value < 999.5 || unit === "TB") return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
    }
  }
  const short = (value) => (value === 0 ? "0" : Math.abs(value) < 1e-4 || Math.abs(value) >= 1e5
    ? value.toExponential(1).replace("e+", "e") : String(Number(value.toPrecision(3))));
  const error = (value) => (value === null || value === undefined ? "–" : data.relative ? `${short(value * 100)}%` : short(value));
  const percent = (part, whole) => (whole ? `${Number(((part / whole) * 100).toPrecision(3))}%` : "0%");
  const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  const bounded = (point) => (point.kind === "none" ? "not known"
    : `${point.kind === "estimated" ? "about" : point.kind === "exact" ? "" : "at most"} ${error(point.bound)}`.trim());

  // --- the budget -------------------------------------------------------------------------------------------------
  const slider = at("step");
  slider.max = data.steps.length - 1;
  const nearest = (list, count) => list.reduce((best, point, i) =>
    (Math.abs(point.bytes - count) < Math.abs(list[best].bytes - count) ? i : best), 0);
  slider.value = nearest(data.steps, data.own ? data.own.bytes : data.expertBytes / 4);
  const chosen = () => data.steps[Number(slider.value)];

  function showBudget() {
    const step = chosen();
    const entry = (label, value) => make("span", {}, make("i", {}, `${label} `), make("b", {}, value));
    at("readout").replaceChildren(
      entry("reads", `${bytes(step.bytes)} (${percent(step.bytes, data.expertBytes)})`),
      entry("blocks", `${step.blocks.toLocaleString("en")} of ${data.fullBlocks.toLocaleString("en")}`),
      entry("bound", bounded(step)),
      entry("expected", error(step.expected)),
    );
    slider.setAttribute("aria-valuetext", `${percent(step.bytes, data.expertBytes)} of the expert bytes, bound ${bounded(step)}`);
  }

  // --- curves -----------------------------------------------------------------------------------------------------
  const known = (value) => value !== null && value !== undefined;
  const curve = (name, points, steps, levels) => ({
    name,
    levels,
    title: TITLES[name] + (levels ? " in levels" : ""),
    line: (name === "deviation" ? points : steps).filter((p) => known(p[name])),
    marks: points.filter((p) => known(p[name])),
  });
  const series = [
    ...Object.keys(TITLES).map((name) => curve(name, data.points, data.steps, false)),
    ...Object.keys(TITLES).map((name) => curve(name, data.levels, data.levels, true)),
  ].filter((one) => one.marks.length);

  function mark(shape, x, y, extra) {
    const attributes = { class: `mark ${extra}` };
    if (shape === "circle") return draw("circle", { ...attributes, cx: x, cy: y, r: 4 });
    if (shape === "square") return draw("rect", { ...attributes, x: x - 3.5, y: y - 3.5, width: 7, height: 7 });
    return draw("path", { ...attributes, d: `M${x} ${y - 5}L${x + 5} ${y}L${x} ${y + 5}L${x - 5} ${y}Z` });
  }

  let chart = null; // what the last drawing needs to move its cursor
  function drawChart() {
    const box = at("chart");
    const width = Math.max(box.clientWidth, 260);
    const height = Math.max(240, Math.min(400, width * 0.62));
    const edge = { left: 52, right: 14, top: 22, bottom: 40 };
    const values = series.flatMap((one) => [...one.line, ...one.marks].map((p) => p[one.name]).filter((v) => v > 0));
    const top = values.length ? Math.max(...values) : 1;
    const low = Math.max(values.length ? Math.min(...values) : top / 10, top / 10 ** DECADES);
    const [first, last] = [Math.floor(Math.log10(low) * 3) / 3 - 0.12, Math.log10(top) + 0.08];
    const full = data.expertBytes || 1;
    const x = (count) => edge.left + (count / full) * (width - edge.left - edge.right);
    const base = height - edge.bottom;
    const floor = base - 10; // where 0 lies, below the axis of what is not
    const y = (value) => (value > 0
      ? Math.min(floor - 8, edge.top + ((last - Math.log10(value)) / (last - first)) * (floor - 14 - edge.top)) : floor);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "group",
      "aria-label": "Error over the bytes that are read; the left and right arrow keys go through the budgets",
      "aria-describedby": "chart-status" });
    const steps = last - first > 2.2 ? [1] : [1, 2, 5];
    for (let power = Math.floor(first); power <= Math.ceil(last); power += 1) {
      for (const factor of steps) {
        const value = factor * 10 ** power;
        if (Math.log10(value) < first || Math.log10(value) > last) continue;
        svg.append(draw("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y(value), y2: y(value) }),
          draw("text", { x: edge.left - 8, y: y(value) + 4, "text-anchor": "end" }, error(value)));
      }
    }
    svg.append(draw("text", { x: edge.left - 8, y: floor + 4, "text-anchor": "end" }, "0"),
      draw("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: base, y2: base }));
    for (const part of width < 460 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) {
      const anchor = part === 1 ? "end" : part === 0 ? "start" : "middle";
      svg.append(draw("line", { class: "axis", x1: x(part * full), x2: x(part * full), y1: base, y2: base + 4 }),
        draw("text", { x: x(part * full), y: base + 17, "text-anchor": anchor }, bytes(part * full)),
        draw("text", { x: x(part * full), y: base + 32, "text-anchor": anchor }, `${part * 100}%`));
    }
    if (data.own) {
      const right = x(data.own.bytes) > width * 0.6;
      svg.append(draw("line", { class: "own", x1: x(data.own.bytes), x2: x(data.own.bytes), y1: edge.top, y2: base }),
        draw("text", { x: x(data.own.bytes) + (right ? -5 : 5), y: edge.top - 8, "text-anchor": right ? "end" : "start" },
          `Mergefile: ${data.own.budget}`));
    }
    const cursor = draw("line", { class: "cursor", y1: edge.top, y2: base });
    svg.append(cursor);
    for (const one of series) {
      const positive = one.line.filter((p) => p[one.name] > 0);
      const group = draw("g", { class: one.levels ? `${one.name} levels` : one.name });
      group.append(draw("polyline", { class: "line", points: positive.map((p) => `${x(p.bytes)},${y(p[one.name])}`).join(" ") }));
      for (const p of one.marks) group.append(mark(SHAPES[one.name], x(p.bytes), y(p[one.name]), p[one.name] > 0 ? "" : "zero"));
      svg.append(group);
    }
    svg.addEventListener("pointermove", (event) => say(nearest(data.points, countAt(event))));
    svg.addEventListener("pointerleave", () => moveCursor());
    svg.addEventListener("click", (event) => choose(nearest(data.steps, countAt(event))));
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      say(Math.max(0, Math.min(data.points.length - 1, (chart.point ?? nearest(data.points, chosen().bytes)) + move)));
    });
    svg.addEventListener("blur", () => moveCursor());
    function countAt(event) {
      const inside = (event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width;
      return ((inside * width - edge.left) / (width - edge.left - edge.right)) * full;
    }
    chart = { cursor, x, point: null };
    box.replaceChildren(svg);
    moveCursor();
  }

  function moveCursor() {
    if (!chart) return;
    chart.point = null;
    place(chosen().bytes);
    tell(data.points[nearest(data.points, chosen().bytes)]);
  }
  function place(count) {
    chart.cursor.setAttribute("x1", chart.x(count));
    chart.cursor.setAttribute("x2", chart.x(count));
  }
  function say(index) {
    chart.point = index;
    place(data.points[index].bytes);
    tell(data.points[index]);
  }
  function tell(point) {
    const parts = parts_of(point);
    const partner = data.levels[data.points.indexOf(point)];
    if (partner) parts.push(...parts_of(partner));
    at("chart-status").textContent = parts.join(" · ");
  }
  function parts_of(point) {
    const parts = [`${point.budget}: reads ${bytes(point.bytes)} in ${plural(point.blocks, "block")}`, `bound ${bounded(point)}`,
      `expected ${error(point.expected)}`];
    if (known(point.deviation)) parts.push(`measured ${error(point.deviation)}`);
    for (const [name, value] of point.figures) parts.push(`${name} ${short(value)}`);
    return parts;
  }
  function choose(step) {
    slider.value = step;
    update();
  }

  function drawLegend() {
    for (const one of series) {
      at("legend").append(make("li", { class: one.levels ? `${one.name} levels` : one.name },
        draw("svg", { viewBox: "0 0 28 12", "aria-hidden": "true" }, draw("line", { class: "line", x1: 0, x2: 28, y1: 6, y2: 6 }),
          mark(SHAPES[one.name], 14, 6, "")), one.title));
    }
    at("curves-note").textContent = [
      data.relative ? "In percent of the update, the norm of the full read less the base." : "Norms of what differs from the full read.",
      known(data.points[0].bound) ? "The bound holds whatever the deltas are;" : "No bound is known for this operator;",
      "the expected error takes what is left out as orthogonal.",
      series.some((one) => one.name === "deviation")
        ? "Measured is the true distance to the full read, of weights as they are stored: their rounding is in no bound." : "",
    ].join(" ").trim();
  }

  // --- the map ----------------------------------------------------------------------------------------------------
  const heat = (share) => `color-mix(in oklab, var(--heat1) ${Math.round(share * 100)}%, var(--heat0))`;
  const shown = []; // {cell, rect, number}
  const captions = [];

  function drawScale() {
    for (let percent_ = 0; percent_ <= 100; percent_ += 20) {
      at("scale").append(make("li", { style: `--fill: ${heat(percent_ / 100)}` }, `${percent_}%`));
    }
    if (data.cells.some((cell) => !cell[3])) at("scale").append(make("li", { class: "none" }, "nothing to read"));
  }

  function drawMaps() {
    shown.length = captions.length = 0;
    at("maps").replaceChildren(...data.experts.map((name, expert) => {
      const total = make("span");
      const figure = make("figure", {}, make("figcaption", {}, make("b", {}, name), total));
      at("maps").append(figure); // its width is known only inside
      figure.append(drawMap(name, data.cells.filter((cell) => cell[2] === expert), figure.clientWidth || 320));
      captions.push({ expert, total });
      return figure;
    }));
    colourMaps();
  }

  function drawMap(name, cells, width) {
    const size = 12 * 0.6;
    const longest = Math.max(...data.modules.map((module) => module.length), 4);
    const left = Math.min(longest * size + 8, width * 0.42);
    const columns = Math.max(data.layers.length, 1);
    const step = Math.min((width - left) / columns, 64);
    const gap = step > 6 ? 1 : 0;
    const [row, inner] = [20, data.modules.filter((_, i) => cells.some((cell) => cell[1] === i && cell[0] >= 0)).length];
    const used = data.modules.map((_, i) => i).filter((i) => cells.some((cell) => cell[1] === i));
    const outside = (module) => !cells.some((cell) => cell[1] === module && cell[0] >= 0);
    const order = [...used.filter((i) => !outside(i)), ...used.filter(outside)];
    const top = data.layers.length ? 16 : 0;
    const y = (place) => top + place * row + (place >= inner && inner ? 8 : 0);
    const height = y(order.length) + 2;
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "group",
      "aria-label": `What is read of ${name}; the arrow keys go through layers and modules`, "aria-describedby": "map-status" });
    const every = [1, 2, 5, 10, 20, 50, 100].find((many) => many * step >= 24) ?? 200;
    data.layers.forEach((layer, i) => {
      if (layer % every === 0) svg.append(draw("text", { x: left + (i + 0.5) * step, y: 11, "text-anchor": "middle" }, layer));
    });
    if (data.layers.length) svg.append(draw("text", { x: left - 8, y: 11, "text-anchor": "end" }, "layer"));
    const room = Math.floor((left - 8) / size);
    order.forEach((module, place) => {
      const label = data.modules[module];
      const text = label.length > room ? `…${label.slice(label.length - room + 1).replace(/^\.+/, "")}` : label;
      svg.append(draw("text", { x: left - 8, y: y(place) + row * 0.7, "text-anchor": "end" }, text, draw("title", {}, label)));
    });
    const own = [];
    for (const cell of cells) {
      const column = Math.max(cell[0], 0);
      const place = order.indexOf(cell[1]);
      const wide = cell[0] < 0 ? Math.max(step, 34) : step; // outside the layers there is room
      const rect = draw("rect", { class: cell[3] ? "cell" : "cell none", x: left + column * step, y: y(place),
        width: Math.max(wide - gap, 1), height: row - 1 });
      const middle = { x: left + column * step + wide / 2, y: y(place) + 14 };
      const number = wide >= 30 && cell[3] ? draw("text", { class: "number", ...middle }) : null;
      const entry = { cell, rect, number, column, place, name };
      rect.addEventListener("pointerenter", () => point(entry, own));
      own.push(entry);
      svg.append(rect);
    }
    svg.append(...own.filter((entry) => entry.number).map((entry) => entry.number));
    svg.addEventListener("pointerleave", () => point(null, own));
    svg.addEventListener("blur", () => point(null, own));
    svg.addEventListener("keydown", (event) => walk(event, own));
    shown.push(...own);
    return svg;
  }

  function walk(event, own) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move || !own.length) return;
    event.preventDefault();
    const here = own.find((entry) => entry.rect.classList.contains("here"));
    if (!here) return point(own.find((entry) => entry.place === 0) ?? own[0], own);
    const [column, place] = [here.column + move[0], here.place + move[1]];
    const onRow = own.filter((entry) => entry.place === place);
    const next = move[1] ? onRow.sort((a, b) => Math.abs(a.column - column) - Math.abs(b.column - column))[0]
      : onRow.find((entry) => entry.column === column);
    if (next) point(next, own);
  }

  function point(entry, own) {
    for (const other of own) other.rect.classList.remove("here");
    at("map-status").textContent = entry ? about(entry) : "\u00a0";
    if (entry) entry.rect.classList.add("here");
  }

  function about({ cell, name }) {
    const [layer, module, , blocks, selected] = cell;
    const where = `${name} · ${layer >= 0 ? `layer ${data.layers[layer]} · ` : ""}${data.modules[module]}`;
    if (!blocks) return `${where}: nothing to read`;
    const read = selected[Number(slider.value)];
    return `${where}: ${read.toLocaleString("en")} of ${plural(blocks, "block")} (${percent(read, blocks)})`;
  }

  function colourMaps() {
    const step = Number(slider.value);
    for (const { cell, rect, number } of shown) {
      if (!cell[3]) continue;
      const share = cell[4][step] / cell[3];
      rect.style.setProperty("--fill", heat(share));
      if (number) {
        number.textContent = Math.round(share * 100);
        number.classList.toggle("deep", share > 0.5);
      }
    }
    for (const { expert, total } of captions) {
      const own = data.cells.filter((cell) => cell[2] === expert);
      const [read, all] = own.reduce(([r, b], cell) => [r + (cell[3] ? cell[4][step] : 0), b + cell[3]], [0, 0]);
      total.textContent = `${read.toLocaleString("en")} of ${plural(all, "block")} (${percent(read, all)})`;
    }
    const here = shown.find(({ rect }) => rect.classList.contains("here"));
    if (here) at("map-status").textContent = about(here);
  }

  // --- what loses most --------------------------------------------------------------------------------------------
  function showLosses() {
    const step = chosen();
    const rows = step.losses.map(([tensor, omitted, bound, expected, mass]) => make("tr", {},
      make("td", {}, data.tensors[tensor]), make("td", {}, bytes(omitted)), make("td", {}, `${Number((mass * 100).toPrecision(3))}%`),
      make("td", {}, error(expected)), make("td", {}, error(bound))));
    const titles = ["tensor", "left out", "of its deltas", "expected", "bound"];
    at("losses").replaceChildren(
      make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)))), make("tbody", {}, ...rows));
    at("losses").hidden = !rows.length;
    at("losses-note").textContent = rows.length
      ? `At ${percent(step.bytes, data.expertBytes)} of the expert bytes, the tensors with the largest expected errors.`
      : "Nothing is left out at this budget.";
  }

  // --- together ---------------------------------------------------------------------------------------------------
  function update() {
    showBudget();
    moveCursor();
    colourMaps();
    showLosses();
  }
  for (const section of document.querySelectorAll(".needs-script")) section.hidden = false;
  drawLegend();
  drawScale();
  slider.addEventListener("input", update);
  let seen = 0;
  function fit() {
    if (at("chart").clientWidth === seen) return;
    seen = at("chart").clientWidth;
    drawChart();
    drawMaps();
  }
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(at("chart"));
  fit();
  update();
})();
