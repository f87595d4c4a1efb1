/** What belongs together: the state of the page and who shows it. */

class Page {
  constructor(model) {
    this.model = model;
    this.panel = byId("panel");
    this.entry = model.peakAt;
    this.area = null;
    this.axis = new Axis(model, "entries");
    this.areas = new Areas(model, model.by);
    this.chart = new Chart(model, byId("chart"), byId("tip"), {
      onPick: (entry, area) => this.pick(entry, area),
    });
    this.tree = new Tree(model, byId("tree"));
    this.tab = 0;
    this.showHead();
    this.connect();
    this.redraw();
    this.chart.listenToZoom();
  }

  showHead() {
    const { model } = this;
    byId("name").textContent = model.name;
    const last = model.entries - 1;
    const facts = [
      ["Peak", formatBytes(model.peak), model.momentText(model.peakAt)],
      ["At the end", formatBytes(model.activeAt(last)), "still active"],
      ["Reserved peak", formatBytes(model.reservedPeak), "active and cache"],
      ["Entries", formatCount(model.entries), `${formatCount(model.blocks)} blocks`],
    ];
    if (model.nodes) {
      facts.push([
        "Array nodes",
        formatCount(model.nodes.live),
        `${formatCount(model.nodes.pending)} pending`,
      ]);
    }
    byId("facts").replaceChildren(
      ...facts.map(([name, value, more]) =>
        el(
          "div",
          { class: "fact" },
          el("div", { class: "label" }, name),
          el("div", { class: "value" }, value),
          el("div", { class: "hint" }, more),
        ),
      ),
    );
    const notices = [];
    if (model.dropped) {
      const many = model.dropped > 0 ? formatCount(model.dropped) : "Some";
      notices.push(`${many} older events fell out of the ring: the beginning is missing.`);
    }
    if (model.devices > 1) {
      notices.push(`Device ${model.device} of ${model.devices}; --device picks another.`);
    }
    for (const oom of model.ooms.slice(0, 3)) {
      const size = formatBytes(oom.size);
      notices.push(`An allocation of ${size} failed at entry ${formatCount(oom.at)}.`);
    }
    if (model.crossings.length) {
      const [first] = model.crossings;
      const all = model.settings.find((row) => row.name === "limit_crossings")?.value;
      const many = all ?? model.crossings.length; // the file has the first ones
      const times = many > 1 ? `${formatCount(many)} times, first` : "once,";
      const name = first.name.charAt(0).toUpperCase() + first.name.slice(1);
      notices.push(`${name}: ${times} at entry ${formatCount(first.at)}.`);
    }
    if (!model.entries) notices.push("There is no entry in this recording.");
    byId("notices").replaceChildren(
      ...notices.map((text) => el("p", { class: "notice" }, text)),
    );
  }

  connect() {
    const { model } = this;
    const select = byId("by");
    select.append(...Object.keys(model.keys).map((key) => el("option", {}, key)));
    select.value = model.by;
    select.addEventListener("change", () => {
      this.areas = new Areas(model, select.value);
      this.area = null;
      this.redraw();
    });
    for (const kind of ["entries", "time"]) {
      const button = byId(`axis-${kind}`);
      button.disabled = kind === "time" && !model.hasTime;
      button.addEventListener("click", () => {
        this.axis = new Axis(model, kind);
        this.showAxis();
      });
    }
    byId("go-peak").addEventListener("click", () => this.pick(model.peakAt, null));
    byId("go-end").addEventListener("click", () => this.pick(model.entries - 1, null));
    byId("zoom-out").addEventListener("click", () => this.chart.zoomOut());
    byId("theme").addEventListener("click", () => {
      const { dataset } = document.documentElement;
      setTheme(dataset.theme !== "dark");
      this.redraw();
    });
    darkWanted.addEventListener("change", () => {
      setTheme(darkWanted.matches);
      this.redraw();
    });
  }

  redraw() {
    this.showAxis();
    this.showMoment();
  }

  showAxis() {
    this.chart.show(this.areas, this.axis);
    for (const kind of ["entries", "time"]) {
      byId(`axis-${kind}`).setAttribute("aria-pressed", kind === this.axis.kind);
    }
  }

  /** Choose a moment, and an area of it or none. */
  pick(entry, area) {
    this.entry = entry;
    this.area = area;
    this.chart.setMoment(entry);
    this.showMoment();
  }

  pickBlock(block) {
    this.chart.setMoment(this.entry, block);
    showBlock(this, block);
  }

  back() {
    this.pick(this.entry, null);
  }

  showMoment() {
    const { model, entry } = this;
    if (this.area === null) showAreas(this);
    else showBlocks(this, this.area);
    const where = entry === model.peakAt ? "at the peak, " : "";
    byId("tree-moment").textContent = `${where}after ${model.momentText(entry)}`;
    this.tree.show(entry);
    byId("go-peak").setAttribute("aria-pressed", entry === model.peakAt);
    byId("go-end").setAttribute("aria-pressed", entry === model.entries - 1);
    this.showTables();
  }

  showTables() {
    const tables = tablesOf(this.model, {
      key: this.areas.key,
      entry: this.entry,
      onMoment: (at) => this.pick(at, null),
      showCache: () => (this.cacheTab ??= new CacheTab(this.model)).show(),
    });
    const names = [...tables.keys()];
    byId("tabs").replaceChildren(
      ...names.map((name, k) =>
        el(
          "button",
          {
            type: "button",
            role: "tab",
            "aria-selected": String(k === this.tab),
            onclick: () => {
              this.tab = k;
              this.showTables();
            },
          },
          name,
        ),
      ),
    );
    byId("table").replaceChildren(tables.get(names[this.tab])());
  }
}

const darkWanted = matchMedia("(prefers-color-scheme: dark)");

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

async function start() {
  setTheme(darkWanted.matches);
  const description = JSON.parse(byId("description").textContent);
  const buffer = await inflate(byId("columns").textContent);
  byId("columns").remove();
  const columns = readColumns(description.columns, buffer);
  window.mlxmemPage = new Page(new Model(description, columns));
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  byId("notices").append(
    el("p", { class: "notice" }, `The recording can't be shown: ${error.message}`),
  );
  throw error;
});
