"use strict";
// Sorting of the board, and the browser of answers. The state of both stands in the address after #, so that a view can
// be linked: sort, dir (asc or desc), task, method, wrong, text, item, show.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const state = new URLSearchParams(location.hash.slice(1));
  const remember = (name, value) => {
    if (value) state.set(name, value);
    else state.delete(name);
    history.replaceState(null, "", "#" + state.toString());
  };
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // The board. Rows without a figure stay last; equal rows keep the order of the page.
  const headings = [...document.querySelectorAll("#board thead button")];
  const body = document.querySelector("#board tbody");
  const rows = [...body.rows];
  const value = (row, column) => {
    const text = row.cells[column].dataset.v;
    if (text === undefined) return null;
    const number = Number(text);
    return text === "" || Number.isNaN(number) ? text : number;
  };
  const sort = (heading, direction) => {
    const column = headings.indexOf(heading);
    const sign = direction === "asc" ? 1 : -1;
    const sorted = rows
      .map((row, order) => ({ row, order, key: value(row, column) }))
      .sort((a, b) => {
        if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.order - b.order;
        return sign * ((a.key > b.key) - (a.key < b.key)) || a.order - b.order;
      });
    body.append(...sorted.map((entry) => entry.row));
    for (const other of headings) {
      const chosen = other === heading ? (direction === "asc" ? "ascending" : "descending") : "none";
      other.parentElement.setAttribute("aria-sort", chosen);
    }
    remember("sort", heading.dataset.column);
    remember("dir", direction);
  };
  const first = (heading) => (heading.dataset.best === "high" ? "desc" : "asc");
  for (const heading of headings) {
    heading.addEventListener("click", () => {
      const now = heading.parentElement.getAttribute("aria-sort");
      const start = first(heading);
      const shown = now === "ascending" ? "asc" : now === "descending" ? "desc" : null;
      sort(heading, shown === start ? (start === "asc" ? "desc" : "asc") : start);
    });
  }
  const asked = headings.find((heading) => heading.dataset.column === state.get("sort"));
  if (asked) sort(asked, ["asc", "desc"].includes(state.get("dir")) ? state.get("dir") : first(asked));

  // The answers.
  const PAGE = 60;
  const SHADES = ["#ffffff", "#f0f6fb", "#e4eff8", "#d8e8f5", "#cbe1f2", "#bcd8ee", "#acceea", "#9cc5e6", "#8bbbe1", "#78b0dc"];
  const list = document.getElementById("list");
  const detail = document.getElementById("detail");
  const more = document.getElementById("more");
  const filters = {
    task: document.getElementById("by-task"),
    method: document.getElementById("by-method"),
    text: document.getElementById("by-text"),
    wrong: document.getElementById("wrong"),
  };
  const promptOf = (answer) => data.prompts[answer.prompt];
  const methodOf = (answer) => data.methods[answer.method];
  const texts = data.answers.map((answer) =>
    [promptOf(answer).item, answer.text || answer.error || "", ...promptOf(answer).references].join("\n").toLowerCase());
  let found = [];
  let limit = PAGE;
  let chosen = null;

  const scoreOf = (answer) =>
    make("span", {
      className: "score " + (answer.right ? "right" : answer.error || answer.score < 0.5 ? "wrong" : ""),
      textContent: answer.error ? "failed" : answer.score.toFixed(2),
    });
  const entry = (answer, withMethod, withItem) => {
    const button = make("button", { type: "button" }, scoreOf(answer));
    if (withItem) button.append(make("span", { textContent: promptOf(answer).task + " · " + promptOf(answer).item }));
    if (withMethod) button.append(make("code", { textContent: methodOf(answer) }));
    button.append(make("span", { className: "clip quiet", textContent: answer.error || answer.text }));
    button.setAttribute("aria-pressed", String(answer === chosen));
    button.addEventListener("click", () => choose(answer));
    return button;
  };
  const showList = () => {
    list.replaceChildren(...found.slice(0, limit).map((answer) => make("li", {}, entry(answer, true, true))));
    more.hidden = found.length <= limit;
    document.getElementById("count").textContent = found.length + " of " + data.answers.length + " answers";
  };
  const filter = () => {
    const words = filters.text.value.toLowerCase();
    found = data.answers.filter((answer, number) =>
      (!filters.task.value || promptOf(answer).task === filters.task.value) &&
      (!filters.method.value || methodOf(answer) === filters.method.value) &&
      (!filters.wrong.checked || !answer.right) &&
      (!words || texts[number].includes(words)));
    limit = PAGE;
    if (!found.includes(chosen)) chosen = found[0] || null;
    showList();
    showDetail();
  };
  const choose = (answer) => {
    chosen = answer;
    remember("item", promptOf(answer).item);
    remember("show", methodOf(answer));
    showList();
    showDetail();
    if (matchMedia("(max-width: 760px)").matches) detail.scrollIntoView(); // it stands below the list there
  };

  // Which digit of a profile stands for a token; the profile has as many bins as it has characters.
  const digitOf = (profile, token, tokens) => profile[Math.floor(((token + 1) * profile.length - 1) / tokens)];
  // The text as spans, one per run of characters that look the same: shade k0 to k9, and ref inside a reference.
  const shaded = (text, sizes, firstToken, answer, tokens) => {
    const marked = new Set();
    for (const reference of promptOf(answer).references.filter(Boolean)) {
      for (let at = text.indexOf(reference); at >= 0; at = text.indexOf(reference, at + reference.length)) {
        for (let place = at; place < at + reference.length; place += 1) marked.add(place);
      }
    }
    const shades = answer.kept && sizes
      ? sizes.flatMap((size, number) => Array(size).fill("k" + digitOf(answer.kept, firstToken + number, tokens)))
      : [];
    const spans = [];
    let place = 0;
    Array.from(text).forEach((character, number) => {
      const look = [shades[number] || "", marked.has(place) ? "ref" : ""].filter(Boolean).join(" ");
      const last = spans[spans.length - 1];
      if (last && last.look === look) last.text += character;
      else spans.push({ look, text: character });
      place += character.length;
    });
    return spans.map((span) => make("span", { className: span.look, textContent: span.text }));
  };
  const strip = (profile) => {
    const canvas = make("canvas", { className: "strip", width: profile.length, height: 1 });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "rows kept along the prompt, from its begin to its end");
    const pen = canvas.getContext("2d");
    Array.from(profile).forEach((digit, number) => {
      pen.fillStyle = digit === "0" ? "#f3f4f6" : SHADES[Number(digit)];
      pen.fillRect(number, 0, 1, 1);
    });
    return canvas;
  };
  const key = () => {
    const parts = [["k0", "held by no head"], ["k2", "by few"], ["k5", "by half"], ["k9", "by every head of every layer"], ["ref", "reference"]];
    return make("div", { className: "key" }, ...parts.map(([name, text]) => make("span", { className: name, textContent: text })));
  };
  const promptText = (answer) => {
    const prompt = promptOf(answer);
    if (prompt.head === null || prompt.head === undefined) return [];
    const heading = make("h4", { textContent: "prompt, " + prompt.tokens + " tokens" });
    const block = make("pre", { className: "prompt", tabIndex: 0 });
    block.append(...shaded(prompt.head, prompt.headSizes, 0, answer, prompt.tokens));
    if (prompt.tail) {
      const shown = prompt.headSizes && prompt.tailSizes ? prompt.headSizes.length + prompt.tailSizes.length : null;
      const hidden = shown === null ? "… the middle is not shown …" : "… " + (prompt.tokens - shown) + " tokens are not shown …";
      const start = prompt.tokens - (prompt.tailSizes || []).length;
      block.append(make("span", { className: "gap", textContent: hidden }));
      block.append(...shaded(prompt.tail, prompt.tailSizes, start, answer, prompt.tokens));
    }
    const whole = "Every row of the prompt was kept.";
    if (!answer.kept) return [heading, make("p", { className: "quiet", textContent: answer.error ? "" : whole }), block];
    const ends = make("div", { className: "ends" }, make("span", { textContent: "begin" }), make("span", { textContent: "end" }));
    const unknown = prompt.headSizes ? [] : [make("p", {
      className: "quiet", textContent: "The tokenizer gives no places for its tokens: the text is not shaded." })];
    return [make("h4", { textContent: "rows kept along the prompt" }), strip(answer.kept), ends, heading, key(), ...unknown, block];
  };
  const share = (answer) =>
    answer.keptShare === null || answer.keptShare === undefined ? "" :
      " · kept " + (100 * answer.keptShare).toFixed(1) + " % of the rows, " + (answer.bytes / 1048576).toFixed(2) + " MiB";
  const showDetail = () => {
    if (!chosen) {
      detail.replaceChildren(make("p", { className: "quiet", textContent: "No answer fits the filters." }));
      return;
    }
    const prompt = promptOf(chosen);
    const others = data.answers.filter((answer) => answer.prompt === chosen.prompt);
    detail.replaceChildren(
      make("h3", { textContent: prompt.task + " · " + prompt.item }),
      make("p", { className: "quiet" }, make("code", { textContent: methodOf(chosen) }), share(chosen)),
      make("h4", { textContent: prompt.references.length > 1 ? "references" : "reference" }),
      make("p", { className: "said", textContent: prompt.references.join("\n") }),
      make("h4", {}, chosen.error ? "error" : "prediction, score ", chosen.error ? "" : chosen.score.toFixed(2)),
      make("p", { className: "said", textContent: chosen.error || chosen.text || "(nothing)" }),
      ...promptText(chosen),
      make("h4", { textContent: "the same item under every method" }),
      make("div", { className: "others" }, ...others.map((answer) => entry(answer, true, false))));
  };

  filters.task.value = state.get("task") || "";
  filters.method.value = state.get("method") || "";
  filters.text.value = state.get("text") || "";
  filters.wrong.checked = state.get("wrong") === "1";
  for (const name of ["task", "method"]) {
    if (filters[name].selectedIndex < 0) filters[name].value = "";
  }
  for (const [name, control] of Object.entries(filters)) {
    control.addEventListener("input", () => {
      remember(name, control.type === "checkbox" ? (control.checked ? "1" : "") : control.value);
      filter();
    });
  }
  more.addEventListener("click", () => {
    limit += PAGE;
    showList();
  });
  const named = (answer) => promptOf(answer).item === state.get("item");
  const wanted = (answer) => named(answer) && methodOf(answer) === state.get("show");
  filter();
  const start = found.find(wanted) || found.find(named);
  if (start) {
    chosen = start;
    limit = Math.max(limit, found.indexOf(start) + 1);
    showList();
    showDetail();
  }
})();
