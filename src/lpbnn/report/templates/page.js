"use strict";
// Tables sort on a click on a column's head: best first, then worst first, then as written.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const written = [...body.rows];
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const key = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent;
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.classList.add("sorts");
    const sort = () => {
      const step = (Number(head.dataset.step || 0) + 1) % 3;
      for (const other of heads) {
        delete other.dataset.step;
        other.removeAttribute("aria-sort");
      }
      let rows = written;
      if (step) {
        head.dataset.step = step;
        const down = (head.dataset.first === "down") === (step === 1);
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        rows = [...written].sort((a, b) => {
          const [x, y] = [key(a, column), key(b, column)];
          if (x === "" || y === "") return (x === "") - (y === "");
          const [p, q] = [Number(x), Number(y)];
          const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
          return down ? -order : order;
        });
      }
      body.append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        sort();
      }
    });
  });
}

// Figures are saved as they look now: colours and font of the page are written into the file.
for (const button of document.querySelectorAll("button.save")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const svg = button.parentElement.querySelector("svg").cloneNode(true);
    const [, , width, height] = svg.getAttribute("viewBox").split(" ");
    const look = getComputedStyle(document.documentElement);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.style.fontFamily = getComputedStyle(document.body).fontFamily;
    svg.style.overflow = "visible";
    svg.style.background = look.getPropertyValue("--paper");
    const text = new XMLSerializer().serializeToString(svg)
      .replace(/var\((--\w+)\)/g, (_, name) => look.getPropertyValue(name).trim());
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    const words = svg.getAttribute("aria-label").replace(/[^\p{L}\p{N}]+/gu, "-");
    link.download = `${words.replace(/^-|-$/g, "")}.svg`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
