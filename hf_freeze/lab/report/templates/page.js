
"use strict";
// Without this script the tables are in the order of the grids, all rows shown, and the pictures as drawn. What the reader chooses is
// in the fragment of the address, so that a view can be linked: find, group, from, method, machine and hide are of the page,
// sort, x, y and with of the group whose number follows.
// A label of more letters than BRIEF is not written beside its point.
const MISSING = "–", BRIEF = 32, form = document.getElementById("filters");
const collator = new Intl.Collator("en", { numeric: true });
const state = () => new URLSearchParams(location.hash.slice(1));

function change(values) {
  const now = state();
  for (const [name, value] of Object.entries(values)) value ? now.set(name, value) : now.delete(name);
  history.replaceState(null, "", `#${now}`);
  render();
}

function element(name, attributes = {}, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(text);
  return made;
}

class Group {
  constructor(section) {
    this.section = section;
    this.number = section.dataset.group;
    this.table = section.querySelector("table.rows");
    this.columns = [...this.table.tHead.rows[0].cells].map((cell, index) => ({
      cell, index, name: cell.dataset.name, heading: cell.textContent, kind: cell.dataset.kind, meaning: cell.title,
      more: cell.dataset.better === "more", hidden: "hidden" in cell.dataset, unit: cell.dataset.name === "share" ? 100 : 1,
    }));
    this.byName = new Map(this.columns.map(column => [column.name, column]));
    this.rows = [...this.table.tBodies[0].rows].map((tr, index) => {
      const cells = [...tr.cells], number = text => text === undefined ? NaN : Number(text);
      return {
        tr, index, name: cells[0].textContent, label: cells[1].textContent, text: tr.textContent.toLowerCase(),
        from: tr.dataset.from, methods: tr.dataset.methods.split(" "), machines: tr.dataset.machines.split("|"),
        keys: cells.map(({ dataset, textContent }) => dataset.key ?? dataset.value ?? (textContent === MISSING ? "" : textContent)),
        values: cells.map(cell => number(cell.dataset.value)), spreads: cells.map(cell => number(cell.dataset.spread)),
        machineOf: cells.map(cell => cell.dataset.on ?? ""),
      };
    });
    this.defaults = section.dataset.axes.split(".");
    this.style = document.head.appendChild(element("style"));
    this.order = this.rows;
    this.prepare();
  }

  prepare() {
    for (const { cell, name } of this.columns) {
      const button = element("button", { type: "button" });
      button.append(...cell.childNodes);
      cell.append(button);
      button.addEventListener("click", () => {
        const sort = state().get(`sort${this.number}`);
        change({ [`sort${this.number}`]: sort === name ? `-${name}` : name });
      });
    }
    const chooser = this.section.querySelector("details.columns");
    chooser.hidden = false;
    this.boxes = [...chooser.querySelectorAll("input")];
    chooser.addEventListener("change", ({ target }) => {
      const hidden = new Set([...this.hidden(state())].map(column => column.name));
      target.checked ? hidden.delete(target.value) : hidden.add(target.value);
      change({ hide: [...hidden].join(".") || "none" });
    });
    this.picture = this.section.querySelector("figure.picture");
    this.picture.hidden = false;
    for (const axis of ["x", "y"]) {
      const select = this[axis] = this.picture.querySelector(`select[name=${axis}]`);
      const score = axis === "y";
      for (const column of this.weighable().filter(({ kind }) => (kind === "score") === score))
        select.append(element("option", { value: column.name }, column.meaning || column.heading));
      select.addEventListener("change", () => change({ [axis + this.number]: select.value }));
    }
    const further = this.picture.querySelector("fieldset");
    for (const column of this.weighable()) {
      const label = element("label");
      label.append(element("input", { type: "checkbox", value: column.name }), ` ${column.heading}`);
      further.append(label);
    }
    this.further = [...further.querySelectorAll("input")];
    further.addEventListener("change", () => {
      const chosen = this.further.filter(box => box.checked && !box.disabled).map(box => box.value);
      change({ [`with${this.number}`]: chosen.join(".") || "none" });
    });
  }

  weighable() {
    return this.columns.filter(column => column.kind && this.rows.some(row => !isNaN(row.values[column.index])));
  }

  hidden(now) {
    const chosen = now.get("hide");
    const names = chosen?.split(".");
    return new Set(this.columns.filter(column => names ? names.includes(column.name) : column.hidden));
  }

  render(now) {
    const words = (now.get("find") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const [group, from, method, machine] = ["group", "from", "method", "machine"].map(name => form.elements[name]?.value);
    const shown = this.rows.filter(row =>
      words.every(word => row.text.includes(word)) && (!from || row.from === from) && (!group || group === this.number)
      && (!method || row.methods.includes(method)) && (!machine || row.machines.includes(machine)));
    const visible = new Set(shown);
    for (const row of this.rows) row.tr.hidden = !visible.has(row);
    const narrowed = group || from || method || machine || words.length;
    this.section.hidden = !shown.length && Boolean(narrowed) && document.querySelectorAll("section[data-group]").length > 1;
    this.sort(now.get(`sort${this.number}`));
    const hidden = this.hidden(now);
    this.style.textContent = [...hidden].map(({ index }) => `#${this.table.id} tr > :nth-child(${index + 1}) { display: none; }`).join("\n");
    for (const box of this.boxes) box.checked = ![...hidden].some(column => column.name === box.value);
    this.weigh(now, shown);
    return shown.length;
  }

  sort(wanted) {
    const descending = wanted?.startsWith("-"), column = this.byName.get(wanted?.replace(/^-/, ""));
    for (const { cell } of this.columns) cell.removeAttribute("aria-sort");
    const order = [...this.rows];
    if (column) {
      column.cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const keys = new Map(order.map(row => [row, row.keys[column.index]]));
      const sign = descending ? -1 : 1;
      order.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        if (x === "" || y === "") return (x === "") - (y === "") || a.index - b.index; // what is missing is last, either way
        return sign * (isNaN(x) || isNaN(y) ? collator.compare(x, y) : x - y) || a.index - b.index;
      });
    }
    if (order.some((row, index) => row !== this.order[index])) {
      const body = this.table.tBodies[0];
      body.remove(); // many rows move faster so
      body.replaceChildren(...order.map(row => row.tr));
      this.table.append(body);
    }
    this.order = order;
  }

  // The Pareto front over some columns: of the rows that have them all, those that no other row beats, being as good in each and better
  // in one. Times of unlike machines are not compared.
  front(columns, rows) {
    const known = rows.filter(row => columns.every(({ index }) => !isNaN(row.values[index])));
    const beats = (a, b) => {
      let better = false;
      for (const { index, more, kind } of columns) {
        const gain = (more ? 1 : -1) * (a.values[index] - b.values[index]);
        if (gain < 0 || (kind === "time" && a.machineOf[index] !== b.machineOf[index])) return false;
        better ||= gain > 0;
      }
      return better;
    };
    return { known: new Set(known), on: new Set(known.filter(row => !known.some(other => beats(other, row)))) };
  }

  weigh(now, shown) {
    const column = (name, fallback, score) => {
      const found = this.byName.get(now.get(name + this.number));
      return found?.kind && (found.kind === "score") === score ? found : this.byName.get(fallback);
    };
    const y = column("y", this.defaults[0], true), x = column("x", this.defaults[1], false);
    const further = now.get(`with${this.number}`)?.split(".") ?? this.defaults.slice(2);
    const axes = [y, x, ...this.weighable().filter(each => further.includes(each.name) && each !== x && each !== y)];
    [this.x.value, this.y.value] = [x.name, y.name];
    for (const box of this.further) {
      box.disabled = box.value === x.name || box.value === y.name;
      box.checked = axes.some(axis => axis.name === box.value);
    }
    const pair = this.front([y, x], shown), all = this.front(axes, shown), place = this.byName.get("front").index;
    for (const row of this.rows) {
      const marks = [pair.on.has(row) && "2-D", all.on.has(row) && axes.length > 2 && `${axes.length}-D`].filter(Boolean);
      row.tr.cells[place].textContent = marks.join(", ") || MISSING;
      row.keys[place] = marks.join(", ");
      row.tr.classList.toggle("beaten", all.known.has(row) && !all.on.has(row));
    }
    const headings = axes.map(axis => axis.heading), more = axes.length > 2 ? `; ${axes.length}-D, none in ${headings.join(", ")}` : "";
    this.section.querySelector(".front-legend").textContent = `front, of the rows shown: 2-D, no row is as good in both `
      + `${headings[0]} and ${headings[1]} and better in one${more}; rows that another row beats in this sense are grey. Fronts compare means, without a test.`;
    this.draw(x, y, axes, shown, pair, all);
  }

  draw(x, y, axes, shown, pair, all) {
    let drawn = shown.filter(row => pair.known.has(row));
    const said = [], rows = (count, what) => count && said.push(`${count} ${count === 1 ? "row" : "rows"} ${what}.`);
    rows(shown.length - drawn.length, `without ${x.heading} or ${y.heading} not drawn`);
    if (x.kind === "time") {
      const count = new Map();
      for (const row of drawn) count.set(row.machineOf[x.index], (count.get(row.machineOf[x.index]) ?? 0) + 1);
      const [most] = [...count].sort((a, b) => b[1] - a[1])[0] ?? [""];
      const others = drawn.filter(row => row.machineOf[x.index] !== most);
      rows(others.length, "of other machines not drawn");
      drawn = drawn.filter(row => !others.includes(row));
      if (most) said.push(`Measured on: ${most}.`);
    }
    const value = (row, axis) => axis.unit * row.values[axis.index], edge = outerFence(drawn.map(row => value(row, y)), y);
    const clipped = score => edge === null ? score : y.more ? Math.max(score, edge) : Math.min(score, edge);
    const beyond = drawn.filter(row => clipped(value(row, y)) !== value(row, y));
    rows(beyond.length, "far worse than the others on the edge, hollow");
    rows(pair.known.size && drawn.filter(row => !all.known.has(row)).length, "without some of the numbers not weighed over all of them");
    const plot = new Plot(x, y, drawn.map(row => value(row, x)), drawn.map(row => clipped(value(row, y))));
    const onFront = drawn.filter(row => pair.on.has(row)).sort((a, b) => value(a, x) - value(b, x) || value(a, y) - value(b, y));
    plot.steps(onFront.map(row => [value(row, x), clipped(value(row, y))]));
    const rank = row => pair.on.has(row) ? 2 : all.on.has(row) ? 1 : 0;
    for (const row of [...drawn].sort((a, b) => rank(a) - rank(b))) {
      const shownAs = [x, y].map(axis => `${axis.heading} ${row.tr.cells[axis.index].textContent.trim()}`).join(", ");
      plot.point(value(row, x), clipped(value(row, y)), y.unit * row.spreads[y.index], ["", "other", "front"][rank(row)], beyond.includes(row),
        `${row.name}: ${row.label}; ${shownAs}`);
    }
    const named = [...onFront, ...drawn.filter(row => rank(row) === 1)];
    for (const row of drawn.length <= 24 ? [...named, ...drawn.filter(row => !named.includes(row))] : named)
      if (row.label.length <= BRIEF) plot.name(value(row, x), clipped(value(row, y)), row.label);
    const listed = found => found.length > 24 ? `${found.length} rows` : found.map(row => row.label).join("; ") || "no row";
    const over = columns => columns.map(column => column.heading).join(", ");
    const front = `On the front over ${over([y, x])}: ${listed(onFront)}.`;
    const further = axes.length > 2 ? ` Over ${over(axes)}: ${listed(shown.filter(row => all.on.has(row)))}.` : "";
    plot.svg.setAttribute("aria-label", `${y.heading} against ${x.heading}. ${front}`);
    this.picture.querySelector(".drawing").replaceChildren(plot.svg);
    this.picture.querySelector("figcaption span").textContent = "Blue: no row shown is as good in both and better in one (dashed line)"
      + `${axes.length > 2 ? "; blue rings: only when all that is ticked counts" : ""}; grey: another row is. A point says its row when pointed at.`;
    this.picture.querySelector("p").textContent = `${front}${further} ${said.join(" ")}`;
  }
}

// Beyond it a score is far worse than the others: the outer fence of the box plot (Tukey, 1977); null where none is, or rows are few.
function outerFence(scores, { more, kind }) {
  if (scores.length < 8) return null;
  const log = !more && scores.every(score => score > 0), scaled = scores.map(score => log ? Math.log(score) : score).sort((a, b) => a - b);
  const quartile = share => {
    const at = share * (scaled.length - 1), low = Math.floor(at);
    return scaled[low] + (at - low) * ((scaled[low + 1] ?? scaled[low]) - scaled[low]);
  };
  const [low, high] = [quartile(0.25), quartile(0.75)], fence = more ? low - 3 * (high - low) : high + 3 * (high - low);
  const edge = log ? Math.exp(fence) : fence;
  return scores.some(score => more ? score < edge : score > edge) ? edge : null;
}

class Plot {
  static width = 640;
  static height = 400;
  static margin = { left: 58, right: 24, top: 14, bottom: 44 };

  constructor(x, y, xs, ys) {
    const { width, height, margin } = Plot;
    this.svg = this.add(null, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    this.x = new Scale(xs, margin.left, width - margin.right, x.name !== "share" && ratio(xs) > 10, x.kind !== "score");
    this.y = new Scale(ys, height - margin.bottom, margin.top, !y.more && ratio(ys) > 1, false);
    this.names = [];
    const [bottom, right] = [height - margin.bottom, width - margin.right];
    for (const tick of this.x.ticks()) {
      this.add(this.svg, "line", { class: "grid", x1: this.x.at(tick), x2: this.x.at(tick), y1: margin.top, y2: bottom });
      this.add(this.svg, "text", { x: this.x.at(tick), y: bottom + 16, "text-anchor": "middle" }, written(tick));
    }
    for (const tick of this.y.ticks()) {
      this.add(this.svg, "line", { class: "grid", x1: margin.left, x2: right, y1: this.y.at(tick), y2: this.y.at(tick) });
      this.add(this.svg, "text", { x: margin.left - 6, y: this.y.at(tick) + 4, "text-anchor": "end" }, written(tick));
    }
    this.add(this.svg, "path", { class: "axis", d: `M${margin.left},${margin.top}V${bottom}H${right}` });
    const middle = (margin.top + bottom) / 2;
    this.add(this.svg, "text", { x: (margin.left + right) / 2, y: height - 8, "text-anchor": "middle" }, x.meaning || x.heading);
    this.add(this.svg, "text", { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` },
      `${y.meaning || y.heading} (${y.more ? "higher" : "lower"} is better)`);
  }

  add(parent, name, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, typeof value === "number" ? value.toFixed(1) : value);
    if (text) made.append(text);
    parent?.append(made);
    return made;
  }

  steps(points) {
    const at = points.map(([x, y]) => [this.x.at(x).toFixed(1), this.y.at(y).toFixed(1)]);
    if (at.length > 1) this.add(this.svg, "path", { class: "line", d: at.map(([x, y], i) => i ? `H${x}V${y}` : `M${x},${y}`).join("") });
  }

  point(x, y, spread, kind, hollow, title) {
    const [cx, cy] = [this.x.at(x), this.y.at(y)];
    if (spread > 0 && !hollow)
      this.add(this.svg, "line", { class: "spread", x1: cx, x2: cx, y1: this.y.at(y - spread), y2: this.y.at(y + spread) });
    const circle = this.add(this.svg, "circle", { class: `point ${kind}`, cx, cy, r: kind ? 5 : 4, ...(hollow && { style: "fill-opacity: 0; stroke: currentColor" }) });
    this.add(circle, "title", {}, title);
  }

  // Beside its point, where that covers no other name; else the name is left to the table.
  name(x, y, text) {
    const [cx, cy] = [this.x.at(x), this.y.at(y)], narrow = matchMedia("(max-width: 40rem)").matches;
    const wide = (narrow ? 9.2 : 6.3) * text.length, high = narrow ? 13 : 9;
    for (const [dx, dy] of [[8, -5], [8, 13], [-8 - wide, -5], [-8 - wide, 13], [-wide / 2, -10], [-wide / 2, 20]]) {
      const box = [cx + dx, cy + dy - high, cx + dx + wide, cy + dy + 2];
      const clash = this.names.some(([l, t, r, b]) => box[0] < r && box[2] > l && box[1] < b && box[3] > t);
      if (clash || box[0] < Plot.margin.left || box[2] > Plot.width || box[1] < 0) continue;
      this.names.push(box);
      this.add(this.svg, "text", { x: box[0], y: cy + dy }, text);
      return;
    }
  }
}

class Scale {
  constructor(values, from, to, log, zero) {
    this.log = log && values.length > 0 && Math.min(...values) > 0;
    const scaled = values.map(value => this.scaled(value));
    let low = Math.min(...scaled), high = Math.max(...scaled);
    if (!values.length) [low, high] = [0, 1];
    const room = 0.08 * (high - low) || Math.abs(high) * 0.1 || 1;
    [this.low, this.high] = [zero && !this.log ? Math.min(0, low) : low - room, high + room];
    [this.from, this.to] = [from, to];
  }

  scaled(value) { return this.log ? Math.log10(value) : value; }

  at(value) {
    const share = (this.scaled(value) - this.low) / (this.high - this.low);
    return this.from + Math.min(1, Math.max(0, isNaN(share) ? 0 : share)) * (this.to - this.from);
  }

  ticks() {
    if (!this.log || this.high - this.low < 0.5) {
      const [low, high] = this.log ? [10 ** this.low, 10 ** this.high] : [this.low, this.high];
      const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find(each => each * power >= rough);
      return Array.from({ length: 12 }, (_, i) => step * (Math.ceil(low / step) + i)).filter(tick => tick <= high);
    }
    const found = [];
    for (let power = Math.floor(this.low); power <= this.high; power++)
      for (const digit of this.high - this.low > 3 ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
    return found.filter(tick => Math.log10(tick) >= this.low && Math.log10(tick) <= this.high);
  }
}

function ratio(values) { return Math.max(...values) / Math.min(...values); }
function written(value) { return value.toLocaleString("en", { maximumSignificantDigits: 4 }); }

const groups = [...document.querySelectorAll("section[data-group]")].map(section => new Group(section));

function render() {
  const now = state();
  for (const field of form.elements) {
    if (field.type === "button" || (field.type === "search" && document.activeElement === field)) continue;
    field.value = now.get(field.name) ?? "";
    if (field.selectedIndex === -1) field.value = ""; // a value that this page does not have
  }
  const all = groups.reduce((sum, group) => sum + group.rows.length, 0);
  const shown = groups.reduce((sum, group) => sum + group.render(now), 0);
  document.getElementById("status").textContent = `${shown} of ${all} rows shown`;
}

form.hidden = false;
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", ({ target }) => change({ [target.name]: target.value }));
form.elements.clear.addEventListener("click", () => {
  history.replaceState(null, "", "#");
  document.activeElement.blur();
  render();
});
addEventListener("hashchange", render);
for (const link of document.querySelectorAll("a[href^='#group-']"))
  link.addEventListener("click", event => { // or the address would lose what was chosen
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).scrollIntoView();
  });
render();
