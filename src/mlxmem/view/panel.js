/** The panel beside the chart: areas, then blocks of one, then a block's life. */

const MOST_BLOCKS = 60;

/** Largest first: the blocks of an area (or of all, with null) live at an entry. */
function liveBlocks(model, areas, area, entry) {
  const found = [];
  for (let b = 0; b < model.blocks && model.start[b] <= entry; b++) {
    if (model.end[b] <= entry) continue;
    if (area === null || areas.areaOf(b) === area) found.push(b);
  }
  return found.sort((a, b) => model.size[b] - model.size[a] || a - b);
}

function showAreas(page) {
  const { model, areas, chart, entry } = page;
  const values = areas.valuesAt(entry);
  const active = model.activeAt(entry);
  const order = Array.from(values.keys()).filter((area) => values[area] > 0);
  order.sort((a, b) => values[b] - values[a]);
  const rows = order.map((area) => {
    const label = areas.labels[area];
    return el(
      "li",
      {},
      el(
        "button",
        { type: "button", class: "row", onclick: () => page.pick(entry, area), title: label },
        swatch(chart.areaColour(area)),
        el("span", { class: "name" }, shorten(label, 60)),
        el("span", { class: "bytes" }, formatBytes(values[area])),
        el("span", { class: "share" }, formatShare(values[area], active)),
      ),
    );
  });
  page.panel.replaceChildren(
    el("h2", {}, `Active: ${formatBytes(active)}`),
    el("p", { class: "hint" }, `after ${model.momentText(entry)}`),
    el("ul", { class: "rows", id: "areas" }, rows),
  );
}

function showBlocks(page, area) {
  const { model, areas, chart, entry } = page;
  const found = liveBlocks(model, areas, area, entry);
  const bytes = found.reduce((sum, b) => sum + model.size[b], 0);
  const rows = found.slice(0, MOST_BLOCKS).map((block) =>
    el(
      "li",
      {},
      el(
        "button",
        { type: "button", class: "row", onclick: () => page.pickBlock(block) },
        el("span", { class: "bytes" }, formatBytes(model.size[block])),
        el("span", { class: "name" }, blockText(model, areas, area, block)),
      ),
    ),
  );
  if (found.length > MOST_BLOCKS) {
    rows.push(
      el("li", { class: "hint" }, `${formatCount(found.length - MOST_BLOCKS)} smaller ones`),
    );
  }
  const buffers = `${formatCount(found.length)} ${found.length === 1 ? "buffer" : "buffers"}`;
  page.panel.replaceChildren(
    el("button", { type: "button", class: "back", onclick: () => page.back() }, "‹ Areas"),
    el(
      "h2",
      { class: "what", id: "area" },
      swatch(chart.areaColour(area)),
      el("span", {}, areas.labels[area]),
    ),
    el(
      "p",
      { id: "area-total" },
      `${formatExact(bytes)} in ${buffers} after ${model.momentText(entry)}`,
    ),
    el("ul", { class: "rows", id: "blocks" }, rows),
  );
}

function blockText(model, areas, area, block) {
  const isRest = areas.rest > 0 && area === areas.count - 1;
  const made = model.start[block] < 0 ? "before" : `entry ${formatCount(model.start[block])}`;
  const primitive = model.label("primitive", block);
  const parts = [made, primitive];
  if (isRest) parts.push(shorten(model.label(areas.key, block), 40));
  return parts.join(" · ");
}

/** How long a block lived, in entries and time. */
function lifeText(model, block) {
  const start = model.start[block];
  const end = Math.min(model.end[block], model.entries);
  const took = model.timeAt(end) - model.timeAt(start);
  const events = `${formatCount(end - Math.max(start, 0))} entries`;
  return model.hasTime ? `${events}, ${formatTime(took)}` : events;
}

function showBlock(page, block) {
  const { model, area } = page;
  const size = model.size[block];
  const requested = size - model.slack[block];
  const start = model.start[block];
  const end = model.end[block];
  const address = model.addresses[model.address[block]];
  const facts = [
    ["Size", formatExact(size)],
    ["Requested", requested === size ? "the same" : formatExact(requested)],
    ["Made", start < 0 ? "before the recording" : model.momentText(start)],
    ["Freed", end < model.entries ? model.momentText(end) : "still live at the end"],
    ["Freed during", model.rangeNames[model.freedDuring[block]] || "no range"],
    ["Lived", lifeText(model, block)],
    ["Primitive", model.label("primitive", block)],
    ["Range", model.label("range", block)],
    ["Module", model.label("module", block)],
    ["Thread", model.label("thread", block)],
    ["Stream", model.label("stream", block)],
    ["Action", model.label("action", block)],
    ["Address", `0x${address.toString(16)}`],
  ];
  page.panel.replaceChildren(
    el(
      "button",
      { type: "button", class: "back", onclick: () => page.pick(page.entry, area) },
      "‹ Blocks",
    ),
    el("h2", {}, `Block of ${formatBytes(size)}`),
    el(
      "dl",
      { id: "block" },
      facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    ),
    el("div", { class: "label" }, "Made at"),
    stackList(model, model.stack[block]),
  );
}
