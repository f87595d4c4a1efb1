/** Tables that sort and filter. */

const MOST_ROWS = 300;
// As limits.py has it.
const UNSEEN = "by a call that was not seen: C++ code, or a reference from before enable()";

/**
 * A table with a filter above it.
 *
 * A column is { name, of: row => value, show: value => text, number, wide }.
 */
function sortedTable(columns, rows, { sortBy = 0, caption, onRow } = {}) {
  let column = columns[sortBy];
  let descending = Boolean(column?.number);
  const body = el("tbody");
  const note = el("span", { class: "hint", role: "status" });
  const filter = el("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": `Filter ${caption}`,
  });
  const heads = columns.map((c) => {
    const button = el("button", { type: "button" }, c.name);
    const head = el("th", { scope: "col", class: c.number ? "number" : null }, button);
    button.addEventListener("click", () => {
      descending = column === c ? !descending : Boolean(c.number);
      column = c;
      fill();
    });
    return head;
  });
  const texts = new Map();
  const textOf = (row) => {
    if (!texts.has(row)) {
      const cells = columns.map((c) => (c.show ? c.show(c.of(row)) : c.of(row)));
      texts.set(row, { cells, all: cells.join(" ").toLowerCase() });
    }
    return texts.get(row);
  };
  const compare = (a, b) => {
    const [x, y] = [column.of(a), column.of(b)];
    const order = column.number ? x - y : String(x).localeCompare(String(y));
    return descending ? -order : order;
  };
  function fill() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length
      ? rows.filter((row) => words.every((word) => textOf(row).all.includes(word)))
      : rows.slice();
    found.sort(compare);
    heads.forEach((head, k) => {
      const sorted = columns[k] === column;
      if (sorted) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(
      ...found.slice(0, MOST_ROWS).map((row) => {
        const line = el(
          "tr",
          { class: onRow ? "active" : null },
          textOf(row).cells.map((cell, k) =>
            el("td", { class: columns[k].number ? "number" : null }, String(cell)),
          ),
        );
        if (onRow) line.addEventListener("click", () => onRow(row));
        return line;
      }),
    );
    const rest = found.length > MOST_ROWS ? `, the first ${MOST_ROWS} are shown` : "";
    note.textContent = `${formatCount(found.length)} of ${formatCount(rows.length)}${rest}`;
  }
  filter.addEventListener("input", fill);
  fill();
  return el(
    "div",
    {},
    el("div", { class: "filter" }, filter, note),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { "aria-label": caption },
        el("thead", {}, el("tr", {}, heads)),
        body,
      ),
    ),
  );
}

/** Totals of each group of a key. */
function groupRows(model, key, entry) {
  const { labels, of } = model.grouping(key);
  const rows = labels.map((label) => ({
    label,
    peak: 0,
    peakCount: 0,
    now: 0,
    end: 0,
    endCount: 0,
    allocated: 0,
    allocations: 0,
    largest: 0,
  }));
  for (let b = 0; b < model.blocks; b++) {
    const row = rows[of[b]];
    const size = model.size[b];
    if (model.start[b] >= 0) {
      row.allocated += size;
      row.allocations++;
    }
    if (size > row.largest) row.largest = size;
    if (model.isLive(b, model.peakAt)) {
      row.peak += size;
      row.peakCount++;
    }
    if (model.isLive(b, entry)) row.now += size;
    if (model.end[b] >= model.entries) {
      row.end += size;
      row.endCount++;
    }
  }
  return rows.filter((row) => row.allocations || row.largest || row.end || row.peak);
}

function bytesColumn(name, of) {
  return { name, of, show: formatBytes, number: true };
}

function countColumn(name, of) {
  return { name, of, show: formatCount, number: true };
}

function textColumn(name, of) {
  return { name, of };
}

/** All tables: name of the tab -> a function that makes it. */
function tablesOf(model, { key, entry, onMoment, showCache }) {
  const at = (row) => row.at - 1;
  const when = [
    countColumn("entry", (row) => row.at),
    { name: "time", of: (row) => row.us, show: formatTime, number: true },
    countColumn("thread", (row) => row.thread),
  ];
  const tables = new Map();
  tables.set(`By ${key}`, () =>
    sortedTable(
      [
        bytesColumn("at the peak", (row) => row.peak),
        countColumn("buffers", (row) => row.peakCount),
        bytesColumn("at the moment", (row) => row.now),
        bytesColumn("at the end", (row) => row.end),
        countColumn("left", (row) => row.endCount),
        bytesColumn("allocated", (row) => row.allocated),
        countColumn("allocations", (row) => row.allocations),
        bytesColumn("largest", (row) => row.largest),
        textColumn(key, (row) => row.label),
      ],
      groupRows(model, key, entry),
      { caption: `by ${key}` },
    ),
  );
  if (model.cacheReport) tables.set("Cache", showCache);
  if (model.marks.length) {
    tables.set(`Marks (${model.marks.length})`, () =>
      sortedTable(
        [
          ...when,
          bytesColumn("active", (row) => model.activeAt(at(row))),
          textColumn("mark", (row) => row.name),
        ],
        model.marks,
        { caption: "marks", sortBy: 0, onRow: (row) => onMoment(at(row)) },
      ),
    );
  }
  if (model.ranges.length) {
    tables.set(`Ranges (${model.ranges.length})`, () =>
      sortedTable(
        [
          ...when,
          countColumn("entries", (row) => row.endAt - row.at),
          {
            name: "took",
            of: (row) => row.endUs - row.us,
            show: formatTime,
            number: true,
          },
          bytesColumn(
            "active grew by",
            (row) => model.activeAt(row.endAt - 1) - model.activeAt(at(row)),
          ),
          textColumn("range", (row) => row.path.join("/") + (row.open ? " (open)" : "")),
        ],
        model.ranges,
        { caption: "ranges", onRow: (row) => onMoment(row.endAt - 1) },
      ),
    );
  }
  if (model.nodes) {
    tables.set("Array nodes", () =>
      sortedTable(
        [
          countColumn("pending", (row) => row.pending),
          countColumn("live", (row) => row.live),
          textColumn("line", (row) => lineText(model, row.stack)),
          textColumn("range", (row) => row.range),
          textColumn("module", (row) => row.module),
        ],
        model.nodes.lines,
        { caption: "array nodes" },
      ),
    );
  }
  if (model.ooms.length) {
    tables.set(`Failed allocations (${model.ooms.length})`, () =>
      sortedTable(
        [
          ...when,
          bytesColumn("size", (row) => row.size),
          { ...bytesColumn("free", (row) => row.free), show: knownBytes },
          { ...bytesColumn("active", (row) => row.active), show: knownBytes },
          { ...bytesColumn("cache", (row) => row.cache), show: knownBytes },
          textColumn("primitive", (row) => row.primitive),
          textColumn("line", (row) => lineText(model, row.stack)),
          textColumn("message", (row) => row.message),
        ],
        model.ooms,
        { caption: "failed allocations", onRow: (row) => onMoment(at(row)) },
      ),
    );
  }
  if (model.calls.length) {
    tables.set(`Calls (${model.calls.length})`, () =>
      sortedTable(
        [
          ...when,
          textColumn("call", (row) => row.name),
          { ...bytesColumn("value", (row) => row.value ?? -1), show: knownBytes },
          { ...bytesColumn("before", (row) => row.previous ?? -1), show: knownBytes },
          textColumn("line", (row) => (row.stack.length ? lineText(model, row.stack) : UNSEEN)),
        ],
        model.calls,
        { caption: "calls", onRow: (row) => onMoment(at(row)) },
      ),
    );
  }
  if (model.crossings.length) {
    tables.set(`Crossings (${model.crossings.length})`, () =>
      sortedTable(
        [
          ...when,
          bytesColumn("active", (row) => model.activeAt(at(row))),
          textColumn("crossing", (row) => row.name),
          textColumn("line", (row) => lineText(model, row.stack)),
        ],
        model.crossings,
        { caption: "crossings", onRow: (row) => onMoment(at(row)) },
      ),
    );
  }
  tables.set("Settings", () =>
    sortedTable(
      [textColumn("setting", (row) => row.name), textColumn("value", settingText)],
      model.settings,
      { caption: "settings" },
    ),
  );
  return tables;
}

function knownBytes(bytes) {
  return bytes < 0 ? "" : formatBytes(bytes);
}

function settingText({ name, text, value }) {
  const isSize = /(_limit|_limit_at_start|_bytes|_size|memory)$/.test(name);
  return isSize && value >= 1024 ? `${formatBytes(value)} (${text})` : text;
}

function lineText(model, places) {
  return places.length ? frameText(model.frames[places[0]]) : "no stack";
}
