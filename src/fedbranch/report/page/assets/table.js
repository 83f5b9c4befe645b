// The clients, one row each: searched, sorted, filtered by the selected cluster, a page at a time.

const PER_PAGE = 100;

/** The columns that have something to say. `value` sorts, `text` is read. */
function columnsOf(run, metric) {
  const { clients } = run;
  const has = (column) => column?.some((value) => value !== null && value !== undefined);
  const text = (get) => ({ value: get, text: (i) => get(i) ?? "–" });
  const number = (column, format = shown) => ({
    isNumber: true, value: (i) => column[i] ?? null, text: (i) => format(column[i] ?? null),
  });
  const counts = (column) => number(column, (value) => (value === null ? "–" : whole(value)));
  const last = metric && given(clients.last, metric.name);
  const plain = metric && given(clients.plain, metric.name);
  const columns = [
    { key: "client", title: "client", ...text((i) => clientName(run, i)) },
    {
      key: "cluster", title: "cluster", value: (i) => clients.leaf[i],
      text: (i) => (clients.leaf[i] === null ? "–" : pathTo(run, clients.leaf[i]).join(" › ")),
    },
  ];
  if (has(clients.group)) columns.push({ key: "group", title: "true group", ...text((i) => clients.group[i]) });
  if (has(clients.examples)) columns.push({ key: "examples", title: "examples", ...counts(clients.examples) });
  if (has(plain)) columns.push({ key: "plain", title: `${metric.name}, plain FL`, ...number(plain) });
  if (has(last)) columns.push({ key: "last", title: `${metric.name}, own model`, ...number(last) });
  if (has(last) && has(plain)) {
    const sign = metric.is_better === "lower" ? -1 : 1;
    const gains = last.map((value, i) =>
      value === null || plain[i] === null ? null : sign * (value - plain[i]));
    columns.push({ key: "gain", title: "gain", ...number(gains, signed) });
  }
  columns.push({ key: "refused", title: "refused replies", ...counts(clients.refused) });
  if (has(clients.joined)) columns.push({ key: "joined", title: "joined in round", ...counts(clients.joined) });
  if (has(clients.left)) columns.push({ key: "left", title: "left in round", ...counts(clients.left) });
  return columns;
}

/** The positions of the clients to show, in order. */
function rowsOf(run, columns) {
  const { clients } = run;
  const all = state.node === null
    ? clients.ids.map((_, i) => i) : nodesOf(run).get(state.node).clients;
  const query = state.query.trim().toLowerCase();
  const matches = (i) =>
    [clients.ids[i], clients.names[i], clients.group[i], clients.leaf[i] === null ? null : `cluster ${clients.leaf[i]}`]
      .some((text) => text !== null && String(text).toLowerCase().includes(query));
  const rows = query ? all.filter(matches) : [...all];
  const column = columns.find((c) => c.key === state.sort.column) ?? columns[0];
  const names = new Intl.Collator("en", { numeric: true });
  const sign = state.sort.isDown ? -1 : 1;
  const keys = new Map(rows.map((i) => [i, column.value(i)]));
  return rows.sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    if (x === y) return a - b;
    if (x === null || x === undefined) return 1; // the unknown is always last
    if (y === null || y === undefined) return -1;
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : names.compare(String(x), String(y)));
  });
}

function drawTable() {
  const run = theRun();
  const columns = columnsOf(run, theMetric());
  const rows = rowsOf(run, columns);
  const numPages = Math.max(1, Math.ceil(rows.length / PER_PAGE));
  state.page = Math.min(state.page, numPages - 1);
  const from = state.page * PER_PAGE;
  const visible = rows.slice(from, from + PER_PAGE);

  const node = nodesOf(run).get(state.node);
  const off = byId("filter-off");
  off.hidden = !node;
  off.textContent = node ? `Only ${clusterName(node).toLowerCase()}: show all` : "";
  byId("count").textContent =
    `${counted(rows.length, "client")}${rows.length === run.clients.ids.length ? "" : ` of ${whole(run.clients.ids.length)}`}` +
    (numPages > 1 ? `, ${whole(from + 1)} to ${whole(from + visible.length)} shown` : "");

  refill(byId("table"),
    make("table", { class: "clients" },
      make("caption", { class: "unseen" }, "Clients; the headings sort"),
      make("thead", {}, make("tr", {}, columns.map(headingOf))),
      make("tbody", {}, visible.flatMap((i) => rowOf(run, columns, i)))));
  drawPages(numPages);
}

function headingOf(column) {
  const isSorted = state.sort.column === column.key;
  const direction = state.sort.isDown ? "descending" : "ascending";
  return make("th", {
    scope: "col", class: column.isNumber ? "number" : null, "aria-sort": isSorted ? direction : "none",
  }, make("button", {
    type: "button", "data-focus": `sort-${column.key}`,
    onclick: () => change({
      // Of numbers people want the largest first.
      sort: { column: column.key, isDown: isSorted ? !state.sort.isDown : Boolean(column.isNumber) }, page: 0,
    }),
  }, column.title, make("span", { class: "arrow", "aria-hidden": "true" },
    isSorted ? (state.sort.isDown ? " ↓" : " ↑") : "")));
}

function rowOf(run, columns, i) {
  const id = run.clients.ids[i];
  const isOpen = state.open.has(id);
  const cells = columns.map((column) => {
    const attributes = { class: column.isNumber ? "number" : null };
    if (column.key === "client") {
      const isNamed = run.clients.names[i] !== null && run.clients.names[i] !== id;
      return make("th", { scope: "row", title: isNamed ? id : null }, column.text(i));
    }
    if (column.key === "cluster" && run.clients.leaf[i] !== null) {
      return make("td", {}, swatch(looksOf(run).get(run.clients.leaf[i]) ?? NEUTRAL), " ", column.text(i));
    }
    if (column.key === "refused" && run.clients.refused[i]) {
      return make("td", attributes, make("button", {
        type: "button", class: "link", "aria-expanded": String(isOpen), "data-focus": `open-${i}`,
        "aria-label": `${counted(run.clients.refused[i], "refused reply", "refused replies")}, reasons`,
        onclick: () => {
          if (!state.open.delete(id)) state.open.add(id);
          change({});
        },
      }, `${column.text(i)} ${isOpen ? "▴" : "▾"}`));
    }
    if (column.key === "gain") {
      const gain = column.value(i);
      attributes.class += gain > 0 ? " better" : gain < 0 ? " worse" : "";
    }
    return make("td", attributes, String(column.text(i)));
  });
  const row = make("tr", {}, cells);
  if (!isOpen) return [row];
  const reasons = run.clients.refusals[i];
  const rest = run.clients.refused[i] - reasons.length;
  return [row, make("tr", { class: "reasons" }, make("td", { colspan: columns.length },
    make("ul", {}, reasons.map(([round, reason]) => make("li", {}, `round ${round}: ${reason}`))),
    rest > 0 ? make("p", { class: "hint" }, `and ${counted(rest, "earlier one")}, in history.jsonl`) : null))];
}

function drawPages(numPages) {
  const turn = (title, page, isPossible) => make("button", {
    type: "button", disabled: !isPossible, onclick: () => {
      change({ page });
      byId("clients").scrollIntoView({ block: "start" });
      byId("table").focus({ preventScroll: true });
    },
  }, title);
  refill(byId("pages"), ...(numPages < 2 ? [] : [
    turn("Previous", state.page - 1, state.page > 0),
    make("span", {}, `page ${state.page + 1} of ${numPages}`),
    turn("Next", state.page + 1, state.page < numPages - 1),
  ]));
}

// CSV

/** A field as spreadsheets read it; what they would run as a formula is made a text. */
function csvField(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function csvOf(run) {
  const columns = columnsOf(run, theMetric());
  const lines = [["id", ...columns.map((column) => column.title)]];
  for (const i of rowsOf(run, columns)) {
    lines.push([run.clients.ids[i], ...columns.map((column) =>
      column.isNumber ? column.value(i) : column.text(i))]);
  }
  // The first character tells spreadsheets that this is UTF-8.
  return "\ufeff" + lines.map((line) => line.map(csvField).join(",")).join("\r\n") + "\r\n";
}

function downloadCsv() {
  const address = URL.createObjectURL(new Blob([csvOf(theRun())], { type: "text/csv" }));
  const link = make("a", { href: address, download: `${theRun().name}-clients.csv` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function startTable() {
  byId("search").addEventListener("input", (event) => change({ query: event.target.value, page: 0 }));
  byId("filter-off").addEventListener("click", () => {
    select(state.node);
    byId("search").focus();
  });
  byId("csv").addEventListener("click", downloadCsv);
}
