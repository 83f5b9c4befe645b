// Lines over rounds: axes, bands, marks, and a cursor that all charts of a group share.

const MOST_NAMED_MARKS = 6;
const LARGEST_SHOWN = 1e307; // clients can report any number; beyond this an axis would end at infinity
const MARGIN = { top: 18, right: 12, bottom: 26, left: 56 };

const within = (value) => Math.max(-LARGEST_SHOWN, Math.min(LARGEST_SHOWN, value));

/** Charts that are read at the same round; moving the cursor in one moves it in all. */
class CursorGroup {
  constructor() {
    this.charts = new Map(); // element -> its Plot
    this.round = null;
  }

  move(round) {
    this.round = round;
    for (const chart of this.charts.values()) chart.showCursor(round);
  }
}

/** About `most` round numbers that cover an interval. */
function niceTicks(low, high, most, isWhole = false) {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((s) => s >= rough * 0.999);
  if (isWhole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) {
    ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return ticks;
}

function logTicks(low, high, most) {
  const decades = Math.log10(high / low);
  const factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
  let ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    ticks.push(...factors.map((factor) => factor * 10 ** power));
  }
  ticks = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  const keep = Math.ceil(ticks.length / Math.max(2, most + 2));
  return ticks.filter((_, i) => i % keep === 0);
}

function tickText(value) {
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e5)) {
    return value.toExponential(0).replace("-", "−").replace("e+", "e");
  }
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

/**
 * One chart. `spec`: label (for those who do not see it), height, from and to (rounds), isLog,
 * lines [{title, rounds, values, look, isDotted, isDashed, isThin, isFaint, hasDots, node,
 * partner}], bands [{rounds, low, high, look}], marks [{round, text}], keys [{title, isDashed}],
 * isZeroLine. A thin line has no entry in the legend; a partner's value stands beside its line's.
 */
class Plot {
  constructor(element, group, spec) {
    this.element = element;
    this.group = group;
    this.spec = spec;
    group.charts.set(element, this);
    this.width = Math.max(260, element.clientWidth || 600);
    this.height = spec.height;
    this.findScales();
    this.draw();
    if (group.round !== null) this.showCursor(group.round);
  }

  findScales() {
    const { lines, bands = [], isLog, from, to } = this.spec;
    let low = Infinity;
    let high = -Infinity;
    const take = (values) => {
      for (const value of values) {
        if (value === null || value === undefined || (isLog && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    };
    for (const line of lines) take(line.values);
    for (const band of bands) take(band.low), take(band.high);
    if (low <= high) [low, high] = [within(low), within(high)];
    if (low > high) [low, high] = isLog ? [0.1, 1] : [0, 1];
    if (isLog) {
      if (high / low < 1.1) [low, high] = [low / 1.1, high * 1.1];
      [low, high] = [low / 1.08, high * 1.08];
    } else {
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      [low, high] = [low - room, high + room];
    }
    Object.assign(this, { low, high });
    const innerWidth = this.width - MARGIN.left - MARGIN.right;
    const innerHeight = this.height - MARGIN.top - MARGIN.bottom;
    this.x = (round) => MARGIN.left + ((round - from) / Math.max(1, to - from)) * innerWidth;
    const scaled = isLog ? Math.log : within;
    const [bottom, top] = [scaled(low), scaled(high)];
    this.y = (value) =>
      MARGIN.top + innerHeight * (1 - (scaled(value) - bottom) / (top - bottom));
    const rounds = new Set();
    for (const line of lines) if (!line.isThin) line.rounds.forEach((round) => rounds.add(round));
    this.rounds = [...rounds].sort((a, b) => a - b);
  }

  draw() {
    const { spec, width, height } = this;
    const svg = draw("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: "0",
      "aria-label": `${spec.label} Left and right arrow keys read single rounds.`,
    });
    this.drawAxes(svg);
    this.drawMarks(svg);
    for (const band of spec.bands ?? []) svg.append(this.bandPath(band));
    // The faint and the thin first, so that what matters is on top.
    const order = (line) => (line.isThin ? 0 : line.isFaint ? 1 : line.isDotted ? 2 : 3);
    for (const line of [...spec.lines].sort((a, b) => order(a) - order(b))) this.drawLine(svg, line);
    this.cursorLine = draw("line", {
      class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden",
    });
    this.cursorDots = draw("g", { class: "cursor-dots" });
    this.cursorName = draw("text", { class: "cursor-name", y: MARGIN.top + 10 });
    svg.append(this.cursorLine, this.cursorDots, this.cursorName);
    this.listen(svg);
    this.legend = this.makeLegend();
    const scrolled = this.element.querySelector(".legend")?.scrollTop ?? 0;
    refill(this.element, svg, this.legend);
    this.legend.scrollTop = scrolled;
  }

  drawAxes(svg) {
    const { spec, width, height, x, y, low, high } = this;
    const rows = Math.max(2, Math.floor(height / 48));
    const ticks = spec.isLog ? logTicks(low, high, rows) : niceTicks(low, high, rows);
    for (const tick of ticks) {
      svg.append(
        draw("line", {
          class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick),
        }),
        draw("text", { class: "tick", x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end" },
          tickText(tick)),
      );
    }
    if (spec.isZeroLine && !spec.isLog && low < 0 && high > 0) {
      svg.append(draw("line", {
        class: "zero", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(0), y2: y(0),
      }));
    }
    const bottom = height - MARGIN.bottom;
    svg.append(draw("line", {
      class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom,
    }));
    const columns = Math.min(10, Math.floor(width / 80));
    for (const tick of niceTicks(spec.from, spec.to, columns, true)) {
      svg.append(draw("text", { class: "tick", x: x(tick), y: bottom + 16, "text-anchor": "middle" },
        String(tick)));
    }
    svg.append(draw("text", {
      class: "tick unit", x: MARGIN.left - 8, y: bottom + 16, "text-anchor": "end",
    }, "round"));
  }

  drawMarks(svg) {
    const marks = [...(this.spec.marks ?? [])].sort((a, b) => a.round - b.round);
    const isCrowded = marks.length > MOST_NAMED_MARKS;
    let free = 0; // where the last name ends
    for (const mark of marks) {
      const at = this.x(mark.round);
      svg.append(draw("line", {
        class: isCrowded ? "mark crowded" : "mark", x1: at, x2: at, y1: MARGIN.top - 4, y2: this.height - MARGIN.bottom,
      }, draw("title", {}, mark.text)));
      const length = 6.2 * mark.text.length + 8;
      if (isCrowded || at < free || at + length > this.width) continue;
      svg.append(draw("text", { class: "tick", x: at + 3, y: MARGIN.top - 7 }, mark.text));
      free = at + length;
    }
  }

  drawLine(svg, line) {
    const classes = ["line"];
    if (line.isThin) classes.push("thin");
    if (line.isFaint) classes.push("faint");
    if (line.isDotted) classes.push("dotted");
    let path = "";
    let isOpen = false;
    const dots = [];
    line.values.forEach((value, i) => {
      if (value === null || value === undefined || (this.spec.isLog && value <= 0)) {
        isOpen = isOpen && line.hasDots; // dots are what was measured, whatever lies between
        return;
      }
      const [px, py] = [this.x(line.rounds[i]).toFixed(1), this.y(value).toFixed(1)];
      path += `${isOpen ? "L" : "M"}${px} ${py}`;
      const isAlone = !isOpen && (line.values[i + 1] ?? null) === null;
      if (line.hasDots || isAlone) dots.push([px, py]);
      isOpen = true;
    });
    svg.append(draw("path", {
      d: path, class: classes.join(" "), style: { stroke: line.look.colour },
      "stroke-dasharray": line.isDotted ? "1 5" : line.isDashed ? "5 4" : line.look.dash || null,
    }, draw("title", {}, line.title)));
    for (const [cx, cy] of dots) {
      svg.append(draw("circle", {
        cx, cy, r: 2.4, class: line.isFaint ? "faint" : null, style: { fill: line.look.colour },
      }));
    }
  }

  bandPath(band) {
    const upper = [];
    const lower = [];
    band.rounds.forEach((round, i) => {
      const [low, high] = [band.low[i], band.high[i]];
      if (low === null || high === null || (this.spec.isLog && low <= 0)) return;
      upper.push(`${this.x(round).toFixed(1)} ${this.y(high).toFixed(1)}`);
      lower.unshift(`${this.x(round).toFixed(1)} ${this.y(low).toFixed(1)}`);
    });
    return draw("path", {
      d: upper.length ? `M${[...upper, ...lower].join("L")}Z` : "",
      class: "band", style: { fill: band.look.colour },
    });
  }

  makeLegend() {
    this.valueSpans = [];
    const partners = new Set(this.spec.lines.map((line) => line.partner));
    const told = this.spec.lines.filter((line) => !line.isThin && !partners.has(line));
    const keys = (this.spec.keys ?? []).map((key) =>
      make("span", { class: "entry key" },
        swatch({ ...NEUTRAL, dash: key.isDashed ? "5 4" : "" }), make("span", {}, key.title)));
    const entries = told.map((line) => {
      const value = make("span", { class: line.partner ? "value two" : "value" });
      this.valueSpans.push([line, value]);
      const content = [swatch(line.look, line.isDotted), make("span", {}, line.title), value];
      return line.node === undefined
        ? make("span", { class: "entry" }, content)
        : make("button", {
            type: "button", class: line.isFaint ? "entry faint" : "entry",
            "aria-pressed": String(state.node === line.node), onclick: () => select(line.node),
          }, content);
    });
    return make("div", { class: "legend" }, keys, entries);
  }

  listen(svg) {
    const nearest = (round) => {
      let best = null;
      for (const known of this.rounds) {
        if (best === null || Math.abs(known - round) < Math.abs(best - round)) best = known;
      }
      return best;
    };
    const follow = (event) => {
      const box = svg.getBoundingClientRect();
      const inner = this.width - MARGIN.left - MARGIN.right;
      const px = ((event.clientX - box.left) / box.width) * this.width - MARGIN.left;
      const { from, to } = this.spec;
      const round = nearest(from + (px / inner) * (to - from));
      if (round !== this.group.round) this.group.move(round);
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow); // a finger does not hover
    svg.addEventListener("pointerleave", () => this.group.move(null));
    svg.addEventListener("blur", () => this.group.move(null));
    svg.addEventListener("keydown", (event) => {
      const last = this.rounds.length - 1;
      if (last < 0) return;
      const here = this.rounds.indexOf(nearest(this.group.round ?? this.rounds[last]));
      const isNew = this.group.round === null;
      const to = {
        ArrowLeft: isNew ? here : here - 1, ArrowRight: isNew ? here : here + 1, Home: 0, End: last,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.group.move(this.rounds[Math.max(0, Math.min(last, to))]);
      this.readAloud();
    });
  }

  showCursor(round) {
    this.cursorDots.replaceChildren();
    this.cursorName.textContent = round === null ? "" : `round ${round}`;
    for (const [, span] of this.valueSpans) span.textContent = "";
    this.cursorLine.setAttribute("visibility", round === null ? "hidden" : "visible");
    if (round === null) return;
    this.cursorLine.setAttribute("x1", this.x(round));
    this.cursorLine.setAttribute("x2", this.x(round));
    const isRight = this.x(round) > this.width - 80;
    this.cursorName.setAttribute("x", this.x(round) + (isRight ? -5 : 5));
    this.cursorName.setAttribute("text-anchor", isRight ? "end" : "start");
    for (const [line, span] of this.valueSpans) {
      const texts = [];
      for (const each of line.partner ? [line, line.partner] : [line]) {
        const value = each.values[each.rounds.indexOf(round)] ?? null;
        if (value === null) continue;
        texts.push(shown(value));
        if (each.isFaint || (this.spec.isLog && value <= 0)) continue;
        this.cursorDots.append(draw("circle", {
          cx: this.x(round), cy: this.y(value), r: 3.5, style: { fill: each.look.colour },
        }));
      }
      span.textContent = texts.join(" / ");
    }
  }

  /** Say what the cursor shows to those who hear the page. */
  readAloud() {
    const values = this.valueSpans
      .filter(([line, span]) => span.textContent && !line.isFaint)
      .map(([line, span]) => `${line.title} ${span.textContent}`);
    byId("aloud").textContent = `Round ${this.group.round}: ${listedShortly(values, 8)}`;
  }
}
