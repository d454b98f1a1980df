// Elements and tables. Everything that came from the daemon gets into the page as text, never as
// markup; and only what changed is touched, so that focus, selection and open parts stay.

export const at = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// columns: {title, kind ("text", "number", "code" or "name"), of: row -> string}.
// Without rows there is one that says `empty`.
export function fill(table, columns, rows, empty) {
  head(table, columns);
  const body = table.tBodies[0];
  table.tHead.hidden = rows.length === 0;
  while (body.rows.length > Math.max(1, rows.length)) body.deleteRow(-1);
  if (rows.length === 0) {
    while (body.rows.length) body.deleteRow(-1);
    const cell = element("td", { colspan: columns.length, role: "cell", class: "empty" }, empty);
    body.append(element("tr", { role: "row" }, cell));
    return;
  }
  rows.forEach((row, index) => {
    if (body.rows[index]?.cells.length !== columns.length) {
      body.rows[index]?.remove();
      const cells = columns.map(({ title, kind }) => cell(title, kind));
      body.insertBefore(element("tr", { role: "row" }, ...cells), body.rows[index] ?? null);
    }
    columns.forEach(({ of }, column) => setText(body.rows[index].cells[column], of(row)));
  });
}

// The roles that display: block would take from the parts of a table on a narrow screen.
function cell(title, kind) {
  return kind === "name"
    ? element("th", { role: "rowheader", scope: "row", class: kind, "data-title": title })
    : element("td", { role: "cell", class: kind, "data-title": title });
}

function head(table, columns) {
  const titles = columns.map(({ title }) => title).join("\n");
  if (table.dataset.titles === titles) return;
  table.dataset.titles = titles;
  table.setAttribute("role", "table");
  const cells = columns.map(({ title, kind }) =>
    element("th", { role: "columnheader", scope: "col", class: kind }, title));
  table.replaceChildren(
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...cells)),
    element("tbody", { role: "rowgroup" }));
}

// How much of something is taken; `text` says it too.
export function bar(target, share, label, text) {
  target.setAttribute("role", "meter");
  target.setAttribute("aria-label", label);
  target.setAttribute("aria-valuemin", "0");
  target.setAttribute("aria-valuemax", "100");
  target.setAttribute("aria-valuenow", String(Math.round(100 * share)));
  target.setAttribute("aria-valuetext", text);
  if (!target.firstChild) target.append(element("span"));
  target.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
}
