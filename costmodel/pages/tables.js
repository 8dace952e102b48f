"use strict";
// Tables: a click on a head sorts by it, a button shows the rows that are folded away. Without scripts they are whole.
(() => {
  const value = (row, column, numbers) => {
    const text = row.cells[column].textContent;
    return numbers ? parseFloat(text.replaceAll(",", "")) || 0 : text;
  };
  for (const table of document.querySelectorAll("table[data-shown]")) {
    const body = table.tBodies[0];
    const shown = Number(table.dataset.shown);
    let folded = body.rows.length > shown + 3;
    const fold = () => [...body.rows].forEach((row, place) => { row.hidden = folded && place >= shown; });
    if (folded) {
      const more = document.createElement("button");
      more.className = "more";
      more.type = "button";
      const name = () => { more.textContent = folded ? `show all ${body.rows.length} rows` : `show ${shown} rows`; };
      more.addEventListener("click", () => { folded = !folded; fold(); name(); });
      table.parentElement.after(more);
      name();
      fold();
    }
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const numbers = head.classList.contains("n");
        const before = head.getAttribute("aria-sort");
        const down = before === null ? numbers : before === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const sign = down ? -1 : 1;
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [value(a, column, numbers), value(b, column, numbers)];
          return sign * (numbers ? x - y : x.localeCompare(y));
        });
        body.append(...rows);
        fold();
      });
    });
  }
})();
