/** Which groups are areas of their own, and what each holds at any entry. */

const MOST_AREAS = 12;
const CHECKPOINT = 2048; // entries between two stored sets of values

class Areas {
  constructor(model, key) {
    this.model = model;
    this.key = key;
    const { labels, of } = model.grouping(key);
    this.groupOf = of;
    const highest = this.highestPerGroup(labels.length, of);
    const order = Array.from(highest.keys()).filter((g) => highest[g] > 0);
    order.sort((a, b) => highest[b] - highest[a] || a - b);
    const atPeak = this.bytesPerGroup(labels.length, of, model.peakAt);
    // Whoever is large at some time has an area; who is large at the peak lies below.
    this.groups = order.slice(0, MOST_AREAS);
    this.groups.sort((a, b) => atPeak[b] - atPeak[a] || highest[b] - highest[a]);
    this.labels = this.groups.map((g) => labels[g]);
    this.rest = order.length - this.groups.length;
    if (this.rest) this.labels.push(`${formatCount(this.rest)} others`);
    this.count = this.labels.length;
    this.areaOfGroup = new Int32Array(labels.length).fill(this.count - 1);
    this.groups.forEach((g, area) => (this.areaOfGroup[g] = area));
    this.storeCheckpoints();
  }

  areaOf(block) {
    return this.areaOfGroup[this.groupOf[block]];
  }

  bytesPerGroup(count, of, entry) {
    const { model } = this;
    const bytes = new Float64Array(count);
    for (let b = 0; b < model.blocks && model.start[b] <= entry; b++) {
      if (model.end[b] > entry) bytes[of[b]] += model.size[b];
    }
    return bytes;
  }

  /** The most bytes that each group ever holds. */
  highestPerGroup(count, of) {
    const { model } = this;
    const now = this.bytesPerGroup(count, of, -1);
    const highest = now.slice();
    for (let i = 0; i < model.entries; i++) {
      const c = model.change[i];
      if (c > 0) {
        const g = of[c - 1];
        now[g] += model.size[c - 1];
        if (now[g] > highest[g]) highest[g] = now[g];
      } else if (c < 0) {
        now[of[-c - 1]] -= model.size[-c - 1];
      }
    }
    return highest;
  }

  storeCheckpoints() {
    const { model } = this;
    const now = new Float64Array(this.count);
    for (let b = 0; b < model.blocks && model.start[b] < 0; b++) {
      now[this.areaOf(b)] += model.size[b];
    }
    this.checkpoints = [now.slice()]; // values before entry k * CHECKPOINT
    for (let i = 0; i < model.entries; i++) {
      this.apply(now, i);
      if ((i + 1) % CHECKPOINT === 0) this.checkpoints.push(now.slice());
    }
  }

  apply(values, i) {
    const c = this.model.change[i];
    if (c > 0) values[this.areaOf(c - 1)] += this.model.size[c - 1];
    else if (c < 0) values[this.areaOf(-c - 1)] -= this.model.size[-c - 1];
  }

  /** Bytes per area after an entry. */
  valuesAt(entry) {
    const k = Math.floor((entry + 1) / CHECKPOINT);
    const values = this.checkpoints[k].slice();
    for (let i = k * CHECKPOINT; i <= entry; i++) this.apply(values, i);
    return values;
  }

  /** Bytes per area after each of some ascending entries: one array per area. */
  valuesAlong(entries) {
    const columns = this.labels.map(() => new Float64Array(entries.length));
    if (!entries.length) return columns;
    const values = this.valuesAt(entries[0]);
    let done = entries[0];
    for (let k = 0; k < entries.length; k++) {
      while (done < entries[k]) this.apply(values, ++done);
      for (let area = 0; area < this.count; area++) columns[area][k] = values[area];
    }
    return columns;
  }
}

/** The horizontal axis: where each entry lies. */
class Axis {
  constructor(model, kind) {
    this.model = model;
    this.kind = kind;
    this.low = kind === "time" ? 0 : -1;
    let high = kind === "time" ? model.timeAt(model.entries - 1) / 1e6 : model.entries;
    if (kind === "time") {
      for (const mark of model.marks) high = Math.max(high, mark.us / 1e6);
      for (const range of model.ranges) high = Math.max(high, range.endUs / 1e6);
    }
    this.high = high > this.low ? high : this.low + 1;
  }

  /** Seconds, or the number of the entry. */
  x(entry) {
    return this.kind === "time" ? this.model.timeAt(entry) / 1e6 : entry;
  }

  /** Something between entries at - 1 and at. */
  between(at, us) {
    return this.kind === "time" ? us / 1e6 : at - 0.5;
  }

  /** The last entry at or before x, -1 if none is. */
  entryAt(x) {
    const last = this.model.entries - 1;
    if (this.kind !== "time") return Math.max(-1, Math.min(Math.floor(x), last));
    const { time } = this.model;
    const us = x * 1e6 + 1e-3; // what dividing by 1e6 lost
    let low = -1;
    let high = last;
    while (low < high) {
      const middle = Math.floor((low + high + 1) / 2);
      if (time[middle] <= us) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

/**
 * Entries that stand for all in [x0, x1]: of every bin the one where `column` is
 * highest and the last one. So no peak is lost, however far out the zoom is; where a
 * bin has no more than two entries, all are there.
 */
function pickEntries(axis, column, x0, x1, bins) {
  const first = axis.entryAt(x0);
  const last = axis.entryAt(x1);
  const picked = [first];
  const width = (x1 - x0) / bins;
  let i = first + 1;
  while (i <= last) {
    const bin = Math.floor((axis.x(i) - x0) / width);
    let best = i;
    let end = i;
    while (++i <= last && Math.floor((axis.x(i) - x0) / width) <= bin) {
      if (column[i] > column[best]) best = i;
      end = i;
    }
    picked.push(best);
    if (end !== best) picked.push(end);
  }
  return picked;
}
