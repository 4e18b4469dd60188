// Sort a table by the column whose header is pressed. Open all details for printing.
"use strict";
{
  const exact = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value === undefined) return null;
    const value = JSON.parse(cell.dataset.value);
    return Array.isArray(value) ? value[0] : value;
  };

  // Unknown values come last in both directions.
  const compare = (a, b, direction) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return direction * (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  };

  const sort = (table, header) => {
    const column = header.cellIndex;
    const rows = [...table.tBodies[0].rows];
    const isText = rows.some((row) => typeof exact(row, column) === "string");
    const first = isText ? "ascending" : "descending";
    const other = isText ? "descending" : "ascending";
    const order = header.getAttribute("aria-sort") === first ? other : first;
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const direction = order === "ascending" ? 1 : -1;
    rows.sort((a, b) => compare(exact(a, column), exact(b, column), direction));
    table.tBodies[0].append(...rows);
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    if (table.tBodies[0].rows.length < 2) continue;
    for (const header of table.tHead.rows[0].cells) {
      if (header.textContent === "") continue;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      button.addEventListener("click", () => sort(table, header));
      header.append(button);
    }
  }

  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const each of opened) each.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const each of opened) each.open = false;
  });
}
