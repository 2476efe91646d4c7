// Elements out of text. Nothing here, and nothing that uses it, turns a string into markup.

export const byId = (id) => document.getElementById(id);

// element("td", { class: "number" }, "12", child): an element with attributes and children; null and false are left out.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Written only where it differs: a screen reader is told of a change, not of a second that has passed.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A table's head and rows; columns are [title, isNumber].
export function fillTable(table, columns, rows) {
  table.hidden = rows.length === 0;
  if (!table.tHead) {
    const cells = columns.map(([title, isNumber]) => element("th", { scope: "col", class: isNumber && "number" }, title));
    table.append(element("thead", {}, element("tr", {}, ...cells)), element("tbody"));
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, index) => {
    let line = body.rows[index];
    if (!line) {
      line = element("tr", {}, ...columns.map(([, isNumber]) => element("td", { class: isNumber && "number" })));
      body.append(line);
    }
    row.forEach((text, column) => setText(line.cells[column], text));
  });
}

// A list of texts; hidden while there is none.
export function fillList(list, texts) {
  list.hidden = texts.length === 0;
  while (list.children.length > texts.length) list.lastElementChild.remove();
  texts.forEach((text, index) => setText(list.children[index] ?? list.appendChild(element("li")), text));
}

// The clipboard is for secure pages only; a box in the next room is often reached over plain HTTP.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser does not let this page copy");
}

// A button that copies, and says that it has.
export function copyButton(label, text) {
  const button = element("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    try {
      await copy(await text());
      setText(button, "Copied");
    } catch (error) {
      setText(button, `Not copied: ${error.message}`);
    }
    setTimeout(() => setText(button, label), 3000);
  });
  return button;
}
