// The flight recorder: memory, power, temperature and link of each card, and what the engine holds, a sample a second.

import { Chart } from "./chart.js";
import { Columns } from "./columns.js";
import { byId, element, setText } from "./dom.js";
import * as format from "./format.js";

const SHOWN_S = 15 * 60;
const KEPT = 1000;
const GAP_S = 5;
const GIB = 2 ** 30;
const IN_GIB = { incrs: [1, 2, 4, 8, 16, 32, 64].map((count) => count * GIB), values: (_, ticks) => ticks.map((tick) => `${tick / GIB} GiB`) };
const ENGINE = ["time_s", "running", "waiting", "kv_blocks_used"];
const CARD = ["time_s", "used_bytes", "power_w", "temperature_c"];

export class Cards {
  constructor() {
    this.host = byId("cards");
    this.cards = new Map();
    this.blockTokens = null;
    this.samples = new Columns(ENGINE.length, KEPT);
    this.blocks = new Chart(this.host, "KV blocks in use", ["blocks"], (value) => format.number(value), { least: 1 });
  }

  take({ samples, cards, block_tokens: blockTokens }) {
    this.blockTokens = blockTokens ?? null;
    this.samples.add(rows(samples, ENGINE), GAP_S);
    for (const card of cards) this.ofCard(card).take(card);
    const found = this.cards.size;
    setText(byId("cards-words"), found ? "" : "No NVIDIA card is read here: the engine computes on the CPU, or NVML does not answer.");
    this.draw();
  }

  ofCard(card) {
    if (!this.cards.has(card.address)) this.cards.set(card.address, new Card(this.host, card));
    return this.cards.get(card.address);
  }

  draw() {
    const to = Math.max(this.samples.last, ...[...this.cards.values()].map((card) => card.samples.last), Date.now() / 1000 - 3);
    const data = this.samples.data;
    this.blocks.draw([data[0], data[3]], to - SHOWN_S, to);
    this.cards.forEach((card) => card.draw(to - SHOWN_S, to));
  }

  // Tokens that the engine's KV cache holds; null where it does not count them.
  get kvTokensUsed() {
    const blocks = this.samples.data[3].at(-1) ?? null;
    return blocks === null || this.blockTokens === null ? null : blocks * this.blockTokens;
  }

  // Newest first facts of each card, for the budget.
  get now() {
    return [...this.cards.values()].map((card) => ({ name: card.name, totalBytes: card.totalBytes, usedBytes: card.samples.data[1].at(-1) ?? null }));
  }
}

class Card {
  constructor(host, { address, name }) {
    this.name = `${name || "card"} ${address}`;
    this.samples = new Columns(CARD.length, KEPT);
    this.link = element("p", { class: "chain-name" });
    this.memory = new Chart(host, `Memory of ${this.name}`, ["in use"], format.bytes, { ticks: IN_GIB });
    this.power = new Chart(host, `Power and temperature of ${this.name}`, ["W", "°C"], (value) => format.number(value), { least: 50 });
    this.power.figure.append(this.link);
  }

  take(card) {
    this.totalBytes = card.total_bytes;
    this.memory.least = card.total_bytes;
    this.samples.add(rows(card, CARD), GAP_S);
    const generation = card.pcie_generation.at(-1);
    const width = card.pcie_width.at(-1);
    const replays = card.pcie_replays.at(-1);
    if (card.time_s.length) setText(this.link, linkWords(generation, width, replays));
  }

  draw(from, to) {
    const [times, used, power, temperature] = this.samples.data;
    this.memory.draw([times, used], from, to);
    this.power.draw([times, power, temperature], from, to);
  }
}

function linkWords(generation, width, replays) {
  if (generation === null && width === null) return "PCIe: the card does not say";
  const again = replays === null ? "" : `, ${format.count(replays, "packet", "packets")} sent again since the driver was loaded`;
  return `PCIe generation ${generation ?? "?"}, ${width ?? "?"} lanes${again}`;
}

const rows = (columns, fields) => columns.time_s.map((_, index) => fields.map((field) => columns[field][index]));
