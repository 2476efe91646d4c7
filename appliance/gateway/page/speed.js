// Tokens a second, time to the first token, time between two tokens: steps of ten seconds, up to a day.

import { Chart } from "./chart.js";
import { Columns } from "./columns.js";
import { byId } from "./dom.js";
import * as format from "./format.js";

const KEPT = 24 * 360;
const FIELDS = ["time_s", "tokens_per_s", "first_p50_s", "first_p95_s", "between_p50_s", "between_p95_s", "running", "waiting"];

export class Speed {
  constructor() {
    const host = byId("speed");
    const options = { marks: () => this.incidents };
    this.incidents = [];
    this.steps = new Columns(FIELDS.length, KEPT);
    this.charts = [
      [new Chart(host, "Tokens a second, all answers", ["tokens/s"], (value) => format.number(value, 1), { least: 1, ...options }), [1]],
      [new Chart(host, "Time to the first token", ["half within", "95 % within"], format.seconds, { least: 0.01, ...options }), [2, 3]],
      [new Chart(host, "Between two tokens", ["half within", "95 % within"], format.seconds, { least: 0.001, ...options }), [4, 5]],
      [new Chart(host, "Requests", ["running", "waiting"], (value) => format.number(value, 1), { least: 1, ...options }), [6, 7]],
    ];
    byId("range").addEventListener("change", () => this.draw());
  }

  take({ step_s: stepS, steps }) {
    this.steps.add(steps.map((step) => FIELDS.map((field) => step[field])), 2.5 * stepS);
    this.draw();
  }

  mark(incidents) {
    this.incidents = incidents.map((incident) => incident.time_s);
    this.draw();
  }

  draw() {
    const to = Math.max(this.steps.last, Date.now() / 1000 - 10);
    const from = to - Number(byId("range").value);
    const shown = this.steps.since(from);
    for (const [chart, columns] of this.charts) chart.draw([shown[0], ...columns.map((column) => shown[column])], from, to);
  }
}
