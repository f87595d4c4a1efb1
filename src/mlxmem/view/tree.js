/** The call tree at a moment, as an icicle. */

const MOST_NODES = 500; // drawn at a time; a click on one shows more below it
const TREE_DEPTH = 24;
const ROW_PX = 26;

/** The tree of all stacks at an entry: nodes with bytes, count, children by frame. */
function callTree(model, entry) {
  const sums = new Map();
  for (let b = 0; b < model.blocks && model.start[b] <= entry; b++) {
    if (model.end[b] <= entry) continue;
    const sum = sums.get(model.stack[b]) ?? { bytes: 0, count: 0 };
    sum.bytes += model.size[b];
    sum.count++;
    sums.set(model.stack[b], sum);
  }
  const root = newNode(null, null);
  for (const [stack, { bytes, count }] of sums) {
    let node = root;
    node.bytes += bytes;
    node.count += count;
    const places = model.stacks[stack];
    for (let depth = places.length - 1; depth >= 0; depth--) {
      const place = places[depth];
      let child = node.children.get(place);
      if (!child) {
        child = newNode(place, node);
        node.children.set(place, child);
      }
      child.bytes += bytes;
      child.count += count;
      node = child;
    }
  }
  return root;
}

function newNode(frame, parent) {
  const depth = parent ? parent.depth + 1 : 0;
  return { frame, parent, depth, bytes: 0, count: 0, children: new Map() };
}

/**
 * The nodes below one that are drawn: the largest of those that have `least` bytes,
 * and no child without its parent.
 */
function largestBelow(top, least) {
  const found = [];
  let level = [top];
  for (let depth = 0; depth < TREE_DEPTH && level.length; depth++) {
    level = level.flatMap((node) =>
      [...node.children.values()].filter((child) => child.bytes >= least),
    );
    found.push(...level);
  }
  found.sort((a, b) => b.bytes - a.bytes || a.depth - b.depth);
  return new Set(found.slice(0, MOST_NODES));
}

/** A picture of the tree, and what a click on it does. */
class Tree {
  constructor(model, node) {
    this.model = model;
    this.node = node;
  }

  show(entry) {
    this.root = callTree(this.model, entry);
    this.draw(this.root);
    if (this.listening) return;
    this.listening = true;
    this.node.on("plotly_icicleclick", ({ points: [point] }) => {
      const node = this.byId.get(point.id);
      if (node) this.draw(node);
      return false; // Plotly would zoom into what is drawn, where more is known
    });
  }

  /** Draw a node's way down from the root, and all below it. */
  draw(top) {
    this.byId = new Map();
    this.columns = { depth: 0 };
    for (const name of ["ids", "labels", "parents", "values", "text", "colors"]) {
      this.columns[name] = [];
    }
    this.pixels = (this.node.clientWidth || 1000) / Math.max(top.bytes, 1);
    const way = [];
    for (let node = top; node; node = node.parent) way.unshift(node);
    let parent = "";
    for (const node of way) parent = this.add(node, parent, top.bytes);
    const least = Math.max(0.5 / this.pixels, 1);
    const shown = largestBelow(top, least);
    const visit = (node, id) => {
      const few = { frame: null, depth: node.depth + 1, bytes: 0, count: 0, lines: 0 };
      for (const child of node.children.values()) {
        if (shown.has(child)) {
          visit(child, this.add(child, id, child.bytes));
        } else {
          few.bytes += child.bytes;
          few.count += child.count;
          few.lines++;
        }
      }
      if (few.bytes >= least && few.depth - top.depth <= TREE_DEPTH) {
        this.add(few, id, few.bytes);
      }
    };
    visit(top, parent);
    this.plot();
  }

  add(node, parent, bytes) {
    const { columns, model, root } = this;
    const id = `${columns.ids.length}`;
    let label = node.lines ? `${node.lines} smaller` : `active ${formatBytes(bytes)}`;
    let where = node.lines ? label : "all live buffers";
    let color = colour("--rest");
    if (node.frame !== null) {
      const frame = model.frames[node.frame];
      const [file, line, name] = frame;
      label = line ? `${name}  ${file.split("/").at(-1)}:${line}` : name;
      where = frameText(frame);
      color = colour(`--tree-${(hash(file) % 8) + 1}`);
    }
    const buffers = `${formatCount(node.count)} ${node.count === 1 ? "buffer" : "buffers"}`;
    const share = formatShare(node.bytes, root.bytes);
    columns.ids.push(id);
    columns.parents.push(parent);
    columns.values.push(bytes);
    columns.labels.push(plain(fit(label, bytes * this.pixels)));
    columns.colors.push(color);
    columns.text.push(
      `${plain(where)}<br>${formatExact(node.bytes)}, ${share}, ${buffers}`,
    );
    columns.depth = Math.max(columns.depth, node.depth + 1);
    if (!node.lines) this.byId.set(id, node);
    return id;
  }

  plot() {
    const { depth, colors, text, ...rest } = this.columns;
    const height = 8 + ROW_PX * depth;
    this.node.style.height = `${height}px`;
    const trace = {
      type: "icicle",
      ...rest,
      hovertext: text,
      hoverinfo: "text",
      branchvalues: "total",
      tiling: { orientation: "v", pad: 1 },
      textinfo: "label",
      textposition: "middle left",
      pathbar: { visible: false },
      marker: { colors, line: { width: 0 } },
      leaf: { opacity: 1 },
      textfont: { size: 12 },
    };
    const layout = {
      font: { family: "system-ui, sans-serif", size: 12, color: colour("--text") },
      paper_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 2, r: 2, t: 4, b: 4 },
      height,
      hoverlabel: { align: "left" },
    };
    const config = { displayModeBar: false, responsive: true };
    return Plotly.react(this.node, [trace], layout, config);
  }
}

function hash(text) {
  let value = 5381;
  for (let i = 0; i < text.length; i++) value = (value * 33 + text.charCodeAt(i)) >>> 0;
  return value;
}
