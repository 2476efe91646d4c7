// One chart: uPlot, with its numbers as text beside it, in the page's colours, as wide as its place.

import uPlot from "./vendor/uplot/uPlot.js";
import { element, setText } from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 160;
const charts = new Set();
const styles = getComputedStyle(document.documentElement);
const colour = (name) => styles.getPropertyValue(name).trim();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.plot?.redraw()));

export class Chart {
  // lines: names in the order of the data; show: a value as text; marks(): moments to draw a line at.
  constructor(host, title, lines, show, { least = 0, marks = () => [], ticks = {} } = {}) {
    this.lines = lines;
    this.show = show;
    this.least = least;
    this.marks = marks;
    this.ticks = ticks; // uPlot's words for an axis, where its own do not do
    this.data = [[], ...lines.map(() => [])];
    this.values = lines.map(() => element("b", {}, "–"));
    this.at = element("span");
    const legend = lines.map((name, index) => {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = `var(--c${index})`;
      return element("li", {}, swatch, `${name} `, this.values[index]);
    });
    this.place = element("div", { class: "plot", role: "img", "aria-label": `${title}, over time; the newest values stand above` });
    this.figure = element("figure", {}, element("figcaption", {}, title), element("ul", { class: "legend" }, ...legend, element("li", {}, this.at)), this.place);
    host.append(this.figure);
    charts.add(this);
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.place);
  }

  // data: [times, values of the first line, ...]; from and to: what of it is shown.
  draw(data, from, to) {
    this.data = data;
    this.range = [from, to];
    if (this.plot) this.plot.setData(data);
    else if (this.place.clientWidth) this.plot = new uPlot(this.options(), data, this.place);
    this.tell(null);
  }

  remove() {
    charts.delete(this);
    this.watcher.disconnect();
    this.plot?.destroy();
    this.figure.remove();
  }

  resize() {
    const width = this.place.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else if (this.range) this.draw(this.data, ...this.range);
  }

  // The values under the pointer, else the newest that there are.
  tell(index) {
    this.lines.forEach((_, line) => {
      const values = this.data[line + 1];
      const value = index === null ? values.findLast((each) => each !== null && each !== undefined) : values[index];
      setText(this.values[line], value === null || value === undefined ? "–" : this.show(value));
    });
    setText(this.at, index === null ? "" : `at ${format.clock(this.data[0][index])}`);
  }

  options() {
    const axis = { stroke: () => colour("--faint"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1 } };
    return {
      width: this.place.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { range: () => this.range }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(this.least, (high ?? 0) * 1.1)] } },
      axes: [{ ...axis, space: 60 }, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => this.show(tick)), ...this.ticks }],
      series: [{}, ...this.lines.map((name, index) => ({ label: name, stroke: () => colour(`--c${index}`), width: 1.5, points: { show: false } }))],
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.idx ?? null)],
        draw: [(plot) => this.drawMarks(plot)],
      },
    };
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--bad");
    ctx.setLineDash([4, 3]);
    for (const timeS of this.marks()) {
      if (timeS < this.range[0] || timeS > this.range[1]) continue;
      const x = plot.valToPos(timeS, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}
