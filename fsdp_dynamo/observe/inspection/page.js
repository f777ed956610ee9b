// The page of `inspect_graphs`: a list of owners (the whole step, units), their phases, and two
// stages of a phase side by side. All data is in #data; no server is asked. The timeline is in
// page.timeline.js.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const CONTEXT = 3; // unchanged lines that stay around a change
let address = ""; // the last address that this page set
const state = { owner: 0, phase: null, left: 0, right: 0, side: 0 };

// -- state and address -----------------------------------------------------------------------

const owner = () => data.owners[state.owner];
const phases = () => owner().phases;
const stages = () => phases().find((p) => p.name === state.phase).stages;

function choose(change) {
  Object.assign(state, change);
  if (!phases().some((p) => p.name === state.phase)) state.phase = firstPhase();
  const last = stages().length - 1;
  state.left = Math.max(0, Math.min(state.left, last));
  state.right = Math.max(0, Math.min(state.right, last));
  address = "#" + new URLSearchParams({
    graph: owner().name, phase: state.phase,
    left: stages()[state.left].name, right: stages()[state.right].name,
  });
  location.replace(address);
  draw();
}

function firstPhase() {
  const names = phases().map((p) => p.name);
  return ["backward", "forward"].find((n) => names.includes(n)) ?? names[0];
}

// The initial stage and the one before it.
function initialPair() {
  const right = phases().find((p) => p.name === state.phase).initial;
  return { left: Math.max(0, right - 1), right };
}

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const found = data.owners.findIndex((o) => o.name === asked.get("graph"));
  state.owner = found < 0 ? data.start.owner : found;
  state.phase = asked.get("phase") ?? (found < 0 ? data.start.phase : null);
  if (!phases().some((p) => p.name === state.phase)) state.phase = firstPhase();
  const at = (key) => stages().findIndex((s) => s.name === asked.get(key));
  const [left, right] = [at("left"), at("right")];
  Object.assign(state, left >= 0 && right >= 0 ? { left, right } : initialPair());
}

// -- drawing -------------------------------------------------------------------------------------

function element(tag, text, properties = {}) {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  return Object.assign(made, properties);
}

function buttons(id, names, chosen, onclick, meanings = {}) {
  $(id).replaceChildren(...names.map((name, i) => {
    const button = element("button", name, { onclick: () => onclick(i), title: meanings[name] ?? "" });
    button.setAttribute("aria-pressed", String(i === chosen || name === chosen));
    return button;
  }));
}

function draw() {
  drawOwners();
  buttons("phases", phases().map((p) => p.name), state.phase, (i) => {
    choose({ phase: phases()[i].name });
    choose(initialPair());
  }, data.phases);
  const list = stages();
  buttons("stages", list.map((s) => s.name), list[state.right].name,
    (i) => choose({ left: Math.max(0, i - 1), right: i }), data.stages);
  for (const side of ["left", "right"]) {
    $(side).replaceChildren(...list.map((s, i) => element("option", s.name, { value: i })));
    $(side).value = state[side];
    $(side + "description").textContent = data.stages[list[state[side]].name] ?? "";
    $(side + "file").textContent = list[state[side]].file;
    $(side + "file").href = encodeURIComponent(list[state[side]].file);
  }
  $("back").disabled = state.right <= 1;
  $("next").disabled = state.right >= list.length - 1;
  drawDiff(list[state.left], list[state.right]);
  drawTimeline();
}

function drawOwners() {
  const wanted = $("filter").value.toLowerCase();
  const rows = data.owners.map((o, i) => {
    const row = element("li", null, { onclick: () => { choose({ owner: i }); choose(initialPair()); } });
    row.append(...named(o.name, o.unit));
    row.setAttribute("aria-current", String(i === state.owner));
    row.hidden = !o.name.toLowerCase().includes(wanted);
    return row;
  });
  const others = data.without_code.map((unit) => {
    const row = element("li", null, { className: "none", title: "ran code that was compiled for an equal unit" });
    row.append(...named(unit || data.root, unit));
    return row;
  });
  $("owners").replaceChildren(...rows, ...others);
}

// A name after the colour of its unit in the timeline.
function named(name, unit) {
  const swatch = element("span", null, { className: "swatch" });
  swatch.style.background = unit === null ? "transparent" : colour(unit);
  return [swatch, element("span", name)];
}

// -- side by side ----------------------------------------------------------------------------------

function drawDiff(left, right) {
  const [a, b] = [left.text.split("\n"), right.text.split("\n")];
  const [here, there] = [new Set(a), new Set(b)];
  const rows = align(a, b);
  let added = 0, removed = 0, moved = 0;
  for (const row of rows) {
    if (row.same) continue;
    row.leftClass = row.i === null ? "" : there.has(a[row.i]) && a[row.i].trim() ? "moved" : "removed";
    row.rightClass = row.j === null ? "" : here.has(b[row.j]) && b[row.j].trim() ? "moved" : "added";
    removed += row.leftClass === "removed";
    added += row.rightClass === "added";
    moved += row.rightClass === "moved";
  }
  $("summary").textContent = added + removed + moved === 0
    ? `${left.name} and ${right.name} are equal (${a.length} lines)`
    : `${left.name} to ${right.name}: ${moved} lines moved, ${added} added, ${removed} removed`;
  const table = element("table", null);
  const columns = element("colgroup", null);
  for (const width of ["3.6em", "", "3.6em", ""]) {
    columns.append(element("col", null, { style: width ? `width:${width}` : "" }));
  }
  table.append(columns);
  let hidden = [];
  const show = (row) => table.append(oneRow(row, a, b));
  const flush = () => {
    if (hidden.length > 1) table.append(foldRow(hidden, a, b));
    else hidden.forEach(show);
    hidden = [];
  };
  const near = nearChanges(rows);
  const folds = $("fold").checked && rows.some((row) => !row.same);
  rows.forEach((row, at) => {
    if (folds && row.same && !near[at]) hidden.push(row);
    else { flush(); show(row); }
  });
  flush();
  $("diff").replaceChildren(table);
}

function nearChanges(rows) {
  const near = new Array(rows.length).fill(false);
  rows.forEach((row, at) => {
    if (!row.same) for (let k = at - CONTEXT; k <= at + CONTEXT; k++) near[k] = true;
  });
  return near;
}

function oneRow(row, a, b) {
  const tr = element("tr", null);
  for (const [at, lines, kind] of [[row.i, a, row.leftClass], [row.j, b, row.rightClass]]) {
    tr.append(element("td", at === null ? "" : String(at + 1), { className: "number" }));
    const cell = element("td", null, { className: kind || "" });
    if (at !== null) fillCode(cell, lines[at]);
    tr.append(cell);
  }
  return tr;
}

function fillCode(cell, line) {
  const at = line.lastIndexOf("  # ");
  if (at < 0) { cell.textContent = line; return; }
  if (!line.slice(0, at).trim()) {
    cell.append(element("span", line, { className: "remark alone" }));
    return;
  }
  const remark = line.slice(at);
  const isCollective = /# (all_gather|reduce_scatter|all_reduce) /.test(remark);
  cell.append(element("span", line.slice(0, at), { className: isCollective ? "collective" : "" }));
  cell.append(element("span", remark, { className: "remark" }));
}

function foldRow(hidden, a, b) {
  const tr = element("tr", null, { className: "fold" });
  const cell = element("td", `${hidden.length} unchanged lines`, { colSpan: 4 });
  cell.onclick = () => tr.replaceWith(...hidden.map((row) => oneRow(row, a, b)));
  tr.append(cell);
  return tr;
}

// Rows of the side-by-side view, by a patience diff: the longest increasing run of lines that occur
// once on both sides, with their equal neighbours, and the lines in between.
function align(a, b) {
  const rows = [];
  let i = 0, j = 0;
  const until = (ii, jj) => {
    while (i < ii && j < jj && a[i] === b[j]) rows.push({ i: i++, j: j++, same: true });
    let tail = 0;
    while (ii - tail > i && jj - tail > j && a[ii - tail - 1] === b[jj - tail - 1]) tail++;
    while (i < ii - tail || j < jj - tail) {
      rows.push({ i: i < ii - tail ? i++ : null, j: j < jj - tail ? j++ : null, same: false });
    }
    while (i < ii) rows.push({ i: i++, j: j++, same: true });
  };
  for (const [ii, jj] of anchors(a, b)) {
    until(ii, jj);
    rows.push({ i: i++, j: j++, same: true });
  }
  until(a.length, b.length);
  return rows;
}

function anchors(a, b) {
  const once = (lines) => {
    const at = new Map();
    lines.forEach((line, k) => at.set(line, at.has(line) ? -1 : k));
    return at;
  };
  const [inA, inB] = [once(a), once(b)];
  const pairs = [];
  inA.forEach((i, line) => {
    const j = inB.get(line);
    if (i >= 0 && j !== undefined && j >= 0) pairs.push([i, j]);
  });
  const tops = [], before = new Array(pairs.length).fill(-1); // patience: tops end runs by length
  pairs.forEach(([, j], p) => {
    let low = 0, high = tops.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[tops[middle]][1] < j) low = middle + 1; else high = middle;
    }
    if (low) before[p] = tops[low - 1];
    tops[low] = p;
  });
  const run = [];
  for (let p = tops.length ? tops[tops.length - 1] : -1; p >= 0; p = before[p]) run.push(pairs[p]);
  return run.reverse();
}

// -- start ---------------------------------------------------------------------------------------------

function step(by) {
  const right = state.right + by;
  if (right >= 1 && right < stages().length) choose({ left: right - 1, right });
}

$("subtitle").textContent = data.subtitle;
$("back").onclick = () => step(-1);
$("next").onclick = () => step(1);
$("left").onchange = (e) => choose({ left: Number(e.target.value) });
$("right").onchange = (e) => choose({ right: Number(e.target.value) });
$("fold").onchange = draw;
$("filter").oninput = drawOwners;
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select")) return;
  if (event.key === "ArrowLeft") step(-1);
  if (event.key === "ArrowRight") step(1);
});
window.addEventListener("hashchange", () => {
  if (location.hash !== address) { fromAddress(); draw(); }
});
window.addEventListener("resize", drawTimeline);
fromAddress();
choose({});
