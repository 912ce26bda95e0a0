"use strict";
(() => {
  for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;

  // --- light and dark ---------------------------------------------------------------------------------------------
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const kept = { // a browser may refuse to keep anything for a page that is a file
    get() { try { return localStorage.getItem("mergepipe-theme"); } catch { return null; } },
    set(value) { try { localStorage.setItem("mergepipe-theme", value); } catch { /* it holds for this visit */ } },
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wantsDark.matches);
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  const before = kept.get();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    kept.set(root.dataset.theme);
    show();
  });
  wantsDark.addEventListener("change", show);
  show();

  // --- maps: the arrow keys and the pointer say what a cell holds ---------------------------------------------------
  for (const map of document.querySelectorAll("svg.map")) {
    const status = document.getElementById(map.getAttribute("aria-describedby"));
    const hint = status.textContent;
    const cells = [...map.querySelectorAll(".cell")].map((cell) => {
      const place = cell.dataset.place.split("-");
      const outside = place[0] === "o";
      return { cell, row: outside ? 1e6 + Number(place[1]) : Number(place[0]), column: outside ? 0 : Number(place[1]) };
    });
    let here = null;
    const go = (entry) => {
      if (here) here.cell.classList.remove("here");
      here = entry;
      if (here) here.cell.classList.add("here");
      status.textContent = here ? here.cell.querySelector("title").textContent : hint;
    };
    for (const entry of cells) entry.cell.addEventListener("pointerenter", () => go(entry));
    map.addEventListener("pointerleave", () => go(null));
    map.addEventListener("blur", () => go(null));
    map.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!move || !cells.length) return;
      event.preventDefault();
      if (!here) return void go(cells[0]);
      if (move[1]) {
        const next = cells.find((one) => one.row === here.row && one.column === here.column + move[1]);
        if (next) go(next);
        return;
      }
      const rows = [...new Set(cells.map((one) => one.row))].sort((a, b) => a - b);
      const row = rows[rows.indexOf(here.row) + move[0]];
      const onRow = cells.filter((one) => one.row === row);
      const away = (one) => Math.abs(one.column - here.column);
      if (onRow.length) go(onRow.reduce((best, one) => (away(one) < away(best) ? one : best)));
    });
  }

  // --- the table of tensors: sorted by a column, and searched -------------------------------------------------------
  const table = document.getElementById("tensor-table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const search = document.getElementById("search");
  const found = document.getElementById("found");
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head || !event.target.closest("button")) return;
    const column = head.cellIndex;
    const up = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "descending" : "ascending");
    const keyed = rows.map((row, number) => [value(row, column), number, row]);
    keyed.sort(([a, n], [b, m]) => { // what is not known stands last, whichever way
      if (a === null || b === null) return (a === null) - (b === null) || n - m;
      return (up ? -compare(a, b) : compare(a, b)) || n - m;
    });
    body.append(...keyed.map(([, , row]) => row));
  });
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      count += !row.hidden;
    }
    found.textContent = words.length ? `${count.toLocaleString("en")} of ${rows.length.toLocaleString("en")} tensors` : "";
  };
  search.addEventListener("input", filter);
  filter();
})();
