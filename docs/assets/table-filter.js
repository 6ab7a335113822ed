// A filter box above the tables of a page that asks for it: <div class="table-filter"></div>.
for (const place of document.querySelectorAll(".table-filter")) {
  const rows = [...document.querySelectorAll("article table tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter: llama, moe, no …" });
  input.setAttribute("aria-label", "Filter the tables");
  const count = document.createElement("output");
  place.append(input, count);
  const sections = [...document.querySelectorAll("article h2")].map((heading) => {
    const parts = [];
    for (let next = heading.nextElementSibling; next && next.tagName !== "H2"; next = next.nextElementSibling) parts.push(next);
    return { heading, parts, rows: rows.filter((row) => parts.some((part) => part.contains(row))) };
  });
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => { row.hidden = !words.every((word) => texts[i].includes(word)); });
    for (const { heading, parts, rows: own } of sections) {
      const hidden = own.length > 0 && own.every((row) => row.hidden);
      for (const each of [heading, ...parts]) each.hidden = hidden;
    }
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = words.length ? `${shown} of ${rows.length}` : `${rows.length} rows`;
    history.replaceState(null, "", input.value ? `#filter=${encodeURIComponent(input.value)}` : location.pathname + location.search);
  };
  const asked = location.hash.match(/^#filter=(.*)/);
  if (asked) input.value = decodeURIComponent(asked[1]);
  input.addEventListener("input", filter);
  if (asked) filter();
  else count.textContent = `${rows.length} rows`;
}
