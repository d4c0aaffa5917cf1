"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const style = () => getComputedStyle(document.documentElement);
  const several = DATA.runs.length > 1;
  const hasTimes = DATA.charts.some((chart) => chart.curves.some((curve) => curve.t));
  const state = { log: false, clip: false, smooth: 0, axis: "step", hidden: new Set(), zoom: null, cursor: null };
  const drawn = []; // everything with a canvas
  const LEFT = 56, RIGHT = 10, TOP = 8, BOTTOM = 20, HEIGHT = 190;

  // Texts come from files: they are only ever set as text.
  function make(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "color") made.style.background = value;
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  const colour = (run) => `var(--c${run % 8})`;
  const swatch = (run) => make("span", { class: "swatch", color: colour(run), "aria-hidden": "true" });

  function number(value, missing = "-") {
    if (value === null || value === undefined) return missing;
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(3).replace(/\.?0+e/, "e");
    return Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e13) return value.toExponential(0);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return size !== 0 && size < 1e-3 ? value.toExponential(0) : `${+value.toPrecision(3)}`;
  }

  function duration(seconds) {
    if (seconds >= 172800) return `${+(seconds / 86400).toPrecision(3)} d`;
    if (seconds >= 7200) return `${+(seconds / 3600).toPrecision(3)} h`;
    if (seconds >= 180) return `${+(seconds / 60).toPrecision(3)} min`;
    return `${+seconds.toPrecision(3)} s`;
  }

  const shortened = (name) => (name.length > 100 ? `${name.slice(0, 99)}\u2026` : name);

  const place = (x) => (state.axis === "time" ? duration(x) : `step ${x.toLocaleString("en")}`);

  function ticks(low, high, count) {
    if (!(high > low)) return [low];
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const size = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
    const found = [];
    for (let at = Math.ceil(low / size); at * size <= high + size * 1e-9; at++) found.push(at * size);
    return found;
  }

  function logTicks(low, high) { // low and high are exponents of ten
    const found = [];
    const every = Math.max(1, Math.ceil((high - low) / 5));
    for (let at = Math.floor(low); at <= Math.ceil(high); at++) {
      if (at % every === 0) for (const one of high - low < 2 ? [1, 2, 5] : [1]) {
        const tick = at + Math.log10(one);
        if (tick >= low && tick <= high) found.push(tick);
      }
    }
    return found.length > 1 ? found : ticks(low, high, 3);
  }

  function smoothed(values) {
    if (!state.smooth) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * state.smooth + value * (1 - state.smooth);
      weight = weight * state.smooth + (1 - state.smooth);
      return sum / weight;
    });
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function prepare(canvas, height) {
    const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11.5px system-ui, sans-serif";
    return [pen, width];
  }

  // Losses that differ in such a word share a chart. The loss in training comes first.
  const PHASE = /(?<=^|[/._ -])(?:(train(?:ing)?)|valid(?:ation)?|val|eval(?:uation)?)(?=$|[/._ -])/i;

  function joined(charts) {
    const found = new Map();
    for (const chart of charts) {
      const shared = chart.name.replace(PHASE, "").replace(/^[/._ -]+|[/._ -]+$/g, "");
      const key = chart.group === "Loss" ? `Loss ${shared}` : `${chart.group}: ${chart.name}`;
      found.set(key, [...(found.get(key) || []), chart]);
    }
    const isValidation = (chart) => Number((PHASE.exec(chart.name) || [0, 1])[1] === undefined);
    return [...found.values()].map((parts) => {
      parts.sort((a, b) => isValidation(a) - isValidation(b));
      const names = parts.map((part) => part.name);
      const curves = parts.flatMap((chart, part) => chart.curves.map((curve) => ({ ...curve, part })));
      return { name: names.join(", "), parts: names, group: parts[0].group, thinned: parts.some((part) => part.thinned), curves };
    });
  }

  // One chart: a curve for each run that has the metric.
  function lineChart(chart) {
    const canvas = make("canvas", { "aria-hidden": "true" });
    const readout = make("output");
    const nans = chart.curves.reduce((sum, curve) => sum + curve.nan, 0);
    const ofPart = (curve) => (several ? curve.run : curve.part);
    const spikes = chart.curves.flatMap((curve) => curve.spikes);
    const spiked = spikes.length ? `${spikes.length} spikes: steps ${spikes.slice(0, 8).join(", ")}${spikes.length > 8 ? ", ..." : ""}` : "";
    const notes = [chart.thinned ? "thinned" : "", spiked, nans ? `NaN at ${nans.toLocaleString("en")} steps` : ""].filter(Boolean);
    const note = notes.length ? ` (${notes.join(", ")})` : "";
    const figure = make("figure", { tabindex: "0", role: "group", "aria-label": `${shortened(chart.name)}${note}; arrow keys read the values` },
      make("figcaption", {}, shortened(chart.name), make("small", {}, note)), canvas, readout);
    let box = null; // what the canvas shows, for the pointer
    let from = null;

    function curves() {
      return chart.curves.filter((curve) => !state.hidden.has(curve.run)).map((curve) => {
        const xs = state.axis === "time" ? curve.t : curve.x;
        if (!xs) return null;
        const keep = xs.map((x, at) => at).filter((at) => xs[at] !== null);
        return { run: curve.run, part: curve.part, spikes: new Set(curve.spikes), steps: keep.map((at) => curve.x[at]), x: keep.map((at) => xs[at]), y: smoothed(keep.map((at) => curve.y[at])), raw: keep.map((at) => curve.y[at]) };
      }).filter((curve) => curve && curve.x.length);
    }

    function draw() {
      const [pen, width] = prepare(canvas, HEIGHT);
      const shown = curves(), css = style();
      let [x0, x1] = [Infinity, -Infinity];
      for (const curve of shown) { x0 = Math.min(x0, curve.x[0]); x1 = Math.max(x1, curve.x[curve.x.length - 1]); }
      if (state.zoom) [x0, x1] = state.zoom;
      const up = (value) => (value === null ? null : state.log ? (value > 0 ? Math.log10(value) : null) : value);
      const ys = [];
      for (const curve of shown) curve.raw.forEach((value, at) => {
        const y = up(value);
        if (y !== null && curve.x[at] >= x0 && curve.x[at] <= x1) ys.push(y);
      });
      ys.sort((a, b) => a - b);
      const cut = state.clip ? Math.floor(ys.length * 0.02) : 0; // at either end
      let [y0, y1] = [ys[cut], ys[ys.length - 1 - cut]];
      if (!(y1 >= y0)) {
        pen.fillStyle = css.getPropertyValue("--soft");
        pen.fillText(state.log ? "no values above zero" : nans ? "only NaN" : "no values", LEFT, HEIGHT / 2);
        box = null;
        return read(shown);
      }
      const pad = y1 > y0 ? (y1 - y0) * 0.05 : Math.abs(y0) * 0.05 || 1;
      y0 -= pad; y1 += pad;
      if (x1 <= x0) { x0 -= 1; x1 += 1; }
      box = { x0, x1, width };
      const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
      const py = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
      pen.strokeStyle = css.getPropertyValue("--grid");
      pen.fillStyle = css.getPropertyValue("--soft");
      pen.lineWidth = 1;
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      for (const tick of state.log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
        pen.beginPath(); pen.moveTo(LEFT, py(tick)); pen.lineTo(width - RIGHT, py(tick)); pen.stroke();
        pen.fillText(short(state.log ? 10 ** tick : tick), LEFT - 6, py(tick));
      }
      pen.textBaseline = "alphabetic";
      pen.textAlign = "center";
      const columns = Math.max(2, Math.floor(width / 75));
      for (const tick of ticks(x0, x1, columns)) {
        if (state.axis === "step" && tick !== Math.round(tick)) continue;
        const text = state.axis === "time" ? duration(tick) : short(tick);
        pen.fillText(text, Math.min(Math.max(px(tick), LEFT), width - RIGHT - pen.measureText(text).width / 2), HEIGHT - 5);
      }
      pen.save();
      pen.beginPath(); pen.rect(LEFT, 0, width - LEFT, HEIGHT - BOTTOM + 2); pen.clip();
      pen.lineJoin = "round";
      for (const curve of shown) {
        const ink = css.getPropertyValue(`--c${ofPart(curve) % 8}`);
        for (const [values, alpha, size] of state.smooth ? [[curve.raw, 0.25, 1], [curve.y, 1, 1.8]] : [[curve.y, 1, 1.5]]) {
          pen.globalAlpha = alpha; pen.strokeStyle = pen.fillStyle = ink; pen.lineWidth = size;
          pen.setLineDash(curve.part ? [2, 2] : curve.run >= 8 ? [6, 3] : []);
          pen.beginPath();
          let down = false;
          values.forEach((value, at) => {
            const y = up(value);
            if (y === null) { down = false; return; }
            if (down) pen.lineTo(px(curve.x[at]), py(y)); else pen.moveTo(px(curve.x[at]), py(y));
            down = true;
          });
          pen.stroke();
          pen.setLineDash([]);
          const lone = (at) => up(values[at]) !== null && (values.length <= 40 || ((at === 0 || up(values[at - 1]) === null) && (at === values.length - 1 || up(values[at + 1]) === null)));
          values.forEach((value, at) => { if (lone(at)) { pen.beginPath(); pen.arc(px(curve.x[at]), py(up(value)), 2.2, 0, 7); pen.fill(); } });
        }
        pen.globalAlpha = 1;
        // A triangle at the top for each spike, and a mark below for each step that is not finite.
        curve.steps.forEach((step, at) => {
          if (!curve.spikes.has(step)) return;
          const x = px(curve.x[at]);
          pen.beginPath(); pen.moveTo(x - 4, 0); pen.lineTo(x + 4, 0); pen.lineTo(x, 7); pen.fill();
        });
        curve.raw.forEach((value, at) => { if (value === null) pen.fillRect(px(curve.x[at]) - 1, HEIGHT - BOTTOM - 7, 2, 7); });
        if (state.cursor !== null) {
          const at = nearest(curve.x, state.cursor), y = up(curve.y[at]);
          if (y !== null) { pen.beginPath(); pen.arc(px(curve.x[at]), py(y), 3.8, 0, 7); pen.fill(); }
        }
      }
      if (state.cursor !== null) {
        pen.strokeStyle = css.getPropertyValue("--soft"); pen.lineWidth = 1;
        pen.beginPath(); pen.moveTo(px(state.cursor), 0); pen.lineTo(px(state.cursor), HEIGHT - BOTTOM); pen.stroke();
      }
      if (from !== null && state.cursor !== null) {
        pen.globalAlpha = 0.15; pen.fillStyle = css.getPropertyValue("--accent");
        pen.fillRect(Math.min(px(from), px(state.cursor)), 0, Math.abs(px(state.cursor) - px(from)), HEIGHT - BOTTOM);
        pen.globalAlpha = 1;
      }
      pen.restore();
      read(shown);
    }

    function read(shown) {
      const parts = shown.map((curve) => {
        const at = state.cursor === null ? curve.x.length - 1 : nearest(curve.x, state.cursor);
        const name = (several ? `${DATA.runs[curve.run].name}, ` : "") + (chart.parts.length > 1 ? `${shortened(chart.parts[curve.part])}, ` : "");
        return make("span", {}, swatch(ofPart(curve)), `${name}${place(curve.x[at])}`, make("b", {}, number(curve.y[at], "NaN")));
      });
      readout.replaceChildren(...parts);
    }

    const at = (event) => {
      if (!box) return null;
      const share = (event.offsetX - LEFT) / (box.width - LEFT - RIGHT);
      return box.x0 + Math.min(Math.max(share, 0), 1) * (box.x1 - box.x0);
    };
    canvas.addEventListener("pointermove", (event) => setCursor(at(event)));
    canvas.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = at(event); setCursor(at(event)); });
    canvas.addEventListener("pointerup", (event) => {
      const to = at(event), began = from;
      from = null;
      if (box && began !== null && to !== null && Math.abs(to - began) > (box.x1 - box.x0) * 0.03) setZoom([Math.min(began, to), Math.max(began, to)]);
    });
    canvas.addEventListener("pointerleave", () => { from = null; setCursor(null); });
    canvas.addEventListener("dblclick", () => setZoom(null));
    figure.addEventListener("keydown", (event) => {
      const xs = (curves()[0] || { x: [] }).x;
      if (!xs.length) return;
      const now = state.cursor === null ? xs.length - 1 : nearest(xs, state.cursor), page = Math.ceil(xs.length / 10);
      const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - page, PageDown: now + page, Home: 0, End: xs.length - 1 };
      if (event.key === "Escape") { setZoom(null); setCursor(null); }
      if (!(event.key in moves)) return;
      event.preventDefault();
      setCursor(xs[Math.min(Math.max(moves[event.key], 0), xs.length - 1)]);
    });
    speakWhileFocused(figure, readout, () => setCursor(null));
    return { name: chart.name, group: chart.group, figure, canvas, draw };
  }

  // Ranks by steps, the darker the worse.
  function rankMap(map) {
    const canvas = make("canvas", { "aria-hidden": "true" });
    const readout = make("output");
    const name = shortened(map.name) + (several ? ` (${DATA.runs[map.run].name})` : "");
    const note = map.thinned ? " (the worst of neighbours)" : "";
    const figure = make("figure", { tabindex: "0", role: "group", "aria-label": `${name}: ranks by steps${note}; arrow keys read the values` },
      make("figcaption", {}, name, make("small", {}, note)), canvas, readout);
    const rows = map.ranks.length, columns = map.steps.length;
    const height = Math.min(Math.max(rows * 18, 54), 384) + TOP + BOTTOM;
    const known = map.cells.flat().filter((cell) => cell !== null);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    // Noise of a few percent stays pale.
    const span = Math.max(high - low, 0.25 * Math.max(Math.abs(low), Math.abs(high))) || 1;
    // Cut at three times, or one very slow rank would hide the others.
    const ofVerdict = (times) => (times > 1 ? Math.min(1, 0.4 + 0.3 * (times - 1)) : 0);
    const shareOf = (cell) => (map.isVerdict ? ofVerdict(cell) : (map.lowIsBad ? high - cell : cell - low) / span);
    let at = null, size = null;

    function draw() {
      const [pen, width] = prepare(canvas, height), css = style();
      const cool = css.getPropertyValue("--cool").split(",").map(Number), hot = css.getPropertyValue("--hot").split(",").map(Number);
      size = [(width - LEFT - RIGHT) / columns, (height - TOP - BOTTOM) / rows];
      map.cells.forEach((row, y) => row.forEach((cell, x) => {
        const share = shareOf(cell);
        pen.fillStyle = cell === null ? css.getPropertyValue("--none") : `rgb(${cool.map((one, c) => Math.round(one + (hot[c] - one) * share)).join(",")})`;
        pen.fillRect(LEFT + x * size[0], TOP + y * size[1], Math.ceil(size[0]), Math.ceil(size[1]));
      }));
      pen.fillStyle = css.getPropertyValue("--soft");
      pen.textAlign = "right"; pen.textBaseline = "middle";
      const every = Math.ceil(rows / (height / 18));
      map.ranks.forEach((rank, y) => { if (y % every === 0) pen.fillText(rank, LEFT - 6, TOP + (y + 0.5) * size[1]); });
      pen.textBaseline = "alphabetic"; pen.textAlign = "left";
      pen.fillText(`step ${map.steps[0]}`, LEFT, height - 5);
      pen.textAlign = "right";
      if (columns > 1) pen.fillText(map.steps[columns - 1], width - RIGHT, height - 5);
      if (at) {
        pen.strokeStyle = css.getPropertyValue("--ink"); pen.lineWidth = 1.5;
        pen.strokeRect(LEFT + at[0] * size[0], TOP + at[1] * size[1], size[0], size[1]);
      }
      const [x, y] = at || [];
      readout.replaceChildren(at
        ? make("span", {}, `rank ${map.ranks[y]}, step ${map.steps[x]}`, make("b", {}, number(map.cells[y][x])))
        : make("span", {}, `${map.lowIsBad ? "worst" : "least"} ${number(low)}, ${map.lowIsBad ? "best" : "largest"} ${number(high)}`));
    }

    function go(x, y) {
      at = x === null ? null : [Math.min(Math.max(x, 0), columns - 1), Math.min(Math.max(y, 0), rows - 1)];
      draw();
    }
    canvas.addEventListener("pointermove", (event) => { if (size) go(Math.floor((event.offsetX - LEFT) / size[0]), Math.floor((event.offsetY - TOP) / size[1])); });
    canvas.addEventListener("pointerleave", () => go(null));
    figure.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "Escape") go(null);
      if (!move) return;
      event.preventDefault();
      if (at) go(at[0] + move[0], at[1] + move[1]); else go(columns - 1, 0);
    });
    speakWhileFocused(figure, readout, () => go(null));
    return { name, group: map.isVerdict ? "Slow ranks" : "Ranks over time", figure, canvas, draw };
  }

  function speakWhileFocused(figure, readout, leave) {
    figure.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
    figure.addEventListener("blur", () => { readout.removeAttribute("aria-live"); leave(); });
  }

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; for (const one of drawn) if (one.near) one.draw(); });
  }
  function setCursor(x) { if (x !== state.cursor) { state.cursor = x; redraw(); } }
  function setZoom(range) { state.zoom = range; byId("whole").hidden = range === null; redraw(); }

  function showFigures() {
    const ofRuns = DATA.runs.map((run) => {
      const found = run.figures.map(([label, value, what]) => [label, number(value, "NaN"), what]);
      if (run.steps) found.unshift(["steps", run.steps[1].toLocaleString("en"), `from ${run.steps[0].toLocaleString("en")}`]);
      if (run.seconds !== null) found.push(["duration", duration(run.seconds), `began ${new Date(run.began * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`]);
      return found;
    });
    if (!several) {
      for (const [label, value, what] of ofRuns[0]) byId("figures").append(make("div", { class: "figure" }, make("span", {}, label), make("b", {}, value), make("span", {}, what)));
      return;
    }
    const labels = [...new Set(ofRuns.flat().map(([label]) => label))];
    const head = make("tr", {}, ...["run", ...labels].map((label) => make("th", { scope: "col" }, label)));
    const rows = ofRuns.map((found, run) => make("tr", {}, make("th", { scope: "row" }, swatch(run), " ", DATA.runs[run].name), ...labels.map((label) => {
      const [, value, what] = found.find((one) => one[0] === label) || [label, "-", ""];
      return make("td", {}, make("b", {}, value), make("br"), make("small", {}, what));
    })));
    byId("figures").append(make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
  }

  function showSettings() {
    const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.settings)))];
    if (!names.length) return;
    const table = byId("settings-table"), body = make("tbody");
    table.append(make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "setting"), ...DATA.runs.map((run) => make("th", { scope: "col" }, run.name)))), body);
    for (const name of names) {
      const texts = DATA.runs.map((run) => (name in run.settings ? run.settings[name] : "-"));
      const row = make("tr", {}, make("td", {}, name), ...texts.map((text) => make("td", {}, text)));
      if (new Set(texts).size > 1) row.className = "differs";
      body.append(row);
    }
    const only = byId("differing");
    const filter = () => { for (const row of body.children) row.hidden = several && only.checked && row.className !== "differs"; };
    if (several) { byId("differing-label").hidden = false; only.addEventListener("change", filter); }
    filter();
    byId("settings").hidden = false;
  }

  function showConstants(place) {
    const names = Object.keys(DATA.constants);
    if (!names.length) return;
    const texts = names.map((name) => `${shortened(name)} ${[...new Set(DATA.constants[name].filter((one) => one !== null).map(number))].join(" / ")}`);
    place.append(make("p", { class: "constants" }, `Never changed: ${texts.join(", ")}.`));
  }

  function showLegend() {
    if (!several) return;
    DATA.runs.forEach((run, index) => {
      const box = make("input", { type: "checkbox" });
      box.checked = true;
      box.addEventListener("change", () => { if (box.checked) state.hidden.delete(index); else state.hidden.add(index); redraw(); });
      byId("legend").append(make("label", {}, box, swatch(index), run.name));
    });
  }

  function showCharts() {
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const one = drawn.find((each) => each.figure === entry.target);
        one.near = entry.isIntersecting;
        if (one.near) one.draw();
      }
    }, { rootMargin: "300px" });
    const made = [...joined(DATA.charts).map(lineChart), ...DATA.maps.map(rankMap)];
    const groups = [...new Set(made.map((one) => one.group))];
    const last = ["Timers", "Other"];
    groups.sort((a, b) => last.indexOf(a) - last.indexOf(b));
    for (const group of groups) {
      const grid = make("div", { class: "grid" });
      const section = make("section", {}, make("h2", {}, group), grid);
      for (const one of made.filter((each) => each.group === group)) { grid.append(one.figure); drawn.push(one); one.section = section; }
      byId("charts").append(section);
      if (group === "Slow ranks") section.append(byId("slow"));
    }
    showConstants(byId("charts"));
    for (const one of drawn) near.observe(one.figure);
    new ResizeObserver(redraw).observe(document.body);
  }

  function listen() {
    byId("bar").hidden = false;
    byId("axis-label").hidden = !hasTimes;
    byId("log").addEventListener("change", (event) => { state.log = event.target.checked; redraw(); });
    byId("clip").addEventListener("change", (event) => { state.clip = event.target.checked; redraw(); });
    byId("smooth").addEventListener("input", (event) => { state.smooth = Number(event.target.value); redraw(); });
    byId("axis").addEventListener("change", (event) => { state.axis = event.target.value; state.cursor = null; setZoom(null); });
    byId("whole").addEventListener("click", () => setZoom(null));
    byId("theme").addEventListener("change", (event) => { document.documentElement.dataset.theme = event.target.value; redraw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    byId("find").addEventListener("input", (event) => {
      const wanted = event.target.value.trim().toLowerCase();
      for (const one of drawn) one.figure.hidden = !one.name.toLowerCase().includes(wanted);
      for (const one of drawn) one.section.hidden = ![...one.section.querySelectorAll("figure")].some((figure) => !figure.hidden);
    });
  }

  const { charts, maps } = DATA.leftOut;
  if (DATA.charts.some((chart) => chart.thinned)) byId("foot").append("Thinned curves show the least and the largest value of each section. ");
  if (charts || maps) byId("foot").append(`Left out to keep the page small: ${charts} charts, ${maps} maps of ranks. `);
  byId("foot").append("Hover or use arrow keys to read values, drag to zoom, double-click or press Escape for the whole range.");
  showFigures();
  showSettings();
  showLegend();
  showCharts();
  listen();
})();
