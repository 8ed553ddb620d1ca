"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const range = document.getElementById("range"), said = document.getElementById("said");
  const plots = new Map();  // chart's number → { plot, chart, shown, values }
  const several = data.labels.length > 1;
  let span = null;  // steps that all plots show; null: each shows all of its own
  let syncing = false;

  // ── Values as people read them ──

  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

  function scaled(value, factor, units) {
    let at = 0, rest = value;
    while (Math.abs(rest) >= factor && at < units.length - 1) { rest /= factor; at += 1; }
    return plain.format(Number(rest.toPrecision(3))) + units[at];
  }

  function number(value) {
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
    return plain.format(value);
  }

  const formats = {
    number, rate: (value) => scaled(value, 1000, ["", "k", "M", "G"]),
    bytes: (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
    seconds: (value) => Math.abs(value) >= 1 ? plain.format(value) + " s" : plain.format(Number((value * 1000).toPrecision(3))) + " ms",
    share: (value) => plain.format(Number((value * 100).toPrecision(3))) + "%",
  };

  // Steps of an axis in round units of memory.
  const binary = [0, 1, 2, 3, 4].flatMap((power) => [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map((size) => size * 1024 ** power));

  // ── Colours, from the style sheet so that themes are said once ──

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (series, at) => css("--c" + (several ? series.run : at) % 8);
  const dashes = (series) => several && series.dashed ? [7, 5] : [];

  // ── One plot ──

  function joined(chart) {
    return uPlot.join(chart.series.map((series) => [series.x, series.y]));
  }

  function extent(chart, shown, low, high) {
    let least = Infinity, most = -Infinity;
    chart.series.forEach((series, at) => {
      if (!shown[at]) return;
      series.x.forEach((step, i) => {
        if (step < low || step > high) return;
        least = Math.min(least, series.y[i]); most = Math.max(most, series.y[i]);
      });
    });
    if (least > most) return chart.log ? [0.1, 1] : [0, 1];
    for (const level of chart.levels) {  // a card's memory far above everything would hide the rest
      if (level.value <= 4 * most) {
        least = Math.min(least, level.low ?? level.value); most = Math.max(most, level.high ?? level.value);
      }
    }
    if (chart.log) return [least / 1.3, most * 1.3];
    const room = (most - least || Math.abs(most) || 1) * 0.06;
    return [chart.unit !== "number" && least >= 0 ? 0 : least - room, most + room];
  }

  function marks(chart) {
    return (u) => {
      const ctx = u.ctx, ratio = devicePixelRatio, box = u.bbox;
      ctx.save();
      ctx.beginPath(); ctx.rect(box.left, box.top, box.width, box.height); ctx.clip();
      ctx.lineWidth = 1.5 * ratio;
      for (const level of chart.levels) {
        if (level.low !== null) {
          const top = u.valToPos(level.high, "y", true), foot = u.valToPos(level.low, "y", true);
          ctx.globalAlpha = 0.14; ctx.fillStyle = css("--muted");
          ctx.fillRect(box.left, top, box.width, foot - top); ctx.globalAlpha = 1;
        }
        const y = u.valToPos(level.value, "y", true);
        ctx.strokeStyle = css("--text"); ctx.setLineDash(pattern(chart, level).map((size) => size * ratio));
        ctx.beginPath(); ctx.moveTo(box.left, y); ctx.lineTo(box.left + box.width, y); ctx.stroke();
      }
      for (const mark of chart.marks) {
        const x = u.valToPos(mark.step, "x", true);
        ctx.strokeStyle = ctx.fillStyle = css(mark.kind === "guard" ? "--bad" : "--muted");
        ctx.setLineDash(mark.kind === "guard" ? [] : [2 * ratio, 3 * ratio]);
        ctx.beginPath(); ctx.moveTo(x, box.top); ctx.lineTo(x, box.top + box.height); ctx.stroke();
        if (mark.kind === "guard") {
          const size = 5 * ratio;
          ctx.beginPath(); ctx.moveTo(x - size, box.top); ctx.lineTo(x + size, box.top);
          ctx.lineTo(x, box.top + 1.6 * size); ctx.fill();
        }
      }
      ctx.restore();
    };
  }

  const pattern = (chart, level) => [[6, 4], [2, 3], [12, 4]][chart.levels.indexOf(level) % 3];

  function draw(host) {
    const at = Number(host.dataset.chart), chart = data.charts[at], before = plots.get(at);
    if (before) before.plot.destroy();
    const shown = before ? before.shown : chart.series.map(() => true);
    const axis = {
      stroke: css("--muted"), font: "11px system-ui, sans-serif",
      grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--line"), width: 1, size: 4 },
    };
    const format = formats[chart.unit] || number, joinedData = joined(chart);
    const points = (series) => series.points || series.x.length < 40;
    const options = {
      width: host.clientWidth, height: host.clientHeight, padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: false, dist: 4 }, focus: { prox: -1 } },
      scales: {
        x: { time: false, range: (u, low, high) => span || (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: chart.log ? 3 : 1, range: () => extent(chart, shown, ...(span || [-Infinity, Infinity])) },
      },
      axes: [
        { ...axis, size: 28, space: 60, label: "step", labelSize: 16, labelGap: 0, labelFont: "11px system-ui, sans-serif", values: (u, ticks) => ticks.map((tick) => Number.isInteger(tick) ? whole.format(tick) : "") },
        { ...axis, ...(chart.unit === "bytes" && { incrs: binary }), size: 62, values: (u, ticks) => ticks.map((tick) => tick === null ? "" : format(tick)) },
      ],
      series: [{}, ...chart.series.map((series, i) => ({
        label: series.label, show: shown[i], stroke: series.points ? css("--bad") : colour(series, i),
        fill: series.points ? css("--bad") : undefined, width: series.points ? 0 : 1.8, dash: dashes(series),
        spanGaps: true, paths: series.points ? () => null : undefined,
        points: { show: points(series), size: series.points ? 9 : 5, fill: series.points ? css("--bad") : undefined },
      }))],
      hooks: {
        draw: [marks(chart)],
        setCursor: [(u) => read(at, u.cursor.idx)],
        setSelect: [(u) => {
          if (u.select.width > 4) zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    };
    host.replaceChildren();
    const plot = new uPlot(options, joinedData, host);
    plot.over.addEventListener("dblclick", (event) => { event.stopImmediatePropagation(); zoom(null); }, true);
    plots.set(at, { plot, chart, shown, format, host, data: joinedData });
    legend(at);
  }

  // ── Legend: names, values at the cursor, and switches ──

  function key(series, i) {
    const stroke = series.points ? css("--bad") : colour(series, i);
    const dash = dashes(series).length ? ' stroke-dasharray="5 3"' : "";
    const shape = series.points ? `<circle cx="10" cy="5" r="4" fill="${stroke}"/>`
      : `<line x1="0" y1="5" x2="20" y2="5" stroke="${stroke}" stroke-width="3"${dash}/>`;
    return `<svg viewBox="0 0 20 10" aria-hidden="true">${shape}</svg>`;
  }

  function note(host, text, svg) {
    const entry = document.createElement("span");
    entry.className = "note";
    entry.innerHTML = `<svg viewBox="0 0 20 10" aria-hidden="true">${svg}</svg>`;
    entry.append(text);
    host.append(entry);
  }

  function legend(at) {
    const entry = plots.get(at), host = document.querySelector(`[data-legend="${at}"]`);
    host.replaceChildren();
    entry.values = entry.chart.series.map((series, i) => {
      const button = document.createElement("button"), name = document.createElement("span"), value = document.createElement("span");
      button.type = "button";
      button.innerHTML = key(series, i);  // colours of the style sheet only; what the run says goes in as text
      name.className = "name"; name.textContent = series.label;
      value.className = "value";
      button.append(name, value);
      button.setAttribute("aria-pressed", String(entry.shown[i]));
      button.addEventListener("click", () => {
        entry.shown[i] = !entry.shown[i];
        button.setAttribute("aria-pressed", String(entry.shown[i]));
        entry.plot.setSeries(i + 1, { show: entry.shown[i] });
        entry.plot.redraw(false, true);
      });
      host.append(button);
      return value;
    });
    for (const level of entry.chart.levels) {
      const dash = pattern(entry.chart, level).join(" "), line = css("--text");
      note(host, `${level.label}: ${entry.format(level.value)}`, `<line x1="0" y1="5" x2="20" y2="5" stroke="${line}" stroke-width="2" stroke-dasharray="${dash}"/>`);
    }
    const kinds = new Set(entry.chart.marks.map((mark) => mark.kind));
    if (kinds.has("guard")) note(host, "guard event", `<path d="M5 0H15L10 9Z" fill="${css("--bad")}"/>`);
    if (kinds.has("start")) note(host, "restart", `<line x1="10" y1="0" x2="10" y2="10" stroke="${css("--muted")}" stroke-width="2" stroke-dasharray="2 2"/>`);
    read(at, null);
  }

  function read(at, index) {
    const entry = plots.get(at);
    if (!entry || !entry.values) return;
    const steps = entry.data[0];
    entry.chart.series.forEach((series, i) => {
      const values = entry.data[i + 1];
      let from = index;
      if (from !== null && from !== undefined) {  // series are thinned each on its own: the last value up to here
        while (from > 0 && values[from] == null) from -= 1;
      }
      const value = from === null || from === undefined ? null : values[from];
      entry.values[i].textContent = value == null ? "" : entry.format(value);
    });
    const step = index === null || index === undefined ? null : steps[index];
    if (step === null) { if (!syncing) showSpan(); return; }
    const near = entry.chart.marks.filter((mark) => mark.step === step).map((mark) => mark.text);
    range.textContent = `step ${whole.format(step)}`;
    entry.host.title = near.join("\n");
  }

  // ── Steps that are shown ──

  function limits() {
    let low = Infinity, high = -Infinity;
    for (const chart of data.charts) for (const series of chart.series) {
      low = Math.min(low, series.x[0]); high = Math.max(high, series.x[series.x.length - 1]);
    }
    return [low, high];
  }

  function showSpan() {
    range.textContent = span ? `steps ${whole.format(Math.ceil(span[0]))} to ${whole.format(Math.floor(span[1]))}` : "all steps";
  }

  function zoom(low, high) {
    const [first, last] = limits();
    if (low === null || (low <= first && high >= last) || high - low < 0.5) {
      if (low !== null && high - low < 0.5) return;
      span = null;
    } else span = [Math.max(low, first), Math.min(high, last)];
    syncing = true;
    for (const { plot } of plots.values()) plot.setData(plot.data, true);
    syncing = false;
    showSpan();
    said.textContent = range.textContent;
  }

  function by(action, around) {
    const [first, last] = limits(), [low, high] = span || [first, last], width = high - low;
    const middle = around ?? (low + high) / 2;
    if (action === "in") zoom(middle - (middle - low) / 2, middle + (high - middle) / 2);
    else if (action === "out") zoom(middle - (middle - low) * 2, middle + (high - middle) * 2);
    else if (action === "left" && low > first) { const by = Math.min(width / 2, low - first); zoom(low - by, high - by); }
    else if (action === "right" && high < last) { const by = Math.min(width / 2, last - high); zoom(low + by, high + by); }
    else if (action === "reset") zoom(null);
  }

  document.querySelectorAll(".tools button").forEach((button) => button.addEventListener("click", () => by(button.dataset.do)));

  // ── Keyboard ──

  function keyed(event) {
    const entry = plots.get(Number(event.currentTarget.dataset.chart)), { plot } = entry, steps = entry.data[0];
    const at = plot.cursor.idx ?? null, low = plot.scales.x.min, high = plot.scales.x.max;
    const inView = steps.map((step, i) => i).filter((i) => steps[i] >= low && steps[i] <= high);
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !inView.length) return;
    let to = null;
    if (move) to = at === null ? (move > 0 ? inView[0] : inView[inView.length - 1]) : at + move * (event.shiftKey ? 10 : 1);
    else if (event.key === "Home") to = inView[0];
    else if (event.key === "End") to = inView[inView.length - 1];
    else if (event.key === "+" || event.key === "=") by("in", at === null ? undefined : steps[at]);
    else if (event.key === "-") by("out", at === null ? undefined : steps[at]);
    else if (event.key === "0" || event.key === "Escape") by("reset");
    else return;
    event.preventDefault();
    if (to === null) return;
    const index = Math.max(inView[0], Math.min(inView[inView.length - 1], to));
    plot.setCursor({ left: plot.valToPos(steps[index], "x"), top: plot.over.clientHeight / 2 });
    said.textContent = `step ${whole.format(steps[index])}: ` + entry.chart.series.map((series, i) => `${series.label} ${entry.values[i].textContent || "none"}`).join(", ")
      + entry.chart.marks.filter((mark) => mark.step === steps[index]).map((mark) => "; " + mark.text).join("");
  }

  // ── The same values as a table, made when it is opened ──

  function fill(details) {
    const chart = data.charts[Number(details.dataset.table)], host = details.querySelector(".scroll");
    if (!details.open || host.childElementCount) return;
    const columns = joined(chart), count = columns[0].length, most = 400, every = Math.max(1, Math.ceil(count / most));
    const table = document.createElement("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    const format = formats[chart.unit] || number;
    for (const text of ["step", ...chart.series.map((series) => series.label)]) {
      const cell = document.createElement("th"); cell.scope = "col"; cell.textContent = text; head.append(cell);
    }
    for (let i = 0; i < count; i += every) {
      const row = body.insertRow(), step = document.createElement("th");
      step.scope = "row"; step.textContent = whole.format(columns[0][i]); row.append(step);
      for (const values of columns.slice(1)) row.insertCell().textContent = values[i] == null ? "—" : format(values[i]);
    }
    host.append(table);
  }

  // ── When to draw ──

  const hosts = [...document.querySelectorAll(".plot")];
  const drawAll = () => hosts.forEach((host) => { if (host.clientWidth) draw(host); });
  hosts.forEach((host) => host.addEventListener("keydown", keyed));
  document.querySelectorAll("details.data").forEach((details) => details.addEventListener("toggle", () => fill(details)));
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const entry = plots.get(Number(target.dataset.chart)), width = target.clientWidth, height = target.clientHeight;
    if (!width) return;
    if (!entry) draw(target);  // a plot in a part of the page that has just been opened
    else if (entry.plot.width !== width || entry.plot.height !== height) entry.plot.setSize({ width, height });
  }));
  drawAll();
  hosts.forEach((host) => sizes.observe(host));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", drawAll);
  window.addEventListener("beforeprint", drawAll);
  window.addEventListener("afterprint", drawAll);
})();
