/** The tab "Cache": what the cache did, and what other limits would have done. */

// As commands/cache.py has them.
const MOST_LIMITS = 4; // that the program set, as lines
const PLOT_PX = 250; // height
const LIMIT_ROW_PX = 17; // of the lines' labels, above it
const MOST_TICKS = 10;
const BEYOND = 4; // times the largest limit of the curve: no longer on the axis

/** The share of hits, as the command has it. */
function formatRate(rate) {
  return `${(100 * rate).toFixed(1)}%`;
}

/** Made when the tab is opened first; the same node from then on. */
class CacheTab {
  constructor(model) {
    this.model = model;
    this.report = model.cacheReport;
    this.limits = this.limitsOf();
    const { points } = this;
    this.chart = points.length > 1 ? el("div", { id: "cache-chart" }) : null;
    this.node = el(
      "div",
      { id: "cache" },
      this.head(),
      this.chart ?? el("p", { class: "hint" }, "Nothing was ever cached: no limit matters."),
      el(
        "div",
        { class: "pairs" },
        this.missTable(),
        this.lostTable(),
        this.roundingTable(),
        this.sizeTable(),
      ),
      this.lineTable(),
    );
  }

  get points() {
    return this.report.what_if.curve;
  }

  /** The node, for a place in the page; the chart needs that place to be drawn. */
  show() {
    if (this.chart) queueMicrotask(() => this.draw());
    return this.node;
  }

  head() {
    const { totals, agreement, what_if: whatIf, policy } = this.report;
    const { cache_limit: limit, reason } = whatIf.recommendation;
    const facts = [
      `Hits: ${formatRate(totals.hit_rate)} of ${formatCount(totals.allocations)} requests, ` +
        `${formatRate(totals.hit_rate_bytes)} of ${formatBytes(totals.requested_bytes)}`,
      `${formatCount(totals.system_allocations)} new buffers, ${formatBytes(totals.system_bytes)}`,
      `peak reserved ${formatBytes(totals.peak_reserved)}`,
    ];
    const size = limit >= 1024 ? `, ${formatBytes(limit)}` : "";
    const advice = limit === null ? "nothing" : `mx.set_cache_limit(${limit})${size}`;
    const checked = formatCount(agreement.checked);
    const model = agreement.mismatches
      ? `${formatCount(agreement.mismatches)} of ${checked} decisions differ, first at entry ` +
        `${formatCount(agreement.first_at)}: take what is said of other limits with care`
      : `the replay took all ${checked} decisions as MLX did`;
    const about = whatIf.exact
      ? ""
      : "; what was cached at the start is not all known, so that other limits are about right";
    const rules = policy.has_cache ? "" : "An MLX whose CPU backend caches nothing. ";
    return el(
      "div",
      { class: "cache-head" },
      el("p", { id: "cache-totals" }, facts.join(" · ")),
      el(
        "p",
        { id: "cache-recommended" },
        el("strong", {}, `Recommended: ${advice}`),
        `: ${reason}`,
      ),
      el(
        "p",
        { class: agreement.mismatches ? "notice" : "hint" },
        `${rules}Check: ${model}${about}`,
      ),
    );
  }

  /** Limits to draw as upright lines: the recommended one, and those there were. */
  limitsOf() {
    const { policy, what_if: whatIf } = this.report;
    const recommended = whatIf.recommendation.cache_limit;
    const found = [];
    if (recommended !== null) {
      found.push({ limit: recommended, text: "recommended", color: "--call" });
    }
    if (policy.cache_limit !== null) {
      found.push({ limit: policy.cache_limit, text: "at the start", color: "--limit" });
    }
    const known = new Set([policy.cache_limit]);
    for (const { name, value } of this.model.calls) {
      if (name !== "set_cache_limit" || value === null || known.has(value)) continue;
      known.add(value);
      if (known.size <= MOST_LIMITS + 1) {
        found.push({ limit: value, text: "set by the program", color: "--limit" });
      }
    }
    // Labels are left of their lines, so that none crosses a label of a row below.
    return found.sort((a, b) => a.limit - b.limit);
  }

  /** Where limits stand on the axis: 0 has its own place, at the left. */
  scale() {
    const positive = this.points.map((point) => point.cache_limit).filter((n) => n > 0);
    const most = positive.at(-1);
    const near = this.limits
      .map(({ limit }) => limit)
      .filter((n) => n > 0 && n <= BEYOND * most);
    const low = Math.min(positive[0], ...near);
    const high = Math.max(most, ...near);
    const zero = low / Math.max(2, (high / low) ** 0.08);
    const right = high * (high / zero) ** 0.03;
    const left = zero / (high / zero) ** 0.03;
    const place = (limit) => (limit > right ? right : limit || zero);
    const tickvals = [zero];
    const ticktext = ["0"];
    const doublings = Math.log2(right / low);
    const step = [1, 2, 5, 10].find((s) => doublings / s <= MOST_TICKS) ?? 20;
    for (let power = 0; 2 ** power <= right; power += step) {
      if (2 ** power < low) continue;
      tickvals.push(2 ** power);
      ticktext.push(formatBytes(2 ** power).replace(".0", ""));
    }
    return { place, left, right, tickvals, ticktext };
  }

  draw() {
    if (!this.chart.isConnected) return;
    const { points } = this;
    const scale = this.scale();
    const x = points.map((point) => scale.place(point.cache_limit));
    const text = points.map(
      (point) =>
        `cache limit ${formatBytes(point.cache_limit)}<br>` +
        `hits: ${formatRate(point.hit_rate)} of requests, ` +
        `${formatRate(point.hit_rate_bytes)} of bytes<br>` +
        `peak reserved ${formatBytes(point.peak_reserved)}<br>` +
        `${formatCount(point.system_allocations)} new buffers`,
    );
    const line = (name, y, style, more) => ({
      type: "scatter",
      mode: "lines+markers",
      name,
      x,
      y,
      line: { width: 1.8, ...style },
      marker: { size: 5 },
      hoverinfo: "skip",
      ...more,
    });
    const requests = points.map((point) => point.hit_rate);
    const bytes = points.map((point) => point.hit_rate_bytes);
    const reserved = points.map((point) => point.peak_reserved);
    const traces = [
      line("hits by requests", requests, { color: colour("--accent") }, { text, hoverinfo: "text" }),
      line("hits by bytes", bytes, { color: colour("--cache") }),
      line(
        "peak reserved (right axis)",
        reserved,
        { color: colour("--reserved"), dash: "dot", width: 1.4 },
        { yaxis: "y2", marker: { size: 3 } },
      ),
    ];
    return Plotly.react(this.chart, traces, this.layout(scale, Math.max(...reserved)), {
      displayModeBar: false,
      responsive: true,
    });
  }

  layout(scale, highest) {
    const text = colour("--text");
    const grid = colour("--grid");
    const top = highest * 1.04;
    const margin = { l: 60, r: 92, t: 10 + LIMIT_ROW_PX * this.limits.length, b: 72 };
    return {
      font: { family: "system-ui, sans-serif", size: 12, color: text },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: colour("--card"), // which the spike needs to know
      height: PLOT_PX + margin.t + margin.b,
      margin,
      hovermode: "x",
      hoverdistance: -1,
      hoverlabel: {
        bgcolor: colour("--card"),
        bordercolor: colour("--edge"),
        font: { family: "system-ui, sans-serif", size: 13, color: text },
        align: "left",
      },
      dragmode: false,
      legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" },
      xaxis: {
        type: "log",
        range: [Math.log10(scale.left), Math.log10(scale.right)],
        fixedrange: true,
        title: { text: "cache limit", standoff: 8 },
        tickmode: "array",
        tickvals: scale.tickvals,
        ticktext: scale.ticktext,
        gridcolor: grid,
        zeroline: false,
        showspikes: true,
        spikemode: "across",
        spikethickness: 1,
        spikedash: "dot",
        spikecolor: colour("--soft"),
      },
      yaxis: {
        range: [0, 1.04],
        fixedrange: true,
        tickformat: ".0%",
        gridcolor: grid,
        zeroline: false,
        title: { text: "hit rate", standoff: 6 },
      },
      yaxis2: {
        overlaying: "y",
        side: "right",
        range: [0, top],
        fixedrange: true,
        showgrid: false,
        zeroline: false,
        tickmode: "array",
        ...byteTicks(top),
        title: { text: "peak reserved", standoff: 8 },
      },
      shapes: this.limits.map(({ limit, color, text: what }, row) => ({
        type: "line",
        xref: "x",
        yref: "paper",
        x0: scale.place(limit),
        x1: scale.place(limit),
        y0: 0,
        y1: 1 + (LIMIT_ROW_PX * row + 13) / PLOT_PX, // up to its label
        line: {
          color: colour(color),
          width: 1.4,
          dash: what === "recommended" ? "solid" : "dashdot",
        },
      })),
      annotations: this.limits.map(({ limit, text: what, color }, row) => {
        const place = scale.place(limit);
        const share = Math.log(place / scale.left) / Math.log(scale.right / scale.left);
        return {
          x: Math.log10(place),
          y: 1,
          xref: "x",
          yref: "paper",
          yshift: LIMIT_ROW_PX * row,
          yanchor: "bottom",
          xanchor: share > 0.6 ? "right" : "left",
          showarrow: false,
          text: `${what}: ${formatBytes(limit)}${limit > place ? " →" : ""}`,
          font: { size: 12, color: colour(color) },
          bgcolor: colour("--card"),
        };
      }),
    };
  }

  missTable() {
    const rows = this.report.misses.filter((row) => row.count);
    return smallTable("Misses", rows, [
      { name: "requests", of: (row) => formatRate(row.share), number: true },
      { name: "misses", of: (row) => formatCount(row.count), number: true },
      { name: "bytes", of: (row) => formatBytes(row.bytes), number: true },
      { name: "why", of: (row) => `${row.kind}: ${this.report.words.reasons[row.kind]}` },
    ]);
  }

  lostTable() {
    return smallTable("Buffers that were lost", this.report.evicted_by, [
      { name: "misses", of: (row) => formatCount(row.misses), number: true },
      { name: "bytes", of: (row) => formatBytes(row.bytes), number: true },
      { name: "what took the buffers that would have served", of: (row) => takerText(row, this.report.words) },
    ]);
  }

  roundingTable() {
    const found = this.report.what_if.rounding;
    if (!found) return null;
    const names = found.lines.slice(0, 5).map((label) => shorten(label));
    const more = found.lines.length - names.length;
    return smallTable(
      "Where sizes jump, rounded up",
      found.steps,
      [
        { name: "hit rate", of: (row) => formatRate(row.hit_rate), number: true },
        { name: "bytes hit", of: (row) => formatRate(row.hit_rate_bytes), number: true },
        { name: "new buffers", of: (row) => formatCount(row.system_allocations), number: true },
        { name: "peak reserved", of: (row) => formatBytes(row.peak_reserved), number: true },
        { name: "sizes rounded up to", of: roundingText },
      ],
      `of ${names.join(", ")}${more > 0 ? ` and ${more} more` : ""}`,
    );
  }

  sizeTable() {
    const { most } = this.report.contents;
    if (!most.buffers) return null;
    const highest = Math.max(...most.sizes.map((row) => row.bytes));
    const when =
      most.at < 0 ? "before the first entry" : `after ${this.model.momentText(most.at)}`;
    const old = most.unknown_bytes
      ? `; ${formatBytes(most.unknown_bytes)} of it from before the recording, ` +
        "in buffers that nothing used since"
      : "";
    return smallTable(
      "Cache at its fullest",
      most.sizes,
      [
        { name: "size from", of: (row) => formatBytes(row.from_bytes), number: true },
        { name: "buffers", of: (row) => formatCount(row.buffers), number: true },
        { name: "bytes", of: (row) => formatBytes(row.bytes), number: true },
        { name: "", of: (row) => bar(row.bytes / highest), wide: true },
      ],
      `${formatBytes(most.bytes)} in ${formatCount(most.buffers)} buffers, ${when}${old}`,
    );
  }

  lineTable() {
    const { lines, by } = this.report;
    return smallTable("By missed bytes", lines, [
      { name: "missed", of: (row) => formatBytes(row.missed_bytes), number: true },
      { name: "hits", of: (row) => formatRate(row.hit_rate), number: true },
      { name: "requests", of: (row) => formatCount(row.allocations), number: true },
      { name: "sizes", of: (row) => formatCount(row.sizes), number: true },
      {
        name: "from - to",
        of: (row) => `${formatBytes(row.smallest)} - ${formatBytes(row.largest)}`,
        number: true,
      },
      { name: "mostly", of: mainMiss },
      { name: "", of: (row) => (row.jumps ? "jump" : "") },
      { name: by, of: (row) => (row.file ? frameText(framePlace(row)) : row.label), wide: true },
    ]);
  }
}

function framePlace({ file, line, function: name }) {
  return [file, line, name];
}

/** What took buffers: a call with its line, or a limit. */
function takerText({ kind, call, value, frames }, words) {
  if (!call) return words.takers[kind];
  const size = call === "clear_cache" ? "" : formatBytes(value);
  const where = frames.length ? shorten(frameText(framePlace(frames[0])), 60) : UNSEEN;
  return `${call}(${size}) at ${where}${words.when[kind] ?? ""}`;
}

function roundingText({ steps_per_doubling: steps }) {
  if (steps === null) return "as they are";
  return steps === 1 ? "powers of two" : `${steps} sizes in each doubling`;
}

/** The reason of most misses. */
function mainMiss({ misses }) {
  const [kind, most] = Object.entries(misses).reduce((a, b) => (b[1] > a[1] ? b : a));
  return most ? kind : "";
}

function bar(share) {
  const node = el("div", { class: "bar" });
  node.style.width = `${Math.max(100 * share, 0.5)}%`;
  return node;
}

/** A table without sorting, with a heading; nothing where there is no row. */
function smallTable(caption, rows, columns, note = null) {
  if (!rows.length) return null;
  const classOf = ({ number, wide }) => (number ? "number" : wide ? "wide" : null);
  return el(
    "section",
    { class: "small-table" },
    el("h2", {}, caption, note && el("small", {}, note)),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { "aria-label": caption },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            columns.map((c) => el("th", { scope: "col", class: classOf(c) }, c.name)),
          ),
        ),
        el(
          "tbody",
          {},
          rows.map((row) =>
            el(
              "tr",
              {},
              columns.map((c) => el("td", { class: classOf(c) }, c.of(row))),
            ),
          ),
        ),
      ),
    ),
  );
}
