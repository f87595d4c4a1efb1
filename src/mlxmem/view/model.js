/** What the page was given: the description and its columns. */

const ARRAYS = {
  u8: Uint8Array,
  u16: Uint16Array,
  u32: Uint32Array,
  i8: Int8Array,
  i16: Int16Array,
  i32: Int32Array,
  f64: Float64Array,
};

/** Inflate base64 of a zlib stream. */
async function inflate(base64) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser is too old to unpack the recording");
  }
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed])
    .stream()
    .pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Cut the columns out of the inflated bytes. */
function readColumns(layout, buffer) {
  const columns = {};
  let at = 0;
  for (const { name, type, count, delta } of layout) {
    const size = count * ARRAYS[type].BYTES_PER_ELEMENT;
    let values = new ARRAYS[type](buffer.slice(at, at + size));
    at += size;
    if (delta) {
      const sums = new Float64Array(count);
      let sum = 0;
      for (let i = 0; i < count; i++) sums[i] = sum += values[i];
      values = sums;
    }
    columns[name] = values;
  }
  return columns;
}

/**
 * A recording in memory.
 *
 * Entry -1 is the moment before the first entry. `change[i]` is block + 1 where
 * entry i makes a block, -(block + 1) where it frees one, else 0.
 */
class Model {
  constructor(description, columns) {
    Object.assign(this, description);
    this.time = columns.time;
    this.size = columns.size;
    this.slack = columns.slack;
    this.stack = columns.stack;
    this.addresses = columns.addresses;
    this.address = columns.address;
    this.freedDuring = columns["freed during"];
    this.columns = columns;
    const n = this.entries;
    const count = this.blocks;
    this.start = new Int32Array(count);
    this.end = new Int32Array(count);
    this.change = new Int32Array(n);
    this.startActive = 0;
    for (let b = 0; b < count; b++) {
      const start = columns.start[b];
      const end = start + columns.life[b];
      this.start[b] = start;
      this.end[b] = end;
      if (start >= 0) this.change[start] = b + 1;
      else this.startActive += this.size[b];
      if (end < n) this.change[end] = -(b + 1);
    }
    this.active = new Float64Array(n);
    this.reserved = columns.reserved;
    this.cache = new Float64Array(n);
    let active = this.startActive;
    for (let i = 0; i < n; i++) {
      active += this.step(i);
      this.active[i] = active;
      this.reserved[i] += this.startReserved;
      this.cache[i] = this.reserved[i] - active;
    }
    this.groupings = {};
  }

  /** Bytes by which entry i changes active memory. */
  step(i) {
    const c = this.change[i];
    return c > 0 ? this.size[c - 1] : c < 0 ? -this.size[-c - 1] : 0;
  }

  activeAt(entry) {
    return entry < 0 ? this.startActive : this.active[entry];
  }

  reservedAt(entry) {
    return entry < 0 ? this.startReserved : this.reserved[entry];
  }

  timeAt(entry) {
    return this.entries ? this.time[Math.min(Math.max(entry, 0), this.entries - 1)] : 0;
  }

  isLive(block, entry) {
    return this.start[block] <= entry && this.end[block] > entry;
  }

  /** Labels of a key and the group of each block. */
  grouping(key) {
    return (this.groupings[key] ??= this.makeGrouping(key));
  }

  makeGrouping(key) {
    const { labels, ofStack } = this.keys[key];
    if (!ofStack) return { labels, of: this.columns[`by ${key}`] };
    const of = new Int32Array(this.blocks);
    for (let b = 0; b < of.length; b++) of[b] = ofStack[this.stack[b]];
    return { labels, of };
  }

  label(key, block) {
    const { labels, ofStack } = this.keys[key];
    return labels[ofStack ? ofStack[this.stack[block]] : this.columns[`by ${key}`][block]];
  }

  /** Frames of a stack as [file, line, function], innermost first. */
  framesOf(places) {
    return places.map((place) => this.frames[place]);
  }

  /** Describe a moment: "entry 1,204 (3.214 s)". */
  momentText(entry) {
    if (entry < 0) return "before the first entry";
    const time = this.hasTime ? ` (${formatTime(this.timeAt(entry))})` : "";
    return `entry ${formatCount(entry)}${time}`;
  }
}

/** "file:line function" of a frame. */
function frameText([file, line, name]) {
  return line ? `${file}:${line} ${name}` : name;
}
