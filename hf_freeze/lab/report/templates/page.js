
"use strict";
// Without this script the tables are in the order of the grids, with all rows and the front over the numbers ticked at first. What the
// reader chooses is in the fragment of the address, so that a view can be linked: every field of the page that is not as it was.
const MISSING = ["–", "not known"], collator = new Intl.Collator("en", { numeric: true });
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const fields = all("input[name]");

class Group {
  constructor(section) {
    this.section = section;
    this.table = section.querySelector("table.rows");
    this.columns = all("thead th", this.table).map((cell, index) => ({ cell, index, ...cell.dataset }));
    this.rows = [...this.table.tBodies[0].rows].map((tr, index) => ({
      tr, index, text: tr.textContent.toLowerCase(),
      values: [...tr.cells].map(({ dataset }) => "value" in dataset ? Number(dataset.value) : NaN),
      on: [...tr.cells].map(({ dataset }) => dataset.on),
    }));
    this.sorted = section.querySelector("input[data-sort]");
    for (const { cell, name } of this.columns) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...cell.childNodes);
      button.addEventListener("click", () => {
        this.sorted.value = this.sorted.value === name ? `-${name}` : name;
        change();
      });
      cell.append(button);
    }
    this.marks = all("figure g[id*='-row-']", section).map(mark => {
      const row = this.rows[mark.id.match(/-row-(\d+)/)[1]], title = document.createElementNS(mark.namespaceURI, "title");
      title.append([...row.tr.cells].slice(0, 2).map(cell => cell.textContent).join(": "));
      mark.prepend(title); // what is shown where the mouse points at it
      return { mark, row };
    });
  }

  render(words) {
    for (const { tr, text } of this.rows) tr.hidden = !words.every(word => text.includes(word));
    const shown = this.rows.filter(({ tr }) => !tr.hidden);
    this.section.hidden = !shown.length && groups.length > 1;
    for (const { mark, row } of this.marks) mark.style.display = row.tr.hidden ? "none" : "";
    for (const { name, value, checked } of all("input[type=checkbox]", this.section))
      if (name.startsWith("show")) this.table.classList.toggle(`no-${value}`, !checked);
    this.weigh(shown);
    this.sort(this.sorted.value.replace(/^-/, ""), this.sorted.value.startsWith("-") ? -1 : 1);
    return shown.length;
  }

  // The Pareto front over the ticked columns: of the rows that have them all, those that no other row beats, being as good in each and
  // better in one. Times of unlike machines are not compared.
  weigh(shown) {
    const ticked = all("input[name^=over]:checked", this.section).map(({ value }) => value);
    const axes = this.columns.filter(({ name }) => ticked.includes(name)), place = this.columns.findIndex(({ name }) => name === "front");
    const known = axes.length ? shown.filter(({ values }) => axes.every(({ index }) => !isNaN(values[index]))) : [];
    const gain = (a, b, { index, better }) => (better === "more" ? 1 : -1) * (a.values[index] - b.values[index]);
    const beats = (a, b) => axes.every(axis => gain(a, b, axis) >= 0 && a.on[axis.index] === b.on[axis.index])
      && axes.some(axis => gain(a, b, axis) > 0);
    const beaten = new Set(known.filter(row => known.some(other => beats(other, row)))), on = new Set(known.filter(row => !beaten.has(row)));
    for (const row of this.rows) {
      row.tr.classList.toggle("beaten", beaten.has(row));
      row.tr.cells[place].textContent = on.has(row) ? "front" : MISSING[0];
    }
    this.section.querySelector(".front").textContent = axes.map(({ cell }) => cell.textContent).join(", ") || "nothing";
  }

  sort(name, sign) {
    const column = this.columns.find(column => column.name === name);
    for (const { cell } of this.columns) cell.removeAttribute("aria-sort");
    column?.cell.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
    const key = ({ tr, values, index }) => {
      if (!column) return index;
      const text = tr.cells[column.index].textContent;
      return isNaN(values[column.index]) ? (MISSING.includes(text) ? "" : text) : values[column.index];
    };
    const order = this.rows.map(row => [key(row), row]).sort(([x, a], [y, b]) => {
      if (x === "" || y === "") return (x === "") - (y === "") || a.index - b.index; // what is missing is last, either way
      return sign * (typeof x === "string" ? collator.compare(x, y) : x - y) || a.index - b.index;
    });
    this.table.tBodies[0].replaceChildren(...order.map(([, { tr }]) => tr));
  }
}

// Of all fields of a name, as they are or as they were at first.
const chosen = (name, first) => fields.filter(field => field.name === name).map(field => field.type !== "checkbox"
  ? (first ? field.defaultValue : field.value) : (first ? field.defaultChecked : field.checked) ? field.value : "").filter(Boolean).join(".");

function change() {
  const now = new URLSearchParams();
  for (const { name } of fields) if (chosen(name) !== chosen(name, true)) now.set(name, chosen(name));
  history.replaceState(null, "", `#${now}`);
  render();
}

function read() {
  const now = new URLSearchParams(location.hash.slice(1));
  for (const field of fields) {
    const value = now.get(field.name);
    if (field.type === "checkbox") field.checked = value === null ? field.defaultChecked : value.split(".").includes(field.value);
    else field.value = value ?? field.defaultValue;
  }
  render();
}

function render() {
  const words = document.querySelector("input[name=find]").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = groups.reduce((sum, group) => sum + group.render(words), 0);
  document.getElementById("status").textContent = `${shown} of ${groups.reduce((sum, { rows }) => sum + rows.length, 0)} rows shown`;
}

const groups = all("section[data-group]").map(section => new Group(section));
for (const part of all("[data-script]")) part.hidden = false;
addEventListener("input", change);
addEventListener("hashchange", () => location.hash.startsWith("#group-") || read());
document.getElementById("clear").addEventListener("click", () => {
  history.replaceState(null, "", "#");
  read();
});
read();
