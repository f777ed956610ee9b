"use strict";
// The timeline of one step. Functions that it shares with page.js, which follows it, are there.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 20, LABEL = 100, AXIS = 18, RIGHT = 30;
const CUT = 38; // width of a span that is cut out
const CHARACTER = 6.3; // width of a character in a bar

function drawTimeline() {
  const sides = data.timeline;
  $("timeline").hidden = sides.length === 0;
  if (!sides.length) return;
  buttons("sides", sides.map((s) => s.title), state.side, (i) => { state.side = i; drawTimeline(); });
  const side = sides[state.side];
  const end = Math.max(...side.bars.map((bar) => bar.end_ms), 1e-6);
  const width = Math.max(600, $("lanes").clientWidth);
  const clock = clockOf(side.cuts, end, width - LABEL - RIGHT);
  $("caption").textContent = caption(side, clock.total);
  const height = AXIS + side.lanes.length * ROW + 4;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.append(...axis(clock, height), ...side.lanes.map((lane, row) =>
    shape("text", { x: 0, y: AXIS + row * ROW + 14, class: "lane" }, lane)));
  const drawn = side.bars.map((bar) => drawBar(bar, side.lanes.indexOf(bar.lane), clock));
  svg.append(...drawn.map(([rect]) => rect), ...side.cuts.flatMap((cut) => drawCut(cut, clock, height)));
  svg.append(...drawn.flatMap(([, ...label]) => label));
  $("lanes").replaceChildren(svg);
}

function caption(side, ms) {
  const exposed = side.bars.some((bar) => isExposed(bar, ms));
  const parts = [`${ms.toFixed(2)} ms${side.cuts.length ? " without compilation" : ""}`];
  parts.push("one colour per unit, as in the list below");
  if (exposed) parts.push("red edge: partly exposed, the rank waits and computes nothing");
  return `${parts.join("; ")}. ${side.note}`;
}

const isExposed = (bar, total) => bar.exposed_ms > total / 200;

// Milliseconds to pixels. The clock stands still in a cut, which has a width all the same.
function clockOf(cuts, total, width) {
  const gap = cuts.length ? Math.min(CUT, 0.4 * width / cuts.length) : 0;
  const scale = (width - gap * cuts.length) / total;
  // `after`: behind a cut at this time, not before it.
  const place = (ms, after = false) => LABEL + ms * scale
    + gap * cuts.filter((cut) => cut.at_ms < ms || (after && cut.at_ms === ms)).length;
  const isNearCut = (x) => cuts.some(
    (cut) => x > place(cut.at_ms) - gap / 2 && x < place(cut.at_ms, true) + gap / 2);
  return { total, place, isNearCut };
}

function axis(clock, height) {
  const wanted = clock.total / 8;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= wanted);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const made = [];
  for (let k = 0; k * step <= clock.total; k++) {
    const x = clock.place(k * step);
    made.push(shape("line", { x1: x, x2: x, y1: AXIS - 3, y2: height, class: "tick" }));
    if (clock.isNearCut(x)) continue; // the cut has its own label there
    made.push(shape("text", { x, y: 11, class: "tick" }, `${(k * step).toFixed(digits)}${k ? "" : " ms"}`));
  }
  return made;
}

function drawBar(bar, row, clock) {
  const x = clock.place(bar.begin_ms);
  const y = AXIS + row * ROW + 2;
  const length = Math.max(1, clock.place(bar.end_ms) - x);
  const rect = shape("rect", {
    x, y, width: length, height: ROW - 4, rx: 2, fill: colour(bar.unit),
    class: (isExposed(bar, clock.total) ? "exposed " : "") + (bar.unit === owner().unit ? "chosen" : ""),
  });
  rect.append(shape("title", {}, describe(bar)));
  rect.onclick = () => openUnit(bar.unit);
  const label = shortened(bar.unit, length - 6);
  if (!label) return [rect];
  return [rect, shape("text", { x: x + length / 2, y: y + 12, class: "bar" }, label)];
}

// The unit's name, shortened from the left to fit.
function shortened(unit, width) {
  const parts = (unit || data.root).split(".");
  while (parts.length && parts.join(".").length * CHARACTER > width) parts.shift();
  return parts.join(".");
}

function drawCut(cut, clock, height) {
  const x = clock.place(cut.at_ms);
  const width = clock.place(cut.at_ms, true) - x;
  const seconds = `${(cut.ms / 1e3).toFixed(1)} s`;
  const box = shape("rect", { x, y: AXIS, width, height: height - AXIS, class: "cut" });
  box.append(shape("title", {}, `${seconds} of compilation, cut out`));
  const made = [box];
  for (let y = AXIS - width; y < height; y += 7) { // hatching: diagonal lines from edge to edge
    const [top, bottom] = [Math.max(AXIS, y), Math.min(height, y + width)];
    made.push(shape("line", { x1: x + top - y, x2: x + bottom - y, y1: top, y2: bottom, class: "hatch" }));
  }
  if (width > seconds.length * CHARACTER) {
    made.push(shape("text", { x: x + width / 2, y: 11, class: "cut" }, seconds));
  }
  return made;
}

function describe(bar) {
  const parts = [bar.name.trim() + (bar.unit ? "" : ` ${data.root}`), `${(bar.end_ms - bar.begin_ms).toFixed(3)} ms`];
  if (bar.exposed_ms > 0) parts.push(`${bar.exposed_ms.toFixed(3)} ms exposed`);
  if (bar.num_bytes) parts.push(`${bar.num_bytes.toLocaleString("en")} bytes ${bar.bytes_are}`);
  return parts.join(", ");
}

function openUnit(unit) {
  const found = data.owners.findIndex((o) => o.unit === unit);
  if (found < 0) return;
  choose({ owner: found });
  choose(initialPair());
}

// Hues from yellow to violet: red is reserved for edges, and the root is grey.
function colour(unit) {
  const at = data.units.indexOf(unit);
  return at < 0 || unit === "" ? "#aab2bb" : `hsl(${45 + (at * 0.618034 % 1) * 255} 55% 66%)`;
}

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

