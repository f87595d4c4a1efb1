/** The big chart: areas of active memory, reserved, cache, nodes, marks and ranges. */

const BINS = 700;
const MOST_LANES = 8;
const MOST_BARS = 1200;
const MOST_NAMES = 40; // marks with their names beside them
const CLICK_PX = 4;
const DOUBLE_CLICK_MS = 400;

class Chart {
  constructor(model, node, tip, { onPick }) {
    Object.assign(this, { model, node, tip, onPick });
    this.entry = model.peakAt;
    this.block = null;
    this.listen();
  }

  /** Show areas on an axis; keeps the window where the axis is the same. */
  show(areas, axis) {
    if (this.axis?.kind !== axis.kind) this.window = [axis.low, axis.high];
    this.areas = areas;
    this.axis = axis;
    this.draw();
  }

  setWindow(x0, x1) {
    this.window = x1 > x0 ? [x0, x1] : [this.axis.low, this.axis.high];
    this.draw();
  }

  zoomOut() {
    this.setWindow(this.axis.low, this.axis.high);
  }

  setMoment(entry, block = null) {
    this.entry = entry;
    this.block = block;
    Plotly.relayout(this.node, { shapes: this.shapes() });
  }

  draw() {
    this.drawing = true;
    const { axis, model } = this;
    const [x0, x1] = this.window;
    this.entries = pickEntries(axis, model.active, x0, x1, BINS);
    this.xs = Float64Array.from(this.entries, (i) => axis.x(i));
    this.values = this.areas.valuesAlong(this.entries);
    const lanes = this.lanes();
    const traces = [...this.areaTraces(), ...this.lineTraces(), ...lanes.traces];
    const done = Plotly.react(this.node, traces, this.layout(lanes), {
      displaylogo: false,
      responsive: true,
      doubleClick: false,
      scrollZoom: false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d"]],
    });
    return done.then(() => {
      this.drawing = false;
    });
  }

  /** Repeat the last value up to the right end of the window. */
  hold(values) {
    return [...values, values.length ? values.at(-1) : 0];
  }

  areaTraces() {
    const right = Math.min(this.axis.high, Math.max(this.window[1], this.xs.at(-1)));
    const x = [...this.xs, right];
    const sums = new Float64Array(this.entries.length);
    return this.values.map((values, area) => {
      for (let k = 0; k < sums.length; k++) sums[k] += values[k];
      return {
        type: "scatter",
        mode: "lines",
        name: plain(shorten(this.areas.labels[area])),
        x,
        y: this.hold(sums),
        fill: area ? "tonexty" : "tozeroy",
        fillcolor: this.areaColour(area),
        // The line keeps areas visible that are narrower than a pixel.
        line: { shape: "hv", width: 0.6, color: this.areaColour(area) },
        hoverinfo: "skip",
        showlegend: false,
      };
    });
  }

  areaColour(area) {
    const isRest = this.areas.rest > 0 && area === this.areas.count - 1;
    return colour(isRest ? "--rest" : `--area-${area + 1}`);
  }

  lineTraces() {
    const { axis, model } = this;
    const [x0, x1] = this.window;
    const line = (name, column, start, style) => {
      const entries = pickEntries(axis, column, x0, x1, BINS);
      const y = entries.map((i) => (i < 0 ? start : column[i]));
      const x = entries.map((i) => axis.x(i));
      x.push(Math.min(axis.high, Math.max(x1, x.at(-1))));
      return {
        type: "scatter",
        mode: "lines",
        name,
        x,
        y: this.hold(y),
        line: { shape: "hv", width: 1.4, ...style },
        hoverinfo: "skip",
      };
    };
    const startCache = model.startReserved - model.startActive;
    const traces = [
      line("reserved", model.reserved, model.startReserved, {
        color: colour("--reserved"),
      }),
      line("cache", model.cache, startCache, { color: colour("--cache"), dash: "dot" }),
    ];
    if (model.nodes?.samples.length) {
      traces.push({
        type: "scatter",
        mode: "lines",
        name: "pending nodes (right axis)",
        x: model.nodes.samples.map(([at, us]) => axis.between(at, us)),
        y: model.nodes.samples.map((sample) => sample[3]),
        yaxis: "y2",
        line: { color: colour("--nodes"), width: 1.4, dash: "dash" },
        hoverinfo: "skip",
      });
    }
    return traces;
  }

  /** Ranges in the window as bars, a lane for each depth of each thread. */
  lanes() {
    const { axis, model } = this;
    const [x0, x1] = this.window;
    const least = (x1 - x0) / 1500;
    const rows = new Map();
    const bars = [];
    for (const range of model.ranges) {
      const left = axis.between(range.at, range.us);
      const right = axis.between(range.endAt, range.endUs);
      if (right < x0 || left > x1) continue;
      const lane = `${range.thread}:${range.path.length}`;
      if (!rows.has(lane)) rows.set(lane, [range.thread, range.path.length]);
      bars.push({ range, lane, left, right });
    }
    const order = [...rows.entries()].sort(
      ([, a], [, b]) => a[0] - b[0] || a[1] - b[1],
    );
    const shown = new Map(order.slice(0, MOST_LANES).map(([lane], k) => [lane, k]));
    const kept = bars.filter((bar) => shown.has(bar.lane));
    kept.sort((a, b) => b.right - b.left - (a.right - a.left));
    const drawn = kept.slice(0, MOST_BARS);
    const names = [...new Set(model.ranges.map((range) => range.name))];
    const trace = {
      type: "bar",
      orientation: "h",
      yaxis: "y3",
      y: drawn.map((bar) => shown.get(bar.lane)),
      base: drawn.map((bar) => bar.left),
      x: drawn.map((bar) => Math.max(bar.right - bar.left, least)),
      text: drawn.map((bar) => {
        const width = (Math.min(bar.right, x1) - Math.max(bar.left, x0)) / (x1 - x0);
        return plain(fit(bar.range.name, width * this.node.clientWidth * 0.87));
      }),
      textposition: "inside",
      insidetextanchor: "start",
      constraintext: "none",
      textangle: 0,
      textfont: { size: 11, color: "#ffffff" },
      width: 0.9,
      marker: {
        color: drawn.map((bar) => colour(`--range-${(names.indexOf(bar.range.name) % 6) + 1}`)),
        line: { color: colour("--card"), width: 1 },
      },
      hoverinfo: "skip",
      showlegend: false,
    };
    const threads = new Set(order.map(([, [thread]]) => thread));
    const ticks = order.slice(0, MOST_LANES).filter(([, [, depth]]) => depth === 1);
    return {
      traces: drawn.length ? [trace] : [],
      count: shown.size,
      tickvals: ticks.map(([lane]) => shown.get(lane)),
      ticktext: ticks.map(([, [thread]]) =>
        threads.size > 1 ? `thread ${thread}` : "ranges",
      ),
    };
  }

  layout(lanes) {
    const { axis, model } = this;
    const text = colour("--text");
    const grid = colour("--grid");
    let highest = 1;
    for (const column of [model.reserved, model.active]) {
      const first = axis.entryAt(this.window[0]);
      const last = axis.entryAt(this.window[1]);
      for (let i = Math.max(first, 0); i <= last; i++) {
        if (column[i] > highest) highest = column[i];
      }
      if (first < 0) highest = Math.max(highest, model.activeAt(-1), model.reservedAt(-1));
    }
    highest *= 1.04;
    const foot = lanes.count ? Math.min(0.06 * lanes.count, 0.3) : 0;
    const layout = {
      font: { family: "system-ui, sans-serif", size: 12, color: text },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 76, r: model.nodes?.samples.length ? 64 : 18, t: 56, b: 44 },
      modebar: {
        bgcolor: "rgba(0,0,0,0)",
        color: colour("--soft"),
        activecolor: text,
      },
      height: 470,
      dragmode: "zoom",
      hovermode: false,
      barmode: "overlay",
      legend: {
        orientation: "h",
        traceorder: "normal",
        x: 0,
        y: 1.05,
        yanchor: "bottom",
      },
      uirevision: "same",
      xaxis: {
        range: this.window,
        title: { text: axis.kind === "time" ? "time, s" : "entry", standoff: 6 },
        tickformat: axis.kind === "time" ? "" : ",d",
        gridcolor: grid,
        zeroline: false,
        anchor: lanes.count ? "y3" : "y",
      },
      yaxis: {
        range: [0, highest],
        fixedrange: true,
        domain: [foot ? foot + 0.02 : 0, 1],
        gridcolor: grid,
        zeroline: false,
        tickmode: "array",
        ...byteTicks(highest),
      },
      shapes: this.shapes(),
      annotations: this.annotations(),
    };
    if (model.nodes?.samples.length) {
      layout.yaxis2 = {
        overlaying: "y",
        side: "right",
        rangemode: "tozero",
        tickmode: "auto",
        tickformat: ",d",
        fixedrange: true,
        showgrid: false,
        tickfont: { color: colour("--nodes") },
        title: { text: "pending nodes", font: { color: colour("--nodes") } },
      };
    }
    if (lanes.count) {
      layout.yaxis3 = {
        domain: [0, foot],
        range: [lanes.count - 0.45, -0.55],
        fixedrange: true,
        showgrid: false,
        zeroline: false,
        tickmode: "array",
        tickvals: lanes.tickvals,
        ticktext: lanes.ticktext,
      };
    }
    return layout;
  }

  /** Moments that have a line and, as far as there is room, a name. */
  moments() {
    const { model } = this;
    const calls = model.calls.map(({ at, us, name, value }) => {
      const size = value === null || /^(clear|reset)/.test(name) ? "" : formatBytes(value);
      return { at, us, name: `${name} ${size}`.trim() };
    });
    return [
      { moments: model.marks, color: "--mark", dash: "dot", y: 1, anchor: "bottom", letters: 20 },
      { moments: calls, color: "--call", dash: "dashdot", y: 0.88, anchor: "top", letters: 30 },
      {
        moments: model.crossings,
        color: "--limit",
        dash: "longdash",
        y: 0.82,
        anchor: "top",
        letters: 50,
      },
    ];
  }

  /** What stands across the chart: moments, failures, the one chosen, a block's life. */
  shapes() {
    const { axis, model } = this;
    const [x0, x1] = this.window;
    const upright = (x, color, width, dash) => ({
      type: "line",
      xref: "x",
      yref: "paper",
      x0: x,
      x1: x,
      y0: 0,
      y1: 1,
      line: { color, width, dash },
    });
    const shapes = [];
    for (const { moments, color, dash } of this.moments()) {
      // Lines closer than a pixel would paint the chart over.
      let last = -Infinity;
      for (const { at, us } of moments) {
        const x = axis.between(at, us);
        if (x < x0 || x > x1 || x - last < (x1 - x0) / 400) continue;
        shapes.push(upright(x, colour(color), 1, dash));
        last = x;
      }
    }
    for (const oom of model.ooms) {
      shapes.push(upright(axis.between(oom.at, oom.us), colour("--oom"), 2, "solid"));
    }
    shapes.push(upright(axis.x(this.entry), colour("--text"), 1.2, "dash"));
    if (this.block !== null) {
      const start = axis.x(model.start[this.block]);
      const end = model.end[this.block];
      shapes.push({
        type: "rect",
        name: "life",
        xref: "x",
        yref: "paper",
        x0: start,
        x1: end < model.entries ? axis.x(end) : axis.high,
        y0: 0.955,
        y1: 0.985,
        fillcolor: colour("--life"),
        line: { color: colour("--text"), width: 1 },
      });
    }
    return shapes;
  }

  annotations() {
    const { axis, model } = this;
    const [x0, x1] = this.window;
    const label = (x, text, color, y, yanchor) => ({
      x,
      y,
      xref: "x",
      yref: "paper",
      text: plain(text),
      showarrow: false,
      xanchor: "left",
      yanchor,
      textangle: 0,
      font: { size: 11, color },
      bgcolor: colour("--veil"),
    });
    const notes = [];
    const inside = (note) => {
      if (note.x > x0 + 0.8 * (x1 - x0)) note.xanchor = "right";
      return note;
    };
    for (const { moments, color, y, anchor, letters } of this.moments()) {
      let last = -Infinity;
      let count = 0;
      for (const { at, us, name } of moments) {
        const x = axis.between(at, us);
        // Long names need more room.
        const near = x - last < ((x1 - x0) * letters) / 280;
        if (x < x0 || x > x1 || near || count >= MOST_NAMES) continue;
        const note = label(x, clip(name, letters), colour(color), y, anchor);
        notes.push(anchor === "top" ? inside(note) : note);
        last = x;
        count++;
      }
    }
    for (const oom of model.ooms.slice(0, MOST_NAMES)) {
      const x = axis.between(oom.at, oom.us);
      const text = `failed: ${formatBytes(oom.size)}`;
      const note = inside(label(x, text, colour("--oom"), 0.94, "top"));
      if (x >= x0 && x <= x1) notes.push(note);
    }
    return notes;
  }

  listen() {
    const { node } = this;
    let press = null;
    let clicked = -Infinity;
    node.addEventListener("pointermove", (event) => this.hover(event));
    node.addEventListener("pointerleave", () => this.hideTip());
    node.addEventListener("pointerdown", (e) => (press = [e.clientX, e.clientY]), true);
    window.addEventListener(
      "pointerup",
      (event) => {
        if (!press) return;
        const moved = Math.hypot(event.clientX - press[0], event.clientY - press[1]);
        press = null;
        const spot = moved < CLICK_PX && this.spotAt(event);
        if (!spot) return;
        // Plotly covers the page while a button is down: it would get a dblclick.
        if (event.timeStamp - clicked < DOUBLE_CLICK_MS) {
          clicked = -Infinity;
          this.zoomOut();
        } else {
          clicked = event.timeStamp;
          this.onPick(spot.entry, spot.area);
        }
      },
      true,
    );
    node.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const entry = Math.min(Math.max(this.entry + step, -1), this.model.entries - 1);
      this.onPick(entry, null);
    });
  }

  /** Plotly's own events; they exist after the first drawing. */
  listenToZoom() {
    this.node.on("plotly_relayout", (change) => {
      if (this.drawing) return;
      const low = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0];
      const high = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
      if (low !== undefined && high !== undefined) {
        this.setWindow(Math.max(low, this.axis.low), Math.min(high, this.axis.high));
      } else if (change["xaxis.autorange"]) {
        this.zoomOut();
      }
    });
  }

  /** What is drawn at a position on the screen; null beside the plot. */
  spotAt(event) {
    const { xaxis, yaxis } = this.node._fullLayout ?? {};
    if (!xaxis) return null;
    const box = this.node.getBoundingClientRect();
    const left = event.clientX - box.left - xaxis._offset;
    const top = event.clientY - box.top - yaxis._offset;
    if (left < 0 || left > xaxis._length || top < 0 || top > yaxis._length) return null;
    const x = xaxis.p2c(left);
    const y = yaxis.p2c(top);
    let k = upperBound(this.xs, x) - 1;
    if (k < 0) k = 0;
    const entry = this.entries[k];
    let sum = 0;
    let area = null;
    for (let a = 0; a < this.areas.count && area === null; a++) {
      sum += this.values[a][k];
      if (y <= sum && this.values[a][k] > 0) area = a;
    }
    return { entry, area, values: this.values.map((column) => column[k]) };
  }

  hover(event) {
    const spot = event.buttons ? null : this.spotAt(event);
    if (!spot) {
      this.hideTip();
      return;
    }
    const shown = `${spot.entry}/${spot.area}`;
    if (this.tip.hidden || this.tip.dataset.shown !== shown) {
      this.tip.dataset.shown = shown;
      this.tip.replaceChildren(...this.tipContent(spot));
      this.tip.hidden = false;
    }
    const width = this.tip.offsetWidth;
    const height = this.tip.offsetHeight;
    const right = event.clientX + 18 + width < window.innerWidth;
    const left = right ? event.clientX + 18 : Math.max(event.clientX - 18 - width, 4);
    const top = Math.min(event.clientY + 14, window.innerHeight - height - 6);
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${Math.max(top, 4)}px`;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  tipContent({ entry, area, values }) {
    const { model, areas } = this;
    const active = model.activeAt(entry);
    const reserved = model.reservedAt(entry);
    const rows = [
      el(
        "div",
        { class: "moment" },
        `${model.momentText(entry)}: active ${formatBytes(active)}, reserved `,
        `${formatBytes(reserved)}, cache ${formatBytes(reserved - active)}`,
      ),
    ];
    if (area === null) return rows;
    const { count, stack, stacks } = heaviestStack(model, areas, area, entry);
    rows.unshift(
      el(
        "div",
        { class: "what" },
        swatch(this.areaColour(area)),
        el("strong", {}, areas.labels[area]),
      ),
      el(
        "div",
        { class: "much" },
        `${formatExact(values[area])}, ${formatShare(values[area], active)} of active, `,
        `${formatCount(count)} ${count === 1 ? "buffer" : "buffers"}`,
      ),
    );
    if (stack !== null) {
      const title = stacks > 1 ? `most of it from (1 of ${stacks} stacks)` : "made at";
      rows.push(el("div", { class: "label" }, title), stackList(model, stack, 9));
    }
    return rows;
  }
}

/** The number of values that are <= x, in an ascending array. */
function upperBound(values, x) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The stack that holds most bytes of an area at an entry. */
function heaviestStack(model, areas, area, entry) {
  const sums = new Map();
  let count = 0;
  for (let b = 0; b < model.blocks && model.start[b] <= entry; b++) {
    if (model.end[b] <= entry || areas.areaOf(b) !== area) continue;
    count++;
    const stack = model.stack[b];
    sums.set(stack, (sums.get(stack) ?? 0) + model.size[b]);
  }
  let best = null;
  for (const [stack, bytes] of sums) {
    if (best === null || bytes > sums.get(best)) best = stack;
  }
  return { count, stack: best, stacks: sums.size };
}

function swatch(color) {
  const node = el("span", { class: "swatch" });
  node.style.background = color;
  return node;
}

/** A stack as a list, innermost first. */
function stackList(model, stack, most = Infinity) {
  return frameList(model.framesOf(model.stacks[stack]), most);
}

function frameList(frames, most = Infinity) {
  const items = frames
    .slice(0, most)
    .map(([file, line, name]) =>
      el(
        "li",
        {},
        el("span", { class: "function" }, name),
        line ? el("span", { class: "file" }, ` ${file}:${line}`) : null,
      ),
    );
  if (frames.length > most) items.push(el("li", {}, `… ${frames.length - most} more`));
  if (!frames.length) items.push(el("li", {}, "no stack"));
  return el("ol", { class: "stack" }, items);
}
