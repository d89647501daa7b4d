"use strict";
const samples = JSON.parse(document.getElementById("data").textContent);
const pick = (id) => document.getElementById(id);
let chosen = null; // the row whose text is shown

function option(select, value, text) {
  const one = document.createElement("option");
  one.value = value;
  one.textContent = text;
  select.append(one);
}

function cell(row, kind, text) {
  const one = document.createElement(kind);
  if (text !== undefined) one.textContent = text;
  row.append(one);
  return one;
}

/** [columns][parts] of the chosen sample: attention by step or by layer. */
function masses(sample) {
  const layer = pick("layer").value;
  if (pick("columns").value === "layer") return sample.by_layer;
  if (layer === "mean") return sample.by_step;
  return sample.mass.map((step) => step[Number(layer)]);
}

function draw() {
  const sample = samples[Number(pick("sample").value)];
  const bySteps = pick("columns").value === "step", ofAll = pick("of").value === "all";
  pick("layer").disabled = !bySteps;
  pick("question").textContent = `${sample.question} → ${sample.answer.trim().split("\n")[0]}`;
  const parts = sample.parts.map((part, number) => ({ ...part, number }))
    .filter((part) => ofAll || part.kind === "passage");
  const columns = masses(sample).map((column) => {
    const whole = ofAll ? 1 : parts.reduce((sum, part) => sum + column[part.number], 0) || 1;
    return parts.map((part) => column[part.number] / whole);
  });
  const top = Math.max(...columns.flatMap((column) => column.filter((_, i) => parts[i].kind === "passage")), 1e-9);
  const table = pick("map");
  table.replaceChildren();
  const head = cell(cell(table, "thead"), "tr");
  cell(head, "th", bySteps ? "part / token written" : "part / layer").scope = "col";
  (bySteps ? sample.tokens : sample.layers).forEach((name) => {
    const column = cell(head, "th");
    column.scope = "col";
    cell(column, "span", String(name).replaceAll("\n", "↵").replace(/^ +$/, "␣"));
  });
  const body = cell(table, "tbody");
  parts.forEach((part, i) => {
    const row = cell(body, "tr");
    row.className = part.kind;
    const name = cell(row, "th");
    name.scope = "row";
    const button = cell(name, "button", (part.gold ? "★ " : "") + part.name);
    button.type = "button";
    button.title = `${part.name}: ${part.tokens} tokens`;
    button.setAttribute("aria-pressed", String(chosen === part.name));
    button.addEventListener("click", () => {
      chosen = chosen === part.name ? null : part.name;
      draw();
    });
    columns.forEach((column) => {
      const share = column[i], shade = Math.min(share / top, 1);
      const one = cell(row, "td", share >= 0.005 ? Math.round(100 * share) : "·");
      one.style.background = `rgba(0, 92, 158, ${(0.95 * shade).toFixed(3)})`;
      if (shade > 0.72) one.style.color = "#fff";
      if (share < 0.005) one.className = "none";
      one.title = `${part.name}: ${(100 * share).toFixed(2)} %`;
    });
  });
  const shown = pick("text");
  shown.replaceChildren();
  if (chosen !== null && sample.texts[chosen]) {
    cell(shown, "h2", chosen);
    cell(shown, "p", sample.texts[chosen].trim());
  }
}

function fill() {
  const sample = samples[Number(pick("sample").value)];
  const select = pick("layer"), before = select.value;
  select.replaceChildren();
  option(select, "mean", "mean of all");
  sample.layers.forEach((layer, number) => option(select, String(number), `layer ${layer}`));
  if (before && Number(before) < sample.layers.length) select.value = before;
  draw();
}

samples.forEach((sample, number) => option(pick("sample"), String(number), `${sample.item}: ${sample.question}`));
pick("sample").addEventListener("change", () => { chosen = null; fill(); });
for (const id of ["columns", "layer", "of"]) pick(id).addEventListener("change", draw);
fill();
