// The heat map of ranks by reports, and the trend below it, on canvases.

const STOPS = {
  light: [[0, "f4f8fc"], [0.33, "c3d9eb"], [0.5, "dde0dc"], [0.6, "f4d58a"], [0.75, "ec8b3c"], [0.88, "c93d1f"], [1, "781313"]],
  dark: [[0, "0c1e32"], [0.33, "1b4a71"], [0.5, "3f627d"], [0.6, "a2814a"], [0.75, "e27a33"], [0.88, "ff9f52"], [1, "ffebc4"]],
};
const dark = matchMedia("(prefers-color-scheme: dark)");
// Px left of the columns, right of them, of the widest column and of the tallest row.
let [LABELS, MARKS, WIDEST, TALLEST] = [48, 12, 40, 28];

function colors(stops) {
  const table = new Uint32Array(256);
  const bytes = new Uint8Array(table.buffer);
  for (let at = 0; at < 256; at++) {
    const share = at / 255;
    const next = Math.max(1, stops.findIndex(([place]) => place >= share));
    const [[from, first], [to, last]] = [stops[next - 1], stops[next]];
    for (let part = 0; part < 3; part++) {
      const [a, b] = [first, last].map((hex) => parseInt(hex.slice(2 * part, 2 * part + 2), 16));
      bytes[4 * at + part] = a + ((b - a) * (share - from)) / (to - from);
    }
    bytes[4 * at + 3] = 255;
  }
  return table;
}
const TABLES = { light: colors(STOPS.light), dark: colors(STOPS.dark) };
const table = () => TABLES[dark.matches ? "dark" : "light"];

function fitText() {
  const ratio = parseFloat(getComputedStyle(document.documentElement).fontSize) / 15;
  [LABELS, MARKS, WIDEST, TALLEST] = [48, 12, 40, 28].map((size) => Math.round(size * ratio));
}

export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

// Sizes a canvas to its place and returns a context in CSS pixels.
export function prepared(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `${Math.round(0.8 * parseFloat(getComputedStyle(document.documentElement).fontSize))}px ${getComputedStyle(document.body).fontFamily}`;
  return context;
}

// What a value is on the scale: 0.33 is usual, by the better part of the cells, so that even ranks
// look calm; 1 is 30 % off it, more where the ranks vary more, or where many are further off.
export function scaleOf(columns, isLowBad) {
  const sign = isLowBad ? -1 : 1;
  const count = columns.reduce((sum, column) => sum + column.length, 0);
  const every = Math.max(1, Math.floor(count / 20000));
  const sample = [];
  let at = 0;
  for (const column of columns)
    for (const value of column) if (at++ % every === 0 && value === value) sample.push(sign * value);
  if (!sample.length) return null;
  const part = (values, share) => values.sort((a, b) => a - b)[Math.floor(share * (values.length - 1))];
  const usual = part(sample, 0.4);
  const far = Math.min(0.6 * (part(sample, 0.98) - usual), 0.8 * Math.abs(usual));
  const vary = 1.9 * part(sample.map((value) => Math.abs(value - usual)), 0.4);
  const reach = Math.max(8 * vary, far, 0.3 * Math.abs(usual), 1e-9);
  return {
    share: (value) => Math.min(1, Math.max(0, (sign * value - usual + reach / 2) / (1.5 * reach))),
    good: sign * (usual - reach / 2),
    bad: sign * (usual + reach),
    sign,
  };
}

export class HeatMap {
  constructor(canvas, on) {
    this.canvas = canvas;
    this.on = on; // move(cell, spoken), choose(cell), zoom(first row, last row), keyZoom(key)
    this.image = document.createElement("canvas");
    this.columns = [];
    this.cursor = null;
    this.marks = [];
    this.drag = null;
    canvas.addEventListener("pointermove", (event) => this.#moved(event));
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) this.drag = { from: event.offsetY, to: event.offsetY };
    });
    canvas.addEventListener("pointerup", (event) => this.#released(event));
    canvas.addEventListener("pointerleave", () => {
      this.drag = null;
      if (document.activeElement !== canvas) this.set(null, false);
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => {
      if (!this.cursor && this.columns.length) this.set({ column: this.columns.length - 1, row: 0 }, true);
      this.draw();
    });
    canvas.addEventListener("blur", () => this.draw());
  }

  // How many rows can be told apart.
  mostRows() {
    return Math.max(16, Math.min(512, Math.floor(this.#mostHeight() * (devicePixelRatio || 1))));
  }

  show({ columns, rows, labels, scale }) {
    Object.assign(this, { columns, rows, labels, scale });
    fitText();
    if (this.cursor) {
      this.cursor.column = Math.min(this.cursor.column, columns.length - 1);
      this.cursor.row = Math.min(this.cursor.row, rows - 1);
      if (!columns.length) this.cursor = null;
    }
    this.#paint();
    this.draw();
  }

  columnWidth() {
    return Math.min(WIDEST, (this.canvas.clientWidth - LABELS - MARKS) / Math.max(1, this.columns.length));
  }

  draw() {
    performance.clearMeasures("draw");
    fitText();
    const started = performance.now();
    const height = this.#height();
    const context = prepared(this.canvas, this.canvas.clientWidth, height);
    if (this.columns.length) {
      const width = this.columnWidth() * this.columns.length;
      context.imageSmoothingEnabled = false;
      context.drawImage(this.image, LABELS, 0, width, height);
      this.#lines(context, width, height);
      this.#labels(context, height);
      this.#marks(context, width, height);
      this.#cursor(context, height);
    }
    performance.measure("draw", { start: started, end: performance.now() });
  }

  set(cell, spoken) {
    this.cursor = cell;
    this.draw();
    this.on.move(cell, spoken);
  }

  #mostHeight() {
    return Math.min(1400, Math.max(260, 0.56 * innerHeight));
  }

  #height() {
    return Math.max(1, Math.round(Math.min(TALLEST * (this.rows || 1), this.#mostHeight())));
  }

  // Colours into an image with a pixel for each cell; where the screen has fewer columns, the worst
  // of those that share one.
  #paint() {
    const { columns, rows, scale, image } = this;
    if (!columns.length || !rows) return;
    const started = performance.now();
    const screen = Math.floor((this.canvas.clientWidth - LABELS - MARKS) * (devicePixelRatio || 1));
    const width = Math.max(1, Math.min(columns.length, screen));
    [image.width, image.height] = [width, rows];
    const context = image.getContext("2d");
    const pixels = context.createImageData(width, rows);
    const [cells, color] = [new Uint32Array(pixels.data.buffer), table()];
    for (let x = 0; x < width; x++) {
      const from = Math.floor((x * columns.length) / width);
      const to = Math.max(from + 1, Math.floor(((x + 1) * columns.length) / width));
      for (let row = 0; row < rows; row++) {
        let worst = NaN;
        for (let at = from; at < to; at++) {
          const value = columns[at][row];
          if (value === value && !(scale.sign * value <= scale.sign * worst)) worst = value;
        }
        if (worst === worst) cells[row * width + x] = color[Math.round(255 * scale.share(worst))];
      }
    }
    context.putImageData(pixels, 0, 0);
    performance.clearMeasures("paint");
    performance.measure("paint", { start: started, end: performance.now() });
  }

  #lines(context, width, height) {
    const [across, down] = [this.columnWidth(), height / this.rows];
    context.fillStyle = cssColor("--panel");
    if (down >= 7) for (let row = 1; row < this.rows; row++) context.fillRect(LABELS, row * down - 0.5, width, down >= 14 ? 2 : 1);
    if (across >= 12 && down >= 10) for (let at = 1; at <= this.columns.length; at++) context.fillRect(LABELS + at * across - 1, 0, 1, height);
  }

  #labels(context, height) {
    context.fillStyle = cssColor("--quiet");
    context.textAlign = "right";
    context.textBaseline = "middle";
    let step = 1;
    const least = 1.5 * parseFloat(context.font);
    while ((step * height) / this.rows < least) step *= 2;
    for (let row = 0; row < this.rows; row += step) {
      const middle = ((row + 0.5) * height) / this.rows;
      const y = Math.min(Math.max(middle, 0.4 * least), height - 0.3 * least);
      context.fillText(this.labels(row), LABELS - 8, y);
    }
  }

  #marks(context, width, height) {
    context.fillStyle = cssColor("--bad");
    for (const row of this.marks) {
      const y = ((row + 0.5) * height) / this.rows;
      context.beginPath();
      context.moveTo(LABELS + width + 2, y);
      context.lineTo(LABELS + width + MARKS - 2, y - MARKS / 2 + 1);
      context.lineTo(LABELS + width + MARKS - 2, y + MARKS / 2 - 1);
      context.fill();
    }
  }

  #cursor(context, height) {
    if (this.drag && Math.abs(this.drag.to - this.drag.from) > 5) {
      context.fillStyle = cssColor("--band");
      context.fillRect(LABELS, this.drag.from, this.canvas.clientWidth - LABELS - MARKS, this.drag.to - this.drag.from);
    }
    if (!this.cursor) return;
    const [across, down] = [this.columnWidth(), height / this.rows];
    const [w, h] = [Math.max(across, 7), Math.max(down, 7)];
    const x = LABELS + (this.cursor.column + 0.5) * across - w / 2;
    const y = (this.cursor.row + 0.5) * down - h / 2;
    context.lineWidth = 4;
    context.strokeStyle = cssColor("--panel");
    context.strokeRect(x, y, w, h);
    context.lineWidth = 2;
    context.strokeStyle = cssColor("--ink");
    context.strokeRect(x, y, w, h);
  }

  #at(event) {
    const column = Math.floor((event.offsetX - LABELS) / this.columnWidth());
    const row = Math.floor((event.offsetY * this.rows) / this.#height());
    const isInside = column >= 0 && column < this.columns.length && row >= 0 && row < this.rows;
    return isInside ? { column, row } : null;
  }

  #moved(event) {
    if (this.drag) this.drag.to = event.offsetY;
    const cell = this.#at(event);
    const isSame = cell && this.cursor && cell.column === this.cursor.column && cell.row === this.cursor.row;
    if (this.drag || !isSame) this.set(cell, false);
  }

  #released(event) {
    const drag = this.drag;
    this.drag = null;
    if (drag && Math.abs(drag.to - drag.from) > 5) {
      const rows = [drag.from, drag.to].sort((a, b) => a - b).map((y) => Math.floor((y * this.rows) / this.#height()));
      this.on.zoom(Math.max(0, rows[0]), Math.min(this.rows - 1, rows[1]));
      return;
    }
    const cell = this.#at(event);
    if (cell) {
      this.set(cell, false);
      this.on.choose(cell);
    }
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.columns.length) return;
    const cell = { ...(this.cursor || { column: this.columns.length - 1, row: 0 }) };
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [0, -10], PageDown: [0, 10] };
    if (event.key in moves) {
      cell.column += moves[event.key][0];
      cell.row += moves[event.key][1];
    } else if (event.key === "Home") cell.column = 0;
    else if (event.key === "End") cell.column = this.columns.length - 1;
    else if (event.key === "Enter" || event.key === " ") this.on.choose(cell);
    else if (["+", "=", "-", "Escape"].includes(event.key)) {
      this.on.keyZoom(event.key);
      event.preventDefault();
      return;
    } else return;
    event.preventDefault();
    cell.column = Math.min(Math.max(cell.column, 0), this.columns.length - 1);
    cell.row = Math.min(Math.max(cell.row, 0), this.rows - 1);
    this.set(cell, true);
  }
}

export function drawScale(canvas) {
  const context = prepared(canvas, canvas.clientWidth, canvas.clientHeight);
  const gradient = context.createLinearGradient(0, 0, canvas.clientWidth, 0);
  for (const [place, hex] of STOPS[dark.matches ? "dark" : "light"]) gradient.addColorStop(place, `#${hex}`);
  context.fillStyle = gradient;
  context.fillRect(0, 0, canvas.clientWidth, canvas.clientHeight);
}

function ticks(low, high) {
  const least = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= least);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
  return found;
}

// Mean, deviation and extremes of each report, and one rank's line; the columns are the map's.
export function drawTrend(canvas, { times, spread, line, across, cursor, format }) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const context = prepared(canvas, width, height);
  const least = parseFloat(context.font);
  const [top, bottom] = [0.7 * least, height - 1.6 * least];
  const known = [...spread.min, ...spread.max, ...(line || [])].filter((value) => value !== null);
  if (!known.length) return;
  let [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const room = Math.max(0.06 * (high - low), 0.02 * Math.abs(high), 1e-9);
  [low, high] = [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  const x = (at) => LABELS + (at + 0.5) * across;
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const value of ticks(low, high)) {
    context.fillStyle = cssColor("--line");
    context.fillRect(LABELS, Math.round(y(value)), width - LABELS - MARKS, 1);
    context.fillStyle = cssColor("--quiet");
    context.fillText(format(value), LABELS - 8, y(value));
  }
  context.textAlign = "center";
  let right = -Infinity;
  for (let at = 0; at < times.length; at++) {
    const text = clock(times[at]);
    const half = context.measureText(text).width / 2;
    const middle = Math.min(Math.max(x(at), half), width - half);
    if (middle - half < right + 3 * least) continue;
    context.fillText(text, middle, height - 0.6 * least);
    right = middle + half;
  }
  const runs = (values) => {
    const found = [];
    values.forEach((value, at) => {
      if (value === null) return;
      if (at > 0 && values[at - 1] !== null && found.length) found.at(-1).push(at);
      else found.push([at]);
    });
    return found;
  };
  const band = (lower, upper, color) => {
    context.fillStyle = color;
    for (const run of runs(lower)) {
      context.beginPath();
      context.moveTo(x(run[0]) - across / 2, y(lower[run[0]]));
      for (const at of run) context.lineTo(x(at), y(lower[at]));
      context.lineTo(x(run.at(-1)) + across / 2, y(lower[run.at(-1)]));
      context.lineTo(x(run.at(-1)) + across / 2, y(upper[run.at(-1)]));
      for (const at of [...run].reverse()) context.lineTo(x(at), y(upper[at]));
      context.lineTo(x(run[0]) - across / 2, y(upper[run[0]]));
      context.fill();
    }
  };
  const stroke = (values, color) => {
    context.strokeStyle = color;
    context.lineWidth = 2;
    context.lineJoin = "round";
    for (const run of runs(values)) {
      context.beginPath();
      context.moveTo(x(run[0]) - across / 2, y(values[run[0]]));
      for (const at of run) context.lineTo(x(at), y(values[at]));
      context.lineTo(x(run.at(-1)) + across / 2, y(values[run.at(-1)]));
      context.stroke();
    }
  };
  const around = (sign) =>
    spread.mean.map((mean, at) => {
      if (mean === null) return null;
      const value = mean + sign * spread.sd[at];
      return sign < 0 ? Math.max(value, spread.min[at]) : Math.min(value, spread.max[at]);
    });
  band(spread.min, spread.max, cssColor("--ends"));
  band(around(-1), around(1), cssColor("--band"));
  stroke(spread.mean, cssColor("--accent"));
  if (line) stroke(line, cssColor("--own"));
  if (cursor) {
    context.fillStyle = cssColor("--quiet");
    context.fillRect(x(cursor.column) - 0.5, top, 1, bottom - top);
  }
}
