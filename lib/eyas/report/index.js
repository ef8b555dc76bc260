// The index of all runs: sort, filter, copy a command, two runs side by side. Without it the page is a plain table, newest run first.
"use strict";
const {runs, measures, meanings} = JSON.parse(document.getElementById("data").textContent);
const table = document.querySelector("table.runs"), rows = [...table.tBodies[0].rows], boxes = [...table.querySelectorAll("input[type=checkbox]")];
const view = document.getElementById("compare");

// ---- sort: a click on a head, once more for the other way; what has no value stays at the end
table.tHead.addEventListener("click", event => {
  const head = event.target.closest("button")?.closest("th");
  if (!head) return;
  const first = head.dataset.first || "ascending", way = head.ariaSort === "none" ? first : head.ariaSort === "ascending" ? "descending" : "ascending";
  for (const other of table.tHead.querySelectorAll("th[aria-sort]")) other.ariaSort = "none";
  head.ariaSort = way;
  const key = row => row.cells[head.cellIndex].dataset.sort, sign = way === "ascending" ? 1 : -1;
  rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
  });
  table.tBodies[0].append(...rows);
});

// ---- filter: rows that hold every word
const filter = document.getElementById("filter"), count = document.getElementById("count");
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  count.textContent = words.length ? `${rows.filter(row => !row.hidden).length} of ${rows.length} runs` : "";
});

// ---- copy: where the browser forbids it, the command is selected instead
document.addEventListener("click", async event => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  } catch {
    const code = button.parentElement.querySelector("code");
    if (code) getSelection().selectAllChildren(code);
    button.textContent = code ? "selected" : "not allowed here";
  }
  setTimeout(() => button.textContent = said, 1500);
});

// ---- compare: #compare=a,b shows two runs, #run-a opens one
let ticked = [];
for (const box of boxes) box.addEventListener("change", () => {
  ticked = ticked.filter(name => name !== box.value);
  if (box.checked) ticked = [...ticked, box.value].slice(-2);
  history.replaceState(null, "", ticked.length === 2 ? "#compare=" + ticked.map(encodeURIComponent).join(",") : "#");
  show(ticked);
});
document.getElementById("close").addEventListener("click", () => { history.replaceState(null, "", "#"); show([]); });
addEventListener("hashchange", fromHash);
addEventListener("beforeprint", () => document.querySelectorAll("details.run").forEach(run => run.open = true));

function fromHash() {
  const hash = location.hash;
  if (hash.startsWith("#compare=")) {
    show(hash.slice(9).split(",").map(decodeURIComponent).filter(name => runs.some(run => run.name === name)).slice(0, 2));
    view.scrollIntoView();
  } else if (hash) {
    const found = document.getElementById(decodeURIComponent(hash.slice(1)));
    if (found?.tagName === "DETAILS") { found.open = true; found.scrollIntoView(); }
  }
}

function show(names) {
  ticked = names;
  for (const box of boxes) { box.checked = names.includes(box.value); box.closest("tr").classList.toggle("chosen", box.checked); }
  view.hidden = names.length < 2;
  if (!view.hidden) compare(...names.map(name => runs.find(run => run.name === name)));
}

function compare(a, b) {
  document.getElementById("compared").textContent = `${a.name} and ${b.name}`;
  const lines = measures.filter(m => a.numbers[m.key] || b.numbers[m.key]).map(m => [[m.label, m.note], number(a.numbers[m.key]), number(b.numbers[m.key]), difference(m, a, b)]);
  fill("compared-numbers", ["", a.name, b.name, `${b.name} - ${a.name}`], lines, "Neither run has measured acceptance.");
  // A setting that came after one of the runs tells them apart only where the other one was given it.
  const known = name => (name in a.settings && name in b.settings) || a.given.includes(name) || b.given.includes(name);
  const settings = Object.keys({...a.settings, ...b.settings}).filter(name => name !== "run_name" && known(name) && text(a.settings[name]) !== text(b.settings[name]));
  fill("compared-settings", ["", a.name, b.name], settings.map(name => [[name, meanings[name]], text(a.settings[name]), text(b.settings[name])]), "No setting differs.");
  const facts = Object.keys({...a.facts, ...b.facts}).filter(name => a.facts[name] !== b.facts[name]);
  fill("compared-facts", ["", a.name, b.name], facts.map(name => [name, a.facts[name] || "not recorded", b.facts[name] || "not recorded"]), "Nothing else differs.");
  const paired = document.getElementById("paired");
  paired.hidden = !(a.numbers.acceptance_length && b.numbers.acceptance_length && apart(measures[0], a, b).length === 0);
  paired.querySelector("code").textContent = `python -m eyas evaluate compare --profile ${b.profile} -p run_name ${b.name} -p compare_run ${a.name}`;
}

function number(block) {
  if (!block) return "not measured";
  return block.value.toFixed(2) + (block.low === null ? ", too few prompts for an interval" : ` (${block.low.toFixed(2)} to ${block.high.toFixed(2)})`) + (block.prompts ? `, ${block.prompts} prompts` : "");
}

const apart = (measure, a, b) => measure.needs.filter(name => a.conditions[name] === undefined || text(a.conditions[name]) !== text(b.conditions[name]));

// The interval of a difference of two independent numbers, from their own (Zou and Donner 2008, "MOVER").
function difference(measure, a, b) {
  const [x, y] = [a.numbers[measure.key], b.numbers[measure.key]];
  if (!x || !y) return "";
  const other = apart(measure, a, b);
  if (other.length) return `no difference of the drafters: other ${other.join(", ")}`;
  if (x.low === null || y.low === null) return "too few prompts";
  const d = y.value - x.value, low = d - Math.hypot(y.value - y.low, x.high - x.value), high = d + Math.hypot(y.high - y.value, x.value - x.low);
  return `${signed(d)} (${signed(low)} to ${signed(high)})` + (low <= 0 && high >= 0 ? ", not told apart" : "");
}

const signed = value => (value < 0 ? "-" : "+") + Math.abs(value).toFixed(2);
const text = value => value === undefined ? "not recorded" : Array.isArray(value) ? value.join(", ") : value === "" ? "(empty)" : String(value);

// A table with these heads; a first cell of [name, note] has the note below the name.
function fill(id, heads, lines, nothing) {
  const place = document.getElementById(id), make = (tag, ...inside) => { const made = document.createElement(tag); made.append(...inside); return made; };
  const rows = [heads, ...lines].map((line, i) => make("tr", ...line.map(said => {
    const [name, note] = [said].flat(), cell = make(i ? "td" : "th", name);
    if (note) cell.append(make("small", note));
    return cell;
  })));
  const table = make("table", ...rows);
  table.className = "head";
  place.replaceChildren(lines.length ? table : make("p", nothing));
}

fromHash();
