"use strict";

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes as people read them, in powers of 1024. */
function formatBytes(bytes) {
  const size = Math.abs(bytes);
  if (size < 1024) return `${bytes} B`;
  let value = size;
  for (const unit of UNITS) {
    value /= 1024;
    if (value < 1023.95 || unit === UNITS.at(-1)) {
      return `${bytes < 0 ? "-" : ""}${value.toFixed(1)} ${unit}`;
    }
  }
}

/** An integer with thousands separated. */
function formatCount(value) {
  return value.toLocaleString("en-US");
}

/** Bytes exactly, after the short form. */
function formatExact(bytes) {
  const exact = `${formatCount(bytes)} B`;
  return bytes < 1024 ? exact : `${formatBytes(bytes)} (${exact})`;
}

function formatShare(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "";
}

/** Microseconds as a duration. */
function formatTime(us) {
  const size = Math.abs(us);
  if (size < 1e3) return `${us} µs`;
  if (size < 1e6) return `${(us / 1e3).toFixed(2)} ms`;
  if (size < 120e6) return `${(us / 1e6).toFixed(3)} s`;
  const minutes = Math.floor(size / 60e6);
  const seconds = Math.floor(size / 1e6) % 60;
  return `${us < 0 ? "-" : ""}${minutes} min ${seconds} s`;
}

/** Ticks of a byte axis: round numbers of one binary unit. */
function byteTicks(highest, wanted = 6) {
  let unit = 1;
  while (highest / unit >= 1024) unit *= 1024;
  const steps = [1, 2, 4, 5, 10, 20, 25, 50, 100, 128, 200, 250, 256, 512];
  if (unit > 1) steps.unshift(0.1, 0.2, 0.25, 0.5);
  const step = steps.find((s) => highest / (s * unit) <= wanted) ?? 512;
  const tickvals = [];
  for (let k = 0; k * step * unit <= highest; k++) tickvals.push(k * step * unit);
  const name = ["B", ...UNITS][Math.round(Math.log2(unit) / 10)];
  const ticktext = tickvals.map((v) => (v ? `${+(v / unit).toFixed(2)} ${name}` : "0"));
  return { tickvals, ticktext };
}

/** Text for a label of Plotly, which reads tags and entities in it. */
function plain(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** The last parts of a path and of a label that begins with one. */
function shorten(label, length = 46) {
  if (label.length <= length) return label;
  const [path, ...rest] = label.split(" ");
  const parts = path.split("/");
  const tail = [parts.slice(-2).join("/"), ...rest].join(" ");
  if (parts.length > 2 && tail.length <= length) return `…/${tail}`;
  const last = [parts.at(-1), ...rest].join(" ");
  return clip(last, length);
}

const LETTER_PX = 6.4; // of the charts' font, on average

/** As much of a text as fits into a width; nothing where that is next to nothing. */
function fit(text, pixels) {
  const letters = Math.floor((pixels - 10) / LETTER_PX);
  if (letters >= text.length) return text;
  return letters < 4 ? "" : clip(text, letters);
}

function clip(text, length) {
  return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
}

/** An element; strings become text, never markup. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

/** A colour of the style sheet. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
